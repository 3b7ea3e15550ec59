# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What this collection remembers on a host: the ledger, the pristine bytes, the checksums, and the lock.

Everything lies in one folder (root, 0750)::

    lock                     held while gates are opened or restored
    ledgers/<site>.json      what was edited below one site-packages folder; for people, too. Its name ends in a checksum
                             of the folder's path, so that no two folders share one
    pristine/<sha256>        the bytes of every edited file as it was before
    gates.sha256             the edited files of all ledgers as they must be, for `sha256sum --check`; before a server starts, those
                             of the folders that it imports from are checked
    stale/<site>/<module>    an empty file for each JIT module that an edit made stale and that was not cleared since

A release's ``dist-info/RECORD`` is the second witness of pristine bytes, and the only one after the folder was lost.
"""

from __future__ import annotations

import base64
import csv
import errno
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple, Optional

from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._packages import Package
from ansible_collections.blackwell.inference.plugins.module_utils._transaction import flush_folder

SCHEMA_VERSION = 1
_UNFINISHED = ".new"


class Entry(NamedTuple):
    """One edited file, as the ledger keeps it."""

    package: str  # import name
    version: str  # of the package when the file was edited
    gates: tuple[str, ...]  # gate ids that are open in it through this collection
    capabilities: tuple[str, ...]  # that they were opened for, e.g. "12.0"
    sha256_before: str  # of the pristine bytes
    sha256_after: str  # of the edited bytes
    opened_at: str  # UTC, ISO 8601
    collection_version: str


Ledgers = Mapping[str, Mapping[str, Entry]]  # entries by path relative to a site-packages folder, by that folder


class Store:
    """The state folder.

    Args:
        folder: Its path; it is made when something is first written.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def ledger(self, root: str) -> dict[str, Entry]:
        """The edited files below ``root`` (a site-packages folder), by path relative to it."""
        path, found = self._ledger_path(root), "it is not a ledger"
        try:
            with open(path, encoding="utf-8") as file:
                return _entries(json.load(file))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise InferenceError(path, f"cannot be read ({error.strerror})", "the ledger of this collection", "Run as its owner.") from None
        except _NoLedger as error:
            found = str(error)
        except ValueError:  # no JSON at all
            pass
        raise InferenceError(
            path,
            found,
            f"schema_version {SCHEMA_VERSION}",
            "Use the collection version that wrote it, or move it away: RECORD and the pristine bytes beside it are enough to restore.",
        )

    def write_ledger(self, root: str, entries: Mapping[str, Entry]) -> None:
        """Replace the ledger of ``root``; without entries it is removed."""
        path = self._ledger_path(root)
        if not entries:
            with _clear(path):
                _remove(path)
            return
        content = {
            "schema_version": SCHEMA_VERSION,
            "site_packages": root,
            "files": {name: entry._asdict() for name, entry in sorted(entries.items())},
        }
        self._write(path, (json.dumps(content, indent=2) + "\n").encode())

    def pristine(self, sha256: str) -> Optional[bytes]:
        """The stored bytes with this checksum, or None where they are missing or damaged."""
        try:
            with open(os.path.join(self.folder, "pristine", sha256), "rb") as file:
                content = file.read()
        except OSError:
            return None
        return content if checksum(content) == sha256 else None

    def pristine_checksums(self) -> list[str]:
        """The checksums of all stored bytes."""
        try:
            return sorted(os.listdir(os.path.join(self.folder, "pristine")))
        except OSError:
            return []

    def keep_pristine(self, content: bytes) -> None:
        """Store ``content`` under its checksum."""
        if self.pristine(checksum(content)) is None:
            self._write(os.path.join(self.folder, "pristine", checksum(content)), content)

    def stale_modules(self, root: str) -> list[str]:
        """The JIT modules of the FlashInfer below ``root`` that are marked as stale."""
        folder = self._stale_folder(root)
        with _clear(folder):
            names = os.listdir(folder) if os.path.isdir(folder) else []
        return sorted(name for name in names if not name.endswith(_UNFINISHED))

    def mark_stale(self, root: str, modules: Iterable[str]) -> None:
        """Remember that ``modules`` are stale, until they are cleared."""
        for module in modules:
            self._write(os.path.join(self._stale_folder(root), module), b"")

    def forget_stale(self, root: str, modules: Iterable[str]) -> None:
        """Note that ``modules`` were cleared or built."""
        for module in modules:
            path = os.path.join(self._stale_folder(root), module)
            with _clear(path):
                _remove(path)

    def is_settled(self) -> bool:
        """Whether the checksum list fits the ledgers, and nothing is left of a run that was killed or of a folder that is gone."""
        lines, _needed, left = self._contents({})
        try:
            with open(self._checksums, "rb") as file:
                return file.read() == lines and not left
        except OSError:
            return not lines and not left

    def settle(self, ledgers: Ledgers, instead_of: Ledgers) -> None:
        """Put ``ledgers`` in place, and let everything else in the folder follow.

        The ledger of a folder that is gone goes, too. Pristine bytes that only those that they stand ``instead_of``
        named are dropped. Others stay: if a ledger was lost, or a disk was not mounted, they are what a restore has.
        """
        named = {entry.sha256_before for entries in instead_of.values() for entry in entries.values()}
        lines, needed, left = self._contents(ledgers)
        with _clear(self.folder):
            for path in [*left, *(os.path.join(self.folder, "pristine", sha256) for sha256 in sorted(named - needed))]:
                _remove(path)
        for root, entries in ledgers.items():
            self.write_ledger(root, entries)
        if lines:
            self._write(self._checksums, lines)
        else:
            with _clear(self._checksums):
                _remove(self._checksums)

    def _contents(self, ledgers: Ledgers) -> tuple[bytes, set[str], list[str]]:
        """With ``ledgers`` in place: the checksum list, the pristine bytes that are named, and files that have no more use."""
        found = {self._ledger_path(root): (root, dict(entries)) for root, entries in ledgers.items()}
        left: list[str] = []
        for folder, _folders, names in os.walk(self.folder):
            for path in (os.path.join(folder, name) for name in names):
                if path.endswith(_UNFINISHED):
                    left.append(path)
                elif os.path.basename(folder) == "ledgers" and path not in found:
                    with suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
                        content = json.load(file)
                        root, entries = content["site_packages"], _entries(content)
                        if _is_gone(root):
                            left.append(path)
                        else:
                            found[path] = root, entries
        rows = [(root, name, entry) for _path, (root, named) in sorted(found.items()) for name, entry in named.items()]
        lines = [b"%s  %s\n" % (entry.sha256_after.encode(), os.fsencode(os.path.join(root, name))) for root, name, entry in rows]
        return b"".join(lines), {entry.sha256_before for _root, _name, entry in rows}, left

    @property
    def _checksums(self) -> str:
        return os.path.join(self.folder, "gates.sha256")

    def refuse_unwritable(self) -> None:
        """Raise InferenceError if nothing can be written here, without writing anything."""
        folder = os.path.abspath(self.folder)
        while not os.path.lexists(folder):
            folder = os.path.dirname(folder)
        with _clear(self.folder):
            if not os.path.isdir(folder):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    @contextmanager
    def lock(self, timeout: float) -> Iterator[None]:
        """Hold the folder alone, waiting up to ``timeout`` seconds for another run to end."""
        self._make(self.folder)
        path, deadline = os.path.join(self.folder, "lock"), time.monotonic() + timeout
        with _clear(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
        try:
            while not _locked(descriptor, path):
                if time.monotonic() >= deadline:
                    raise InferenceError(
                        "state_dir",
                        f"another run has held {path} for {timeout:g} s",
                        "one run at a time",
                        "Wait for it to end, and run again.",
                    )
                time.sleep(0.1)
            yield
        finally:
            os.close(descriptor)

    def _ledger_path(self, root: str) -> str:
        return os.path.join(self.folder, "ledgers", f"{_site_name(root)}.json")

    def _stale_folder(self, root: str) -> str:
        return os.path.join(self.folder, "stale", _site_name(root))

    def _make(self, folder: str) -> None:
        """Make the state folder and ``folder``, which is it or one in it."""
        with _clear(folder):
            for path in (self.folder, folder):  # `mode` is only that of the last one
                os.makedirs(path, mode=0o750, exist_ok=True)

    def _write(self, path: str, content: bytes) -> None:
        self._make(os.path.dirname(path))
        temporary = path + _UNFINISHED
        with _clear(path):
            try:
                with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o640), "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
                flush_folder(os.path.dirname(path))
            except OSError:
                with suppress(OSError):
                    _remove(temporary)
                raise


def _site_name(root: str) -> str:
    """A file name for a site-packages folder: readable, and unlike that of every other folder."""
    return f"{re.sub(r'[^A-Za-z0-9._]+', '-', root).strip('-')[-100:]}-{checksum(os.fsencode(root))[:8]}"


def _is_gone(folder: str) -> bool:
    """Whether there is no such folder; one that cannot be looked at is not gone."""
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


class _NoLedger(ValueError):
    """A ledger file that cannot be used; the message says what it is instead."""


def _entries(content: object) -> dict[str, Entry]:
    """The entries in the content of a ledger file. Raises ValueError."""
    version = content.get("schema_version") if isinstance(content, dict) else None
    if not isinstance(content, dict) or version != SCHEMA_VERSION:
        raise _NoLedger(f"its schema_version is {version}" if version else "it is not a ledger")
    try:
        os.fsencode(content["site_packages"])
        entries = {
            name: Entry(**{**item, "gates": tuple(item["gates"]), "capabilities": tuple(item["capabilities"])})
            for name, item in content["files"].items()
        }
    except (LookupError, TypeError, AttributeError):
        raise _NoLedger("it is damaged") from None
    if any(not isinstance(part, (str, tuple)) for entry in entries.values() for part in entry):
        raise _NoLedger("it is damaged")
    return entries


def _locked(descriptor: int, path: str) -> bool:
    with _clear(path):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@contextmanager
def _clear(path: str) -> Iterator[None]:
    """Turn an operating system error below ``path`` into a message for people."""
    try:
        yield
    except OSError as error:
        raise InferenceError(
            f"state_dir {path}", f"cannot be written ({error.strerror})", "a folder of this collection's own with some megabytes free"
        ) from None


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.remove(path)


def checksum(content: bytes) -> str:
    """The sha256 of ``content`` in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def recorded_checksums(package: Package, files: set[str]) -> dict[str, str]:
    """What the RECORD of ``package`` says that ``files`` (relative to its root) should have as sha256.

    A file without a checksum there, and every file of a package without RECORD, is left out.
    """
    if package.dist_info is None:
        return {}
    path, found = os.path.join(package.dist_info, "RECORD"), {}
    try:
        with open(path, encoding="utf-8", newline="") as file:
            for row in csv.reader(file):
                if len(row) >= 2 and row[0] in files and row[1].startswith("sha256="):
                    digest = row[1][len("sha256=") :]
                    found[row[0]] = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()
    except (OSError, ValueError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise InferenceError(path, f"cannot be read ({reason})", "the RECORD that pip wrote", package.reinstall) from None
    return found
