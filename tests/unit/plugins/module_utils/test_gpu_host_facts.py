# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import ast
import os
import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils import _gpu as gpu
from ansible_collections.blackwell.inference.plugins.module_utils import _gpu_host as gpu_host
from ansible_collections.blackwell.inference.plugins.module_utils._jit_build import cuda_home
from ansible_collections.blackwell.inference.tests.unit.conftest import program
from ansible_collections.blackwell.inference.tests.unit.wheels import unpack

CARD = gpu.Gpu(0, None, "card", "12.0", 97887, "580.95.05", 600.0, 30.0, "00000000:C1:00.0", 1, 5, 16, 16, False, 0, True)
PAIR = gpu.Inventory([CARD, replace(CARD, index=1)], "13.0", [gpu.Link((0, 1), "NODE", "OK")])
TOOLKIT = gpu_host.Toolkit("/cuda", "/cuda/bin/nvcc", "12.9", "/bin/ninja", "/bin/c++", None)
HOST = gpu_host.Host(64, 512 << 10, 500 << 10, 60, 256 << 10, None, None)
VENV = gpu_host.Venv("0.6.12", "2.11.0", "13.0")


def found(inventory=PAIR, toolkit=TOOLKIT, host=HOST, venv=VENV, **environment: str) -> dict[str, str]:
    """Return the problems of a host that differs from a good one in what is given: their messages by id."""
    return {problem.id: problem.message for problem in gpu_host.problems(inventory, toolkit, host, venv, environment)}


def cards(**changed: object) -> gpu.Inventory:
    return PAIR._replace(gpus=[replace(card, **changed) for card in PAIR.gpus])


def test_nothing_stands_in_the_way_of_a_good_host():
    assert found(MAX_JOBS="60") == {}


def test_a_host_without_gpus_needs_nothing():
    nothing = gpu_host.Toolkit(None, None, None, None, None, None)
    assert found(gpu.Inventory([], None, []), nothing, HOST._replace(shm_mib=64), VENV._replace(torch_cuda="none")) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"toolkit": TOOLKIT._replace(nvcc=None, nvcc_version=None)},
            "nvcc: none in /cuda; expected 12.9 or newer. Install a CUDA toolkit of 12.9 or newer and set CUDA_HOME to it.",
        ),
        (
            {"toolkit": TOOLKIT._replace(nvcc_version="12.8")},
            "nvcc: 12.8 (/cuda/bin/nvcc); expected 12.9 or newer, with which flashinfer 0.6.12 builds for 12.0. "
            "Install a CUDA toolkit of 12.9 or newer and set CUDA_HOME to it.",
        ),
        (
            {
                "inventory": PAIR._replace(cuda_version="12.8"),
                "toolkit": TOOLKIT._replace(nvcc_version="13.0"),
                "venv": VENV._replace(torch_cuda="12.8"),
            },
            "driver: 580.95.05 runs CUDA 12.8 at most, and nvcc is 13.0; expected a driver that runs what nvcc builds. "
            "Upgrade the driver, or set CUDA_HOME to an older toolkit.",
        ),
        (
            {"toolkit": TOOLKIT._replace(ninja=None)},
            "ninja: none in the PATH of the unit; expected one, for the kernels that are built here. "
            "Install ninja into the serving venv, whose bin folder the unit has first.",
        ),
        (
            {"toolkit": TOOLKIT._replace(compiler=None)},
            "C++ compiler: none in the PATH of the unit; expected one, for the kernels that are built here. "
            "Install g++, or name a compiler in CXX.",
        ),
        (
            {"toolkit": TOOLKIT._replace(link_error="ld: cannot find -lcuda")},
            "libcuda: ld: cannot find -lcuda; expected libraries that the linker finds. "
            "Name the folder of libcuda.so (a driver's, or a toolkit's stubs) in FLASHINFER_EXTRA_LDFLAGS=-L<folder>.",
        ),
        (
            {"host": HOST._replace(memory_available_mib=23 << 10, compile_jobs=1)},
            "memory: 23 GiB are available; expected 16 for the host and 8 for a compiler. Build the kernels while nothing else runs.",
        ),
        (
            {"MAX_JOBS": "61"},
            "environment MAX_JOBS: 61 compilers, while 500 GiB are available, and 64 cores; "
            "expected at most 60, at 8 GiB each and 16 left over. Set sglang_server_max_jobs to 60.",
        ),
        (
            {"host": HOST._replace(shm_mib=64)},
            "shm: /dev/shm has 64 MiB; expected 8192 or more, which the ranks share. "
            "Remount it: mount -o remount,size=16G /dev/shm. For a container: --shm-size 16g.",
        ),
        (
            {"host": HOST._replace(memlock_mib=8)},
            "memlock: units may lock 8 MiB, and PID 1 may not raise that; expected no limit, as for memory that GPUs copy from. "
            "Start the container with --ulimit memlock=-1.",
        ),
        (
            {"inventory": cards(persistence_mode=False)},
            "persistence_mode: off for GPU 0, 1; expected it on, so that the driver keeps a GPU initialised while nothing uses it. "
            "Enable nvidia-persistenced.service, or run nvidia-smi -pm 1.",
        ),
        (
            {"inventory": PAIR._replace(links=[gpu.Link((0, 1), "SYS", "CNS")])},
            "peer_access: none between the GPUs 0 and 1 (CNS); expected every pair to reach each other, "
            "without which no fused allreduce works. Switch off IOMMU and ACS in the BIOS, or start the kernel with iommu=pt.",
        ),
        (
            {"host": HOST._replace(iommu="DMA-FQ")},
            "iommu: it translates what the GPUs send to each other (DMA-FQ); "
            "expected identity, or none: through it copies between cards hang or arrive damaged. "
            "Start the kernel with iommu=pt, or switch it off in the BIOS.",
        ),
        (
            {"venv": VENV._replace(torch="2.13.0+cpu", torch_cuda="none")},
            "torch: torch 2.13.0+cpu in the serving venv is built without CUDA; expected CUDA 12.8 or newer, which knows 12.0. "
            "Install another build of torch.",
        ),
        (
            {"venv": VENV._replace(torch_cuda="12.6")},
            "torch: torch 2.11.0 in the serving venv is built for CUDA 12.6; expected CUDA 12.8 or newer, which knows 12.0. "
            "Install another build of torch.",
        ),
        (
            {"inventory": PAIR._replace(cuda_version="12.8")},
            "torch: torch 2.11.0 in the serving venv is built for CUDA 13.0; expected CUDA 12.8 at most, which driver 580.95.05 runs. "
            "Upgrade the driver, or install another build of torch.",
        ),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_each_problem_is_one_line_that_names_the_remedy(given, message):
    assert list(found(**given).values()) == [message]


def test_only_what_no_server_can_start_with_is_fatal():
    bad = gpu_host.problems(cards(persistence_mode=False), TOOLKIT._replace(ninja=None), HOST, VENV._replace(torch_cuda="none"), {})
    assert {problem.id: problem.fatal for problem in bad} == {"torch": True, "ninja": False, "persistence_mode": False}


def test_many_pairs_without_access_are_one_line():
    inventory = PAIR._replace(links=[gpu.Link((0, other), "SYS", "GNS") for other in range(1, 8)])
    assert "between the GPUs 0 and 1, 0 and 2, 0 and 3 and 4 more pairs (GNS)" in found(inventory)["peer_access"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"venv": gpu_host.Venv(None, None, None), "toolkit": TOOLKIT._replace(nvcc_version="12.8")}, "the release is not known"),
        ({"inventory": PAIR._replace(links=[gpu.Link((0, 1), "SYS", None)])}, "the driver cannot tell"),
        ({"inventory": PAIR._replace(cuda_version="12.9"), "venv": VENV._replace(torch_cuda="12.8")}, "minor releases of CUDA get on"),
        ({"inventory": PAIR._replace(links=[gpu.Link((0, 1), "NV18", "OK")]), "host": HOST._replace(iommu="DMA")}, "NVLink passes it by"),
        ({"host": HOST._replace(iommu="identity")}, "it does not translate"),
        ({"host": HOST._replace(memory_available_mib=None, compile_jobs=1), "MAX_JOBS": "8"}, "the kernel does not say"),
        ({"inventory": cards(persistence_mode=None)}, "the driver has no such mode"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_problem(given, why):
    assert found(**given) == {}


def test_memory_and_limits_are_read_from_the_kernel(tmp_path):
    texts = {
        "proc/meminfo": f"MemTotal:  {64 << 20} kB\nMemAvailable:  {40 << 20} kB\n",
        "proc/1/limits": "Max stack size  8388608  unlimited  bytes\nMax locked memory         4194304    8388608    bytes\n",
        "proc/1/status": "CapEff:\t00000000a80425fb\n",  # as Docker starts a container
        "sys/bus/pci/devices/0000:41:00.0/iommu_group/type": "identity\n",
        "sys/bus/pci/devices/0000:c1:00.0/iommu_group/type": "DMA-FQ\n",
        "dev/shm/file": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    read = gpu_host.read_host([replace(CARD, pci_bus_id="00000000:41:00.0"), CARD], str(tmp_path))
    assert (read.memory_mib, read.memory_available_mib, read.memlock_mib, read.iommu) == (64 << 10, 40 << 10, 8, "DMA-FQ")
    assert read.compile_jobs == min(3, read.cores)
    assert read.shm_mib > 0
    (tmp_path / "proc/1/status").write_text("CapEff:\t000001ffffffffff\n")  # as systemd runs on a host
    assert gpu_host.read_host([], str(tmp_path))._replace(cores=1, shm_mib=None, compile_jobs=1) == gpu_host.Host(
        1, 64 << 10, 40 << 10, 1, None, None, None
    )


def test_a_kernel_that_says_nothing(tmp_path):
    assert gpu_host.read_host([CARD], str(tmp_path))._replace(cores=1) == gpu_host.Host(1, None, None, 1, None, None, None)


@pytest.fixture
def programs(tmp_path):
    """Make programs that print a line, below a folder; return the folder."""

    def programs(**lines: str) -> Path:
        folder = tmp_path / "toolkit"
        (folder / "bin").mkdir(parents=True)
        for name, line in lines.items():
            program(folder / "bin" / name.replace("cxx", "c++"), line)
        return folder

    return programs


NVCC = "echo 'Cuda compilation tools, release 12.8, V12.8.93'"


def test_the_toolkit_is_the_one_of_the_unit_and_not_of_this_process(programs, monkeypatch):
    folder = programs(nvcc=NVCC, ninja="exit 1", cxx='echo "ld: $* finds nothing" >&2; exit 1')
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    toolkit = gpu_host.find_toolkit({"PATH": f"{folder}/bin:/usr/bin", "FLASHINFER_EXTRA_LDFLAGS": "-L/driver"})
    home, nvcc, version, ninja, compiler, error = toolkit
    assert (home, nvcc, version) == (str(folder), f"{folder}/bin/nvcc", "12.8")
    assert (ninja, compiler) == (f"{folder}/bin/ninja", f"{folder}/bin/c++")
    assert f"-L{folder}/lib64 -L{folder}/lib64/stubs -lcudart -lcuda -L/driver" in error


def test_a_real_linker_says_whether_it_finds_libcuda(programs):
    folder = programs(nvcc=NVCC)
    environment = {"CUDA_HOME": str(folder), "PATH": os.environ["PATH"]}
    assert "cannot find -lcuda" in gpu_host.find_toolkit(environment).link_error
    (folder / "lib64/stubs").mkdir(parents=True)
    for name in ("lib64/libcudart.so", "lib64/stubs/libcuda.so"):
        subprocess.run(["c++", "-shared", "-x", "c++", os.devnull, "-o", folder / name], check=True)
    assert gpu_host.find_toolkit(environment).link_error is None


@pytest.mark.parametrize("body", ["exit 3", "echo nonsense", "exec sleep 60"])
def test_an_nvcc_that_does_not_answer_has_no_release(programs, body):
    folder = programs(nvcc=body)
    toolkit = gpu_host.find_toolkit({"CUDA_HOME": str(folder)}, timeout=0.5)
    assert (toolkit.nvcc, toolkit.nvcc_version) == (f"{folder}/bin/nvcc", None)


def test_a_host_without_a_toolkit(tmp_path):
    toolkit = gpu_host.find_toolkit({"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)})
    assert toolkit == gpu_host.Toolkit(str(tmp_path), None, None, None, None, None)


@pytest.mark.parametrize("release", ["0.6.1", "0.7.4"])
@pytest.mark.parametrize("names", [("CUDA_HOME",), ("CUDA_PATH",), ("CUDA_HOME", "CUDA_PATH"), ("PATH",), ()], ids="-".join)
def test_the_toolkit_is_where_flashinfers_own_code_finds_it(release, names, programs, tmp_path):
    folder = programs(nvcc=NVCC)
    values = {"CUDA_HOME": "/one", "CUDA_PATH": "/other", "PATH": f"{folder}/bin:/usr/bin:/bin"}
    environment = {"PATH": "/usr/bin:/bin", **{name: values[name] for name in names}}
    source = (unpack("flashinfer-python", release, tmp_path, "flashinfer/jit/cpp_ext.py") / "flashinfer/jit/cpp_ext.py").read_text()
    (function,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "get_cuda_path")
    function.decorator_list = []
    program = f"import os, subprocess\n{ast.unparse(function)}\ntry:\n    print(get_cuda_path())\nexcept RuntimeError:\n    print(None)\n"
    upstream = subprocess.run(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()
    assert str(cuda_home(environment)) == upstream


def test_the_serving_venv_tells_which_cuda_it_needs(tmp_path):
    venv.create(tmp_path / "venv", symlinks=True)
    python = str(tmp_path / "venv/bin/python")
    assert gpu_host.find_venv(python) == gpu_host.find_venv(None) == gpu_host.Venv(None, None, None)
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    for name, file, text in (
        ("flashinfer_python-0.6.12", "flashinfer/__init__.py", ""),
        ("torch-2.11.0", "torch/version.py", "__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"),
    ):
        (packages / f"{name}.dist-info").mkdir()
        (packages / file).parent.mkdir()
        (packages / file).write_text(text)
    (packages / "torch/__init__.py").touch()
    assert gpu_host.find_venv(python) == gpu_host.Venv("0.6.12", "2.11.0", "13.0")
    (packages / "torch/version.py").write_text("cuda: Optional[str] = None\n")
    assert gpu_host.find_venv(python).torch_cuda == "none"
