# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Replace files whole: all of them or none, and never in place.

Each new file is written beside the old one and flushed to disk before the first one is renamed over, so a kill at any
instant leaves every file whole, a hard link in another venv keeps its bytes, and a full disk is noticed before
anything has changed.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError


class Replacement(NamedTuple):
    """New bytes for one file of a package."""

    path: str  # absolute
    package: str  # absolute path of the package folder; nothing outside it is ever written
    before: bytes  # what the file holds now; anything else stops the transaction
    after: bytes


def replace_all(replacements: Iterable[Replacement], pycache_prefix: str = "", before_first: Callable[[], None] = lambda: None) -> None:
    """Put every replacement in place, or none.

    Owner, mode and extended attributes are kept, the modification time is now, and compiled files (.pyc) that would
    hide the change are removed, whether they are checked by time, by hash or not at all.

    Args:
        replacements: What to write.
        pycache_prefix: PYTHONPYCACHEPREFIX of the server, if it has one.
        before_first: Called when all is written beside, before the first file is replaced.

    Raises:
        InferenceError: A file may not be written, changed in the meantime, or the disk is full. Nothing has changed then.
    """
    planned = [(item, _target(item)) for item in replacements]
    for _item, target in planned:
        _refuse_unwritable(target)
    written: list[tuple[str, str]] = []
    try:
        for item, target in planned:
            temporary = _temporary(target)
            with suppress(FileNotFoundError):
                os.remove(temporary)  # left behind by a run that was killed
            written.append((temporary, target))
            _write_like(target, temporary, item.after)
        for item, target in planned:
            with open(target, "rb") as file:
                if file.read() != item.before:
                    raise InferenceError(target, "it changed during this run", "no other writer", "See who writes it, and run again.")
        before_first()
        for item, target in planned:
            _remove_compiled(item, target, pycache_prefix)
        _rename_all(planned)
    except OSError as error:
        name = written[-1][1] if written else "the files"
        raise InferenceError(
            name, f"cannot be replaced ({error.strerror})", "a writable folder with free space", "Nothing was changed."
        ) from None
    finally:
        for temporary, _target_path in written:
            with suppress(OSError):
                os.remove(temporary)


def refuse_irreplaceable(replacements: Iterable[Replacement]) -> None:
    """Raise InferenceError if one of the files may not be replaced, without writing anything."""
    for item in replacements:
        _refuse_unwritable(_target(item))


def leftovers(path: str) -> list[str]:
    """The temporary files that a run left beside ``path`` when it was killed."""
    beside = {_temporary(path), _temporary(os.path.realpath(path))}
    return sorted(temporary for temporary in beside if os.path.lexists(temporary))


def _rename_all(planned: list[tuple[Replacement, str]]) -> None:
    done: list[tuple[Replacement, str]] = []
    try:
        for item, target in planned:
            os.replace(_temporary(target), target)
            done.append((item, target))
            flush_folder(os.path.dirname(target))
    except OSError:
        for item, target in reversed(done):
            try:
                _write_like(target, _temporary(target), item.before)
                os.replace(_temporary(target), target)
            except OSError as error:
                raise InferenceError(
                    target,
                    f"it was replaced, the next file was not, and it cannot be put back ({error.strerror})",
                    "a writable folder with free space",
                    "Make room, and run with state=restored.",
                ) from None
        raise


def _target(item: Replacement) -> str:
    """The file that is to be replaced: the end of a symlink inside the package; a link that leads out is replaced itself."""
    package = os.path.realpath(item.package)
    folder = os.path.realpath(os.path.dirname(item.path))
    if os.path.commonpath([folder, package]) != package:
        raise InferenceError(item.path, f"its folder leads out of the package, to {folder}", f"a folder inside {package}")
    resolved = os.path.realpath(item.path)
    inside = os.path.commonpath([resolved, package]) == package
    return resolved if inside else os.path.join(folder, os.path.basename(item.path))


def _refuse_unwritable(target: str) -> None:
    expected = "a file that this run may replace"
    try:
        mode = os.stat(target).st_mode
        if not mode & stat.S_IWUSR:
            found = f"it is read-only (mode {stat.S_IMODE(mode):04o})"
            raise InferenceError(target, found, expected, "Nothing was changed; chmod u+w if it may be.")
        with open(target, "r+b"):  # notices read-only mounts and the immutable attribute, too
            pass
    except OSError as error:
        raise InferenceError(target, f"it cannot be written ({error.strerror})", expected, "Nothing was changed.") from None
    if not os.access(os.path.dirname(target), os.W_OK | os.X_OK):
        raise InferenceError(os.path.dirname(target), "nothing can be written into it", expected, "Nothing was changed; run as its owner.")


def _temporary(target: str) -> str:
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name}.blackwell-inference")


def _write_like(model: str, path: str, content: bytes) -> None:
    """Write ``content`` to ``path``, with owner, mode and extended attributes of ``model``, down to the disk."""
    status = os.stat(model)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        if (os.fstat(file.fileno()).st_uid, os.fstat(file.fileno()).st_gid) != (status.st_uid, status.st_gid):
            os.fchown(file.fileno(), status.st_uid, status.st_gid)
        os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
        for name in _attributes(model):
            with suppress(OSError):  # one that only the system may set, or only another owner
                os.setxattr(file.fileno(), name, os.getxattr(model, name))
        os.fsync(file.fileno())


def _attributes(path: str) -> list[str]:
    try:
        return os.listxattr(path)
    except OSError:  # a file system without extended attributes has none to keep
        return []


def _remove_compiled(item: Replacement, target: str, pycache_prefix: str) -> None:
    folder, name = os.path.split(target)
    compiled = f"{glob.escape(os.path.splitext(name)[0])}.*.pyc"
    places = [os.path.join(glob.escape(folder), "__pycache__")]
    if pycache_prefix:  # below it, the path is the one that the server imports by, symlinks and all
        inside = os.path.relpath(os.path.dirname(item.path), os.path.dirname(item.package))
        places.append(os.path.join(glob.escape(pycache_prefix), "**", glob.escape(inside)))
    for path in (path for place in places for path in glob.glob(os.path.join(place, compiled), recursive=True)):
        with suppress(FileNotFoundError):
            os.remove(path)


def flush_folder(folder: str) -> None:
    """Put the names in ``folder`` on disk: what was renamed stays so after a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
