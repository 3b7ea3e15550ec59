# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The probe on two real GPUs, as it is and with something broken on purpose, and what is decided from each.

Needs torch and flashinfer in the interpreter that runs pytest; see tests/gpu/README.md. Results go to $PROOF_DIR.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils import _proof_probe as probe
from ansible_collections.blackwell.inference.plugins.module_utils._decision import decide

HOLDER = "import torch, time; x = torch.zeros(1 << 20, device='cuda:1'); print('holding', flush=True); time.sleep(600)"
QUICK = ["--tokens", "1,17", "--phase-timeout", "20"]


@pytest.fixture
def run(tmp_path):
    """Run the probe; return its exit status and result, which is kept under ``keep``."""

    def go(keep: str, *arguments: str) -> tuple[int, dict]:
        folder = Path(os.environ.get("PROOF_DIR", tmp_path))
        folder.mkdir(parents=True, exist_ok=True)
        output = folder / f"{keep}.json"
        command = [sys.executable, probe.__file__, "--output", str(output), *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        print(done.stdout)
        return done.returncode, json.loads(output.read_text())

    return go


def test_measures(run):
    status, result = run("measured")
    assert (status, result["status"]) == (0, "measured"), result["message"]
    decision = decide(result, world_size=2)
    print(decision)
    assert decision.candidates["fusion"].correct, decision.reason
    assert [row["tokens"] for row in result["stages"]["fusion"]["times"]] == list(probe.TOKENS)


def test_one_ulp_too_many_in_one_number_is_wrong(run):
    status, result = run("corrupted", "--fault", "corrupt", *QUICK)
    decision = decide(result)
    assert status == 0
    assert decision.strategy == "nccl"
    assert "fusion is wrong: its norm is" in decision.reason
    assert all(not check["ranks_agree"] for check in result["stages"]["fusion"]["checks"]["fusion"])


def test_a_rank_that_does_not_take_part_is_a_hang_that_ends(run):
    status, result = run("hung", "--fault", "hang", *QUICK)
    decision = decide(result)
    assert status == 4
    assert result["stages"]["fusion"]["status"] == "hung"
    assert decision.strategy == "nccl"
    assert "hung in checking fusion at 1 tokens" in decision.reason
    status, result = run("after-hang", *QUICK)
    assert status == 0, result["message"]  # nothing is left of it


def test_a_missing_rank_is_named(run):
    status, result = run("missing", "--fault", "missing", *QUICK)
    assert status == 4
    assert "rank 1 never started" in decide(result).reason


@pytest.mark.parametrize(("ranks", "words"), [("8", "8 ranks on 2 GPUs"), ("3", "knows 2, 4 and 8")])
def test_a_wrong_world_size_is_refused(run, ranks, words):
    status, result = run(f"refused-{ranks}", "--world-size", ranks)
    assert (status, result["status"]) == (3, "refused")
    assert words in decide(result).reason


def test_a_measurement_is_not_for_another_world_size(run):
    _status, result = run("refused-8", "--world-size", "8")
    assert "8 ranks were measured, and the server has 2" in decide(result, world_size=2).reason


def test_a_busy_gpu_is_refused(run):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "holding\n"
        time.sleep(1)
        status, result = run("busy")
    finally:
        holder.kill()
        holder.wait()
    assert (status, result["status"]) == (3, "refused")
    assert "the GPUs are in use: GPU 1 " in decide(result).reason
