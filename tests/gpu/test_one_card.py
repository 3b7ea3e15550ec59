# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""PCIe-IPC between two processes on one real GPU, as it is and with something broken on purpose. Needs flashinfer 0.7.

The parent is the probe's own, with ranks that share the card. Results go to $PROOF_DIR.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils import _proof_probe as probe

TOKENS = (1, 8, 16, 17, 64, 128, 256)
HIDDEN_SIZE = 6144


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the stage; return its outcome, which is kept under ``keep``."""
    monkeypatch.setattr(probe, "__file__", str(Path(__file__).with_name("one_card.py")))

    def go(keep: str, tokens: tuple = TOKENS, fault: str | None = None, **environment: str) -> dict:
        options = probe.Options(2, HIDDEN_SIZE, tokens, 20, 120, fault)
        result = probe.run_stage("pcie_ipc", options, {"OMP_NUM_THREADS": "1", **os.environ, **environment})
        folder = Path(os.environ.get("PROOF_DIR", tmp_path))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{keep}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result))
        return result

    return go


def right(check: dict) -> bool:
    """Whether one batch size is as the decision wants it."""
    within = all(check[f"{part}_error_ulp"] <= check[f"{part}_bound_ulp"] for part in ("sum", "norm"))
    return check["finite"] and check["ranks_agree"] and within


def test_is_right_as_released(run):
    result = run("pcie-ipc-one-card")
    assert result["status"] == "measured", result["message"]
    assert (result["ranks"], result["tuned"]) == ([0, 1], False)
    assert [check["tokens"] for check in result["checks"]["pcie_ipc"]] == list(TOKENS)
    assert all(map(right, result["checks"]["pcie_ipc"]))


def test_one_ulp_too_many_in_one_number_is_wrong(run):
    result = run("pcie-ipc-one-card-corrupted", (1, 17), "corrupt")
    assert result["status"] == "measured", result["message"]
    assert not any(map(right, result["checks"]["pcie_ipc"]))
    assert not any(check["ranks_agree"] for check in result["checks"]["pcie_ipc"])


def test_a_rank_that_does_not_take_part_is_a_hang_that_ends(run):
    result = run("pcie-ipc-one-card-hung", (1, 17), "hang")
    assert (result["status"], result["phase"]) == ("hung", "checking pcie_ipc at 1 tokens")


def test_is_right_when_tuned(run):
    result = run("pcie-ipc-one-card-tuned", TUNE="1,16")  # fewer than the probe: the ranks take turns
    assert result["status"] == "measured", result["message"]
    assert result["tuned"] is True
    assert all(map(right, result["checks"]["pcie_ipc"]))
