# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the modules ``gate`` and ``gate_info`` share: their options, turned into an installation and a set of gates."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from ansible_collections.blackwell.inference.plugins.module_utils._catalogue import BY_ID, GATES, Gate
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._gpu import detect_capabilities, parse_capability
from ansible_collections.blackwell.inference.plugins.module_utils._opening import recovered
from ansible_collections.blackwell.inference.plugins.module_utils._packages import locate
from ansible_collections.blackwell.inference.plugins.module_utils._predicate import Capability
from ansible_collections.blackwell.inference.plugins.module_utils._starting_servers import started_before
from ansible_collections.blackwell.inference.plugins.module_utils._store import Store
from ansible_collections.blackwell.inference.plugins.module_utils._survey import Installation
from ansible_collections.blackwell.inference.plugins.module_utils._version import COLLECTION_VERSION

ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "python": {"type": "path"},
    "site_packages": {"type": "path"},
    "compute_capability": {"type": "list", "elements": "str"},
    "gates": {"type": "list", "elements": "str"},
    "optional": {"type": "bool", "default": False},
    "state_dir": {"type": "path", "default": "/var/lib/blackwell-inference"},
}
ONE_SITE = ("python", "site_packages")  # mutually exclusive, and one of them required


def capabilities(parameters: Mapping[str, Any]) -> tuple[Capability, ...]:
    """The compute capabilities of the host's GPUs, as given or as its driver says, in rising order; empty without a GPU."""
    given = parameters["compute_capability"]
    return tuple(sorted({parse_capability(text) for text in (detect_capabilities() if given is None else given)}))


def admitted_capabilities() -> tuple[Capability, ...]:
    """Every compute capability that some gate may be opened for."""
    return tuple(sorted({capability for gate in GATES for capability in gate.admits}))


def gates(parameters: Mapping[str, Any]) -> tuple[Gate, ...]:
    """The gates that are asked for, in the catalogue's order; all of them where none is named, the optional ones left alone."""
    names = parameters["gates"]
    if names is None:
        return GATES if parameters["optional"] else tuple(gate.unasked() for gate in GATES)
    for name in names:
        if name not in BY_ID:
            near = difflib.get_close_matches(name, BY_ID, 1, 0.3)
            raise InferenceError("gates", f"{name!r} is no gate", f"{near[0]}, perhaps" if near else ", ".join(BY_ID))
    return tuple(gate for gate in GATES if gate.id in names)


def installation(parameters: Mapping[str, Any], selected: Iterable[Gate]) -> Installation:
    """The packages that ``selected`` gates, and those that they need, are in."""
    needed = {BY_ID[name].package for gate in selected for name in (gate.id, *gate.needs)}
    site, store = locate(parameters["python"], parameters["site_packages"]), Store(parameters["state_dir"])
    return recovered(Installation(site, store, needed), COLLECTION_VERSION)


def stale_jit_modules(installation: Installation) -> list[str]:
    """The JIT modules that this run or an earlier one made stale, and that nobody has cleared."""
    flashinfer = installation.site.packages.get("flashinfer")
    return installation.store.stale_modules(flashinfer.root) if flashinfer else []


def restart_pending(installation: Installation, written_now: bool = False) -> list[str]:
    """The processes of servers that were started before a file with gates was last written, and go on with what it held then.

    Args:
        written_now: Count the files as written now, for a run that writes them or would.
    """
    written: dict[str, float] = {}
    for file in installation.files():
        root = installation.package(file.name.split("/", 1)[0]).root
        written[root] = max(written.get(root, 0), time.time() if written_now else os.path.getmtime(file.path))
    return list(dict.fromkeys(process for root, moment in written.items() for process in started_before(root, moment)))
