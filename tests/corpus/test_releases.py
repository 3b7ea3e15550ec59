# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One pair of releases: the verdicts, opening, opening again, restoring; and before and after, what upstream's code does."""

from __future__ import annotations

import json

from ansible_collections.blackwell.inference.plugins.module_utils._catalogue import BY_ID, NEWEST_TESTED
from ansible_collections.blackwell.inference.tests.corpus.compatibility import RESULTS
from ansible_collections.blackwell.inference.tests.corpus.host import Host
from ansible_collections.blackwell.inference.tests.corpus.releases import FLASHINFER, SGLANG, SHIPPED_CLOSED, Pair, order

ALONE = ("8.9", "9.0", "10.0", "10.3", "12.0", "12.1")
MIXED = "9.0 12.0"
MAJORS = "flashinfer.trtllm_comm.majors"
MULTICAST = {"flashinfer.workspace.multicast_device", "flashinfer.workspace.multicast_granularity"}
# Where an opening for 12.0 cannot but change another answer as well: a list of majors has no minor version, and the
# workspace's conditions ask for multicast and not for a capability. Both are documented.
SPREADS = {MAJORS: {"12.1", MIXED}, **{gate: {"8.9", "12.1"} for gate in MULTICAST}}
# What auto, trtllm and mnnvl are to resolve to at 12.0.
RESOLVED = {"auto": "trtllm", "trtllm": "trtllm"}
# Gates in CUDA sources, which test_cuda.py is about.
CUDA = {f"flashinfer.trtllm_allreduce.{name}" for name in ("guards", "lamport_stride", "cluster_size")} | {"flashinfer.trtllm_gen.fmha"}
OPEN, CLOSED = {"open", "opened"}, {"closed", "not_admitted"}


def to_open(pair: Pair) -> set[str]:
    """The gates that keep fusion shut at 12.0 in this pair."""
    return {shipped.gate for shipped in SHIPPED_CLOSED if shipped.counts_in(pair)}


def test_the_newest_releases_are_those_that_the_catalogue_calls_tested():
    recorded = json.loads(RESULTS.read_text(encoding="utf-8"))["newest_tested"]
    assert {"flashinfer": FLASHINFER[-1], "sglang": SGLANG[-1]} == NEWEST_TESTED == recorded


def test_release(pair, host, record_property):
    pair = pair.resolved()
    assert host.not_as_recorded() == []
    before = host.oracle()

    verdicts = {}
    for capability in ALONE:
        if capability != "12.0":
            verdicts[capability] = verdicts_of(host, capability)  # nothing is written there
            assert host.files() == host.pristine
    shown = host.gate("12.0", module="gate_info")
    opened = host.gate("12.0")
    verdicts["12.0"] = {gate["id"]: gate["before"] for gate in opened["gates"]}
    assert (opened["changed"], opened["complete"], opened["half_open"]) == (True, True, [])
    assert {gate["id"] for gate in opened["gates"] if (gate["before"], gate["after"]) == ("closed", "opened")} == to_open(pair)
    assert all(gate["before"] == gate["after"] for gate in opened["gates"] if gate["id"] not in to_open(pair))
    ships_half_open = order(pair.sglang) < order("0.5.8")
    assert bool(shown["half_open"]) is ships_half_open

    edited = host.files()
    assert {name for name in edited if edited[name] != host.pristine.get(name)} == {
        gate["file"] for gate in opened["gates"] if gate["id"] in to_open(pair)
    }
    assert edited.keys() == host.pristine.keys()
    after = host.oracle()
    only_opened(before, after, to_open(pair))
    resolves(after["details"]["sglang"], before["details"]["sglang"])
    needs_no_multicast(after["details"], to_open(pair))

    written = {path: path.stat().st_mtime_ns for path in host.site.rglob("*")}
    again = host.gate("12.0")
    assert (again["changed"], again["files"]) == (False, [])
    assert {path: path.stat().st_mtime_ns for path in host.site.rglob("*")} == written
    assert {gate["before"] for gate in again["gates"] if gate["id"] in to_open(pair)} == {"opened"}

    assert host.gate("12.0", state="restored")["changed"] is True
    assert host.files() == host.pristine
    assert host.not_as_recorded() == []

    mixed = host.gate("9.0", "12.0")
    verdicts[MIXED] = {gate["id"]: gate["before"] for gate in mixed["gates"]}
    assert host.files() == edited
    agree(verdicts, before)
    # What the host had no driver to ask for is restored by what was remembered.
    assert host.gate(state="restored")["changed"] is True
    assert host.not_as_recorded() == []

    record_property("row", row(pair, verdicts["12.0"], opened, after))


def verdicts_of(host: Host, capability: str) -> dict[str, str]:
    """The verdicts on a host with GPUs that nothing may be opened for; checks that nothing is."""
    result = host.gate(capability)
    assert (result["changed"], result["files"]) == (False, [])
    verdicts = {gate["id"]: gate["after"] for gate in result["gates"]}
    assert set(verdicts.values()) <= {"open", "not_admitted", "absent"}
    return verdicts


def agree(verdicts: dict[str, dict[str, str]], oracle: dict) -> None:
    """Check that the verdict on each gate is what upstream's code does, at each capability."""
    for gate in oracle.keys() & BY_ID.keys():
        for capability, is_open in oracle[gate].items():
            verdict = verdicts[capability][gate] if capability in verdicts else None
            assert verdict in (None, "absent") or verdict in (OPEN if is_open else CLOSED), (gate, capability, verdict, is_open)
            # A gate that is closed and said to be absent is not on the path of this pair.
            assert verdict != "absent" or is_open or gate in MULTICAST, (gate, capability)
    found = {gate for gate, verdict in verdicts["12.0"].items() if verdict != "absent"}
    assert found - CUDA - {"sglang.fusion.auto_enable", "sglang.fusion.mlp_to_next_layer"} <= oracle.keys()


def only_opened(before: dict, after: dict, opened: set[str]) -> None:
    """Check that at 12.0 exactly the opened gates let through, and that nothing else changed anywhere."""
    assert before.keys() == after.keys()
    for gate in before.keys() & BY_ID.keys():
        changed = {capability for capability in before[gate] if before[gate][capability] is not after[gate][capability]}
        assert changed == ({"12.0"} | SPREADS.get(gate, set()) if gate in opened else set()), gate
        assert after[gate]["12.0"] if gate in opened else after[gate]["12.0"] is before[gate]["12.0"]
    for gate in before.keys() & {gate for gate in BY_ID if not BY_ID[gate].admits}:
        assert after[gate] == before[gate], gate
    for capability in ALONE:
        asked = [oracle["details"]["sglang"][capability] for oracle in (before, after)]
        assert asked[0]["context_created"] is asked[1]["context_created"], "the edit creates a CUDA context at import"
        assert asked[0] == asked[1] or capability == "12.0", capability
        compiled = [flags_of(oracle["details"]["jit"][capability]) for oracle in (before, after)]
        assert compiled[0] == compiled[1] or (capability in ("12.0", "12.1") and MAJORS in opened), capability
    flags = after["details"]["jit"]["12.0"][MAJORS]
    assert len(flags) == 1 and "sm_120" in flags[0]
    assert not any("12" in flag for flag in after["details"]["jit"]["9.0"][MAJORS])


def flags_of(modules: dict[str, object]) -> dict[str, object]:
    """The architecture flags of each JIT module that is compiled; why another one is not names the list that was edited."""
    return {gate: flags for gate, flags in modules.items() if isinstance(flags, list)}


def resolves(after: dict, before: dict) -> None:
    """Check what `_resolve_backend` makes of each choice: trtllm alone at 12.0, and as before elsewhere."""
    for capability, answers in after.items():
        for choice, answer in answers.get("backend", {}).items():
            if capability != "12.0":
                assert answer == before[capability]["backend"][choice]
            elif choice in RESOLVED:
                assert answer == RESOLVED[choice]
            else:
                assert answer.startswith("ValueError"), (choice, answer)


def needs_no_multicast(after: dict, opened: set[str]) -> None:
    """Check that no multicast is asked for at 12.0, and that it still is where it was requested or where the device has it."""
    workspace = after["workspace"]
    if workspace["12.0"] and MULTICAST.issubset(opened):
        assert workspace["12.0"]["created"] == "ok"
        assert workspace["12.0"]["multicast_of_buffers"] == [False] * 3
        assert workspace["12.0"]["queries"] == 0
        assert workspace["12.0"]["granularity_mib"] == 2
        assert workspace["12.0"]["requested"].startswith("RuntimeError")
        assert workspace["9.0"]["requested"] == workspace["10.0"]["requested"] == "ok"
        assert workspace["9.0"]["granularity_of_requested_mib"] == 512
    if "preflight" in after["sglang"]["12.0"]:
        assert after["sglang"]["12.0"]["queries"] == 0
        assert after["sglang"]["9.0"]["queries"] == 3
        assert sum(after["sglang"]["12.0"]["preflight"]) < sum(after["sglang"]["9.0"]["preflight"])


def row(pair: Pair, before: dict[str, str], opened: dict, oracle: dict) -> dict:
    """What is kept of a test, for the compatibility table."""
    return {
        "sglang": pair.sglang,
        "flashinfer": pair.flashinfer,
        "pinned": pair.pinned,
        "gates": {gate["id"]: [before[gate["id"]], gate["after"]] for gate in opened["gates"]},
        "files": sorted(file["path"].split("site-packages/")[-1] for file in opened["files"]),
        "executed": sorted(oracle.keys() & BY_ID.keys()),
    }
