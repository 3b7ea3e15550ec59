# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.tests.unit.conftest import EDITED, OPENED, SGLANG, SOURCES, Venv

COMM, MNNVL, COMMUNICATOR, FUSION = "flashinfer/jit/comm.py", *EDITED[:1], *EDITED[2:]
MAJORS, APPLIES, BACKEND = "flashinfer.trtllm_comm.majors", "sglang.fusion.applies", "sglang.fusion.backend"
WORKSPACE = ["flashinfer.workspace.multicast_device", "flashinfer.workspace.multicast_granularity"]


def edit(venv: Venv, name: str, old: str, new: str) -> None:
    """Do by hand what somebody else may do."""
    path = venv.path(name)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def verdict(venv: Venv, gate: str, **options) -> str:
    return venv.gate(check=True, **options).verdicts("before")[gate]


def test_opening_changes_these_files_and_no_other(venv):
    result = venv.gate()
    assert result["changed"] and result["restart_required"] and result["complete"] and result["half_open"] == []
    assert [gate for gate, verdict in result.verdicts().items() if verdict == "opened"] == OPENED
    assert sorted(name for name, content in venv.sources().items() if content != SOURCES[name].encode()) == EDITED
    assert result["stale_jit_modules"] == ["trtllm_comm"]
    assert 'supported_major_versions=[9, 10, 12])\n    return gen_jit_spec("trtllm_comm"' in venv.path(COMM).read_text()


def test_opening_again_changes_nothing_not_even_a_time(venv):
    venv.gate()

    def written() -> dict[object, tuple[int, int]]:
        found = {path: path.stat() for path in [*venv.site.rglob("*"), *venv.state.rglob("*")]}
        return {path: (status.st_ino, status.st_ctime_ns) for path, status in found.items()}

    before, result = written(), venv.gate()
    assert not result["changed"] and not result["files"] and not result["restart_required"] and not result["diff"]
    assert result["stale_jit_modules"] == ["trtllm_comm"]  # nobody has cleared it yet
    assert written() == before


def test_restoring_brings_every_byte_back_and_forgets(venv):
    venv.gate()
    assert venv.gate("restored")["changed"] and venv.is_pristine() and venv.remembered() == []
    assert not venv.gate("restored")["changed"]


@pytest.mark.parametrize("capability", ["8.9", "9.0", "10.0", "10.3", "12.1"])
def test_for_no_other_capability_is_anything_opened(venv, capability):
    before = venv.files()
    result = venv.gate(compute_capability=[capability])
    assert not result["changed"] and venv.files() == before and result["complete"]
    opens_upstream = capability in ("9.0", "10.0", "10.3")
    assert result.verdicts()[MAJORS] == ("open" if opens_upstream else "not_admitted")


def test_a_mixed_host_is_as_closed_as_its_worst_gpu_and_opened_for_it(venv):
    result = venv.gate(compute_capability=["9.0", "12.0"])
    assert result.verdicts("before")[MAJORS] == "closed" and result.verdicts()[MAJORS] == "opened"
    assert verdict(venv, MAJORS, compute_capability=["9.0"]) == "opened"


@pytest.mark.parametrize("other", ["12.1", "8.9"])
def test_beside_a_gpu_that_nothing_is_opened_for_nothing_is_opened(venv, other):
    result = venv.gate(compute_capability=["12.0", other])
    assert not result["changed"] and venv.is_pristine() and {result.verdicts()[gate] for gate in OPENED} == {"not_admitted"}
    venv.gate()
    result = venv.gate(compute_capability=["12.0", other])
    assert result.verdicts()[APPLIES] == "not_admitted" and not result["changed"] and verdict(venv, APPLIES) == "opened"


def test_a_host_without_gpus_has_nothing_to_open(venv):
    before = venv.files()
    result = venv.gate(compute_capability=[])
    assert not result["changed"] and result["gates"] == [] and venv.files() == before


def test_a_gate_is_not_opened_without_what_it_needs(venv):
    before = venv.files()
    with pytest.raises(
        InferenceError, match=rf"^gates: {APPLIES} would be open and {MAJORS}, which it needs, closed; expected both or neither"
    ):
        venv.gate(gates=[APPLIES])
    assert venv.files() == before


def test_the_layers_are_not_opened_without_the_workspace_that_they_call(venv):
    with pytest.raises(InferenceError, match=f"^gates: {APPLIES} would be open and {WORKSPACE[0]}, which it needs, closed"):
        venv.gate(gates=[MAJORS, APPLIES])
    assert venv.is_pristine()


def test_gates_can_be_opened_in_two_goes(venv):
    venv.gate(gates=[MAJORS, *WORKSPACE])
    result = venv.gate()
    assert result.verdicts("before")[MAJORS] == "opened" and result["summary"]["opened"] == 6
    whole = venv.sources()
    venv.gate("restored")
    venv.gate()
    assert venv.sources() == whole


def test_of_two_gates_in_a_file_one_can_be_restored(venv):
    venv.gate()
    result = venv.gate("restored", gates=["sglang.fusion.workspace_preflight"])
    assert result["changed"] and result.verdicts()["sglang.fusion.workspace_preflight"] == "closed"
    assert verdict(venv, BACKEND) == "opened"
    assert "is_sm100_supported() or torch" in venv.path(FUSION).read_text()
    assert venv.gate("restored")["changed"] and venv.is_pristine()


def test_what_other_gates_need_is_not_restored_under_them(venv):
    venv.gate()
    before = venv.files()
    with pytest.raises(InferenceError, match=f" would be open and {MAJORS}, which it needs, closed"):
        venv.gate("restored", gates=[MAJORS])
    assert venv.files() == before


def test_restoring_does_not_ask_what_gpus_there_are_now(venv):
    venv.gate()
    assert venv.gate("restored", compute_capability=None)["changed"] and venv.is_pristine()


def test_restoring_a_part_on_a_host_whose_gpus_were_changed_keeps_the_rest(venv):
    venv.gate()
    venv.gate("restored", gates=["sglang.fusion.workspace_preflight"], compute_capability=["9.0"])
    assert verdict(venv, BACKEND) == "opened"


# Somebody else


def test_a_gate_that_somebody_else_opened_is_taken_as_it_is(venv):
    edit(venv, COMM, "[9, 10]", "[9, 10, 12]")
    result = venv.gate()
    row = next(row for row in result["gates"] if row["id"] == MAJORS)
    assert (row["before"], row["after"], row["reason"]) == ("open", "open", "edited by someone else")
    assert COMM not in json.dumps(result["files"])


def test_a_file_that_somebody_else_edited_is_not_edited_further(venv):
    edit(venv, COMM, "[9, 10]", "[9, 10, 11]")
    before = venv.files()
    with pytest.raises(
        InferenceError, match=r"^flashinfer/jit/comm\.py:11: .*in conflict.*=\[9, 10, 11\].*Nothing was changed\. Reinstall it: pip"
    ):
        venv.gate()
    assert venv.files() == before


def test_with_force_it_is_and_restoring_leads_back_to_that_edit(venv):
    edit(venv, COMM, "[9, 10]", "[9, 10, 11]")
    edited = venv.sources()
    assert venv.gate(force=True)["summary"]["opened"] == 6
    assert not venv.gate()["changed"]
    venv.gate("restored")
    assert venv.sources() == edited


def test_force_does_not_open_what_is_not_recognised_or_not_admitted(venv):
    edit(venv, COMM, "[9, 10]", "majors()")
    before = venv.files()
    with pytest.raises(InferenceError, match="not recognised"):
        venv.gate(force=True)
    assert not venv.gate(force=True, gates=["sglang.mnnvl.supported", "flashinfer.cutlass_mla.majors"])["changed"]
    assert venv.files() == before


@pytest.mark.parametrize("with_record", [True, False])
def test_an_edit_on_top_of_ours_is_only_restored_with_force(venv, with_record):
    for path in venv.site.glob("*.dist-info/RECORD") if not with_record else ():
        path.unlink()
    venv.gate()
    edit(venv, COMM, "Simulated", "Mine")
    before = venv.files()
    with pytest.raises(InferenceError, match=r"comm\.py: it is not as released.*Nothing was changed\. Run with force=true"):
        venv.gate("restored")
    assert venv.files() == before and verdict(venv, MAJORS) == "open"
    assert venv.gate("restored", force=True)["changed"] and venv.is_pristine() and venv.remembered() == []


def test_an_edit_on_top_of_ours_in_a_file_that_is_not_asked_for_does_not_matter(venv):
    venv.gate()
    edit(venv, COMM, "Simulated", "Mine")
    venv.gate("restored", gates=["sglang.fusion.workspace_preflight"])
    assert "Mine" in venv.path(COMM).read_text()


def test_what_somebody_else_opened_is_left_to_them_while_the_rest_is_restored(venv):
    edit(venv, COMMUNICATOR, "(_is_sm90_supported or _is_sm100_supported)\n", "True\n")
    theirs = venv.path(COMMUNICATOR).read_text()
    venv.gate()
    result = venv.gate("restored")
    assert venv.path(COMMUNICATOR).read_text() == theirs and result.verdicts()[APPLIES] == "open"
    assert venv.path(COMM).read_text() == SOURCES[COMM] and venv.remembered() == []


def test_where_nothing_is_remembered_what_is_open_in_no_released_form_is_refused(venv):
    edit(venv, COMMUNICATOR, "(_is_sm90_supported or _is_sm100_supported)\n", "True\n")
    with pytest.raises(InferenceError, match=r"communicator\.py: it is not as released.*, or leave its gates out of the option gates\."):
        venv.gate("restored")
    assert not venv.gate("restored", force=True)["changed"]


def test_without_ledger_and_record_the_stored_bytes_lead_back(venv):
    for record in venv.site.glob("*.dist-info/RECORD"):
        record.unlink()
    venv.gate()
    lose_ledger(venv)
    assert verdict(venv, APPLIES) == "opened"
    lose_ledger(venv)
    assert venv.gate("restored")["changed"] and venv.is_pristine()


def test_a_conflict_names_the_way_that_keeps_the_edit(venv):
    edit(venv, COMMUNICATOR, "def decoy", "def changed")
    with pytest.raises(
        InferenceError,
        match=r"is in conflict .* or run with force=true \(fusion_gates_force in a play\) to keep that edit and open the gate",
    ):
        venv.gate()


# What happened in between


def reinstall(venv: Venv) -> None:
    venv.install()


def upgrade(venv: Venv) -> None:
    shutil.rmtree(venv.site / f"{SGLANG}.dist-info")
    venv.install({name: f"# new\n{text}" for name, text in SOURCES.items()}, ["flashinfer_python-0.6.9", "sglang-0.5.15"])


@pytest.mark.parametrize("event", [reinstall, upgrade])
def test_a_reinstall_or_an_upgrade_is_new_pristine_and_nothing_is_stacked(venv, event: Callable):
    venv.gate()
    event(venv)
    installed = venv.sources()
    assert verdict(venv, MAJORS) == "closed"
    assert venv.gate()["summary"]["opened"] == 6
    assert venv.path(COMM).read_text().count("12") == 1
    venv.gate("restored")
    assert venv.sources() == installed and venv.remembered() == []


@pytest.mark.parametrize("event", [reinstall, upgrade])
def test_restoring_after_it_has_nothing_to_do_but_forget(venv, event: Callable):
    venv.gate()
    event(venv)
    installed = venv.sources()
    assert not venv.gate("restored")["changed"]
    assert venv.sources() == installed and venv.remembered() == []


def test_after_an_upgrade_that_removed_a_file_the_checksums_still_hold(venv):
    venv.gate()
    venv.path(COMMUNICATOR).unlink()
    with pytest.raises(InferenceError, match=f"{APPLIES} is not recognised"):
        venv.gate()
    venv.gate("restored", gates=[BACKEND, "sglang.fusion.workspace_preflight"])
    assert COMMUNICATOR not in (venv.state / "gates.sha256").read_text()


def test_without_record_an_upgrade_is_a_conflict(venv):
    for path in venv.site.glob("*.dist-info/RECORD"):
        path.unlink()
    venv.gate()
    venv.path(COMM).write_text("# new\n" + SOURCES[COMM])
    assert verdict_of_failure(venv).startswith("flashinfer/jit/comm.py:12: gate flashinfer.trtllm_comm.majors is in conflict")


def verdict_of_failure(venv: Venv) -> str:
    with pytest.raises(InferenceError) as raised:
        venv.gate()
    return str(raised.value)


def lose_ledger(venv: Venv) -> None:
    for path in (venv.state / "ledgers").iterdir():
        path.unlink()


def lose_checksums(venv: Venv) -> None:
    (venv.state / "gates.sha256").unlink()


@pytest.mark.parametrize("lose", [lose_ledger, lose_checksums])
def test_what_was_lost_in_the_state_folder_is_made_again(venv, lose):
    venv.gate()
    remembered = venv.remembered()
    lose(venv)
    result = venv.gate()
    assert not result["changed"] and result["summary"]["opened"] == 6 and venv.remembered() == remembered


def test_without_the_ledger_pristine_bytes_and_record_lead_back(venv):
    venv.gate()
    lose_ledger(venv)
    assert venv.gate("restored")["changed"] and venv.is_pristine()


def test_a_lost_ledger_of_one_venv_survives_runs_on_another(venv, tmp_path):
    other = Venv(tmp_path / "other").install({name: f"# another release\n{text}" for name, text in SOURCES.items()})
    other.state = venv.state
    venv.gate()
    other.gate()
    next(path for path in (venv.state / "ledgers").iterdir() if "other" not in path.name).unlink()
    other.gate("restored")
    venv.gate("restored")
    assert venv.is_pristine()


def test_the_ledger_of_a_venv_that_is_gone_goes_with_the_next_run_and_comes_back_with_the_venv(venv, tmp_path):
    other = Venv(tmp_path / "other").install()
    other.state = venv.state
    remembered = venv.gate() and venv.remembered()
    other.gate()
    other.folder.rename(tmp_path / "unmounted")
    assert venv.gate(check=True)["changed"] is False and str(other.site) in (venv.state / "gates.sha256").read_text()
    assert venv.gate()["changed"] is False
    assert str(other.site) not in (venv.state / "gates.sha256").read_text() and venv.remembered() == remembered
    (tmp_path / "unmounted").rename(other.folder)
    assert other.gate("restored")["changed"] and other.is_pristine() and not venv.is_pristine()


@pytest.mark.parametrize("damage", ["pristine", "folder"])
def test_where_the_pristine_bytes_are_lost_restoring_refuses_with_the_remedy(venv, damage):
    venv.gate()
    shutil.rmtree(venv.state / "pristine" if damage == "pristine" else venv.state)
    before = venv.sources()
    with pytest.raises(
        InferenceError, match=r"Nothing was changed\. Reinstall it: pip install --force-reinstall --no-deps flashinfer-python==0\.6\.9"
    ):
        venv.gate("restored")
    assert venv.sources() == before
    if damage == "folder":
        assert not venv.gate()["changed"]  # open all the same
    venv.install()
    assert not venv.gate("restored")["changed"] and venv.is_pristine()


def test_damaged_pristine_bytes_are_not_written(venv):
    venv.gate()
    for path in (venv.state / "pristine").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    before = venv.sources()
    with pytest.raises(InferenceError, match="its pristine bytes are lost"):
        venv.gate("restored")
    assert venv.sources() == before


def test_a_damaged_ledger_stops_the_run_and_moving_it_away_helps(venv):
    venv.gate()
    ledger = next((venv.state / "ledgers").iterdir())
    ledger.write_text(ledger.read_text()[:100])
    with pytest.raises(InferenceError, match="it is not a ledger"):
        venv.gate("restored")
    ledger.rename(venv.folder / "away")
    assert venv.gate("restored")["changed"] and venv.is_pristine()


def test_gates_that_only_a_newer_collection_knows_are_restored_too(venv):
    venv.gate()
    ledger = next((venv.state / "ledgers").iterdir())
    ledger.write_text(ledger.read_text().replace(BACKEND, "sglang.fusion.of_tomorrow"))
    assert venv.gate("restored")["changed"] and venv.is_pristine()


# Ways to be installed


def test_both_ways_to_name_the_venv_share_a_ledger(venv):
    venv.make_interpreter()
    venv.gate(site_packages=None, python=str(venv.python))
    assert not venv.gate()["changed"]
    venv.gate("restored")
    assert venv.is_pristine()


def test_packages_in_two_places_have_a_ledger_each_and_open_and_restore_together(venv):
    venv.make_interpreter()
    second = venv.folder.parent / "second"
    second.mkdir()
    venv.path("sglang").rename(second / "sglang")
    (venv.site / f"{SGLANG}.dist-info").rename(second / f"{SGLANG}.dist-info")
    (venv.site / "second.pth").write_text(f"{second}\n")
    options = {"site_packages": None, "python": str(venv.python)}
    assert venv.gate(**options)["summary"]["opened"] == 6 and len(list((venv.state / "ledgers").iterdir())) == 2
    with pytest.raises(InferenceError, match="which it needs, closed"):
        venv.gate("restored", gates=[MAJORS], **options)
    venv.gate("restored", **options)
    assert venv.remembered() == []


def test_an_editable_install_is_edited_where_it_is(venv):
    venv.make_interpreter()
    checkout = venv.folder.parent / "checkout"
    checkout.mkdir()
    venv.path("sglang").rename(checkout / "sglang")
    (venv.site / "checkout.pth").write_text(f"{checkout}\n")
    options = {"site_packages": None, "python": str(venv.python)}
    venv.gate(**options)
    assert "_is_sm120_supported" in (checkout / COMMUNICATOR).read_text()
    venv.gate("restored", **options)
    assert (checkout / COMMUNICATOR).read_text() == SOURCES[COMMUNICATOR]


def test_hard_links_of_another_venv_keep_their_bytes(venv):
    cache = venv.folder.parent / "cache"
    for name in SOURCES:
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(venv.path(name), cache / name)
    venv.gate()
    assert all((cache / name).read_text() == SOURCES[name] for name in SOURCES)


def test_a_subfolder_that_leads_out_is_refused_and_nothing_is_changed(venv):
    outside = venv.folder.parent / "outside"
    venv.path("sglang/srt/layers").rename(outside)
    venv.path("sglang/srt/layers").symlink_to(outside)
    before = venv.files()
    for check in (True, False):
        with pytest.raises(InferenceError, match="its folder leads out of the package"):
            venv.gate(check=check)
    assert venv.files() == before and (outside / "communicator.py").read_text() == SOURCES[COMMUNICATOR]


def test_a_package_without_record_opens_and_restores(venv):
    for path in venv.site.glob("*.dist-info/RECORD"):
        path.unlink()
    venv.gate()
    assert not venv.gate()["changed"]
    venv.gate("restored")
    assert venv.is_pristine() and venv.remembered() == []


def test_neighbours_in_any_encoding_do_not_matter(venv):
    venv.path("sglang/srt/layers/latin.py").write_bytes(b"name = '\xe9'\r\n")
    assert venv.gate()["summary"]["opened"] == 6


def test_a_time_to_wait_is_no_less_than_none(venv):
    with pytest.raises(InferenceError, match=r"^lock_timeout: -1; expected seconds to wait, 0 or more"):
        venv.gate(lock_timeout=-1)
