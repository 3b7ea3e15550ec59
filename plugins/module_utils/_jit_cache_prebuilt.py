# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Prebuilt modules, which flashinfer loads instead of building its own: set one aside, put it back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ansible_collections.blackwell.inference.plugins.module_utils import _jit_cache_files as files
from ansible_collections.blackwell.inference.plugins.module_utils._packages import Package

ASIDE = ".set-aside"  # appended to the name of a library, so that flashinfer does not see it
# package -> the folder in it that holds a folder for each module
_FOLDERS = {"flashinfer": ("data", "aot"), "flashinfer_jit_cache": ("jit_cache",)}


def find(packages: Mapping[str, Package], modules: Sequence[str], suffix: str = "") -> list[str]:
    """Return the prebuilt libraries of these modules; with ASIDE as ``suffix`` those that were set aside."""
    return [
        entry.path
        for name, below in _FOLDERS.items()
        for module in (modules if name in packages else ())
        for entry in files.find(packages[name].location, [*below, module, f"{module}.so{suffix}"], [])
    ]


def move(source: str, target: str, check_mode: bool = False) -> None:
    """Rename a library; where an installation has put a new one at the target meanwhile, that one stays and the old one goes."""
    with files.explained(source):
        if check_mode:
            return
        if os.path.lexists(target) and source.endswith(ASIDE):
            os.unlink(source)
        else:
            os.replace(source, target)
