# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The report on three hosts: one that was measured and benchmarked, one that was measured, and one that was not."""

from __future__ import annotations

import json
import re

import pytest
from ansible_collections.blackwell.inference.tests.unit.playbook import ROOT, recap, run_playbook
from ansible_collections.blackwell.inference.tests.unit.plugins.filter.test_proof import RECORDED, benchmark


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("report")
    for host in ("benchmarked", "measured"):
        proof = folder / host / "proofs/sglang.json"
        proof.parent.mkdir(parents=True)
        probe = json.loads((RECORDED / "flashinfer-0.7.4.json").read_text())
        record = {"measured_at": "2026-11-29T19:10:01Z", "fingerprint": {"driver": "580.159.04 <b>"}, "probe": probe}
        proof.write_text(json.dumps({"schema_version": 1, **record}))
    for strategy, rate in (("nccl", 100), ("fusion", 120)):
        kept = folder / "benchmarked/benchmarks" / f"sglang-{strategy}-0.json"
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps({"schema_version": 1, "name": "sglang", "configuration": {}, **benchmark(strategy, rate)}))
    hosts = {
        name: {"fusion_gates_state_dir": str(folder / name), "proof_dir": str(folder / "here")}
        for name in ("benchmarked", "measured", "new")
    }
    printed = run_playbook(ROOT / "playbooks/report.yml", hosts, folder)
    assert [counts["failed"] for counts in recap(printed).values()] == [0, 0, 0], printed
    assert "WARNING" not in printed
    assert f"msg: {folder}/here/report.html" in printed
    return (folder / "here/report.html").read_text()


def test_it_needs_no_other_file(report):
    assert not re.findall(r'(?:src|href)="(?!#)', report)
    assert "<script" not in report


def test_each_host_has_what_was_measured_there(report):
    benchmarked, measured, new = report.split("<h2>")[1:]
    assert [part.count("<svg") for part in (benchmarked, measured, new)] == [2, 1, 0]
    assert "fusion is correct and 1.67 times as fast as NCCL" in measured
    assert "<td>2048</td><td>24576</td><td>130.931</td><td>119.612</td>" in measured
    assert "Nothing has been measured on this host." in new


def test_what_hosts_say_is_only_text(report):
    assert "580.159.04 &lt;b&gt;" in report
