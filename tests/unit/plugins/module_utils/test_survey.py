# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import shutil

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils import _survey
from ansible_collections.blackwell.inference.plugins.module_utils._catalogue import GATES, NEWEST_TESTED, Uses
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._packages import locate
from ansible_collections.blackwell.inference.plugins.module_utils._store import Store
from ansible_collections.blackwell.inference.plugins.module_utils._survey import (
    VERDICTS,
    Installation,
    half_open,
    newer_than_tested,
    report,
    survey,
)

SM120, NEWEST = (12, 0), NEWEST_TESTED["flashinfer"]
COMM, FUSION = "flashinfer/jit/comm.py", "sglang/srt/layers/flashinfer_comm_fusion.py"
MAJORS, BACKEND, WORKSPACE = "flashinfer.trtllm_comm.majors", "sglang.fusion.backend", "flashinfer.workspace.multicast_device"


def installed(venv) -> Installation:
    return Installation(locate(site_packages=str(venv.site)), Store(str(venv.state)), ["flashinfer", "sglang"])


def found(venv, gate: str, *capabilities):
    return {finding.gate.id: finding for finding in survey(installed(venv), capabilities or [SM120], GATES)}[gate]


def rename(venv, old: str, new: str) -> None:
    path = venv.site / f"{old}.dist-info"
    path.rename(venv.site / f"{new}.dist-info")


def test_a_finding_says_where_what_and_why(venv):
    assert found(venv, MAJORS).row() == {
        "id": MAJORS,
        "package": "flashinfer",
        "version": "0.6.9",
        "file": COMM,
        "line": 11,
        "expression": "supported_major_versions=[9, 10]",
        "verdict": "closed",
        "reason": next(gate for gate in GATES if gate.id == MAJORS).admits[SM120],
    }


def test_every_verdict_is_counted_and_the_packages_are_named(venv):
    installation = installed(venv)
    result = report(installation, [SM120], survey(installation, [SM120], GATES))
    assert list(result["summary"]) == list(VERDICTS) and sum(result["summary"].values()) == len(GATES)
    assert result["packages"]["sglang"] == {"version": "0.5.14", "location": str(venv.path("sglang")), "newer_than_tested": False}
    assert (result["compute_capabilities"], result["complete"], result["half_open"]) == (["12.0"], False, [])


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2] + "(",  # truncated
        lambda text: text.replace("[9, 10])\n    return", "majors())\n    return"),
        lambda text: text.replace("[9, 10])\n    return", "[9, *more])\n    return"),
        lambda text: text.replace("[9, 10])\n    return", "**options)\n    return"),
        lambda text: text + text[text.index("def gen_trtllm") :],
        lambda text: text.replace("def gen_trtllm_comm_module():", "gen_trtllm_comm_module = lru_cache(partial(make, 9, 10))\ndef make():"),
        lambda text: "# coding: rot13\n" + text,
        lambda text: text + "\0",
        lambda text: text + "(" * 300,
    ],
)
def test_a_shape_that_is_not_recognised_is_unknown_with_the_line(venv, change):
    venv.path(COMM).write_text(change(venv.path(COMM).read_text()))
    finding = found(venv, MAJORS)
    assert finding.verdict == "unknown" and finding.line >= 1 and finding.place.file == COMM


def test_a_gate_that_came_later_is_absent_and_one_that_should_be_there_unknown(venv):
    text = venv.path(FUSION).read_text().replace("_resolve_backend", "_choose_backend")
    venv.path(FUSION).write_text(text)
    assert found(venv, BACKEND).verdict == "unknown"
    rename(venv, "sglang-0.5.14", "sglang-0.5.13")
    assert (found(venv, BACKEND).verdict, found(venv, BACKEND).reason) == ("absent", "since sglang 0.5.14")


def test_a_broken_file_is_never_taken_for_an_absent_gate(venv):
    rename(venv, "sglang-0.5.14", "sglang-0.5.8")
    venv.path(FUSION).write_text(venv.path(FUSION).read_text() + "(")
    assert found(venv, BACKEND).verdict == "unknown"


def test_without_a_version_nothing_is_taken_for_absent(venv):
    shutil.rmtree(venv.site / "flashinfer_python-0.6.9.dist-info")
    venv.path(COMM).write_text("")
    assert found(venv, MAJORS).verdict == "unknown"


def test_a_release_newer_than_tested_works_by_shape_and_is_named_where_it_does_not(venv):
    rename(venv, "flashinfer_python-0.6.9", "flashinfer_python-0.99.0")
    assert found(venv, MAJORS).verdict == "closed" and report(installed(venv), [SM120], [])["packages"]["flashinfer"]["newer_than_tested"]
    venv.path(COMM).write_text("")
    assert found(venv, MAJORS).reason.endswith(f"; 0.99.0 is newer than {NEWEST}, the newest tested")


@pytest.mark.parametrize(
    ("code", "used"),
    [
        ("x = create(1)", True),
        ("from m import create as c\nx = c(1)", True),
        ("x = m.create(1)", True),
        ("make = m.create", True),
        ("f()[0].create()", True),
        ("# create(1)", False),
        ("'''create(1)'''", False),
        ("from m import create", False),
        ("def f(x: create) -> List[create]: ...\nx: create = None", False),
        ("def create(): ...", False),
        ("x = (", True),  # cannot be told
    ],
)
def test_whether_a_gate_is_on_the_path_follows_from_the_code_that_runs(venv, code, used):
    venv.path(FUSION).write_text(code)
    assert installed(venv).uses(Uses(FUSION, "create")) is used


def test_off_the_path_a_gate_is_absent(venv):
    venv.path(FUSION).write_text(venv.path(FUSION).read_text().replace("create_allreduce_fusion_workspace", "create_something"))
    assert (found(venv, WORKSPACE).verdict, found(venv, BACKEND).verdict) == ("absent", "conflict")


def test_half_open_sets_are_told(venv):
    venv.path(FUSION).write_text(venv.path(FUSION).read_text().replace("not (is_sm90", "not (True or is_sm90"))
    sentences = half_open(survey(installed(venv), [SM120], GATES))
    assert f"{BACKEND} is open, and {MAJORS}, which it needs, is closed" in sentences


def test_a_gate_that_may_not_be_opened_does_not_make_a_host_incomplete(venv):
    venv.path("flashinfer/jit/mla.py").write_text("def gen_mla_module():\n    return get_nvcc_flags_list(majors())\n")
    installation = installed(venv)
    findings = [finding for finding in survey(installation, [SM120], GATES) if finding.verdict == "unknown"]
    assert [finding.gate.id for finding in findings] == ["flashinfer.cutlass_mla.majors"]
    assert report(installation, [SM120], findings)["complete"]


def test_a_file_that_cannot_be_read_is_named(venv, monkeypatch):
    def refuse(path, mode):
        raise PermissionError(13, "Permission denied")

    installation = installed(venv)
    monkeypatch.setattr(_survey, "open", refuse, raising=False)
    with pytest.raises(InferenceError, match=r"jit/comm\.py: cannot be read \(Permission denied\)"):
        installation.file(COMM)


@pytest.mark.parametrize(
    ("version", "newer"),
    [
        (NEWEST, False),
        (f"{NEWEST}+cu130", False),
        (f"{NEWEST}.post99", True),
        ("0.7.4", False),
        ("0.7", False),
        ("0.100.0", True),
        ("0.100.0rc1", True),
        ("unknown", False),
    ],
)
def test_releases_are_compared_as_numbers(version, newer):
    assert newer_than_tested("flashinfer", version) is newer
