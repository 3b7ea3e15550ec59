# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os

import pytest
from ansible_collections.blackwell.inference.tests.unit.conftest import OPENED, program, run_module


def test_it_tells_each_gate_and_changes_nothing(venv):
    before = venv.files()
    result = run_module("gate_info", venv.parameters())
    assert venv.files() == before and not venv.state.exists() and not result["changed"]
    assert [gate for gate, verdict in result.verdicts().items() if verdict == "closed"] == OPENED
    assert result["summary"]["closed"] == len(OPENED) and not result["complete"] and result["half_open"] == []
    assert result["packages"]["flashinfer"] == {
        "version": "0.6.9",
        "location": str(venv.path("flashinfer")),
        "newer_than_tested": False,
    }


def test_check_mode_is_the_same(venv):
    checked, done = (run_module("gate_info", venv.parameters(), check=check) for check in (True, False))
    assert checked == done


@pytest.mark.parametrize("lost", [False, True], ids=["ledger", "lost-ledger"])
def test_it_knows_what_this_collection_opened(venv, lost):
    venv.gate()
    for path in (venv.state / "ledgers").iterdir() if lost else ():
        path.unlink()
    before = venv.files()
    verdicts = run_module("gate_info", venv.parameters()).verdicts()
    assert [gate for gate, verdict in verdicts.items() if verdict == "opened"] == OPENED and venv.files() == before


def test_some_gates_can_be_asked_for(venv):
    result = run_module("gate_info", venv.parameters(gates=["sglang.fusion.backend"]))
    assert list(result.verdicts()) == ["sglang.fusion.backend"]


def test_the_driver_is_asked_where_no_capability_is_given(venv, tmp_path):
    program(tmp_path / "nvidia-smi", "exit 9")
    given = {name: value for name, value in venv.parameters().items() if name != "compute_capability"}
    assert "nvidia-smi" in run_module("gate_info", given, environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"}).msg


def test_a_host_without_gpus_has_no_verdicts(venv):
    result = run_module("gate_info", venv.parameters(compute_capability=[]))
    assert result["gates"] == [] and result["complete"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"site_packages": "/none"}, "site_packages: /none is not a folder"),
        ({"python": "/none"}, "mutually exclusive"),
        ({"compute_capability": ["banana"]}, "'banana' is not a compute capability"),
        ({"gates": ["none"]}, "'none' is no gate"),
    ],
)
def test_bad_input_gets_one_line(venv, changed, message):
    assert message in run_module("gate_info", venv.parameters(**changed)).msg
