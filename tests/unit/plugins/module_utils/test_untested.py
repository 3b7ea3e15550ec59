# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Releases that nobody has looked at yet."""

from __future__ import annotations

import json

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._catalogue import GATES, NEWEST_TESTED
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._survey import _order
from ansible_collections.blackwell.inference.tests.unit.conftest import FLASHINFER, OPENED, SGLANG
from ansible_collections.blackwell.inference.tests.unit.playbook import ROOT

MAJORS = "flashinfer.trtllm_comm.majors"


def reason(result) -> str:
    return next(gate["reason"] for gate in result["gates"] if gate["id"] == MAJORS)


@pytest.mark.parametrize(
    ("releases", "package"),
    [(("flashinfer_python-0.99.0", SGLANG), "flashinfer-python 0.99.0"), ((FLASHINFER, "sglang-0.99.0"), "sglang 0.99.0")],
)
def test_a_release_newer_than_tested_is_opened_unless_that_is_refused(venv, releases, package):
    for folder in venv.site.glob("*.dist-info"):
        (folder / "RECORD").unlink()
        (folder / "METADATA").unlink()
        folder.rmdir()
    before = venv.install(releases=releases).files()
    tested = NEWEST_TESTED[package.split("-")[0].split()[0]]
    with pytest.raises(
        InferenceError, match=rf"^{package}: a gate is closed in it, and it is newer than {tested}; .*Nothing was changed\."
    ):
        venv.gate(untested="refuse")
    assert venv.files() == before
    assert venv.gate()["summary"]["opened"] == len(OPENED)
    assert not venv.gate(untested="refuse")["changed"]  # nothing is left to be edited
    assert venv.gate("restored", untested="refuse")["changed"] and venv.is_pristine()


def test_tested_releases_are_opened_either_way(venv):
    assert venv.gate(untested="refuse")["summary"]["opened"] == len(OPENED)


def test_the_reason_tells_of_a_gate_that_upstream_had_open_before(venv):
    assert "closed it again" not in reason(venv.gate()) + reason(venv.gate("restored"))
    (venv.site / f"{FLASHINFER}.dist-info").rename(venv.site / "flashinfer_python-0.7.99.dist-info")
    again = "; upstream had it open from 0.6.17 on, and 0.7.99 has closed it again: find out why before it is relied on"
    assert reason(venv.gate(check=True)) == f"by this collection{again}"
    assert reason(venv.gate("restored")).endswith(again)


@pytest.mark.parametrize("gate", [gate for gate in GATES if gate.admits], ids=lambda gate: gate.id)
def test_upstream_has_had_a_gate_open_since_the_release_that_is_named(gate):
    """By the recorded verdicts on every tested pair, where the gate is on the path."""
    released = [
        (_order(row[gate.package]), row["gates"][gate.id][0])
        for row in json.loads((ROOT / "tests/corpus/results.json").read_text())["pairs"]
    ]
    on_path = [(order, verdict == "open") for order, verdict in released if verdict != "absent"]
    assert on_path
    assert all(is_open is bool(gate.open_since and order >= _order(gate.open_since)) for order, is_open in on_path)
    if gate.open_since:
        assert min(order for order, is_open in on_path if is_open) == _order(gate.open_since)
