# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who uses a built module: processes that have loaded it, and processes that build it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Optional

from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError

# FlashInfer takes <module>.lock to build one module, and this one to build several at once.
_COMMON_LOCK = "flashinfer_jit.lock"


def refuse_loaded(paths: Sequence[str]) -> None:
    """Raise InferenceError if a process that can be seen from here has mapped a file of one of these module folders."""
    files: dict[str, str] = {}
    for path in paths:
        files.update(dict.fromkeys(_objects(path), path))
    inodes = {_inode(os.lstat(file)): path for file, path in files.items() if os.path.lexists(file)}
    users: dict[str, list[int]] = {}
    for pid in _pids() if files else ():
        loaded = _mapped(pid, files, inodes)
        if loaded:
            users.setdefault(loaded, []).append(pid)
    for path, pids in users.items():
        more = f" and {len(pids) - 1} more" if len(pids) > 1 else ""
        raise InferenceError(path, f"{describe(pids[0])}{more} has loaded it", "a module that no process uses", "Stop the server first.")


@contextlib.contextmanager
def hold_build_locks(cached_ops: int, folder: str, modules: Sequence[str], label: str) -> Iterator[None]:
    """Hold the build locks of these modules, so that nobody builds them meanwhile.

    A lock that does not exist is not made: nobody can hold it, and the service user could not open one of root's.

    Args:
        cached_ops: File descriptor of the folder that holds the modules.
        folder: Name of the locks' folder in there.
        modules: Names of the modules.
        label: Path of ``cached_ops``, for messages.

    Raises:
        InferenceError: Somebody holds one of them.
    """
    with contextlib.ExitStack() as stack:
        for name in (*(f"{module}.lock" for module in modules), _COMMON_LOCK):
            try:
                fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=cached_ops)
            except FileNotFoundError:
                continue
            stack.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                raise InferenceError(
                    os.path.join(label, folder, name),
                    f"{_lock_owner(fd)} holds this lock, so a build is running",
                    "no build",
                    "Wait for it or stop it.",
                ) from None
        yield


def describe(pid: int) -> str:
    """Return e.g. ``pid 4242 (python3 -m sglang.launch_server)``; arguments beyond the program may be secrets and stay out."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return f"pid {pid}"
    program = words[:3] if words[1:2] == ["-m"] else words[:1] + [word for word in words[1:2] if not word.startswith("-")]
    return f"pid {pid} ({' '.join(program).strip() or 'unnamed'})"


def _pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid())


def _objects(path: str) -> list[str]:
    """Return the files of a module folder, symlinks resolved; of a folder elsewhere that a symlink leads to, only the library."""
    real = os.path.realpath(path)
    if os.path.islink(path):
        return [os.path.join(real, os.path.basename(path) + ".so")]
    return [os.path.join(folder, name) for folder, _, names in os.walk(real) for name in names]


def _mapped(pid: int, files: Mapping[str, str], inodes: Mapping[str, str]) -> Optional[str]:
    """Return the module folder that a process maps a file of: by name or, where it sees other names (containers), by inode."""
    try:
        with Path(f"/proc/{pid}/maps").open(encoding="utf-8", errors="surrogateescape") as lines:
            mappings = [line.rstrip("\n").split(None, 5) for line in lines]
    except OSError:
        return None  # it ended, or belongs to somebody else
    for words in mappings:  # <addresses> <permissions> <offset> <device> <inode> <path>
        if len(words) == 6:
            found = files.get(words[5]) or inodes.get(f"{words[3]}:{words[4]}")
            if found:
                return found
    return None


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
