# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""After restoring, every file is as it was released, and the unit has nothing left to guard."""

testinfra_hosts = ["ansible://blackwell-restore"]


def test_every_file_is_as_released(changed_files):
    assert changed_files == []


def test_upstream_is_closed_again(upstream):
    assert not upstream["applies"]
    assert upstream["module"] == "RuntimeError: No supported CUDA architectures found for major versions [9, 10]."


def test_nothing_is_guarded(host):
    assert not host.file("/var/lib/blackwell-inference/gates.sha256").exists
