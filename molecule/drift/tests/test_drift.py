# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""After a reinstall under the patch, one more run opened the gates again and the server fuses."""

testinfra_hosts = ["ansible://blackwell-drift"]


def test_the_gates_are_open_again(upstream, changed_files):
    assert upstream["applies"]
    assert upstream["module"] is None
    assert changed_files == ["flashinfer/jit/comm.py", "sglang/srt/layers/communicator.py"]


def test_the_server_fuses(health):
    assert health["state"] == "ready"
    assert health["server"]["fusion"] == "active"
    assert health["restart_pending"] == []
