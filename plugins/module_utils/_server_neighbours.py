# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Other servers of this host, and files of others: two servers on one port or one GPU would fail one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple, Optional

MARK = "# Managed by blackwell.inference"  # how the files start that the role writes
DEFAULT_PORT = 30000

_RETIRE = "ansible-playbook blackwell.inference.site -l HOST -e sglang_server_state=absent -e sglang_server_name="

_CONFIG = re.compile(r'^ExecStart=.* --config "([^"]+)"', re.MULTILINE)
_PORT_ARGUMENT = re.compile(r'^ExecStart=.* "--port=(\d+)"', re.MULTILINE)
_PORT_KEY = re.compile(r"^port: (\d+)$", re.MULTILINE)
_GPUS = re.compile(r'^Environment="CUDA_VISIBLE_DEVICES=([^"]*)"', re.MULTILINE)


class Server(NamedTuple):
    """What a server claims for itself."""

    unit: str
    port: int
    gpus: Optional[frozenset[str]]  # None: all of them


def overlaps(unit: str, values: dict[str, Any], environment: dict[str, str]) -> list[str]:
    """Return one line for each thing that another server on this host claims, too.

    Args:
        unit: Path of the unit of the server; the other ones lie in its folder.
        values: Flag to value, for the flags that are set.
        environment: The environment of the server.
    """
    path = Path(unit)
    ours = Server(path.name, int(values.get("port", DEFAULT_PORT)), _gpus(environment.get("CUDA_VISIBLE_DEVICES")))
    lines = []
    for theirs in _neighbours(path):
        if theirs.port == ours.port:
            lines.append(f"port: {ours.port} is that of {theirs.unit}; expected another one. {_way_out(theirs)}")
        shared = _shared(ours.gpus, theirs.gpus)
        if shared:
            line = f"CUDA_VISIBLE_DEVICES: {theirs.unit} uses {shared}, too; expected others for each server in sglang_server_gpus"
            lines.append(f"{line}. {_way_out(theirs)}")
    return lines


def _way_out(theirs: Server) -> str:
    return f"If {theirs.unit} is to go: {_RETIRE}{theirs.unit[: -len('.service')]}"


def written_by_hand(files: list[str]) -> list[str]:
    """Return those of the files that hold something and were not written by the role."""
    texts = {file: _text(Path(file)) for file in files}
    return [file for file, text in texts.items() if text and not text.startswith(MARK)]


def _neighbours(unit: Path) -> list[Server]:
    found = []
    for path in sorted(unit.parent.glob("*.service")):
        text = "" if path.name == unit.name else _text(path)
        if text.startswith(MARK):
            gpus = _GPUS.search(text)
            found.append(Server(path.name, _port(text), _gpus(gpus.group(1) if gpus else None)))
    return found


def _port(unit: str) -> int:
    config = _CONFIG.search(unit)
    port = _PORT_KEY.search(_text(Path(config.group(1)))) if config else None
    port = port or _PORT_ARGUMENT.search(unit)
    return int(port.group(1)) if port else DEFAULT_PORT


def _gpus(visible: Optional[str]) -> Optional[frozenset[str]]:
    return None if visible is None else frozenset(item.strip() for item in visible.split(",") if item.strip())


def _shared(ours: Optional[frozenset[str]], theirs: Optional[frozenset[str]]) -> str:
    if ours is None and theirs is None:
        return "all GPUs"
    both = theirs if ours is None else ours if theirs is None else ours & theirs
    return f"GPU {', '.join(sorted(both))}" if both else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
