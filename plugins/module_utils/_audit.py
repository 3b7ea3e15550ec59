# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Find every gate in installed packages that is closed on a host, whether it is catalogued or not."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ansible_collections.blackwell.inference.plugins.module_utils import _audit_cuda as cuda
from ansible_collections.blackwell.inference.plugins.module_utils import _audit_python as python
from ansible_collections.blackwell.inference.plugins.module_utils import _audit_runtime as runtime
from ansible_collections.blackwell.inference.plugins.module_utils._audit_constants import Constants
from ansible_collections.blackwell.inference.plugins.module_utils._audit_excerpt import excerpt
from ansible_collections.blackwell.inference.plugins.module_utils._audit_files import Buffer, Exchange, on_every_core, sources
from ansible_collections.blackwell.inference.plugins.module_utils._audit_path import OPTION
from ansible_collections.blackwell.inference.plugins.module_utils._predicate import Capability

_KERNEL_SOURCE = 50_000  # bytes; a longer file, or a .cu, without host headers is a kernel that a host part launches
_MAY_DEPEND = re.compile(r"ARCH|SM_?\d|HOPPER|BLACKWELL|ENABLE")


class Closed(NamedTuple):
    """A gate that is closed on the host."""

    file: str  # relative to site-packages
    line: int
    end_line: int
    expression: str
    kind: str
    guards: str
    replaced: bool


class Undecided(NamedTuple):
    """A condition over an architecture whose value cannot be told, or a file that cannot be read."""

    file: str
    line: int
    expression: str
    guards: str


class Found(NamedTuple):
    """What an audit found."""

    closed: list[Closed]
    undecided: list[Undecided]
    option_files: list[str]  # files of sglang that the path starts from


def search(roots: Mapping[str, str], hosts: Sequence[Capability]) -> Found:
    """Look through packages for gates that are closed for any of ``hosts``.

    Args:
        roots: For each package, by import name, the folder that it is in.
        hosts: Compute capabilities of the host's GPUs.

    Raises:
        InferenceError: A file or folder cannot be read.
    """
    files = [file for package, root in roots.items() for file in sources(root, package)]
    parts = on_every_core(lambda share, exchange: _Search(roots, hosts).run(share, exchange), files)
    return Found(
        sorted({item for part in parts for item in part.closed}),
        sorted({item for part in parts for item in part.undecided}),
        sorted(file for part in parts for file in part.option_files),
    )


class _Search:
    """One process's share of an audit."""

    def __init__(self, roots: Mapping[str, str], hosts: Sequence[Capability]) -> None:
        self._roots, self._hosts = roots, hosts
        self._buffer, self._constants = Buffer(), Constants(roots)
        self._closed: dict[str, list[Closed]] = {}
        self._undecided: list[Undecided] = []
        self._option_files: list[str] = []
        self._definitions: dict[str, tuple[cuda.Definition, ...]] = {}
        self._later: list[tuple[str, frozenset[str], bool]] = []  # file, names in its conditions, whether it was judged
        self._judges = [cuda.Judge({}, host) for host in hosts]

    def run(self, files: Sequence[str], exchange: Exchange) -> Found:
        """Look through ``files``."""
        for file in files:
            length = self._read(file)
            if file.endswith(".py"):
                self._python(file, bytes(memoryview(self._buffer.raw)[:length]))
            else:
                self._cuda(file, length)
        shared: dict[str, tuple[cuda.Definition, ...]] = {}
        for definitions in exchange(self._definitions):
            for name, found in definitions.items():
                shared[name] = tuple(dict.fromkeys((*shared.get(name, ()), *found)))
        self._judges = [cuda.Judge(shared, host) for host in self._hosts]
        depending = self._judges[0].macros.depending() if self._judges else frozenset()
        for file, names, judged in self._later:
            if not judged or not names.isdisjoint(depending):
                length = self._read(file)
                self._groups(file, length, cuda.structure(self._buffer.raw, length, names & depending))
        return Found([item for found in self._closed.values() for item in found], self._undecided, self._option_files)

    def _read(self, file: str) -> int:
        return self._buffer.read(os.path.join(self._roots[file.split("/", 1)[0]], file))

    def _python(self, file: str, raw: bytes) -> None:
        if file.startswith("sglang/srt/") and OPTION in raw:
            self._option_files.append(file)
        try:
            tree = excerpt(raw)
            constants = partial(self._constants.value, file)
            found = [python.judged(tree, file, host, constants) for host in self._hosts] if tree else []
        except SyntaxError as error:
            self._undecided.append(Undecided(file, error.lineno or 1, f"not read: {error.msg}", ""))
            return
        except RecursionError:
            self._undecided.append(Undecided(file, 1, "not read: nested too deeply", ""))
            return
        for closed, undecided in found:
            self._closed.setdefault(file, []).extend(Closed(file, *item) for item in closed)
            self._undecided.extend(Undecided(file, *item) for item in undecided)

    def _cuda(self, file: str, length: int) -> None:
        raw = self._buffer.raw
        asks = raw.find(b"CUDA_ARCH", 0, length) >= 0
        names = frozenset() if asks else cuda.condition_names(raw, length)
        may_depend = frozenset(filter(_MAY_DEPEND.search, names))
        if asks or may_depend:
            found = cuda.structure(raw, length, may_depend)
            for name, definitions in found.definitions.items():
                self._definitions[name] = tuple(dict.fromkeys((*self._definitions.get(name, ()), *definitions)))
            names = found.names - found.definitions.keys()
            judged = not any(map(_MAY_DEPEND.search, (name for name in names if not name.startswith("__"))))
            if judged:
                self._groups(file, length, found)
            self._later.append((file, names, judged))
        elif names:
            self._later.append((file, names, True))
        if (length > _KERNEL_SOURCE or file.endswith(".cu")) and not runtime.holds_host_code(raw, length):
            return
        if runtime.may_check(raw, length):
            for host in self._hosts:
                self._add(file, length, runtime.closed_checks(raw, length, host))

    def _groups(self, file: str, length: int, found: cuda.Structure) -> None:
        kept = [item for item in self._closed.pop(file, []) if item.kind != "preprocessor"]
        if kept:
            self._closed[file] = kept
        for judge in self._judges:
            self._add(file, length, judge.closed(self._buffer.raw, length, found))

    def _add(self, file: str, length: int, closed: Iterable[cuda.Closed]) -> None:
        line, at = 1, 0
        for item in sorted(closed):
            line += self._buffer.raw.count(b"\n", at, item.start)
            at = item.start
            last = line + self._buffer.raw.count(b"\n", item.start, item.end)
            self._closed.setdefault(file, []).append(Closed(file, line, last, item.expression, item.kind, item.guards, item.replaced))
