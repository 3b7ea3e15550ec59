# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where the cache lies: the oracle is sglang's own __init__ and flashinfer's own jit/env.py, executed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils import _jit_cache as jit_cache
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._gpu_host import oldest_nvcc
from ansible_collections.blackwell.inference.tests.unit.conftest import program
from ansible_collections.blackwell.inference.tests.unit.wheels import unpack

# Stand-ins only for torch (it would ask GPUs) and tvm_ffi (not used here); both packages' code is the released one.
ORACLE = r"""
import importlib, json, os, pathlib, sys, types
root = pathlib.Path(sys.argv[1])

def package(name, path):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [str(path)]
    return module

def resolve(environment, capabilities):
    for name in [name for name in sys.modules if name.split(".")[0] in ("flashinfer", "sglang")]:
        del sys.modules[name]
    os.environ.clear()
    os.environ.update(environment)
    torch.cuda.device_count = lambda: len(capabilities)
    torch.cuda.get_device_capability = lambda device: tuple(capabilities[device])
    sglang = package("sglang", root / "sglang")
    package("sglang.srt", root / "sglang/srt")
    package("flashinfer", root / "flashinfer")
    package("flashinfer.jit", root / "flashinfer/jit")
    try:
        exec((root / "sglang/__init__.py").read_text(), sglang.__dict__)
    except ImportError:  # the first import of something that was not unpacked: the caches are settled by then
        pass
    return str(importlib.import_module("flashinfer.jit.env").FLASHINFER_JIT_DIR)

torch = sys.modules["torch"] = types.ModuleType("torch")
torch.cuda, torch.version = types.SimpleNamespace(), types.SimpleNamespace(cuda=None)
sys.modules["tvm_ffi"] = types.ModuleType("tvm_ffi")
json.dump([resolve(*case) for case in json.load(sys.stdin)], sys.stdout)
"""

PAIRS = [  # sglang and the flashinfer that it pins: every layout there has been
    ("0.5.3", "0.5.0"),
    ("0.5.8", "0.6.1"),
    ("0.5.9", "0.6.6"),
    ("0.5.10", "0.6.7.post2"),
    ("0.5.13", "0.6.12"),
    ("0.5.17", "0.6.16.post4"),
    ("0.5.18", "0.6.17"),
    ("0.5.20", "0.6.18"),
    ("0.5.23", "0.7.4"),
]
ENVIRONMENTS = [
    {},
    {"HOME": "/home/serve"},
    {"HOME": "/home/serve/"},
    {"HOME": "/"},
    {"HOME": ""},
    {"HOME": "/home/serve", "FLASHINFER_WORKSPACE_BASE": "/fast"},
    {"HOME": "/home/serve", "FLASHINFER_WORKSPACE_BASE": "/fast/", "SGLANG_CACHE_DIR": "/other"},
    {"HOME": "/home/serve", "SGLANG_CACHE_DIR": "/fast/sglang"},
    {"HOME": "/home/serve", "SGLANG_CACHE_DIR": "~/kernels"},
    {"HOME": "/home/serve", "SGLANG_CACHE_DIR": "~"},
    {"HOME": "/home/serve", "SGLANG_CACHE_DIR": "/fast/new", "SGL_CACHE_DIR": "/fast/old"},
    {"HOME": "/home/serve", "XDG_CACHE_HOME": "/not/used"},
]
HOSTS = [  # capabilities of its GPUs, release of its nvcc, FLASHINFER_CUDA_ARCH_LIST
    ([(12, 0)], "12.8", None),
    ([(12, 0)] * 8, "13.0", None),
    ([(12, 1)], "12.9", None),
    ([(9, 0), (12, 0)], "13.0", None),
    ([(9, 0)], "12.8", None),
    ([], "13.0", "12.0a"),
    ([], "13.0", "12.0f 9.0a"),
]
# What releases of nvcc have as targets, by NVIDIA's release notes; each has all of the one before.
NVCC_ADDS = {"12.8": {"90a", "100a", "120a"}, "12.9": {"103a", "120f", "121a"}, "13.0": {"110a"}}
CAPABILITIES = ["8.9", "9.0", "10.0", "12.0", "12.1"]


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def packages(request, tmp_path_factory) -> Path:
    sglang, flashinfer = request.param
    root = tmp_path_factory.mktemp(f"{sglang}-{flashinfer}")
    unpack("sglang", sglang, root, "sglang/__init__.py", "sglang/srt/environ.py")
    members = ("jit/*.py", "version.py", "_build_meta.py", "compilation_context.py")
    return unpack("flashinfer-python", flashinfer, root, *(f"flashinfer/{member}" for member in members))


def ask_upstream(packages: Path, cases: list) -> list[Path]:
    answer = subprocess.run(
        [sys.executable, "-c", ORACLE, str(packages)], input=json.dumps(cases), text=True, stdout=subprocess.PIPE, check=True
    )
    return [Path(path) for path in json.loads(answer.stdout)]


def test_the_root_is_where_upstream_puts_it(packages):
    cases = [({**environment, "FLASHINFER_CUDA_ARCH_LIST": "12.0a"}, []) for environment in ENVIRONMENTS]
    ours = [
        jit_cache.resolve(str(packages / "flashinfer"), str(packages / "sglang"), environment, None).path for environment in ENVIRONMENTS
    ]
    assert ours == [str(path.parent.parent) for path in ask_upstream(packages, cases)]


def test_a_module_is_found_in_the_folder_that_upstream_builds_it_in(packages, tmp_path):
    cases = []
    for number, (capabilities, nvcc, arch_list) in enumerate(HOSTS):
        environment = {"HOME": str(tmp_path / str(number)), "CUDA_HOME": nvcc_stand_in(tmp_path, nvcc)}
        cases.append(({**environment, **({"FLASHINFER_CUDA_ARCH_LIST": arch_list} if arch_list else {})}, capabilities))
    for (environment, capabilities), folder in zip(cases, ask_upstream(packages, cases)):
        (folder / "trtllm_comm").mkdir(parents=True)
        cache = jit_cache.resolve(str(packages / "flashinfer"), str(packages / "sglang"), environment, None)
        found = {
            capability for capability in CAPABILITIES if jit_cache.survey(cache, ["trtllm_comm"], [capability]).cache_dirs == [str(folder)]
        }
        expected = {f"{major}.{minor}" for major, minor in capabilities} or {
            architecture.rstrip("af") for architecture in environment["FLASHINFER_CUDA_ARCH_LIST"].split()
        }
        if folder.parent.name == cache.version:
            expected = set()  # nvcc is too old for the GPU: this release finds no architecture and can build nothing
        elif "120f" in folder.parent.name:
            expected |= {"12.0", "12.1"}  # code for the family, and 0.6.7 does build it on 12.1
        assert found == expected, folder


def nvcc_stand_in(folder: Path, release: str) -> str:
    """Make a toolkit whose nvcc says which release it is; return its folder."""
    programs = folder / release / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    program(programs / "nvcc", f"echo 'Cuda compilation tools, release {release}, V{release}.0'")
    return str(folder / release)


@pytest.mark.parametrize("capability", ["9.0", "10.0", "10.3", "12.0", "12.1"])
def test_the_oldest_nvcc_is_the_first_that_has_what_upstream_asks_for(packages, tmp_path, capability):
    gpus = [tuple(map(int, capability.split(".")))]
    cases = [({"HOME": str(tmp_path), "CUDA_HOME": nvcc_stand_in(tmp_path, release)}, gpus) for release in NVCC_ADDS]
    known, builds = set(), []
    version = jit_cache.flashinfer_version(str(packages / "flashinfer"))
    for release, folder in zip(NVCC_ADDS, ask_upstream(packages, cases)):
        known |= NVCC_ADDS[release]
        # Where upstream finds nvcc too old, no architecture stands in the path.
        builds += [release] if folder.parent.name in known else []
    assert builds[0] == max(oldest_nvcc(capability, version), "12.8")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"FLASHINFER_WORKSPACE_BASE": ""}, "environment FLASHINFER_WORKSPACE_BASE: '' is relative"),
        ({"FLASHINFER_WORKSPACE_BASE": "~/x"}, "environment FLASHINFER_WORKSPACE_BASE: '~/x' is relative"),
        ({"SGLANG_CACHE_DIR": "cache"}, "environment SGLANG_CACHE_DIR: 'cache' is relative"),
        ({"HOME": "here"}, "'here/.cache/sglang' is relative"),
    ],
)
def test_a_relative_base_is_refused(environment, message):
    with pytest.raises(InferenceError, match=f".*{message}"):
        jit_cache.workspace_base(environment, redirected=True)


def test_home_is_that_of_the_service_user():
    assert jit_cache.workspace_base({}, redirected=False, user="root") == "/root"
    assert jit_cache.workspace_base({"HOME": "/srv"}, redirected=False, user="nobody-of-this-name") == "/srv"
    with pytest.raises(InferenceError, match="user: nobody-of-this-name does not exist"):
        jit_cache.workspace_base({}, redirected=False, user="nobody-of-this-name")


def test_the_version_is_flashinfers_own(tmp_path):
    assert jit_cache.flashinfer_version(str(tmp_path)) == "0.0.0+unknown"  # as an editable install says
    (tmp_path / "_build_meta.py").write_text('"""Build."""\n__version__ = "0.6.1rc1"\n__git_version__ = "abc"\n')
    assert jit_cache.flashinfer_version(os.fspath(tmp_path)) == "0.6.1rc1"
