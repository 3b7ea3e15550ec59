# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""FlashInfer's JIT cache: where a server keeps it, what in it is to go, and how that goes safely.

The layout is ``<base>/.cache/flashinfer/<version>/<archs>/cached_ops/<module>/``, with build locks in
``cached_ops/tmp/``.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import pwd
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from ansible_collections.blackwell.inference.plugins.module_utils import _jit_cache_files as files
from ansible_collections.blackwell.inference.plugins.module_utils import _jit_cache_holders as holders
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._jit_cache_files import Entry, Skipped

ALL = "all"  # in place of module names: every module
LOCKS = "tmp"  # the folder beside the modules that holds the build locks; it stays
_ARCHS = re.compile(r"\d+[af]?(_\d+[af]?)*")


class Survey(NamedTuple):
    """What a cache holds for this host."""

    cache_dirs: list[str]  # the existing cached_ops folders that this host's server uses
    stale: list[Entry]  # module folders that are to go
    skipped: list[Skipped]


class Cache(NamedTuple):
    """The JIT cache of one flashinfer version, as one service sees it."""

    base: str  # absolute; what FLASHINFER_WORKSPACE_BASE is, or would be
    version: str  # flashinfer's own idea of its version, which names the folder

    @property
    def root(self) -> str:
        """The folder that may be a symlink; nothing below it may."""
        return os.path.join(self.base, ".cache", "flashinfer")

    @property
    def path(self) -> str:
        """The folder that holds one folder for each set of architectures."""
        return os.path.join(self.root, self.version)


def resolve(flashinfer: str, sglang: str, environment: Mapping[str, str], user: Optional[str]) -> Cache:
    """Return the cache of a server that runs these packages.

    Args:
        flashinfer: Folder of the flashinfer package.
        sglang: Folder of the sglang package.
        environment: The service's environment, not this process's.
        user: The service's user; None is the user that runs this.

    Raises:
        InferenceError: The user is unknown and needed, or the environment names a relative folder.
    """
    return Cache(workspace_base(environment, sglang_redirects(sglang), user), flashinfer_version(flashinfer))


def flashinfer_version(flashinfer: str) -> str:
    """Return the version that flashinfer names its cache after: its own, not that of the package metadata."""
    found = re.search(r"""^__version__\s*=\s*["']([^"'/]+)["']""", _text(os.path.join(flashinfer, "_build_meta.py")), re.MULTILINE)
    return found.group(1) if found else "0.0.0+unknown"


def sglang_redirects(sglang: str) -> bool:
    """Tell whether importing this sglang moves flashinfer's cache into its own (0.5.18 and later)."""
    return '"FLASHINFER_WORKSPACE_BASE"' in _text(os.path.join(sglang, "srt", "environ.py"))


def workspace_base(environment: Mapping[str, str], redirected: bool, user: Optional[str] = None) -> str:
    """Return the folder that flashinfer puts ``.cache/flashinfer`` into.

    Args:
        environment: The service's environment.
        redirected: Whether sglang sets FLASHINFER_WORKSPACE_BASE where the environment does not.
        user: Whose home counts where the environment has no HOME.
    """
    if "FLASHINFER_WORKSPACE_BASE" in environment:
        return absolute("FLASHINFER_WORKSPACE_BASE", environment["FLASHINFER_WORKSPACE_BASE"])
    if redirected:
        return sglang_cache_dir(environment, user)
    return absolute("HOME", home(environment, user))


def sglang_cache_dir(environment: Mapping[str, str], user: Optional[str] = None) -> str:
    """Return the folder of sglang's own caches."""
    # The older spelling wins: sglang renames it over the newer one.
    name = "SGL_CACHE_DIR" if "SGL_CACHE_DIR" in environment else "SGLANG_CACHE_DIR"
    folder = environment.get(name, "~/.cache/sglang")
    if folder == "~" or folder.startswith("~/"):
        folder = home(environment, user).rstrip("/") + folder[1:] or "/"
    return absolute(name, folder)


def home(environment: Mapping[str, str], user: Optional[str]) -> str:
    """Return what ``~`` is to a process with this environment that runs as this user."""
    if "HOME" in environment:
        return environment["HOME"].rstrip("/") or "/"
    try:
        entry = pwd.getpwnam(user) if user else pwd.getpwuid(os.geteuid())
    except KeyError:
        raise InferenceError(
            "user",
            f"{user or os.geteuid()} does not exist on this host",
            "the user that the server runs as, or HOME in environment",
        ) from None
    return entry.pw_dir.rstrip("/") or "/"


def absolute(name: str, path: str) -> str:
    """Return the path that a variable of the environment names, without ``..``; InferenceError if it is relative."""
    if not os.path.isabs(path):
        raise InferenceError(
            f"environment {name}",
            f"{path!r} is relative, so the cache would lie wherever the server happens to start",
            "an absolute path",
        )
    return posixpath.normpath(path)


def serves(archs: str, capabilities: Sequence[str]) -> bool:
    """Tell whether a folder name such as ``90a_120f`` belongs to servers with a GPU of these capabilities (none: of any)."""
    if not _ARCHS.fullmatch(archs):
        return False
    wanted = {capability.replace(".", "") for capability in capabilities}
    # 120f is code for the whole family: some releases build it for 12.1 too.
    parts = {number for part in archs.split("_") for number in ({"120", "121"} if part == "120f" else {part.rstrip("af")})}
    return not wanted or bool(wanted & parts)


def survey(cache: Cache, modules: Sequence[str], capabilities: Sequence[str] = ()) -> Survey:
    """Find the built modules that are to go.

    Args:
        cache: Where to look; it need not exist.
        modules: Names of modules, or ALL.
        capabilities: Look only into folders that a server with such GPUs uses; none means any, e.g. ["12.0"].
    """
    skipped: list[Skipped] = []
    folders = []
    for folder in files.find(cache.root, [cache.version, "*", "cached_ops"], skipped):
        archs = folder.below[1]
        if serves(archs, capabilities):
            folders.append(folder)
        elif serves(archs, ()):
            skipped.append(Skipped(os.path.dirname(folder.path), f"built for other GPUs than {', '.join(capabilities)}", False))
    stale = [
        module
        for folder in folders
        for module in files.find(cache.root, [*folder.below, "*"], skipped)
        if module.below[-1] != LOCKS and (ALL in modules or module.below[-1] in modules)
    ]
    return Survey([folder.path for folder in folders], stale, skipped)


def remove(stale: Sequence[Entry], check_mode: bool = False) -> None:
    """Remove the module folders that a survey found, or with ``check_mode`` only see that it could be done.

    Raises:
        InferenceError: A process has loaded one of them or is building it (nothing was removed then), or one
            cannot be removed.
    """
    with contextlib.ExitStack() as locks:
        for folder in sorted({(item.root, item.below[:-1]) for item in stale}):
            names = [item.below[-1] for item in stale if (item.root, item.below[:-1]) == folder]
            locks.enter_context(holders.hold_build_locks(*folder, LOCKS, names))
        holders.refuse_loaded([item.path for item in stale])
        if not check_mode:
            for item in stale:
                files.remove(item)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
