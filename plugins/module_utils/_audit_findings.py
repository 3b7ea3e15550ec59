# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an audit returns: each closed gate with its place on the fusion path, its catalogue entry, and what to do."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Optional

from ansible_collections.blackwell.inference.plugins.module_utils._audit import Closed, Undecided, search
from ansible_collections.blackwell.inference.plugins.module_utils._audit_path import FusionPath, derive
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._packages import Site
from ansible_collections.blackwell.inference.plugins.module_utils._predicate import Capability
from ansible_collections.blackwell.inference.plugins.module_utils._survey import Finding

# What serves a workstation card where a kernel is not for it: by words in the file's path, the first match counts.
_INSTEAD: tuple[tuple[str, str], ...] = (
    (r"data/(?:cutlass|cccl|spdlog)/|/cute/|/third_?party/", "nothing to do: a template, used by kernels that are listed on their own"),
    (r"_train|/train|experimental/|multimodal_gen/|diffusion", "nothing to do: no language model server runs it"),
    (r"gdn|kda(?!_kernels)|mamba|linear_attn|/fla/|delta", "use another backend: --linear-attn-backend triton, --mamba-backend triton"),
    (r"a2a|all_?to_?all", "use another backend: --moe-a2a-backend none"),
    (r"moe|expert|routing|router", "use another backend: --moe-runner-backend flashinfer_cutlass or triton"),
    (
        r"attention|attn|mla|fmha|xqa|decode|prefill|cascade|sparse|msa|dsa|nsa|qsa|rope",
        "use another backend: --attention-backend flashinfer or triton",
    ),
    (r"fp4", "use another backend: --fp4-gemm-backend flashinfer_cutlass or flashinfer_cudnn"),
    (r"gemm|bmm|matmul|quant|fp8", "use another backend: --fp8-gemm-backend cutlass or triton"),
    (r"allreduce|all_reduce|comm|all_gather", "nothing to do: NCCL serves in its place"),
    (r"sampling|topk", "use another backend: --sampling-backend pytorch"),
    (r"server_args|arg_groups|configs", "nothing to do: a default, which the option on the command line sets"),
)
_INSTEAD_OF = tuple((re.compile(words), advice) for words, advice in _INSTEAD)
NOTHING: Mapping[str, Any] = {"findings": [], "undecidable": []}  # what is found for a host without GPUs
# What may keep the fused allreduce from a host, and may as well choose some detail of it.
_MAY_ONLY_CHOOSE = frozenset({"condition", "return", "assignment", "argument"})
_CALLED = re.compile(r"(\w+)\(")
_ELSEWHERE = "nothing to do: the feature that it guards is for other GPUs"


def audited(site: Site, further: Sequence[str], hosts: Sequence[Capability], gates: Iterable[Finding]) -> dict[str, Any]:
    """Audit flashinfer, sglang and ``further`` packages of ``site`` for a host whose GPUs have the capabilities ``hosts``.

    Args:
        site: The packages.
        further: Import names of more packages.
        hosts: Compute capabilities of the host's GPUs.
        gates: The verdicts on the catalogued gates.

    Returns:
        ``findings`` and ``undecidable``, as the module returns them.

    Raises:
        InferenceError: A package is not there, or a file cannot be read.
    """
    roots = _roots(site, further)
    found = search(roots, hosts)
    path = derive(roots, found.option_files)
    known = [gate for gate in gates if gate.place is not None and gate.line is not None]
    helpers = {(item.file, _own_name(item.guards)) for item in found.closed if item.kind == "return"}
    rows = [_row(item, path, _catalogued(item, known), _followed(item, helpers)) for item in found.closed]
    seen = {row["catalogued"] for row in rows}
    for gate in known:
        if gate.gate.id not in seen and gate.verdict in ("closed", "not_admitted", "unknown", "conflict"):
            place, line = gate.place.file if gate.place else "", gate.line or 1
            item = Closed(place, line, line, gate.expression, "catalogue", _function(gate), False)
            rows.append(_row(item, path, gate, ""))
    rows.sort(key=lambda row: (row["file"], row["line"]))
    return {"findings": rows, "undecidable": [_undecidable(item) for item in found.undecided]}


def _roots(site: Site, further: Iterable[str]) -> dict[str, str]:
    """For each package to look through, the folder that it is in."""
    site.require("flashinfer", "sglang")
    roots = {name: os.path.dirname(site.packages[name].location) for name in ("flashinfer", "sglang")}
    places = list(dict.fromkeys(os.path.dirname(package.location) for package in site.packages.values()))
    for name in further:
        place = next((place for place in places if re.fullmatch(r"\w+", name) and os.path.isdir(os.path.join(place, name))), None)
        if place is None:
            raise InferenceError("packages", f"{name!r} is not in {' or '.join(places)}", "import names of installed packages, e.g. vllm")
        roots[name] = place
    return roots


def _catalogued(item: Closed, gates: Iterable[Finding]) -> Optional[Finding]:
    lines = range(item.line, item.end_line + 1)
    return next((gate for gate in gates if gate.place and gate.place.file == item.file and gate.line in lines), None)


def _function(gate: Finding) -> str:
    """The function that a catalogued gate stands in."""
    return str(getattr(gate.place.shape, "function", "")) if gate.place else ""


def _own_name(guards: str) -> str:
    return guards.rpartition(".")[2]


def _followed(item: Closed, helpers: Container[tuple[str, str]]) -> str:
    """The function of the same file whose answer ``item`` asks for, if that is closed: then there is nothing to open here."""
    called = _CALLED.findall(item.expression)
    return next((name for name in called if name != _own_name(item.guards) and (item.file, name) in helpers), "")


def _row(item: Closed, path: FusionPath, gate: Optional[Finding], followed: str) -> dict[str, Any]:
    on_path = path.holds(item.file, item.line, item.guards)
    decides = on_path and (item.kind not in _MAY_ONLY_CHOOSE or path.depends_on(item.file, item.line))
    if gate:  # the catalogue is believed even where the path cannot be followed
        blocks = gate.verdict in ("closed", "conflict", "unknown")
    else:
        blocks = decides and not followed and not (item.replaced and item.kind not in _MAY_ONLY_CHOOSE)
    return {
        "id": hashlib.sha256("\0".join((item.file, item.guards, item.kind, item.expression)).encode()).hexdigest()[:16],
        "file": item.file,
        "line": item.line,
        "expression": item.expression,
        "kind": item.kind,
        "guards": item.guards,
        "replaced": item.replaced,
        "on_path": on_path,
        "blocks": blocks,
        "catalogued": gate.gate.id if gate else None,
        "advice": _advice(item, blocks, gate, followed),
    }


def _advice(item: Closed, blocks: bool, gate: Optional[Finding], followed: str) -> str:
    if gate and gate.verdict == "closed":
        return "open it: the catalogue admits this GPU (module gate, tag patch)"
    if gate and gate.verdict in ("conflict", "unknown"):
        return f"reinstall {gate.gate.package} as released, then open it (module gate, tag patch): {gate.reason}"
    if gate and gate.verdict == "not_admitted":
        return f"leave it closed: {gate.gate.refuses}"
    if followed:
        return f"nothing to do here: it follows from {followed}()"
    if blocks:
        return "leave fusion off: this gate is on its path and not catalogued, so nothing opens it"
    if item.replaced:
        return "nothing to do: other code serves this GPU there"
    return next((advice for words, advice in _INSTEAD_OF if words.search(item.file.lower())), _ELSEWHERE)


def _undecidable(item: Undecided) -> Mapping[str, Any]:
    return {"file": item.file, "line": item.line, "expression": item.expression, "guards": item.guards}
