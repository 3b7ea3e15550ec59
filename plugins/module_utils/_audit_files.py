# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read whole package trees: find the files that can hold a gate, and use every core to look at them."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Callable

from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError

CUDA = frozenset({"cu", "cuh", "h", "hpp", "inl", "cpp", "cc", "c", "cxx", "inc"})
_SUFFIXES = CUDA | {"py"}
_NOT_SERVED = frozenset({"test", "tests", "unittest", "benchmark", "benchmarks", "__pycache__"})
_TEST_FILE = re.compile(r"test_.*\.py|.*_test\.py|conftest\.py")
_MOST_WORKERS = 8


def sources(root: str, package: str) -> Iterator[str]:
    """The sources of ``package``, relative to the folder ``root``, tests and benchmarks left out. Symbolic links are not followed."""
    pending = [package]
    while pending:
        folder = pending.pop()
        try:
            entries = list(os.scandir(os.path.join(root, folder)))
        except OSError as error:
            raise InferenceError(
                os.path.join(root, folder), f"cannot be read ({error.strerror})", "a folder that the server can read"
            ) from None
        for entry in entries:
            name = entry.name
            if entry.is_dir(follow_symlinks=False):
                if name not in _NOT_SERVED:
                    pending.append(f"{folder}/{name}")
            elif name.rpartition(".")[2] in _SUFFIXES and not _TEST_FILE.fullmatch(name):
                yield f"{folder}/{name}"


def text_of(roots: Mapping[str, str], file: str) -> str:
    """The text of a source, relative to the folder that ``roots`` names for its package; empty where there is none."""
    try:
        with open(os.path.join(roots[file.split("/", 1)[0]], file), encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except (KeyError, OSError):
        return ""


class Buffer:
    """One piece of memory that file after file is read into: much cheaper than a new one for each."""

    def __init__(self) -> None:
        self.raw = bytearray(1 << 20)

    def read(self, path: str) -> int:
        """Read a file into ``raw`` and return how long it is."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InferenceError(path, f"cannot be read ({error.strerror})", "a file that the server can read") from None
        try:
            length = os.readv(handle, [self.raw])
            while length == len(self.raw):
                more = bytearray(len(self.raw))
                added = os.readv(handle, [more])
                self.raw = self.raw + more
                length += added
            return length
        finally:
            os.close(handle)


Exchange = Callable[[Any], list[Any]]  # hand out something, and get what every worker, oneself included, handed out
Work = Callable[[Sequence[str], Exchange], Any]


def on_every_core(work: Work, items: Sequence[str]) -> list[Any]:
    """Run ``work`` on shares of ``items``, one process a core, and return what each returned.

    ``work`` gets its share and an Exchange, which it must call exactly once. The processes are forked: nothing is
    imported again, and nothing but results travels.
    """
    workers = max(1, min(len(os.sched_getaffinity(0)), _MOST_WORKERS, len(items) // 64))
    shares = [items[index::workers] for index in range(workers)]
    others = [_Other(work, share) for share in shares[1:]]
    try:

        def exchange(own: Any) -> list[Any]:
            everything = [own, *(other.receive() for other in others)]
            for other in others:
                other.send(everything)
            return everything

        return [work(shares[0], exchange), *(other.receive() for other in others)]
    finally:
        for other in others:
            other.dismiss()
        for other in others:  # one process holds the pipes of those before it, so all must have been dismissed
            other.wait()


class _Other:
    """A forked process at work."""

    def __init__(self, work: Work, share: Sequence[str]) -> None:
        down, up = os.pipe(), os.pipe()
        self._process = os.fork()
        if self._process == 0:
            status = 1
            try:
                os.close(down[1])
                os.close(up[0])
                with os.fdopen(down[0], "rb") as hears, os.fdopen(up[1], "wb") as tells:
                    status = _serve(work, share, hears, tells)
            finally:
                os._exit(status)  # no cleanup of what belongs to the parent
        os.close(down[0])
        os.close(up[1])
        self._tells, self._hears = os.fdopen(down[1], "wb"), os.fdopen(up[0], "rb")

    def send(self, what: Any) -> None:
        """Hand something down."""
        _write(self._tells, what)

    def receive(self) -> Any:
        """What it hands up. Raises what it raised."""
        try:
            good, what = pickle.load(self._hears)  # noqa: S301 - from a process that was forked here
        except EOFError:
            raise InferenceError("audit", "a process of it ended early", "enough memory for it (300 MB)") from None
        if not good:
            raise InferenceError.__new__(InferenceError, what)  # with its message as it is
        return what

    def dismiss(self) -> None:
        """Let it end, whatever it is doing."""
        self._hears.close()
        with contextlib.suppress(OSError):  # it may be gone already
            self._tells.close()

    def wait(self) -> None:
        """Wait until it has ended."""
        os.waitpid(self._process, 0)


def _serve(work: Work, share: Sequence[str], hears: BinaryIO, tells: BinaryIO) -> int:
    def exchange(own: Any) -> list[Any]:
        _write(tells, (True, own))
        everything: list[Any] = pickle.load(hears)  # noqa: S301 - from the process that forked this one
        return everything

    try:
        _write(tells, (True, work(share, exchange)))
    except InferenceError as error:
        _write(tells, (False, str(error)))
    except (EOFError, OSError):
        return 1  # nobody listens any more
    return 0


def _write(stream: BinaryIO, what: Any) -> None:
    pickle.dump(what, stream, pickle.HIGHEST_PROTOCOL)
    stream.flush()
