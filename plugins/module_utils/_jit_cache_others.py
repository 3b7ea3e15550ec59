# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Other caches of a server that a change of the driver, the BIOS, CUDA or the packages makes wrong."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Optional

from ansible_collections.blackwell.inference.plugins.module_utils import _jit_cache_files as files
from ansible_collections.blackwell.inference.plugins.module_utils import _jit_cache_holders as holders
from ansible_collections.blackwell.inference.plugins.module_utils._jit_cache import absolute, home, sglang_cache_dir
from ansible_collections.blackwell.inference.plugins.module_utils._jit_cache_files import Entry, Skipped

NAMES = ("autotune", "p2p_access", "torch_extension_locks")


def find(names: Sequence[str], environment: Mapping[str, str], user: Optional[str], skipped: list[Skipped]) -> list[Entry]:
    """Return what these caches (of NAMES) hold.

    Raises:
        InferenceError: A process has one of torch's locks open, so it is not a leftover.
    """
    found: list[Entry] = []
    sglang = sglang_cache_dir(environment, user)
    if "autotune" in names:
        found += files.find(sglang, ["flashinfer", "autotune"], skipped)
    if "p2p_access" in names:
        # Releases before 0.5.13 keep it in the home folder whatever the environment says.
        for folder in sorted({sglang, os.path.join(home(environment, user), ".cache", "sglang")}):
            found += files.find(folder, ["gpu_p2p_access_cache_for_*.json"], skipped)
    if "torch_extension_locks" in names:
        if environment.get("TORCH_EXTENSIONS_DIR"):
            locks = files.find(absolute("TORCH_EXTENSIONS_DIR", environment["TORCH_EXTENSIONS_DIR"]), ["*", "lock"], skipped)
        else:  # torch makes a folder for each Python and CUDA release
            cache = environment.get("XDG_CACHE_HOME") or os.path.join(home(environment, user), ".cache")
            locks = files.find(os.path.join(absolute("XDG_CACHE_HOME", cache), "torch_extensions"), ["*", "*", "lock"], skipped)
        for lock in locks:
            holders.refuse_open(lock.path)
        found += locks
    return found
