# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Processes of this host: which there are, what to call them in a message, and how to end one of ours."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path


def others() -> list[int]:
    """Return the ids of all processes that can be seen from here but this one, in rising order."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid())


def describe(pid: int) -> str:
    """Return e.g. ``pid 4242 (python3 -m sglang.launch_server)``; arguments beyond the program may be secrets and stay out."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return f"pid {pid}"
    program = words[:3] if words[1:2] == ["-m"] else words[:1] + [word for word in words[1:2] if not word.startswith("-")]
    return f"pid {pid} ({' '.join(program).strip() or 'unnamed'})"


def of_unit(unit: str) -> set[int]:
    """Return the ids of the processes that systemd runs as this unit, e.g. ``sglang.service``."""
    return {pid for pid in others() if belongs(_text(f"/proc/{pid}/cgroup"), unit)}


def belongs(groups: str, unit: str) -> bool:
    """Return whether the control groups of a process, as /proc lists them, are those of a unit."""
    return any(unit in line.split("/") for line in groups.splitlines())


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # it ended


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process that was started in a session of its own, children included; one that cannot die yet is not waited for long."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=2)
