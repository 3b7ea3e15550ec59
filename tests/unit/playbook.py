# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs of ansible-playbook in which every host is this machine, and hosts differ in their variables alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_THIS_MACHINE = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "ansible_become": False}

Hosts = Mapping[str, Mapping[str, object]]


def run_playbook(playbook: Path, hosts: Hosts, folder: Path, *options: str, cwd: Path = ROOT, **environment: str) -> str:
    """Run a playbook on hosts with these variables, its inventory in ``folder``; return all that was printed."""
    inventory = folder / "inventory.json"
    inventory.write_text(json.dumps({"gpu-nodes": {"hosts": hosts, "vars": _THIS_MACHINE}}))
    ours = {
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".venv/collections"),  # this checkout, whatever else is installed
        "ANSIBLE_NOCOLOR": "1",
        "PWD": str(cwd),  # Ansible believes it
    }
    return subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "-i", inventory, playbook, *options],
        env={**os.environ, **ours, **environment},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    ).stdout


def run_role(role: str, hosts: Hosts, folder: Path, *options: str, **environment: str) -> str:
    """Run a role alone, as ``run_playbook`` does a playbook."""
    play = folder / "play.json"
    play.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "roles": [f"blackwell.inference.{role}"]}]))
    return run_playbook(play, hosts, folder, *options, **environment)


def recap(printed: str) -> dict[str, dict[str, int]]:
    """Return what a run counted for each host: ``recap(printed)["host"]["changed"]``."""
    lines = re.findall(r"^(\S+) +: (ok=.*)$", printed.split("PLAY RECAP")[1], re.MULTILINE)
    return {host: {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", counts)} for host, counts in lines}
