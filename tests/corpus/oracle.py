# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ask upstream's own code, executed, what a folder of installed packages does at each compute capability.

    python oracle.py SITE_PACKAGES

Runs in a venv with CPU PyTorch and what FlashInfer imports (requirements.txt beside this file), one process for each
question, since both packages ask for the architecture once, at import. Prints one JSON object::

    {"<gate id>": {"<compute capabilities>": true or false, ...}, ..., "details": {"<question>": {...}}}

True is open. A gate that the installed pair does not have is left out.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import logging
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from types import SimpleNamespace

import standins
import torch
import torch.utils.cpp_extension

# Imported once for all the processes below, and tvm_ffi before the CUDA bindings are stood in for.
for name in ("jinja2", "requests", "tvm_ffi"):
    importlib.import_module(name)

CAPABILITIES = ((8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
Host = tuple[tuple[int, int], ...]
MIXED: Host = ((9, 0), (12, 0))
COMMUNICATOR = "sglang.srt.layers.communicator"
ADD_NORM = "sglang.srt.layers.layer_boundary.residual.add_norm"
FUSION = "sglang.srt.layers.flashinfer_comm_fusion"
MIB = 1 << 20


def main(site: str) -> None:
    """Print what the packages in ``site`` answer."""
    warnings.simplefilter("ignore")
    sys.dont_write_bytecode = True
    sys.path.insert(0, site)
    hosts: list[Host] = [(capability,) for capability in CAPABILITIES]
    with tempfile.TemporaryDirectory() as os.environ["FLASHINFER_WORKSPACE_BASE"]:
        asked = {
            **_forked(lambda: _ask(import_jit, {"jit": (jit, [*hosts, MIXED])})),
            **_forked(lambda: _ask(import_comm, {"workspace": (workspace, hosts), "sglang": (sglang, hosts)})),
        }
    answers: dict[str, dict[str, bool]] = {}
    details: dict[str, dict[str, object]] = {}
    for name, by_host in asked.items():
        for host, result in by_host.items():
            details.setdefault(name, {})[host] = result.pop("details", None)
            for gate, answer in result.items():
                answers.setdefault(gate, {})[host] = answer
    json.dump({**answers, "details": details}, sys.stdout)


def _ask(prepare: Callable[[], None], questions: dict[str, tuple[Callable[..., dict], list[Host]]]) -> dict:
    """Import once what takes long, then ask each question for each host in a process of its own."""
    prepare()
    return {
        name: {
            " ".join(f"{major}.{minor}" for major, minor in host): _forked(lambda question=question, host=host: question(*host))
            for host in hosts
        }
        for name, (question, hosts) in questions.items()
    }


def import_jit() -> None:
    """Import FlashInfer as it is."""
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "9.0a"
    importlib.import_module("flashinfer.jit.comm")


def import_comm() -> None:
    """Import FlashInfer's communication modules as far as they are there, with a stand-in for the driver and the CUDA runtime."""
    standins.Gpu((9, 0))
    standins.Driver(multicast=True).install()
    standins.subscriptable_array()
    standins.unused(["flashinfer.comm.cuda_ipc", "cuda.tile"])  # the former loads libcudart when it is imported
    for name in ("flashinfer.comm.mnnvl", "flashinfer.comm.trtllm_ar"):
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)


def jit(*host: tuple[int, int]) -> dict:
    """Which JIT modules FlashInfer would compile for ``host``, and with which architecture flags."""
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(f"{major}.{minor}{'a' if major >= 9 else ''}" for major, minor in host)
    standins.unused(["nvidia", "nvidia.nvshmem"])  # mixed_comm asks where its headers are
    comm, mla = importlib.import_module("flashinfer.jit.comm"), importlib.import_module("flashinfer.jit.mla")
    comm.current_compilation_context.__init__()  # it has read the environment when FlashInfer was imported
    generators = {
        "flashinfer.trtllm_comm.majors": (comm, "gen_trtllm_comm_module"),
        "flashinfer.mnnvl_comm.majors": (comm, "gen_trtllm_mnnvl_comm_module"),
        "flashinfer.mixed_comm.majors": (comm, "gen_mixed_comm_module"),
        "flashinfer.cutlass_mla.majors": (mla, "gen_mla_module"),
    }
    answers: dict[str, object] = {}
    details = {}
    for gate, (module, name) in generators.items():
        generate = getattr(module, name, None)
        if generate is None:
            continue
        try:
            flags = sorted(flag for flag in generate().extra_cuda_cflags or [] if "-gencode" in flag)
        except RuntimeError as error:
            answers[gate], details[gate] = False, f"{type(error).__name__}: {error}"
        else:
            compiled = {re.sub(r"[af]$", "", flag.rsplit("sm_", 1)[1]) for flag in flags}
            # A host is served only where each of its GPUs gets code.
            answers[gate] = not flags or all(f"{major}{minor}" in compiled for major, minor in host)
            details[gate] = flags
    return {**answers, "details": details}


def workspace(capability: tuple[int, int]) -> dict:
    """Whether FlashInfer can make the workspace of the unified API, with a driver that has multicast only on 9.0 and 10.x."""
    standins.Gpu(capability)
    driver = _driver(capability)
    mnnvl, trtllm_ar = (sys.modules.get(f"flashinfer.comm.{name}") for name in ("mnnvl", "trtllm_ar"))
    if not hasattr(mnnvl, "SymmDeviceMemory") or not hasattr(trtllm_ar, "SymmDeviceMemory"):
        return {}
    made: list[object] = []

    class Recorded(mnnvl.SymmDeviceMemory):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            made.append(kwargs["enable_multicast"])

        def __del__(self) -> None:
            """There is nothing to free."""

    def fill(*args: object) -> None:
        raise _Enough  # the memory is there; what follows compiles a kernel that writes to it

    trtllm_ar.SymmDeviceMemory, trtllm_ar.trtllm_lamport_initialize = Recorded, fill
    details: dict[str, object] = {
        "created": _attempt(
            trtllm_ar.trtllm_create_ipc_workspace_for_all_reduce_fusion,
            *(0, 1, 128, 4096),
            comm_backend=_OneRank(),
            create_metadata=True,
            use_symm_dev_mem=True,
        ),
        "multicast_of_buffers": list(made),
    }
    bare = mnnvl.SymmDeviceMemory.__new__(Recorded)
    bare._exchanger, bare.device_idx, bare.group_size, bare._enable_multicast = SimpleNamespace(handle_type="POSIX"), 0, 1, False
    bare.SIGNAL_PAD_SIZE = mnnvl.SIGNAL_PAD_SIZE
    driver.calls.clear()
    handle_type = ["POSIX"][: len(inspect.signature(bare._get_allocation_prop).parameters) - 1]  # an argument from 0.7.4
    details["sized"] = _attempt(bare._get_allocation_prop, 3 * MIB, *handle_type)
    details["granularity_mib"] = getattr(bare, "_mc_granularity", 0) // MIB
    details["queries"] = driver.calls.count("cuMulticastGetGranularity")
    made.clear()
    details["requested"] = _attempt(Recorded, 3 * MIB, 1, 0, 0, _OneRank(), enable_multicast=True, allocate_signal_pads=False)
    bare._enable_multicast = True
    details["sized_as_requested"] = _attempt(bare._get_allocation_prop, 3 * MIB, *handle_type)
    details["granularity_of_requested_mib"] = getattr(bare, "_mc_granularity", 0) // MIB
    # The two gates of the workspace, each by itself: the check in __init__, and the query in _get_allocation_prop.
    refused = "does not support multicasting" in str(details["created"])
    return {
        "flashinfer.workspace.multicast_device": not refused,
        "flashinfer.workspace.multicast_granularity": details["sized"] == "ok",
        "details": details,
    }


def sglang(capability: tuple[int, int]) -> dict:
    """What SGLang's fusion predicates answer when the operator has asked for fusion with the trtllm backend."""
    gpu, driver = standins.Gpu(capability), _driver(capability)
    sys.meta_path.insert(0, standins.Finder())
    answers: dict[str, object] = {}
    details: dict[str, object] = {}
    places = [name for name in (ADD_NORM, COMMUNICATOR) if _has(name)]
    for module in map(importlib.import_module, places):
        _ask_for_fusion(module)
        applies = getattr(module, "flashinfer_ar_fusion_applies", None) or getattr(module, "apply_flashinfer_allreduce_fusion", None)
        if applies:
            answers["sglang.fusion.applies"] = bool(applies(16))
            break
        answers["sglang.fusion.applies"] = _fuses_inline(module)
        answers["sglang.fusion.mlp_to_next_layer"] = _fuses_next_layer(module)
    fusion = importlib.import_module(FUSION) if _has(FUSION) else None
    # Up to here all is import; a server imports it before it forks.
    details["context_created"] = gpu.context_created
    if hasattr(fusion, "_resolve_backend"):
        cutedsl = ["cutedsl"] if "cutedsl" in inspect.getsource(fusion._resolve_backend) else []
        choices = [(backend, multi) for backend in ("auto", "trtllm", "mnnvl", *cutedsl) for multi in (False, True)]
        details["backend"] = {
            backend + " multi-node" * multi: _attempt(fusion._resolve_backend, backend, multi) for backend, multi in choices
        }
        answers["sglang.fusion.backend"] = details["backend"]["trtllm"] == "trtllm"
        answers["sglang.mnnvl.supported"] = bool(fusion._mnnvl_supported(False))
    if hasattr(fusion, "_flashinfer_trtllm_workspace_allocation_sizes"):
        prop = SimpleNamespace(requestedHandleTypes="POSIX")
        sizes = _attempt(fusion._flashinfer_trtllm_workspace_allocation_sizes, driver, prop, 8, 2048, 6144, torch.bfloat16)
        details["preflight"], details["queries"] = sizes, driver.calls.count("cuMulticastGetGranularity")
        answers["sglang.fusion.workspace_preflight"] = isinstance(sizes, list)
    return {**answers, "details": details}


def _fuses_inline(module: object) -> bool:
    """Whether the layer communicator of releases before 0.5.8 takes the fused path."""
    fused: list[bool] = []
    layernorm = _Norm(fused)
    context = SimpleNamespace(attn_tp_size=8, attn_tp_rank=0, attn_dp_size=1, tp_size=8, cache=None)
    hidden = torch.zeros(16, 8)
    module.tensor_model_parallel_all_reduce = lambda value: value
    module.CommunicateWithAllReduceAndLayerNormFn._gather_hidden_states_and_residual(
        hidden, hidden, None, layernorm, context, residual_input_mode=None
    )
    return bool(fused)


def _fuses_next_layer(module: object) -> bool:
    layer = SimpleNamespace(is_last_layer=False, _context=SimpleNamespace(tp_size=8), _speculative_algo=None, layer_id=0)
    batch = SimpleNamespace(input_ids=torch.zeros(16))
    return bool(module.LayerCommunicator.should_fuse_mlp_allreduce_with_next_layer(layer, batch))


class _Norm:
    def __init__(self, fused: list[bool]) -> None:
        self._fused = fused

    def __call__(self, hidden: object, residual: object) -> tuple[object, object]:
        return hidden, residual

    def forward_with_allreduce_fusion(self, hidden: object, residual: object) -> tuple[object, object]:
        self._fused.append(True)
        return hidden, residual


class _OneRank:
    """A group of one rank."""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def allgather(self, data: object) -> list[object]:
        return [data]

    def bcast(self, data: object, root: int) -> object:
        return data

    def barrier(self) -> None:
        return None

    def Split(self, color: int, key: int) -> _OneRank:
        return self


class _Asked(standins.Anything):
    """The server's arguments, where everything is off but fusion."""

    enable_flashinfer_allreduce_fusion = True
    flashinfer_allreduce_fusion_backend = "trtllm"
    disable_flashinfer_allreduce_fusion = False

    def __getitem__(self, key: str) -> object:
        return getattr(self, key)

    def get(self, key: str, default: object = None) -> object:
        return getattr(self, key, default)


def _ask_for_fusion(module: object) -> None:
    """Give ``module`` the arguments of a server that was started with the fusion flag, in this release's way."""
    asked = _Asked()
    asked.comm = asked
    for name in ("get_global_server_args", "get_server_args", "get_exec", "get_context"):
        if hasattr(module, name):
            setattr(module, name, lambda: asked)
    if hasattr(module, "global_server_args_dict"):
        module.global_server_args_dict = asked
    if hasattr(module, "uses_cutedsl_ar_fusion"):
        module.uses_cutedsl_ar_fusion = lambda: False


def _driver(capability: tuple[int, int]) -> standins.Driver:
    """The driver that was installed, on a GPU of this capability."""
    driver = sys.modules["cuda.bindings.driver"]
    driver.multicast = capability[0] in (9, 10)
    return driver


def _has(module: str) -> bool:
    return any(os.path.exists(os.path.join(entry, *module.split(".")) + ".py") for entry in sys.path)


class _Enough(Exception):
    """What is asked about has happened."""


def _attempt(call: Callable[..., object], *args: object, **kwargs: object) -> object:
    """What ``call`` returns ("ok" where that is no plain value), or the error that it raises, as text."""
    try:
        with redirect_stdout(io.StringIO()):
            value = call(*args, **kwargs)
    except _Enough:
        return "ok"
    except Exception as error:  # whatever upstream raises is the answer
        return f"{type(error).__name__}: {error}"
    return value if isinstance(value, (str, list)) else "ok"


def _forked(call: Callable[[], dict]) -> dict:
    """The result of ``call`` in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        logging.disable(logging.CRITICAL)
        try:
            with redirect_stdout(sys.stderr):
                result = call()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        with os.fdopen(writer, "w") as file:
            json.dump(result, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    _pid, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"upstream's code failed in a way that is no answer (status {status}); see above")
    return json.loads(text)


if __name__ == "__main__":
    main(sys.argv[1])
