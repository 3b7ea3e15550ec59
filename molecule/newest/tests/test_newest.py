# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The newest tested pair: other gates, other flags, the same result."""

testinfra_hosts = ["ansible://blackwell-newest"]


def test_the_gates_are_open_and_nothing_else_was_edited(upstream, changed_files):
    assert upstream["applies"]
    assert upstream["backend"] is None
    assert upstream["workspace"] is None
    assert changed_files == ["sglang/srt/layers/flashinfer_comm_fusion.py", "sglang/srt/layers/layer_boundary/residual/add_norm.py"]


def test_fusion_is_active_on_every_rank(health, log):
    assert health["state"] == "ready"
    assert health["server"]["version"] == "0.5.23"
    assert health["server"]["fusion"] == "active"
    assert sum("FlashInfer AllReduce Fusion enabled and workspace initialized: backend=trtllm" in line for line in log) == 8


def test_the_backend_is_named(ask):
    assert ask("/server_info")["flashinfer_allreduce_fusion_backend"] == "trtllm"
