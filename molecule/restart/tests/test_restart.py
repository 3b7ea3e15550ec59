# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Restarting takes up what was patched, needs nothing patched, and waits for a server that takes long."""

testinfra_hosts = ["ansible://blackwell-restart", "ansible://blackwell-restart-unpatched"]


def test_the_server_is_another_one(host):
    assert host.service("sglang").is_running
    assert host.check_output("systemctl show --property MainPID --value sglang") != host.file("/run/pid-before").content_string


def test_it_fuses_where_the_gates_are_open(host, health):
    assert health["state"] == "ready"
    assert health["server"]["fusion"] == {"blackwell-restart": "active", "blackwell-restart-unpatched": "off"}[host.backend.host]
    assert health["restart_pending"] == []


def test_it_edited_nothing(host, changed_files):
    edited = ["flashinfer/jit/comm.py", "sglang/srt/layers/communicator.py"]
    assert changed_files == (edited if host.backend.host == "blackwell-restart" else [])
