# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real builds for 12.0: the gate opened by gate, the module built by jit_cache, the code counted by cuobjdump."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._jit_cache_elf import device_code
from ansible_collections.blackwell.inference.plugins.modules import jit_cache


def cuobjdump(base_venv: Path, library: Path) -> list[str]:
    """Return what NVIDIA's tool says about a library; it does not tell the suffix f."""
    (program,) = (base_venv / "lib").glob("python*/site-packages/nvidia/*/bin/cuobjdump")
    listed = subprocess.run([program, "--list-elf", library], check=True, stdout=subprocess.PIPE, text=True).stdout
    return re.findall(r"\.(sm_\w+)\.cubin", listed)


@pytest.mark.parametrize("archs", [["90a"], ["120"], ["120a"], ["120f"], ["121a"], ["90a", "120f"]], ids="-".join)
@pytest.mark.parametrize("compression", [[], ["-Xfatbin=-compress-all", "--compress-mode=size"]], ids=["plain", "compressed"])
def test_device_code_is_what_nvcc_was_told_and_cuobjdump_says(base_venv, cuda_home, tmp_path, archs, compression):
    source, library = tmp_path / "k.cu", tmp_path / "k.so"
    source.write_text("__global__ void kernel(int *x) { *x = 1; }\n")
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    subprocess.run([cuda_home / "bin/nvcc", *flags, *compression, "-shared", "-Xcompiler=-fPIC", source, "-o", library], check=True)
    assert device_code(str(library)) == sorted(f"sm_{arch}" for arch in archs)
    assert sorted(set(cuobjdump(base_venv, library))) == sorted(f"sm_{arch.rstrip('f')}" for arch in archs)


@pytest.mark.parametrize(
    ("flashinfer", "arch", "cache"), [("0.6.1", "120a", ".cache/flashinfer"), ("0.7.4", "120f", ".cache/sglang/.cache/flashinfer")]
)
def test_the_fusion_module_is_built_for_the_gpu_and_stays_until_something_changes(
    flashinfer, arch, cache, serving_python, environment, open_gates, run, base_venv
):
    python = serving_python(flashinfer)
    options = {"state": "built", "python": str(python), "environment": environment, "compute_capability": ["12.0"]}
    open_gates(python)
    assert run(jit_cache, check=True, **options)["stale"] == [{"module": "trtllm_comm", "reason": "it is not built"}]
    (built,) = run(jit_cache, **options)["built"]
    assert built["archs"] == [f"sm_{arch}"]
    assert built["library"] == f"{environment['HOME']}/{cache}/{flashinfer}/{arch}/cached_ops/trtllm_comm/trtllm_comm.so"
    assert cuobjdump(base_venv, built["library"]) == [f"sm_{arch.rstrip('f')}"] * 3  # one for each source
    assert not run(jit_cache, **options)["changed"]


def test_the_first_error_of_a_real_compiler_is_the_message(serving_python, environment, run, tmp_path):
    python = serving_python("0.6.1")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "cuda_runtime.h").write_text("not C++\n")
    arguments = {"state": "built", "python": str(python), "compute_capability": ["12.0"], "modules": ["vllm_comm"]}
    with pytest.raises(AssertionError, match=r"modules vllm_comm: the build failed: \S+cuda_runtime\.h\S+ error: .*; expected one without"):
        run(jit_cache, environment={**environment, "FLASHINFER_EXTRA_CUDAFLAGS": f"-I{broken}"}, **arguments)
