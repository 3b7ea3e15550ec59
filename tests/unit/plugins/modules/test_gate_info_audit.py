# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module gate_info with scope=all, and the playbook that reports what it finds."""

from __future__ import annotations

import json

import pytest
import yaml
from ansible_collections.blackwell.inference.plugins.modules import gate_info
from ansible_collections.blackwell.inference.tests.unit.conftest import OPENED, run_module
from ansible_collections.blackwell.inference.tests.unit.playbook import ROOT, recap, run_playbook

PLANTED = {"vllm/attention.py": "def f(major):\n    if major not in (9, 10):\n        raise ValueError\n    return major in table()\n"}


def audit(venv, **options):
    return run_module("gate_info", venv.parameters(scope="all", **options))


def test_it_finds_every_closed_gate_and_changes_nothing(venv):
    before = venv.files()
    result = audit(venv)
    assert venv.files() == before and not venv.state.exists() and not result["changed"]
    assert {row["catalogued"] for row in result["findings"]} >= {*OPENED, "sglang.fusion.auto_enable"}
    assert [row["line"] for row in result["findings"] if row["file"] == "flashinfer/jit/mla.py"] == [2]
    assert result["undecidable"] == []
    assert not {"findings", "undecidable"} & run_module("gate_info", venv.parameters()).keys()


def test_check_mode_is_the_same(venv):
    checked, done = (run_module("gate_info", venv.parameters(scope="all"), check=check) for check in (True, False))
    assert checked == done


def test_what_was_opened_is_no_finding(venv):
    before = {row["id"] for row in audit(venv)["findings"] if row["catalogued"] in OPENED}
    venv.gate()
    after = {row["id"] for row in audit(venv)["findings"]}
    assert len(before) == len(OPENED) and not before & after


def test_further_packages_are_audited(venv):
    venv.install(PLANTED, releases=())
    result = audit(venv, packages=["vllm"])
    (row,) = (row for row in result["findings"] if row["file"] == "vllm/attention.py")
    assert (row["line"], row["expression"], row["kind"], row["guards"]) == (2, "major not in (9, 10)", "raise", "f")
    assert result["undecidable"] == []


def test_rows_are_as_documented(venv):
    venv.install({"vllm/a.py": "def f(device, table):\n    return get_compute_capability(device) in table.all\n"}, releases=())
    result, returns = audit(venv, packages=["vllm"]), yaml.safe_load(gate_info.RETURN)
    for key in ("findings", "undecidable"):
        documented = returns[key]["contains"]
        assert result[key] and all(row.keys() == documented.keys() for row in result[key])
    kinds = " ".join(returns["findings"]["contains"]["kind"]["description"])
    assert all(f"V({row['kind']})" in kinds for row in result["findings"])


def test_a_host_without_gpus_has_no_findings(venv):
    result = audit(venv, compute_capability=[])
    assert (result["findings"], result["undecidable"]) == ([], [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": "all", "packages": ["absent"]}, "packages: 'absent' is not in "),
        ({"packages": ["vllm"]}, "packages: given with scope=fusion; expected scope=all"),
    ],
)
def test_a_mistake_is_one_line(venv, options, message):
    assert message in run_module("gate_info", venv.parameters(**options)).msg


def test_a_file_that_cannot_be_read_is_one_line(venv):
    venv.path("sglang/gone.py").symlink_to(venv.path("nowhere"))
    assert "gone.py: cannot be read" in run_module("gate_info", venv.parameters(scope="all")).msg


@pytest.fixture
def play(venv, tmp_path):
    """Run the playbook on this machine."""

    def run(**variables):
        given = {
            "fusion_gates_python": str(venv.make_interpreter().python) if not venv.python.exists() else str(venv.python),
            "fusion_gates_compute_capability": ["12.0"],
            "fusion_gates_state_dir": str(venv.state),
            "audit_report_dir": str(tmp_path / "reports"),
            **variables,
        }
        return run_playbook(ROOT / "playbooks/audit.yml", {"node1": {}}, tmp_path, "-e", json.dumps(given), cwd=tmp_path)

    return run


def test_the_playbook_fails_on_what_blocks_until_it_is_opened(venv, play, tmp_path):
    venv.install(PLANTED, releases=())
    refused = play()
    assert "closed gates on node1: 6, first flashinfer/comm/mnnvl.py:" in refused
    assert recap(refused)["node1"]["failed"] == 1
    report = (tmp_path / "reports" / "node1.md").read_text()
    assert "flashinfer.trtllm_comm.majors: open it" in report and "flashinfer/jit/mla.py" in report
    assert {row["file"] for row in json.loads((tmp_path / "reports" / "node1.json").read_text())["findings"]} >= {"flashinfer/jit/mla.py"}

    venv.gate()
    passed = play(audit_packages=["vllm"], audit_baseline="reports/node1.json")
    assert recap(passed)["node1"]["failed"] == 0, passed
    report = (tmp_path / "reports" / "node1.md").read_text()
    assert "What blocks the fused allreduce: nothing" in report
    assert "vllm/attention.py" in report and "flashinfer/jit/mla.py" not in report  # the baseline knew that one

    assert "closed gates on node1" in play(audit_fail_on="closed")


@pytest.mark.parametrize("option", [{"audit_fail_on": "open"}, {"audit_baseline": "gone.json"}], ids=lambda option: next(iter(option)))
def test_the_playbook_refuses_a_wrong_option_at_once(play, tmp_path, option):
    refused = play(**option)
    assert "expected closed_on_path, closed, undecidable or never" in refused
    assert recap(refused)["node1"]["failed"] == 1
    assert not (tmp_path / "reports").exists()
