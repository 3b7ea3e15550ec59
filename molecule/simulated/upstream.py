# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ask the installed flashinfer and sglang what allreduce fusion would do here. Their own code answers: it is executed.

    python -I upstream.py SITE_PACKAGES CAPABILITY

Simulated are the GPU, the CUDA driver, and whatever else the two import; every gate is upstream's. Prints one JSON object:
``module`` and ``library`` (the error of the JIT module's generator or null, and where the module is built), ``applies``
(whether the layers fuse), ``backend`` and ``workspace`` (the error of the choice and of the preflight, or null; ``absent``
where the release has none), and ``enabled`` (the line that a rank logs, with places for rank and world_size).
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import json
import os
import re
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace

FUSION = "sglang.srt.layers.flashinfer_comm_fusion"
LAYERS = ("sglang.srt.layers.layer_boundary.residual.add_norm", "sglang.srt.layers.communicator")
# Modules that run, and packages of which only the folder counts: their __init__ would import everything.
REAL = re.compile(
    rf"{re.escape(FUSION)}|{'|'.join(map(re.escape, LAYERS))}"
    r"|sglang\.srt\.(environ|runtime_context|platforms(\..*)?|utils|utils\.common)"
    r"|flashinfer\.(jit(\..*)?|_build_meta|artifacts|compilation_context|utils|version)"
)
FOLDER = re.compile(r"flashinfer|sglang(\.srt(\.layers(\.layer_boundary(\.residual)?)?)?)?")
# What a machine of this kind does not have, so that upstream must not find it.
MISSING = re.compile(r"torch_(npu|musa|xpu)|flashinfer_(cubin|jit_cache)|npu|xpu|hpu|musa|mps")


class Value(type):
    """Something that no gate depends on: a class that can be called, subclassed, compared, calculated with, and is false."""

    def __new__(cls, name: str = "simulated", bases: tuple = (), members: dict | None = None, **_options: object) -> Value:
        return super().__new__(cls, name, bases, dict(members or {}))

    def __init__(cls, *_args: object, **_options: object) -> None:
        super().__init__("simulated", (), {})

    def __getattr__(cls, name: str) -> Value:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, Value(name))
        return getattr(cls, name)

    def __call__(cls, *args: object, **options: object) -> object:
        decorates = len(args) == 1 and not options and isinstance(args[0], (FunctionType, type)) and not isinstance(args[0], Value)
        return args[0] if decorates else Value()

    def __bool__(cls) -> bool:
        return False

    def __iter__(cls):
        return iter(())

    def __getitem__(cls, _key: object) -> Value:
        return cls

    def __add__(cls, _other: object) -> Value:
        return cls

    def __neg__(cls) -> Value:
        return cls

    def __le__(cls, _other: object) -> bool:
        return True

    __or__ = __ror__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = __add__
    __lt__ = __ge__ = __gt__ = __le__  # versions of what is simulated are always right


class SimulatedModule(ModuleType):
    """A module of which every name is a Value."""

    __all__ = ()

    def __getattr__(self, name: str) -> Value:
        if name.startswith("__") or MISSING.fullmatch(name):
            raise AttributeError(name)
        setattr(self, name, Value(name))
        return getattr(self, name)

    def __call__(self, *args: object, **options: object) -> object:
        return Value()(*args, **options)


class Finder:
    """Find the real modules, and simulate all that is neither real nor part of Python."""

    def __init__(self, site: str) -> None:
        self.site = site

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        if REAL.fullmatch(name) or MISSING.fullmatch(name) or top in sys.stdlib_module_names:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        if FOLDER.fullmatch(name):
            spec.submodule_search_locations = [os.path.join(self.site, *name.split("."))]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ModuleType(spec.name) if spec.submodule_search_locations else SimulatedModule(spec.name)

    def exec_module(self, _module: ModuleType) -> None:
        """There is nothing to execute."""


def simulate_gpu(capability: tuple[int, int]) -> None:
    """Let PyTorch report eight GPUs of this capability and a CUDA that knows them."""
    torch = importlib.import_module("torch")
    torch.__version__ = "2.9.1+cu130"
    torch.version = SimpleNamespace(cuda="13.0", hip=None)
    torch.finfo = lambda _dtype: SimpleNamespace(min=-1.0, max=1.0, eps=0.1, tiny=0.1)
    major, minor = capability
    for name, answer in {
        "is_available": True,
        "device_count": 8,
        "current_device": 0,
        "get_device_capability": capability,
        "get_device_properties": SimpleNamespace(major=major, minor=minor, name="simulated", total_memory=96 << 30),
    }.items():
        setattr(torch.cuda, name, lambda *_args, answer=answer: answer)


class Driver:
    """The CUDA driver of a GPU that has, or has not, NVLink multicast: what the preflight asks of it."""

    class CUresult:
        CUDA_SUCCESS, CUDA_ERROR_NOT_SUPPORTED = 0, 801

    def __init__(self, multicast: bool) -> None:
        self.multicast = multicast

    def __getattr__(self, _name: str) -> Value:
        return Value()

    def cuMemGetAllocationGranularity(self, *_args: object) -> tuple[int, int]:
        return self.CUresult.CUDA_SUCCESS, 2 << 20

    def cuMulticastGetGranularity(self, *_args: object) -> tuple[int, int]:
        return (self.CUresult.CUDA_SUCCESS, 2 << 20) if self.multicast else (self.CUresult.CUDA_ERROR_NOT_SUPPORTED, 0)


def error_of(call: Callable[[], object]) -> str | None:
    """Return what ``call`` raises, as Python prints it, or None."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def applies() -> bool:
    """Whether the layers fuse, for a server that was started with the fusion flag and the backend trtllm."""
    asked = Value("arguments")
    asked.enable_flashinfer_allreduce_fusion, asked.flashinfer_allreduce_fusion_backend = True, "trtllm"
    for name in LAYERS:
        if os.path.isfile(os.path.join(sys.path[0], *name.split(".")) + ".py"):
            module = importlib.import_module(name)
            for source in ("get_global_server_args", "get_server_args", "get_exec"):
                setattr(module, source, lambda: asked)
            asked.comm, module.uses_cutedsl_ar_fusion = asked, lambda: False
            predicate = getattr(module, "flashinfer_ar_fusion_applies", None) or module.apply_flashinfer_allreduce_fusion
            return bool(predicate(16))
    raise SystemExit(f"none of {', '.join(LAYERS)} is in {sys.path[0]}")


def enabled_line(path: str) -> str:
    """Return the text that FlashInferWorkspaceManager.initialize logs, as it stands in the file."""
    values = {
        "self": SimpleNamespace(backend="trtllm", max_token_num=2048, hidden_dim=6144),
        "rank": "{rank}",
        "world_size": "{world_size}",
    }
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    manager = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "FlashInferWorkspaceManager")
    initialize = next(node for node in manager.body if isinstance(node, ast.FunctionDef) and node.name == "initialize")
    for call in ast.walk(initialize):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "logger.info":
            return eval(compile(ast.Expression(call.args[0]), path, "eval"), values)  # noqa: S307  upstream's f-string
    raise SystemExit(f"{path}: initialize logs nothing")


def main(site: str, capability: str) -> None:
    """Print the answers."""
    major, minor = map(int, capability.split("."))
    sys.path.insert(0, site)
    sys.dont_write_bytecode = True
    sys.meta_path.insert(0, Finder(site))
    simulate_gpu((major, minor))
    comm = importlib.import_module("flashinfer.jit.comm")
    module = error_of(comm.gen_trtllm_comm_module)
    fusion = importlib.import_module(FUSION)
    answers = {
        "module": module,
        "library": None if module else str(comm.gen_trtllm_comm_module().jit_library_path),
        "applies": applies(),
        "backend": "absent",
        "workspace": "absent",
        "enabled": enabled_line(fusion.__file__),
    }
    if hasattr(fusion, "_resolve_backend"):
        answers["backend"] = error_of(lambda: fusion._resolve_backend("trtllm", False))
    if hasattr(fusion, "_flashinfer_trtllm_workspace_allocation_sizes"):
        driver = Driver(multicast=major in (9, 10))
        sizes = fusion._flashinfer_trtllm_workspace_allocation_sizes
        answers["workspace"] = error_of(lambda: sizes(driver, SimpleNamespace(requestedHandleTypes=0), 8, 2048, 6144, None))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
