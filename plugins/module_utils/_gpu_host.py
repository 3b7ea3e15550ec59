# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a server on these GPUs finds on its host besides them, and what of it stands in its way.

The toolchain is looked for as FlashInfer looks for it, in the environment of the server's unit.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from ansible_collections.blackwell.inference.plugins.module_utils import _account
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._gpu import Gpu, Inventory
from ansible_collections.blackwell.inference.plugins.module_utils._jit_build import COMPILER_GIB, HOST_GIB, cuda_home, max_jobs, nvcc
from ansible_collections.blackwell.inference.plugins.module_utils._jit_cache_venv import complaint
from ansible_collections.blackwell.inference.plugins.module_utils._packages import locate

_SHM, _SHM_MIB = "/dev/shm", 8 * 1024  # noqa: S108 - where the ranks keep what they share
_CAP_SYS_RESOURCE = 24  # the bit of the capability to raise limits
_TRANSLATING = ("DMA", "DMA-FQ")  # types of an IOMMU group whose devices do not see physical addresses

# The ids of all problems, and of those with which no server can start.
IDS = (
    "torch",
    "nvcc",
    "driver",
    "ninja",
    "compiler",
    "libcuda",
    "memory",
    "max_jobs",
    "shm",
    "memlock",
    "persistence_mode",
    "peer_access",
    "iommu",
)
_FATAL = ("torch",)

_Found = Iterator[tuple[str, InferenceError]]  # a problem's id, and what to say

# Capability -> the oldest nvcc that has it as a target with the suffix that FlashInfer asks for. By NVIDIA's release notes.
_OLDEST_NVCC = {"9.0": "12.0", "10.0": "12.8", "10.3": "12.9", "11.0": "13.0", "12.0": "12.8", "12.1": "12.9"}

_PEER_REMEDIES = {
    "CNS": "Switch off IOMMU and ACS in the BIOS, or start the kernel with iommu=pt.",
    "TNS": "Put the cards below one host bridge, or switch off IOMMU and ACS in the BIOS.",
    "GNS": "The driver does not grant it to these cards: set sglang_server_allreduce to nccl.",
    "DR": "Remove the registry key of the nvidia module that forbids it.",
}


class Toolkit(NamedTuple):
    """What a build of kernels would use; None is what is not there."""

    cuda_home: Optional[str]
    nvcc: Optional[str]
    nvcc_version: Optional[str]  # e.g. "13.0"
    ninja: Optional[str]
    compiler: Optional[str]
    link_error: Optional[str]  # what the linker says of libcuda and libcudart; None also where there is no compiler


class Host(NamedTuple):
    """Memory and limits; None is what the kernel does not say."""

    cores: int
    memory_mib: Optional[int]
    memory_available_mib: Optional[int]  # at this moment
    compile_jobs: int  # compilers that fit into that
    shm_mib: Optional[int]
    memlock_mib: Optional[int]  # the most that a unit may lock, where PID 1 may not raise it; None is no limit
    iommu: Optional[str]  # how the GPUs' IOMMU groups translate, the strictest: DMA, DMA-FQ, identity; None where there is none


class Venv(NamedTuple):
    """What is installed in the serving venv; None is what is not, or is not known."""

    flashinfer: Optional[str]
    torch: Optional[str]
    torch_cuda: Optional[str]  # the CUDA that torch was built for, e.g. "13.0"; "none" for a build without


class Problem(NamedTuple):
    """One thing that stands in a server's way."""

    id: str
    message: str  # one line: what was found, what is expected, what to do
    fatal: bool  # whether no server can start


def find_toolkit(environment: Mapping[str, str], timeout: float = 30) -> Toolkit:
    """Look for the toolchain as FlashInfer does in a service with this environment."""
    environment = {"PATH": _account.PATH, **environment}
    home, compiler = cuda_home(environment), shutil.which(environment.get("CXX") or "c++", path=environment["PATH"])
    found = nvcc(environment)
    return Toolkit(
        home,
        found,
        _nvcc_version(found, environment, timeout) if found else None,
        shutil.which("ninja", path=environment["PATH"]),
        compiler,
        _link_error(compiler, home, environment) if compiler and home else None,
    )


def find_venv(python: Optional[str]) -> Venv:
    """Look into the serving venv; it is fine if there is none yet.

    Raises:
        InferenceError: There is a file in place of its interpreter that does not answer as one.
    """
    packages = locate(python).packages if python and os.path.exists(python) else {}
    torch = _text("/", packages["torch"].path("torch/version.py")) if "torch" in packages else ""
    built_for = re.search(r"^cuda\b[^=]*= *(?:'([\d.]+)'|None)", torch, re.MULTILINE)
    return Venv(
        packages["flashinfer"].version if "flashinfer" in packages else None,
        packages["torch"].version if "torch" in packages else None,
        (built_for.group(1) or "none") if built_for else None,
    )


def read_host(gpus: Sequence[Gpu], root: str = "/") -> Host:
    """Read memory and limits from the kernel's files below ``root``."""
    meminfo, cores = _text(root, "proc/meminfo"), len(os.sched_getaffinity(0))
    kib = {name: int(value) for name, value in re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", meminfo, re.MULTILINE)}
    shm = None
    with contextlib.suppress(OSError):
        system = os.statvfs(root.rstrip("/") + _SHM)
        shm = system.f_blocks * system.f_frsize >> 20
    return Host(
        cores,
        kib["MemTotal"] >> 10 if "MemTotal" in kib else None,
        kib["MemAvailable"] >> 10 if "MemAvailable" in kib else None,
        max_jobs(meminfo, cores),
        shm,
        _memlock_mib(_text(root, "proc/1/limits"), _text(root, "proc/1/status")),
        max(filter(None, (_iommu(root, gpu) for gpu in gpus)), key=_TRANSLATING.__contains__, default=None),
    )


def oldest_nvcc(capability: str, flashinfer: Optional[str]) -> str:
    """Return the oldest nvcc, e.g. "12.9", with which a FlashInfer release builds for a capability.

    Args:
        capability: E.g. "12.0".
        flashinfer: Its version; None is unknown, and the least is asked for.
    """
    # These releases turn 12.0 into 120f, which nvcc knows from 12.9 on.
    if capability == "12.0" and flashinfer and (0, 6, 7) <= _release(flashinfer) < (0, 7):
        return "12.9"
    return _OLDEST_NVCC.get(capability, "11.8")


def problems(inventory: Inventory, toolkit: Toolkit, host: Host, venv: Venv, environment: Mapping[str, str]) -> list[Problem]:
    """Name what stands in the way of a server on these GPUs; nothing where there are none.

    Variables that no host should set are for server_args_info to refuse, not for here.

    Args:
        inventory: The GPUs.
        toolkit: As found with ``environment``.
        host: As read.
        venv: As found.
        environment: That of the server's unit.
    """
    if not inventory.gpus:
        return []
    checks = (
        _torch(inventory, venv),
        _toolchain(inventory, toolkit, venv.flashinfer),
        _memory(host, environment),
        _limits(host),
        _cards(inventory, host),
    )
    return [Problem(name, str(error), name in _FATAL) for check in checks for name, error in check]


def _torch(inventory: Inventory, venv: Venv) -> _Found:
    if not venv.torch_cuda:
        return
    built = f"torch {venv.torch} in the serving venv is built {'for' if venv.torch_cuda != 'none' else 'without'} CUDA"
    found = f"{built} {venv.torch_cuda}" if venv.torch_cuda != "none" else built
    newest = max(inventory.compute_capabilities, key=_release, default="")
    oldest = "12.8" if _release(newest) >= (10,) else "11.8"
    if venv.torch_cuda == "none" or _release(venv.torch_cuda) < _release(oldest):
        error = InferenceError("torch", found, f"CUDA {oldest} or newer, which knows {newest}", "Install another build of torch.")
        yield "torch", error
    elif inventory.cuda_version and _release(inventory.cuda_version)[0] < _release(venv.torch_cuda)[0]:
        expected = f"CUDA {inventory.cuda_version} at most, which driver {inventory.driver_version} runs"
        yield "torch", InferenceError("torch", found, expected, "Upgrade the driver, or install another build of torch.")


def _toolchain(inventory: Inventory, toolkit: Toolkit, flashinfer: Optional[str]) -> _Found:
    needed = {capability: oldest_nvcc(capability, flashinfer) for capability in inventory.compute_capabilities}
    capability, oldest = max(needed.items(), key=lambda item: _release(item[1]), default=("", "11.8"))
    remedy = f"Install a CUDA toolkit of {oldest} or newer and set CUDA_HOME to it."
    if not toolkit.nvcc:
        yield "nvcc", InferenceError("nvcc", f"none in {toolkit.cuda_home or 'PATH'}", f"{oldest} or newer", remedy)
    elif toolkit.nvcc_version and _release(toolkit.nvcc_version) < _release(oldest):
        builder = f"flashinfer {flashinfer}" if flashinfer else "FlashInfer"
        expected = f"{oldest} or newer, with which {builder} builds for {capability}"
        yield "nvcc", InferenceError("nvcc", f"{toolkit.nvcc_version} ({toolkit.nvcc})", expected, remedy)
    if toolkit.nvcc_version and inventory.cuda_version and _release(inventory.cuda_version)[0] < _release(toolkit.nvcc_version)[0]:
        found = f"{inventory.driver_version} runs CUDA {inventory.cuda_version} at most, and nvcc is {toolkit.nvcc_version}"
        remedy = "Upgrade the driver, or set CUDA_HOME to an older toolkit."
        yield "driver", InferenceError("driver", found, "a driver that runs what nvcc builds", remedy)
    for name, what, path, remedy in (
        ("ninja", "ninja", toolkit.ninja, "Install ninja into the serving venv, whose bin folder the unit has first."),
        ("compiler", "C++ compiler", toolkit.compiler, "Install g++, or name a compiler in CXX."),
    ):
        if not path:
            yield name, InferenceError(what, "none in the PATH of the unit", "one, for the kernels that are built here", remedy)
    if toolkit.link_error:
        remedy = "Name the folder of libcuda.so (a driver's, or a toolkit's stubs) in FLASHINFER_EXTRA_LDFLAGS=-L<folder>."
        yield "libcuda", InferenceError("libcuda", toolkit.link_error, "libraries that the linker finds", remedy)


def _memory(host: Host, environment: Mapping[str, str]) -> _Found:
    if host.memory_available_mib is None:
        return
    available, wanted = f"{host.memory_available_mib >> 10} GiB are available", environment.get("MAX_JOBS", "")
    if host.memory_available_mib < (HOST_GIB + COMPILER_GIB) << 10:
        expected = f"{HOST_GIB} for the host and {COMPILER_GIB} for a compiler"
        yield "memory", InferenceError("memory", available, expected, "Build the kernels while nothing else runs.")
    if wanted.isdigit() and int(wanted) > host.compile_jobs:
        found = f"{wanted} compilers, while {available}, and {host.cores} cores"
        expected = f"at most {host.compile_jobs}, at {COMPILER_GIB} GiB each and {HOST_GIB} left over"
        remedy = f"Set sglang_server_max_jobs to {host.compile_jobs}."
        yield "max_jobs", InferenceError("environment MAX_JOBS", found, expected, remedy)


def _limits(host: Host) -> _Found:
    if host.shm_mib is not None and host.shm_mib < _SHM_MIB:
        remedy = f"Remount it: mount -o remount,size=16G {_SHM}. For a container: --shm-size 16g."
        yield "shm", InferenceError("shm", f"{_SHM} has {host.shm_mib} MiB", f"{_SHM_MIB} or more, which the ranks share", remedy)
    if host.memlock_mib is not None:
        found = f"units may lock {host.memlock_mib} MiB, and PID 1 may not raise that"
        remedy = "Start the container with --ulimit memlock=-1."
        yield "memlock", InferenceError("memlock", found, "no limit, as for memory that GPUs copy from", remedy)


def _cards(inventory: Inventory, host: Host) -> _Found:
    off = ", ".join(str(gpu.index) for gpu in inventory.gpus if gpu.persistence_mode is False)
    if off:
        expected = "it on, so that the driver keeps a GPU initialised while nothing uses it"
        remedy = "Enable nvidia-persistenced.service, or run nvidia-smi -pm 1."
        yield "persistence_mode", InferenceError("persistence_mode", f"off for GPU {off}", expected, remedy)
    closed = [link for link in inventory.links if link.peer_access not in (None, "OK")]
    if closed:
        pairs = ", ".join(f"{one} and {other}" for one, other in (link.gpus for link in closed[:3]))
        more = f" and {len(closed) - 3} more pairs" if len(closed) > 3 else ""
        why = closed[0].peer_access or ""
        remedy = _PEER_REMEDIES.get(why, "Look for the reason with nvidia-smi topo -p2p r.")
        expected = "every pair to reach each other, without which no fused allreduce works"
        yield "peer_access", InferenceError("peer_access", f"none between the GPUs {pairs}{more} ({why})", expected, remedy)
    if host.iommu in _TRANSLATING and any(not link.link.startswith("NV") for link in inventory.links):
        expected = "identity, or none: through it copies between cards hang or arrive damaged"
        remedy = "Start the kernel with iommu=pt, or switch it off in the BIOS."
        yield "iommu", InferenceError("iommu", f"it translates what the GPUs send to each other ({host.iommu})", expected, remedy)


def _nvcc_version(nvcc: str, environment: Mapping[str, str], timeout: float) -> Optional[str]:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [nvcc, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=False,
            env=dict(environment),
            timeout=timeout,
        )
        release = re.search(r"release (\d+\.\d+)", done.stdout)
        return release.group(1) if release else None
    return None


def _link_error(compiler: str, home: str, environment: Mapping[str, str]) -> Optional[str]:
    """Link nothing the way FlashInfer links a module; return what the linker complains of."""
    folders = [f"-L{home}/lib64", f"-L{home}/lib64/stubs"]
    extra = shlex.split(environment.get("FLASHINFER_EXTRA_LDFLAGS", ""))
    with tempfile.TemporaryDirectory() as folder:
        target = os.path.join(folder, "probe.so")
        command = [compiler, "-shared", "-x", "c++", os.devnull, *folders, "-lcudart", "-lcuda", *extra, "-o", target]
        return complaint(command, "ld", environment) or None


def _memlock_mib(limits: str, status: str) -> Optional[int]:
    hard = re.search(r"^Max locked memory\s+\S+\s+(\d+)", limits, re.MULTILINE)
    capabilities = re.search(r"^CapEff:\s+([0-9a-f]+)$", status, re.MULTILINE)
    may_raise = not capabilities or int(capabilities.group(1), 16) >> _CAP_SYS_RESOURCE & 1
    return int(hard.group(1)) >> 20 if hard and not may_raise else None


def _iommu(root: str, gpu: Gpu) -> Optional[str]:
    """Return how the IOMMU group of a GPU translates addresses."""
    bus = (gpu.pci_bus_id or "").lower()[-len("0000:00:00.0") :]  # nvidia-smi writes the domain with eight digits, the kernel with four
    return _text(root, f"sys/bus/pci/devices/{bus}/iommu_group/type").strip() or None


def _text(root: str, name: str) -> str:
    try:
        return Path(root, name).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers that a version starts with: 0.6.7.post2 is (0, 6, 7)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
