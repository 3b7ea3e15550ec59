# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The optional set, compiled for 12.0 by a real nvcc: the kernels are empty as released, and full once it is open."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

SOURCE = "trtllm_allreduce.cu"
# Without flashinfer/__init__.py, which loads every operator.
PLAN = """
import importlib.util, sys, types
package = types.ModuleType("flashinfer")
package.__path__ = importlib.util.find_spec("flashinfer").submodule_search_locations
sys.modules["flashinfer"] = package
from flashinfer.jit.comm import gen_trtllm_comm_module
spec = gen_trtllm_comm_module()
spec.write_ninja()
print(spec.ninja_path)
"""


def compiled_sizes(python: Path, base_venv: Path, environment: dict[str, str], folder: Path) -> dict[str, int]:
    """Compile SOURCE as FlashInfer would; return how many bytes of machine code each kernel has."""
    folder.mkdir()
    environment = {**environment, "FLASHINFER_CUDA_ARCH_LIST": "12.0a", "FLASHINFER_WORKSPACE_BASE": str(folder)}
    environment["PATH"] = f"{base_venv}/bin:{environment['PATH']}"
    plan = subprocess.run([python, "-c", PLAN], env=environment, check=True, capture_output=True, text=True).stdout.split()[-1]
    target = re.search(rf"^build (\S+): \w+ \S*/{SOURCE}", Path(plan).read_text(), re.MULTILINE)[1]
    subprocess.run(["ninja", "-f", plan, target], env=environment, check=True, cwd=Path(plan).parent)
    (program,) = (base_venv / "lib").glob("python*/site-packages/nvidia/*/bin/cuobjdump")
    subprocess.run([program, "--extract-elf", "all", Path(plan).parent / target], cwd=folder, check=True)
    (image,) = folder.glob("*.cubin")
    listed = subprocess.run(["readelf", "--section-headers", "--wide", image], check=True, capture_output=True, text=True).stdout
    sections = re.findall(r"\.text\.(\S+)\s+PROGBITS\s+\w+\s+\w+\s+(\w+)", listed)
    return {name: int(size, 16) for name, size in sections}


def test_the_kernels_are_empty_as_released_and_full_once_the_set_is_open(serving_python, base_venv, environment, open_gates, tmp_path):
    python = serving_python("0.6.1")
    open_gates(python)
    before = compiled_sizes(python, base_venv, environment, tmp_path / "before")
    open_gates(python, optional=True)
    after = compiled_sizes(python, base_venv, environment, tmp_path / "after")
    assert before.keys() == after.keys()
    empty = {name for name, size in before.items() if size <= 512}
    assert len(empty) > 400 and all(after[name] > before[name] for name in empty)
