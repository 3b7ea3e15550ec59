# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What this collection remembers on a host: the ledger, the pristine bytes, the checksums, and the lock.

Everything lies in one folder (root, 0750)::

    lock                     held while gates are opened or restored
    ledgers/<site>.json      what was edited below one site-packages folder; for people, too
    pristine/<sha256>        the bytes of every edited file as it was before
    gates.sha256             the edited files as they must be, for `sha256sum --check` before the server starts

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple, Optional

from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._packages import Package

SCHEMA_VERSION = 1


class Entry(NamedTuple):
    """One edited file, as the ledger keeps it."""

    package: str  # import name
    version: str  # of the package when the file was edited
    gates: tuple[str, ...]  # gate ids that are open in it through this collection
    sha256_before: str  # of the pristine bytes
    sha256_after: str  # of the edited bytes
    opened_at: str  # UTC, ISO 8601
    collection_version: str


class Store:
    """The state folder.

    Args:
        folder: Its path; it is made when something is first written.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def ledger(self, root: str) -> dict[str, Entry]:
        """The edited files below ``root`` (a site-packages folder), by path relative to it."""
        path = self._ledger_path(root)
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise InferenceError(path, f"cannot be read ({error.strerror})", "the ledger of this collection", "Run as its owner.") from None
        except ValueError:
            content = None
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA_VERSION:
            raise InferenceError(
                path,
                f"its schema_version is {version}" if version else "it is not a ledger",
                f"schema_version {SCHEMA_VERSION}",
                "Use the collection version that wrote it, or move it away: RECORD and the pristine bytes beside it are enough to restore.",
            )
        return {name: Entry(**{**item, "gates": tuple(item["gates"])}) for name, item in content["files"].items()}

    def write_ledger(self, root: str, entries: Mapping[str, Entry]) -> None:
        """Replace the ledger of ``root``; without entries it is removed."""
        path = self._ledger_path(root)
        if not entries:
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

    def keep_pristine(self, content: bytes) -> None:
        """Store ``content`` under its checksum."""
        if self.pristine(checksum(content)) is None:
            self._write(os.path.join(self.folder, "pristine", checksum(content)), content)

    def tidy(self) -> None:
        """Rewrite the checksum list from all ledgers, and drop pristine bytes that none of them names."""
        needed, lines = set(), []
        folder = os.path.join(self.folder, "ledgers")
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
            if not name.endswith(".json"):
                continue
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                content = json.load(file)
            for path, item in content["files"].items():
                needed.add(item["sha256_before"])
                lines.append(f"{item['sha256_after']}  {os.path.join(content['site_packages'], path)}\n")
        checksums = os.path.join(self.folder, "gates.sha256")
        if lines:
            self._write(checksums, "".join(lines).encode())
        else:
            _remove(checksums)
        folder = os.path.join(self.folder, "pristine")
        for name in os.listdir(folder) if os.path.isdir(folder) else []:
            if name not in needed:
                _remove(os.path.join(folder, name))

    @contextmanager
    def lock(self, timeout: float) -> Iterator[None]:
        """Hold the folder alone, waiting up to ``timeout`` seconds for another run to end."""
        self._make(self.folder)
        path = os.path.join(self.folder, "lock")
        with _clear(path), open(path, "a", encoding="utf-8") as file:
            deadline = time.monotonic() + timeout
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as error:
                    if error.errno not in (errno.EAGAIN, errno.EACCES):
                        raise
                if time.monotonic() >= deadline:
                    raise InferenceError(
                        "state_dir",
                        f"another run has held {path} for {timeout:g} s",
                        "one run at a time",
                        "Wait for it to end, and run again.",
                    )
                time.sleep(0.1)
            yield

    def _ledger_path(self, root: str) -> str:
        return os.path.join(self.folder, "ledgers", f"{re.sub(r'[^A-Za-z0-9._]+', '-', root).strip('-')}.json")

    def _make(self, folder: str) -> None:
        with _clear(folder):
            os.makedirs(folder, mode=0o750, exist_ok=True)

    def _write(self, path: str, content: bytes) -> None:
        self._make(os.path.dirname(path))
        temporary = f"{path}.new"
        with _clear(path):
            try:
                with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o640), "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            except OSError:
                _remove(temporary)
                raise


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
    found = {}
    with open(os.path.join(package.dist_info, "RECORD"), encoding="utf-8", newline="") as file:
        for row in csv.reader(file):
            if len(row) >= 2 and row[0] in files and row[1].startswith("sha256="):
                digest = row[1][len("sha256=") :]
                found[row[0]] = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()
    return found
