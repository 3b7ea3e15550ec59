# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a machine without GPUs lacks, so that upstream's own code can be executed on it.

Three things are stood in for, each as little as possible: the GPU that PyTorch reports, the CUDA driver, and the
modules that gates do not depend on. Every gate, and every helper that asks for an architecture, is upstream's.
"""

from __future__ import annotations

import array
import enum
import importlib.machinery
import inspect
import os
import re
import sys
import types
from collections.abc import Iterable
from contextlib import suppress

import torch

# sglang is executed from these modules; of the packages around them only the folders count, not their __init__.
REAL_SGLANG = (
    "sglang.srt.environ",
    "sglang.srt.layers.communicator",
    "sglang.srt.layers.flashinfer_comm_fusion",
    "sglang.srt.layers.layer_boundary.residual.add_norm",
    "sglang.srt.runtime_context",
    "sglang.srt.utils",
    "sglang.srt.utils.common",
)
_FOLDERS = ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.layer_boundary", "sglang.srt.layers.layer_boundary.residual")
# Third-party modules that sglang imports without using them on the way to a gate.
UNUSED = (
    "IPython", "PIL", "aiohttp", "decord", "fastapi", "msgspec", "orjson", "prometheus_client", "psutil", "pybase64", "pydantic",
    "starlette", "torchvision", "triton", "uvicorn", "zmq",
)  # fmt: skip


class _AnyClass(type):
    def __getattr__(cls, name: str) -> object:
        return _any(cls, name)

    def __getitem__(cls, key: object) -> object:
        return cls


class Anything(metaclass=_AnyClass):
    """A value that nothing here depends on: callable, falsy, less than any positive number, and of any attribute."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__()

    def __getattr__(self, name: str) -> object:
        return _any(self, name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        decorated = len(args) == 1 and not kwargs and (inspect.isfunction(args[0]) or inspect.isclass(args[0]))
        return args[0] if decorated else Anything()

    def __getitem__(self, key: object) -> object:
        return self

    def __iter__(self):
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __lt__(self, other: object) -> bool:
        return other > 0

    def __le__(self, other: object) -> bool:
        return other >= 0

    def __gt__(self, other: object) -> bool:
        return other < 0

    def __ge__(self, other: object) -> bool:
        return other <= 0

    def __enter__(self) -> object:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def __or__(self, other: object) -> object:
        return self

    __ror__ = __or__


class _Unused(types.ModuleType):
    """A module of which every name is an Anything."""

    def __getattr__(self, name: str) -> object:
        return _any(self, name)


def _any(owner: object, name: str) -> object:
    """Give ``owner`` the attribute ``name``: a class where it is spelled as one, so that it can be inherited from."""
    if name.startswith("__"):
        raise AttributeError(name)
    value = type(name, (Anything,), {}) if re.match(r"_*[A-Z]\w*[a-z]", name) else Anything()
    setattr(owner, name, value)
    return value


class Finder:
    """Import unused modules as Anything, and the real ones without what their packages would import."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] in UNUSED or (name.startswith("sglang.") and name not in (*REAL_SGLANG, *_FOLDERS)):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name in _FOLDERS:
            spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
            spec.submodule_search_locations = [f"{entry}/{name.replace('.', '/')}" for entry in sys.path]
            return spec
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Unused(spec.name)
        module.__all__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to execute."""


class Gpu:
    """Make PyTorch and NVML report GPUs of one compute capability.

    Args:
        capability: For example (12, 0).

    Attributes:
        context_created: Whether something was asked that makes PyTorch create a CUDA context.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability, self.context_created = capability, False
        major, minor = capability
        properties = types.SimpleNamespace(name="simulated", major=major, minor=minor, total_memory=96 << 30, multi_processor_count=188)
        for name, value in {
            "is_available": lambda: True,
            "is_initialized": lambda: self.context_created,
            "device_count": lambda: 8,
            "current_device": lambda: 0,
            "get_device_name": lambda device=None: "simulated",
            "get_device_capability": lambda device=None: self._ask(capability),
            "get_device_properties": lambda device=None: self._ask(properties),
            "_get_nvml_device_index": lambda device: 0,
        }.items():
            setattr(torch.cuda, name, value)
        torch.version.cuda = "13.0"
        with suppress(ImportError):
            import pynvml

            pynvml.nvmlInit = pynvml.nvmlShutdown = lambda: None
            pynvml.nvmlDeviceGetHandleByIndex = lambda index: index
            pynvml.nvmlDeviceGetCudaComputeCapability = lambda handle: capability

    def _ask(self, answer: object) -> object:
        self.context_created = True
        return answer


class Result(enum.IntEnum):
    """What a driver call returns first."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_SUPPORTED = 801


class Driver(types.ModuleType):
    """``cuda.bindings.driver`` on a GPU that has, or has not, NVLink multicast. Every other call succeeds.

    Args:
        multicast: Whether the GPU has it.

    Attributes:
        calls: The names of the driver calls so far.
    """

    ALLOCATION_GRANULARITY = 2 << 20
    MULTICAST_GRANULARITY = 512 << 20
    CUresult = Result

    def __init__(self, multicast: bool) -> None:
        super().__init__("cuda.bindings.driver")
        self.multicast, self.calls = multicast, []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if not name.startswith("cu"):
            return _Names(name)

        def call(*args: object) -> tuple[object, ...]:
            self.calls.append(name)
            if name.startswith("cuMulticast") and not self.multicast:
                return Result.CUDA_ERROR_NOT_SUPPORTED, None
            return Result.CUDA_SUCCESS, self._answer(name, args)

        return call

    def cuGetErrorName(self, error: Result) -> tuple[Result, str]:
        """The name of an error code."""
        return Result.CUDA_SUCCESS, error.name

    def _answer(self, name: str, args: tuple[object, ...]) -> int:
        if name == "cuMemExportToShareableHandle":
            return os.open(os.devnull, os.O_RDONLY)
        if name == "cuDeviceGetAttribute":
            return int(self.multicast and "MULTICAST" in str(args[0]))
        if name == "cuMemGetAllocationGranularity":
            return self.ALLOCATION_GRANULARITY
        return self.MULTICAST_GRANULARITY if name == "cuMulticastGetGranularity" else 0

    def install(self) -> None:
        """Be what ``from cuda.bindings import driver`` gives."""
        bindings = types.ModuleType("cuda.bindings")
        bindings.driver, bindings.runtime, bindings.nvrtc = self, Driver(self.multicast), Driver(self.multicast)
        bindings.runtime.cudaError_t = bindings.nvrtc.nvrtcResult = Result
        package = types.ModuleType("cuda")
        package.bindings = bindings
        package.__path__ = bindings.__path__ = []
        sys.modules.update({"cuda": package, "cuda.bindings": bindings})
        sys.modules.update({f"cuda.bindings.{name}": getattr(bindings, name) for name in ("driver", "runtime", "nvrtc")})


class _Names:
    """A driver structure, or an enumeration whose members are their own names."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: object) -> types.SimpleNamespace:
        return types.SimpleNamespace(allocFlags=types.SimpleNamespace())

    def __getattr__(self, name: str) -> str:
        return name


def unused(names: Iterable[str]) -> None:
    """Make ``names`` modules of which every name is an Anything."""
    for name in names:
        module = sys.modules[name] = _Unused(name)
        module.__path__ = [os.devnull]
        parent, _dot, child = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], child, module)


def subscriptable_array() -> None:
    """Let `array.array[int]` be written, as Python 3.12 does and flashinfer 0.6.16 to 0.6.16.post3 expect."""

    class Array(array.array):
        __class_getitem__ = classmethod(types.GenericAlias)

    array.array = Array
