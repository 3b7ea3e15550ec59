# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Find and remove files below a cache folder without ever leaving it.

A cache belongs to the service's user, who could plant symlinks in it for root to follow. So only the root of a cache
is opened by its path (operators put it on another disk with a symlink); all below is opened from there, relative to
its parent and without following symlinks.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from typing import NamedTuple

from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Entry(NamedTuple):
    """A file or folder below the root of a cache."""

    root: str
    below: tuple[str, ...]  # names of the folders that lead there, and its own
    bytes: int  # sum of the sizes of its files

    @property
    def path(self) -> str:
        """Its path, for messages and for asking who uses it; never for changing it."""
        return os.path.join(self.root, *self.below)


class Skipped(NamedTuple):
    """Something that looks like part of the cache and is left alone."""

    path: str
    reason: str
    needs_hand: bool  # whether somebody has to look at it


def find(root: str, patterns: Sequence[str], skipped: list[Skipped]) -> list[Entry]:
    """Return what matches one shell pattern for each level below ``root``, sorted; symlinked folders go to ``skipped``.

    The last level may be anything, a symlink included. It is fine if nothing is there.
    """
    with explained(root):
        try:
            fd = os.open(root, _FOLDER)
        except (FileNotFoundError, NotADirectoryError):
            return []
        try:
            return [Entry(root, below, size) for below, size in _matches(fd, root, (), patterns, skipped)]
        finally:
            os.close(fd)


def remove(entry: Entry) -> None:
    """Remove a file, a symlink or a whole folder; it is fine if it is gone already."""
    with explained(entry.path), contextlib.suppress(FileNotFoundError), open_folder(entry.root, entry.below[:-1]) as parent:
        _remove(parent, entry.below[-1])


@contextlib.contextmanager
def open_folder(root: str, below: Sequence[str]) -> Iterator[int]:
    """Give a file descriptor of a folder below ``root``, no symlink followed on the way.

    Raises:
        OSError: It is not there, or something on the way is a symlink.
    """
    fd = os.open(root, _FOLDER)
    try:
        for name in below:
            inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Turn an OSError into a line for people."""
    try:
        yield
    except OSError as error:
        name = f" at {error.filename}" if error.filename else ""
        raise InferenceError(
            path,
            f"the cache cannot be read or changed ({error.strerror}{name})",
            "a folder that this task may change",
            "Run the task as root or as the user that owns the cache.",
        ) from None


def _matches(
    folder: int, path: str, below: tuple[str, ...], patterns: Sequence[str], skipped: list[Skipped]
) -> Iterator[tuple[tuple[str, ...], int]]:
    for name in sorted(os.listdir(folder)):
        if not fnmatch(name, patterns[0]):
            continue
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        if len(patterns) == 1:
            yield (*below, name), _size(folder, name)
        elif stat.S_ISDIR(mode):
            with _inside(folder, name) as fd:
                yield from _matches(fd, os.path.join(path, name), (*below, name), patterns[1:], skipped)
        elif stat.S_ISLNK(mode):
            target = os.readlink(name, dir_fd=folder)
            skipped.append(Skipped(os.path.join(path, name), f"is a symlink to {target}, which may lead out of the cache", True))


def _size(parent: int, name: str) -> int:
    entry = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if not stat.S_ISDIR(entry.st_mode):
        return entry.st_size
    with _inside(parent, name) as fd:
        return sum(_size(fd, child) for child in os.listdir(fd))


def _remove(parent: int, name: str) -> None:
    if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=parent)
        return
    with _inside(parent, name) as fd:
        # Without its log ninja builds everything anew, so a removal cut short leaves nothing that would be used again.
        for child in sorted(os.listdir(fd), key=lambda child: child != ".ninja_log"):
            _remove(fd, child)
    os.rmdir(name, dir_fd=parent)


@contextlib.contextmanager
def _inside(parent: int, name: str) -> Iterator[int]:
    fd = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)
