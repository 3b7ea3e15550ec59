# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who uses a built module: processes that have loaded it, and processes that build it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Optional

from ansible_collections.blackwell.inference.plugins.module_utils import _jit_cache_files as files
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._processes import describe, others

# FlashInfer takes <module>.lock to build one module, and this one to build several at once.
_COMMON_LOCK = "flashinfer_jit.lock"


def refuse_loaded(paths: Sequence[str]) -> None:
    """Raise InferenceError if a process that can be seen from here has mapped a file of one of these module folders."""
    names = {name: path for path in paths for name in _objects(path)}
    inodes = {_inode(os.lstat(name)): path for name, path in names.items() if os.path.lexists(name)}
    users: dict[str, list[int]] = {}
    for pid in others() if names else ():
        loaded = _mapped(pid, names, inodes)
        if loaded:
            users.setdefault(loaded, []).append(pid)
    for path, pids in users.items():
        more = f" and {len(pids) - 1} more" if len(pids) > 1 else ""
        raise InferenceError(path, f"{describe(pids[0])}{more} has loaded it", "a module that no process uses", "Stop the server first.")


@contextlib.contextmanager
def hold_build_locks(root: str, below: Sequence[str], locks: str, modules: Sequence[str]) -> Iterator[None]:
    """Hold the build locks of these modules, so that nobody builds them meanwhile.

    A lock that does not exist is not made: nobody can hold it, and the service user could not open one of root's.

    Args:
        root: Root of the cache.
        below: Names of the folders that lead from there to the modules.
        locks: Name of the folder beside the modules that holds their locks.
        modules: Names of the modules.

    Raises:
        InferenceError: Somebody holds one of them.
    """
    path = os.path.join(root, *below, locks)
    with contextlib.ExitStack() as stack, files.explained(path):
        try:
            folder = stack.enter_context(files.open_folder(root, [*below, locks]))
        except FileNotFoundError:
            modules = ()
        for name in (*(f"{module}.lock" for module in modules), _COMMON_LOCK) if modules else ():
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
                stack.callback(os.close, fd)
                _lock(fd, os.path.join(path, name))
        yield


def refuse_open(path: str) -> None:
    """Raise InferenceError if a process that can be seen from here has this file open."""
    for pid in others():
        for name in _listed(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), os.lstat(path)):
                    raise InferenceError(path, f"{describe(pid)} has it open", "a lock that no process holds", "Stop the server first.")


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []  # the process ended, or belongs to somebody else


def _objects(path: str) -> list[str]:
    """Return the files of a module folder, symlinks resolved; of a folder elsewhere that a symlink leads to, only the library."""
    real = os.path.realpath(path)
    if os.path.islink(path):
        return [os.path.join(real, os.path.basename(path) + ".so")]
    return [os.path.join(folder, name) for folder, _folders, names in os.walk(real) for name in names]


def _mapped(pid: int, names: Mapping[str, str], inodes: Mapping[str, str]) -> Optional[str]:
    """Return the module folder that a process maps a file of: by name or, where it sees other names (containers), by inode."""
    try:
        with Path(f"/proc/{pid}/maps").open(encoding="utf-8", errors="surrogateescape") as lines:
            mappings = [line.rstrip("\n").split(None, 5) for line in lines]
    except OSError:
        return None  # it ended, or belongs to somebody else
    for words in mappings:  # <addresses> <permissions> <offset> <device> <inode> <path>
        if len(words) == 6:
            found = names.get(words[5]) or inodes.get(f"{words[3]}:{words[4]}")
            if found:
                return found
    return None


def _lock(fd: int, path: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        found = f"{_lock_owner(fd)} holds this lock, so a build is running"
        raise InferenceError(path, found, "no build", "Wait for it or stop it.") from None


def _lock_owner(fd: int) -> str:
    wanted = _inode(os.fstat(fd))
    with Path("/proc/locks").open(encoding="ascii") as lines:
        for line in lines:
            words = line.split()  # 1: FLOCK ADVISORY WRITE <pid> <device>:<inode> 0 EOF; those that wait have "->" as second word
            if words[1] == "FLOCK" and words[5] == wanted and int(words[4]) > 0:
                return describe(int(words[4]))
    return "a process that cannot be seen from here"


def _inode(entry: os.stat_result) -> str:
    """Return ``<major>:<minor>:<inode>`` the way /proc writes it."""
    return f"{os.major(entry.st_dev):02x}:{os.minor(entry.st_dev):02x}:{entry.st_ino}"
