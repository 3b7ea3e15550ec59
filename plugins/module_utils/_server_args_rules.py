# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Settings that each exist and together cannot work: a server that would hang, die late or run slower than it has to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What has kernels for compute capability 12.x; every other backend fails at the first request or gives wrong results.
_ATTENTION_ON_12 = ("flashinfer", "triton", "torch_native", "flex_attention", "nsa", "dsa", "hybrid_linear_attn")
_MOE_ON_12 = ("auto", "flashinfer_cutlass", "cutlass", "triton", "triton_kernel", "marlin")
_ALLOWED_ON_12 = {
    "attention-backend": _ATTENTION_ON_12,
    "prefill-attention-backend": _ATTENTION_ON_12,
    "decode-attention-backend": _ATTENTION_ON_12,
    "moe-runner-backend": _MOE_ON_12,
    "speculative-moe-runner-backend": _MOE_ON_12,
    "fp4-gemm-backend": ("auto", "flashinfer_cudnn", "flashinfer_cutlass", "cutlass", "marlin"),
    "fp8-gemm-backend": ("auto", "triton", "cutlass", "flashinfer_cutlass"),
}
_ARCH_LIST = re.compile(r"^\d+\.\d+[af]?( \d+\.\d+[af]?)*$")
_YES = ("1", "true", "yes")
_SECRET_VARIABLE = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY|SECRET_KEY)$")


def read_environment(location: str) -> frozenset[str]:
    """Return the SGLANG_ variables that the release in the package folder ``location`` declares."""
    try:
        text = Path(location, "srt", "environ.py").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    return frozenset(re.findall(r"^\s+(SGLANG_\w+)\s*=", text, re.MULTILINE))


def contradictions(
    values: dict[str, Any], environment: dict[str, str], declared: frozenset[str], compute_capability: str, gpus: int = 0
) -> list[str]:
    """Return one line for each contradiction, [] where there is none.

    Args:
        values: Flag (every spelling of it) to its value, for the flags that are set.
        environment: The environment of the server.
        declared: What read_environment found.
        compute_capability: Of the GPUs, e.g. "12.0"; "" where it is not known.
        gpus: How many GPUs the host has; 0 where it is not known.
    """
    return [
        *_of_fusion(values, environment),
        *_of_environment(environment, declared),
        *_of_server(values, environment, declared),
        *_of_ranks(values, environment, gpus),
        *(_of_backends(values, compute_capability) if compute_capability.startswith("12.") else ()),
    ]


def _of_fusion(values: dict[str, Any], environment: dict[str, str]) -> Iterator[str]:
    fusion = bool(values.get("flashinfer-allreduce-fusion-backend") or values.get("enable-flashinfer-allreduce-fusion"))
    pcie_ipc = environment.get("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE", "").lower() in _YES
    if not (fusion or pcie_ipc):
        return
    what = "allreduce fusion" if fusion else "PCIe-IPC allreduce"
    size = _number(values, "tensor-parallel-size")
    if size not in (2, 4, 8):
        yield f"tensor-parallel-size: {size} with {what}; expected 2, 4 or 8"
    for flag in ("pipeline-parallel-size", "nnodes"):
        if _number(values, flag) > 1:
            yield f"{flag}: {values[flag]} with {what}; expected 1"
    if values.get("enable-dp-attention") or _number(values, "attn-dp-size") > 1:
        yield f"enable-dp-attention: on with {what}; expected off"
    if values.get("enable-deterministic-inference"):
        yield f"enable-deterministic-inference: on with {what}; expected off"
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", ""):
            yield f"{name}: expandable_segments:True with {what}; expected without, such memory cannot be shared between ranks"
    if environment.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        yield f"NCCL_P2P_DISABLE: {environment['NCCL_P2P_DISABLE']} with {what}; expected unset, {what} needs peer access"


def _of_environment(environment: dict[str, str], declared: frozenset[str]) -> Iterator[str]:
    archs = environment.get("FLASHINFER_CUDA_ARCH_LIST")
    if archs is not None and not _ARCH_LIST.match(archs):
        yield f"FLASHINFER_CUDA_ARCH_LIST: found {archs!r}; expected it unset, or capabilities such as '12.0a 12.1a'"
    home = environment.get("CUDA_HOME")
    if home is not None and (":" in home or not home.startswith("/")):
        yield f"CUDA_HOME: found {home!r}; expected one absolute folder, the one that holds bin/nvcc"
    for name, value in environment.items():
        if _SECRET_VARIABLE.search(name) and value.lower() not in ("", "0", "1", "true", "false"):
            yield f"{name}: it is a secret in a unit that everybody can read; expected in sglang_server_secret_environment"
    if environment.get("FLASHINFER_DISABLE_VERSION_CHECK"):
        yield "FLASHINFER_DISABLE_VERSION_CHECK: set; expected unset, align the versions of the flashinfer packages instead"
    if environment.get("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE") and "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE" not in declared:
        yield "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE: this release has no PCIe-IPC allreduce; expected sglang 0.5.22 or newer"


def _of_server(values: dict[str, Any], environment: dict[str, str], declared: frozenset[str]) -> Iterator[str]:
    if values.get("skip-server-warmup"):
        yield "skip-server-warmup: on; expected off, or the first users wait for compilers and a broken kernel shows late"
    nextn = str(values.get("speculative-algorithm", "")).upper() == "NEXTN"
    if nextn and "SGLANG_ENABLE_SPEC_V2" in declared and environment.get("SGLANG_ENABLE_SPEC_V2", "").lower() not in _YES:
        yield "speculative-algorithm: NEXTN without SGLANG_ENABLE_SPEC_V2; expected the variable true, or the model is loaded twice"


def _of_ranks(values: dict[str, Any], environment: dict[str, str], gpus: int) -> Iterator[str]:
    needed = _number(values, "tensor-parallel-size") * _number(values, "pipeline-parallel-size")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    found = gpus if visible is None else len([item for item in visible.split(",") if item.strip()])
    if (gpus or visible is not None) and found < needed and _number(values, "nnodes") == 1:
        subject, where = ("tensor-parallel-size", "") if visible is None else ("CUDA_VISIBLE_DEVICES", " in sglang_server_gpus")
        yield f"{subject}: {found} GPUs for {needed} ranks; expected {needed} or more{where}"


def _of_backends(values: dict[str, Any], compute_capability: str) -> Iterator[str]:
    for flag, allowed in _ALLOWED_ON_12.items():
        value = values.get(flag)
        if value is not None and value not in allowed:
            yield f"{flag}: {value} has no kernels for compute capability {compute_capability}; expected one of {', '.join(allowed)}"


def _number(values: dict[str, Any], flag: str) -> int:
    """Return the value of a size, 1 where it is not set."""
    value = values.get(flag, 1)
    return value if isinstance(value, int) else 1
