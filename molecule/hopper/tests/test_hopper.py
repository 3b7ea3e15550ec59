# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host with 2x H200: upstream has every gate open, so nothing is edited, and the server runs with fusion."""

testinfra_hosts = ["ansible://blackwell-hopper"]


def test_nothing_was_edited(host, changed_files):
    assert changed_files == []
    assert not host.file("/var/lib/blackwell-inference/gates.sha256").exists


def test_upstream_is_open(upstream):
    assert upstream["applies"]
    assert upstream["module"] is None


def test_both_ranks_fuse(health):
    assert health["state"] == "ready"
    assert health["server"] == {"version": "0.5.8", "model_path": "deepseek-ai/DeepSeek-V3", "tp_size": 2, "fusion": "active"}
