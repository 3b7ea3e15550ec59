# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decide from what was measured on a host how its ranks should reduce: fused, over PCIe-IPC, or with NCCL.

NCCL is what is left when nothing else is proven, so whatever is missing, wrong, stale or doubtful leads there, with
the reason in a sentence. A candidate is proven when it is *correct* (every check within its bound on every rank, and
all ranks bit for bit the same) and *faster* (a gain above the least that counts and above the spread of the
measurement, and no batch size at which it is slower than that).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

from ansible_collections.blackwell.inference.plugins.module_utils._remedy import FULL_RUN

SCHEMA_VERSION = 1
REQUIRED_GAIN = 0.05  # of kernels in CUDA graphs, timed in turns
REQUIRED_SERVER_GAIN = 0.07  # runs of one and the same server, restarted in between, have been seen to differ by 6.9 %
CANDIDATES = ("fusion", "pcie_ipc")
HOW_TO_MEASURE = f"Measure it: {FULL_RUN}"
# What may change under a server that runs on: it has started on the host as it is, with the packages and options that were measured.
OUTLIVED = {"driver", "gpus", "links", "nvcc"}

Json = Mapping[str, Any]


class Verdict(NamedTuple):
    """What the measurement says about one candidate."""

    correct: bool
    faster: bool
    gain: Optional[float]  # how much faster than NCCL over all batch sizes, 0.5 is half as fast again; None: not measured
    required: Optional[float]  # the gain that would have been needed
    reason: str


class Decision(NamedTuple):
    """How the ranks should reduce."""

    strategy: str  # fusion, pcie_ipc or nccl
    reason: str
    gain: Optional[float]  # of the strategy over NCCL; None for nccl
    margin: Optional[float]  # by how much that is more than was required; None for nccl
    candidates: Mapping[str, Verdict]


class Malformed(Exception):
    """The result does not have the shape of one."""


def decide(
    probe: Optional[Json],
    world_size: Optional[int] = None,
    recorded: Optional[Json] = None,
    current: Optional[Json] = None,
    benchmark: Optional[Sequence[Json]] = None,
    running: Optional[str] = None,
) -> Decision:
    """Decide how the ranks of a server should reduce. Never raises.

    Args:
        probe: The JSON of the probe; None if there is none.
        world_size: The tensor parallel size of the server; None to take the one that was measured.
        recorded: The fingerprint of the host when it was measured.
        current: The fingerprint of the host as it is now; None to take it as unchanged.
        benchmark: Runs of a server benchmark, A-B-A, each ``{"strategy", "concurrency", "tokens_per_s": [...], "acceptance"}``, or
            ``{"strategy", "error"}`` for one with which the server did not serve; None if there is none. It has the last word.
        running: The strategy with which the server runs; None if it does not run. What was measured for that stands until it is measured
            again, unless packages, gates or options have changed.
    """
    if not isinstance(probe, Mapping):
        return _nccl(f"nothing has been measured on this host. {HOW_TO_MEASURE}")
    changed = [] if current is None else differences(recorded or {}, current)
    if changed:
        earlier = decide(probe, world_size, benchmark=benchmark)
        why = f"the host is not the one that was measured: {'; '.join(changed[:3])}. {HOW_TO_MEASURE}"
        if running == earlier.strategy != "nccl" and _outlived(recorded or {}, current or {}):
            return earlier._replace(reason=f"the server runs with it, and {why}")
        return _nccl(why)
    try:
        if probe.get("schema_version") != SCHEMA_VERSION:
            raise Malformed(f"schema_version is {probe.get('schema_version')!r} and not {SCHEMA_VERSION}")
        measured = _integer(_mapping(probe, "parameters"), "world_size")
        if world_size is not None and measured != world_size:
            return _nccl(f"{measured} ranks were measured, and the server has {world_size}. {HOW_TO_MEASURE}")
        if probe.get("status") == "refused":
            return _nccl(f"it was not measured: {probe.get('message')}")
        stages = _mapping(probe, "stages")
        _refuse_links(_mapping(stages, "links"), measured)
        verdicts = {name: _judge(name, stages.get(name), probe) for name in CANDIDATES}
        if benchmark is not None:
            verdicts = {name: _confirm(name, verdict, benchmark) for name, verdict in verdicts.items()}
    except Malformed as problem:
        return _nccl(f"the result cannot be used: {problem}. {HOW_TO_MEASURE}")
    except _Unfit as problem:
        return _nccl(str(problem))
    if probe.get("fault"):
        return _nccl(f"it was measured with the fault {probe['fault']!r} on purpose, so it proves nothing; {_reasons(verdicts)}", verdicts)
    return _choose(verdicts)


def differences(recorded: Json, current: Json, path: str = "") -> list[str]:
    """Return what changed from one fingerprint to the other, one phrase for each leaf."""
    found = []
    for name in sorted({*recorded, *current}):
        before, after, label = recorded.get(name), current.get(name), f"{path}{name}"
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, f"{label} ")
        elif before != after:
            found.append(f"{label} was {_said(before)} and is {_said(after)}")
    return found


def _outlived(recorded: Json, current: Json) -> bool:
    """Return whether a server that runs has nothing in it that was not measured."""
    return all(recorded.get(name) == current.get(name) for name in {*recorded, *current} - OUTLIVED)


class _Unfit(Exception):
    """The measurement itself says that this host is not to be trusted with anything but NCCL."""


def _choose(verdicts: Mapping[str, Verdict]) -> Decision:
    proven = {name: verdict for name, verdict in verdicts.items() if verdict.correct and verdict.faster}
    if not proven:
        return _nccl(_reasons(verdicts), verdicts)
    name = next(iter(proven))
    if len(proven) == 2:
        # PCIe-IPC needs no opened gate, so fusion has to be worth one.
        fusion, pcie_ipc = proven["fusion"], proven["pcie_ipc"]
        better = (1 + (fusion.gain or 0)) / (1 + (pcie_ipc.gain or 0)) - 1
        name = "fusion" if better > max(fusion.required or 0, pcie_ipc.required or 0) else "pcie_ipc"
    chosen = proven[name]
    return Decision(name, chosen.reason, chosen.gain, round((chosen.gain or 0) - (chosen.required or 0), 4), verdicts)


def _nccl(reason: str, verdicts: Optional[Mapping[str, Verdict]] = None) -> Decision:
    return Decision("nccl", reason, None, None, verdicts or {})


def _reasons(verdicts: Mapping[str, Verdict]) -> str:
    return "; ".join(verdict.reason for verdict in verdicts.values())


def _refuse_links(stage: Json, world_size: int) -> None:
    status = stage.get("status")
    if status != "measured":
        raise _Unfit(f"copying data between the GPUs {status}: {stage.get('message')}")
    pairs = {(_integer(pair, "from"), _integer(pair, "to")): pair for pair in _rows(stage, "pairs")}
    for source in range(world_size):
        for target in range(world_size):
            pair = pairs.get((source, target))
            if source != target and pair is None:
                raise Malformed(f"no copy from GPU {source} to GPU {target} was made")
            if pair and not (pair.get("copied") is True and pair.get("written") is True):
                raise _Unfit(f"what GPU {source} sends to GPU {target} does not arrive as it was sent")


def _judge(name: str, stage: Any, probe: Json) -> Verdict:
    """Judge one candidate by its stage."""
    if not isinstance(stage, Mapping):
        return Verdict(False, False, None, None, f"{name} was not measured")
    if stage.get("status") != "measured":
        return Verdict(False, False, None, None, f"{name} {stage.get('status')}: {stage.get('message')}")
    parameters = _mapping(probe, "parameters")
    reported = _list(stage, "ranks")
    missing = [rank for rank in range(_integer(parameters, "world_size")) if rank not in reported]
    if missing:
        return Verdict(False, False, None, None, f"{name} is not proven: there is no result of rank {', '.join(map(str, missing))}")
    tokens = [_whole("tokens", number) for number in _list(parameters, "tokens")]
    if not tokens:
        raise Malformed("no batch size was measured")
    checks = _mapping(stage, "checks")
    wrong = _wrong("nccl", _rows(checks, "nccl"), tokens) or _wrong(name, _rows(checks, name), tokens if name == "fusion" else [])
    if wrong:
        return Verdict(False, False, None, None, wrong)
    gains, spreads = _gains(name, {_integer(row, "tokens"): row for row in _rows(stage, "times")}, tokens)
    return _faster(name, gains, spreads)


def _wrong(name: str, checks: Sequence[Json], tokens: Sequence[int]) -> Optional[str]:
    """Return what is wrong with the results of an operation; None if they are right at every batch size."""
    for check in checks:
        at = f"at {_integer(check, 'tokens')} tokens"
        if check.get("finite") is not True:
            return f"{name} is wrong: NaN or infinity {at}"
        for part in ("sum", "norm"):
            error, bound = _number(check, f"{part}_error_ulp"), _number(check, f"{part}_bound_ulp")
            if error > bound:
                return f"{name} is wrong: its {part} is {error:.4g} ulp off {at}, and rounding explains {bound:.4g}"
        if check.get("ranks_agree") is not True:
            return f"{name} is wrong: the ranks do not agree {at}"
    unchecked = [number for number in tokens if number not in {check["tokens"] for check in checks}]
    if unchecked or not checks:
        return f"{name} is not proven: nothing was checked at {unchecked[0] if unchecked else 'any number of'} tokens"
    return None


def _gains(name: str, times: Mapping[int, Json], tokens: Sequence[int]) -> tuple[dict[int, float], dict[int, float]]:
    """Return gain over NCCL and spread by batch size; a size that a server leaves to NCCL has neither."""
    gains, spreads = {}, {}
    for number in tokens:
        if number not in times:
            raise Malformed(f"nothing was timed at {number} tokens")
        medians, spread = _mapping(times[number], "medians_us"), _mapping(times[number], "spreads")
        if times[number].get("stable") is not True:
            raise Malformed(f"results changed while {number} tokens were timed")
        if name == "pcie_ipc" and name not in medians:
            gains[number] = spreads[number] = 0.0
            continue
        own, nccl = _number(medians, name), _number(medians, "nccl")
        if not own or not nccl:
            raise Malformed(f"a time of 0 at {number} tokens")
        gains[number] = nccl / own - 1
        spreads[number] = _number(spread, name) + _number(spread, "nccl")
    return gains, spreads


def _faster(
    name: str,
    gains: Mapping[int, float],
    spreads: Mapping[int, float],
    unit: str = "tokens",
    sizes: str = "batch sizes",
    least_that_counts: float = REQUIRED_GAIN,
) -> Verdict:
    """Judge gains over NCCL, by batch size or by another measure of load."""
    gain = round(math.exp(sum(math.log(1 + one) for one in gains.values()) / len(gains)) - 1, 4)
    spread = sum(spreads.values()) / len(spreads)
    required = round(max(least_that_counts, spread), 4)
    least = min(gains, key=lambda number: gains[number])
    slower = [number for number in gains if gains[number] < -max(least_that_counts, spreads[number])]
    if slower:
        text = f"takes {1 / (1 + gains[least]):.2f} times as long as NCCL at {least} {unit}"
        return Verdict(True, False, gain, required, f"{name} is correct, and {text}")
    if gain <= required:
        why = "the spread of the measurement" if spread > least_that_counts else "the least that counts"
        text = f"{gain:+.1%} against NCCL, where {required:.1%} is needed, {why}"
        return Verdict(True, False, gain, required, f"{name} is correct, and not shown to be faster: {text}")
    text = f"{1 + gain:.2f} times as fast as NCCL over {len(gains)} {sizes}, {gains[least]:+.0%} at {least} {unit}, where it gains least"
    return Verdict(True, True, gain, required, f"{name} is correct and {text}")


def _confirm(name: str, verdict: Verdict, benchmark: Sequence[Json]) -> Verdict:
    """Let a benchmark of the server, A-B-A, confirm or refute a candidate that the probe has proven."""
    if not (verdict.correct and verdict.faster):
        return verdict
    failures = [str(run["error"]) for run in benchmark if run.get("strategy") == name and run.get("error")]
    if failures:
        return verdict._replace(faster=False, reason=f"{name} does not serve on this host: {failures[0]}")
    before, after = _rates("nccl", benchmark), _rates(name, benchmark)
    if not before or before.keys() != after.keys():
        return verdict._replace(faster=False, reason=f"{name} was not benchmarked on the server, and other strategies were")
    accepted = {
        key: [run["acceptance"] for run in benchmark if run.get("strategy") == key and run.get("acceptance")] for key in ("nccl", name)
    }
    if accepted["nccl"] and accepted[name] and min(accepted[name]) < min(accepted["nccl"]) * (1 - REQUIRED_GAIN):
        text = f"accepted draft tokens fell from {min(accepted['nccl']):.2f} to {min(accepted[name]):.2f}, a sign of wrong results"
        return verdict._replace(correct=False, faster=False, reason=f"{name} is wrong on the server: {text}")
    gains = {level: _median(after[level]) / _median(before[level]) - 1 for level in before}
    spreads = {level: _spread(before[level]) + _spread(after[level]) for level in before}
    found = _faster(name, gains, spreads, "concurrent requests", "loads of the server", REQUIRED_SERVER_GAIN)
    return found._replace(reason=f"on the server, {found.reason}")


def _rates(strategy: str, benchmark: Sequence[Json]) -> dict[int, list[float]]:
    """Return tokens per second by concurrency, those of all runs with this strategy."""
    rates: dict[int, list[float]] = {}
    for run in benchmark:
        if run.get("strategy") == strategy:
            rates.setdefault(_integer(run, "concurrency"), []).extend(rate for rate in _list(run, "tokens_per_s") if rate > 0)
    return {level: found for level, found in rates.items() if found}


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / _median(values)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _mapping(item: Json, name: str) -> Json:
    value = item.get(name)
    if not isinstance(value, Mapping):
        raise Malformed(f"{name} is missing")
    return value


def _list(item: Json, name: str) -> Sequence[Any]:
    value = item.get(name)
    if not isinstance(value, (list, tuple)):
        raise Malformed(f"{name} is no list")
    return value


def _rows(item: Json, name: str) -> Sequence[Json]:
    rows = _list(item, name)
    if not all(isinstance(row, Mapping) for row in rows):
        raise Malformed(f"{name} holds something else than results")
    return rows


def _number(item: Json, name: str) -> float:
    value = item.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise Malformed(f"{name} is {value!r} and no number from 0")
    return float(value)


def _integer(item: Json, name: str) -> int:
    return _whole(name, item.get(name))


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Malformed(f"{name} is {value!r} and no whole number from 0")
    return value


def _said(value: Any) -> str:
    return "unknown" if value is None else str(value)
