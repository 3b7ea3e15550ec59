# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What modules, roles and playbooks advise to run."""

from __future__ import annotations

import re
from pathlib import Path

from ansible_collections.blackwell.inference.plugins.module_utils._remedy import FULL_RUN

ROOT = Path(__file__).resolve().parents[4]
TEXTS = {
    path: path.read_text()
    for folder in ("plugins", "roles", "playbooks")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".yml", ".j2", ".sh", ".md")
}


def test_no_advice_starts_kernels_that_nobody_has_checked():
    advised = {(path.name, tags) for path, text in TEXTS.items() for tags in re.findall(r"--tags ([a-z,]+)", text)}
    assert ("restored.txt.j2", "configure,restart") in advised  # it would be found
    assert [(name, tags) for name, tags in sorted(advised) if {"patch", "restart"} <= set(tags.split(","))] == []


def test_the_full_run_is_written_in_one_way():
    written = {path.name: text for path, text in TEXTS.items()}
    assert FULL_RUN in written["preflight.sh"]
    assert FULL_RUN.replace("HOST", "{{ inventory_hostname }}") in written["wiring.yml"]
