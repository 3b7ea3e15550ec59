# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Only the files are patched: the server that runs goes on as it was, and is known to need a restart."""

testinfra_hosts = ["ansible://blackwell-patch"]

EDITED = ["flashinfer/jit/comm.py", "sglang/srt/layers/communicator.py"]


def test_upstream_is_open_now(upstream):
    assert upstream["applies"]
    assert upstream["module"] is None


def test_nothing_else_was_edited(host, changed_files):
    assert changed_files == EDITED
    assert host.run("sha256sum --check --strict /var/lib/blackwell-inference/gates.sha256").succeeded


def test_the_server_runs_on(host):
    assert host.check_output("systemctl show --property MainPID --value sglang") == host.file("/run/pid-before").content_string


def test_the_server_does_not_fuse_and_a_restart_is_pending(health):
    assert health["state"] == "ready"
    assert health["server"]["fusion"] == "requested_but_inactive"
    assert sorted(path.split("site-packages/")[-1] for path in health["restart_pending"]) == EDITED
