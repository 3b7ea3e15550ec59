# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What was measured decides, and the last word has the server: it is back at NCCL, and everything that was measured is kept."""

import json
from pathlib import Path

testinfra_hosts = ["ansible://blackwell-prove"]

STATE = "/var/lib/blackwell-inference"
HERE = Path(__file__).parents[3] / ".cache/molecule/proof"


def test_the_server_does_not_fuse(health):
    assert health["state"] == "ready"
    assert health["server"]["fusion"] == "off"


def test_the_proof_is_kept_with_what_it_depends_on(host):
    proof = host.file(f"{STATE}/proofs/sglang.json")
    assert (proof.user, proof.mode) == ("root", 0o640)
    record = json.loads(proof.content_string)
    assert record["fingerprint"]["packages"]["torch"] == "2.9.3"
    assert record["fingerprint"]["server"]["hidden_size"] == 7168  # as the profile says
    assert [run["strategy"] for run in record["benchmark"]] == ["nccl", "nccl", "fusion", "fusion", "nccl", "nccl"]


def test_later_runs_find_the_decision_in_the_facts(host):
    fact = json.loads(host.file("/etc/ansible/facts.d/blackwell_inference_proof_sglang.fact").content_string)
    assert fact["strategy"] == "nccl"
    assert fact["candidates"]["fusion"]["correct"] is True


def test_the_runs_are_kept_by_configuration_and_fetched(host):
    kept = host.check_output("ls %s/benchmarks", STATE).split()
    assert sorted(name.rsplit("-", 1)[0] for name in kept) == ["sglang-fusion", "sglang-nccl"]
    fetched = HERE / "blackwell-prove"
    assert {path.name for path in fetched.iterdir()} == {*kept, "sglang.json"}
    [nccl] = fetched.glob("sglang-nccl-*")
    assert [len(session["runs"]) for session in json.loads(nccl.read_text())["sessions"]] == [6, 6]


def test_the_report_shows_both(host):
    report = (HERE / "report.html").read_text()
    assert report.count("<svg") == 2
    assert "on the server, fusion is correct, and takes 47." in report


def test_nothing_of_the_root_user_is_left_in_the_caches(host):
    assert host.check_output("find /var/cache/sglang /var/lib/sglang ! -user sglang") == ""
