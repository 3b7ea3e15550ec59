# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Servers that import from a venv. While they start, their ranks do so one after another; later, whenever they need one more."""

from __future__ import annotations

import os
import time
from collections.abc import Set
from pathlib import Path

from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._processes import describe, others
from ansible_collections.blackwell.inference.plugins.module_utils._remedy import FULL_RUN

# Ranks are spawned, and have imported what they need, well before a model's weights are loaded.
SETTLED_AFTER_SECONDS = 120


def refuse_starting_server(root: str) -> None:
    """Raise InferenceError while a server that imports from ``root`` (a site-packages folder) is starting."""
    for pid in others():
        age = _age(pid) if _serves_from(pid, root) else SETTLED_AFTER_SECONDS
        if age < SETTLED_AFTER_SECONDS:
            raise InferenceError(
                root,
                f"{describe(pid)} imports from there and started {age:.0f} s ago",
                f"no server younger than {SETTLED_AFTER_SECONDS} s",
                "Nothing was changed; its ranks may still be importing, so wait and run again.",
            )


def refuse_running_server(root: str, stopped: Set[int] = frozenset()) -> bool:
    """Return whether a server that is ``stopped`` before, these processes, imports from ``root`` (a site-packages folder).

    Raises:
        InferenceError: Another one does.
    """
    users = {pid for pid in others() if _serves_from(pid, root)}
    for pid in sorted(users - stopped):
        remedy = f"Stop it first; the full run stops the server that it is for: {FULL_RUN}."
        raise InferenceError(root, f"{describe(pid)} imports from there", "packages that no server uses", remedy)
    return bool(users)


def started_before(root: str, moment: float) -> list[str]:
    """The processes of servers that import from ``root`` and were started before ``moment``, in seconds since the epoch."""
    return [describe(pid) for pid in others() if _serves_from(pid, root) and time.time() - _age(pid) < moment]


def _serves_from(pid: int, root: str) -> bool:
    """Whether the process is an sglang server of the venv around ``root``, by its interpreter or by the libraries it has loaded."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if not any(os.path.basename(word).startswith(b"sglang") for word in words):  # the venv may lie below a folder of that name
            return False
        venv = os.path.dirname(os.path.dirname(os.path.dirname(root)))
        own_interpreter = any(os.path.exists(os.path.join(venv, sign)) for sign in ("pyvenv.cfg", "conda-meta"))  # /usr has none of its own
        if own_interpreter and words[0].startswith(os.path.join(venv, "bin", "").encode()):
            return True
        return f" {root}/".encode() in Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return False  # it ended, or belongs to somebody else


def _age(pid: int) -> float:
    """Seconds since the process started; from /proc/PID/stat, field 22, in clock ticks after boot."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except OSError:
        return SETTLED_AFTER_SECONDS
    return uptime - int(after_name.split()[19]) / os.sysconf("SC_CLK_TCK")
