# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Look at the catalogued gates of a host: what stands in the files, and the verdict on each."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator
from copy import copy
from functools import lru_cache
from typing import NamedTuple, Optional

from ansible_collections.blackwell.inference.plugins.module_utils._catalogue import BY_ID, GATES, NEWEST_TESTED, Gate, Place, Uses
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._packages import UNKNOWN_VERSION, Package, Site
from ansible_collections.blackwell.inference.plugins.module_utils._predicate import Capability, Host
from ansible_collections.blackwell.inference.plugins.module_utils._shapes import Reading, ShapeError, read
from ansible_collections.blackwell.inference.plugins.module_utils._source import Source, Text
from ansible_collections.blackwell.inference.plugins.module_utils._store import Entry, Store, checksum, recorded_checksums

_BY_OTHERS = "edited by someone else"
VERDICTS = ("open", "opened", "closed", "absent", "not_admitted", "unknown", "conflict")
_FUSION_FILES = {place.file for gate in GATES for place in gate.places} | {use.file for gate in GATES for use in gate.path}


# A run looks at the same bytes several times.
_python = lru_cache(maxsize=64)(Source)
_text = lru_cache(maxsize=16)(Text)


class InstalledFile:
    """One file of a package, with what is known about its bytes.

    Args:
        path: Its absolute path.
        name: Its path relative to the folder that the package is imported from.
        content: Its bytes.
        recorded: Its sha256 by RECORD, or None.
        entry: What the ledger says of it, or None.
    """

    def __init__(self, path: str, name: str, content: bytes, recorded: Optional[str], entry: Optional[Entry]) -> None:
        self.path, self.name, self.content, self.recorded, self.entry = path, name, content, recorded, entry
        self.sha256 = checksum(content)

    @property
    def ours(self) -> bool:
        """Whether it holds what this collection wrote."""
        return self.entry is not None and self.sha256 == self.entry.sha256_after

    @property
    def as_released(self) -> bool:
        """Whether it holds its pristine bytes; where nobody knows their checksum, it is taken for them."""
        return self.sha256 in (self.pristine_checksums or [self.sha256])

    @property
    def foreign(self) -> bool:
        """Whether somebody else edited it."""
        return not self.ours and not self.as_released

    @property
    def pristine_checksums(self) -> list[str]:
        """Checksums of the bytes that count as its pristine ones: those that it was edited from, and those of RECORD."""
        known = ([self.entry.sha256_before] if self.entry else []) + ([self.recorded] if self.recorded else [])
        return list(dict.fromkeys(known))

    @property
    def source(self) -> Text:
        """It as a shape reads it: a Source where it is called Python. Raises ShapeError where it is none."""
        try:
            return (_python if self.name.endswith(".py") else _text)(self.content)
        except SyntaxError as error:
            raise ShapeError(error.lineno or 1, f"no Python source ({error.msg})") from None

    @property
    def shown(self) -> str:
        """Its text for a diff."""
        return self.content.decode("utf-8", "replace")

    def holding(self, content: bytes, entry: Optional[Entry]) -> InstalledFile:
        """The same file with other bytes."""
        return InstalledFile(self.path, self.name, content, self.recorded, entry)


class Installation:
    """The packages of a site and their files, each read once.

    Args:
        site: Where the packages are imported from.
        store: What this collection remembers.
        names: Import names of the packages to look at.
    """

    def __init__(self, site: Site, store: Store, names: Iterable[str]) -> None:
        self._names = sorted(set(names))
        site.require(*self._names)
        self.site, self.store = site, store
        found = [site.packages[name] for name in sorted({gate.package for gate in GATES} & site.packages.keys())]
        self._recorded = {package.name: recorded_checksums(package, _FUSION_FILES) for package in found}
        self.ledgers = {package.root: store.ledger(package.root) for package in found}
        self._files: dict[str, Optional[InstalledFile]] = {}

    def packages(self) -> list[Package]:
        """The packages that are looked at, in order of name."""
        return [self.site.packages[name] for name in self._names]

    def package(self, name: str) -> Package:
        """The package with this import name."""
        return self.site.packages[name]

    def file(self, name: str) -> Optional[InstalledFile]:
        """The file with this path relative to its package's root; None where the package has no such file."""
        if name not in self._files:
            package = self.site.packages.get(name.split("/", 1)[0])
            path = package.path(name) if package else ""
            if package is None or not os.path.isfile(path):
                self._files[name] = None
            else:
                entry = self.ledgers.get(package.root, {}).get(name)
                recorded = self._recorded.get(package.name, {}).get(name)
                try:
                    with open(path, "rb") as file:
                        content = file.read()
                except OSError as error:
                    raise InferenceError(path, f"cannot be read ({error.strerror})", "a file that the server can read") from None
                self._files[name] = InstalledFile(path, name, content, recorded, entry)
        return self._files[name]

    def files(self) -> list[InstalledFile]:
        """Every file that holds a catalogued gate, in order of name."""
        names = sorted({place.file for gate in GATES for place in gate.places})
        return [file for file in map(self.file, names) if file is not None]

    def holding(self, files: Iterable[InstalledFile]) -> Installation:
        """The same installation with ``files`` in place of those of the same names."""
        other = copy(self)
        other._files = {**self._files, **{file.name: file for file in files}}
        return other

    def uses(self, use: Uses) -> bool:
        """Whether the code in that file takes what is called in hand; an import or a type annotation alone does not."""
        file = self.file(use.file)
        try:
            nodes = list(_run_time_nodes(_python(file.content).tree)) if file else []
        except SyntaxError:  # no source: what it calls cannot be told
            return True
        aliases = [alias for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
        names = {use.call, *(alias.asname for alias in aliases if alias.asname and alias.name == use.call)}
        return any(getattr(node, "attr", getattr(node, "id", None)) in names for node in nodes)


def _run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and everything in it but type annotations."""
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _run_time_nodes(child)


class Finding(NamedTuple):
    """A gate on a host."""

    gate: Gate
    version: str  # of its package
    place: Optional[Place]
    line: Optional[int]
    expression: str
    verdict: str  # one of VERDICTS
    reason: str

    def row(self) -> dict[str, object]:
        """The finding as the modules return it."""
        return {
            "id": self.gate.id,
            "package": self.gate.package,
            "version": self.version,
            "file": self.place.file if self.place else None,
            "line": self.line,
            "expression": self.expression,
            "verdict": self.verdict,
            "reason": self.reason,
        }


def survey(installation: Installation, capabilities: Iterable[Capability], gates: Iterable[Gate]) -> list[Finding]:
    """The verdict on each of ``gates`` for a host whose GPUs have ``capabilities``; the worst of them counts."""
    return [_find(installation, tuple(capabilities), gate) for gate in gates]


def _find(installation: Installation, capabilities: tuple[Capability, ...], gate: Gate) -> Finding:
    version = installation.package(gate.package).version
    unused = next((use for use in gate.path if not installation.uses(use)), None)
    if gate.until and _order(version) > _order(gate.until):
        return Finding(gate, version, None, None, "", "absent", f"gone after {gate.package} {gate.until}")
    if unused is not None:
        return Finding(gate, version, None, None, "", "absent", f"not on the path here: {unused.file} does not call {unused.call}")
    nearest = next((place for place in gate.places if installation.file(place.file)), gate.places[0])
    try:
        located = locate_gate(installation, gate)
    except ShapeError as error:
        return Finding(gate, version, nearest, error.line, error.found, "unknown", _unknown(gate, version))
    if located is None and not gate.since:
        return Finding(gate, version, None, None, "", "absent", "not installed")
    if located is None and version != UNKNOWN_VERSION and _order(version) < _order(gate.since):
        return Finding(gate, version, None, None, "", "absent", f"since {gate.package} {gate.since}")
    if located is None:
        found = f"no such construct in {' or '.join(sorted({place.file for place in gate.places}))}"
        return Finding(gate, version, nearest, 1, found, "unknown", _unknown(gate, version))
    place, file, reading = located
    verdict, reason = _judge(gate, reading, capabilities, file, version)
    return Finding(gate, version, place, reading.line, reading.expression, verdict, reason)


def locate_gate(installation: Installation, gate: Gate) -> Optional[tuple[Place, InstalledFile, Reading]]:
    """Where ``gate`` stands in this release; None where none of its places has it. Raises ShapeError where one cannot be read."""
    for place in gate.places:
        file = installation.file(place.file)
        reading = read(place.shape, file.source) if file else None
        if file is not None and reading is not None:
            return place, file, reading
    return None


def _judge(gate: Gate, reading: Reading, capabilities: tuple[Capability, ...], file: InstalledFile, version: str) -> tuple[str, str]:
    answers = {capability: reading.answer(Host(capability)) for capability in capabilities}
    if None in answers.values():
        return "unknown", _unknown(gate, version)
    closed = [capability for capability, is_open in answers.items() if not is_open]
    # The ranks of a server must agree, so a gate that would stay closed for one of them is not opened for the others.
    refused = [capability for capability in closed if capability not in gate.admits]
    if refused:
        return "not_admitted", f"closed for {spelled(refused)}: {gate.refuses}"
    if closed and file.foreign:
        return "conflict", "the file is not as released, not by this collection, and the gate is closed in it"
    if closed:
        return "closed", gate.admits[closed[0]] + _closed_again(gate, version)
    if file.ours and file.entry is not None and gate.id in file.entry.gates:
        return "opened", f"by this collection{_closed_again(gate, version)}"
    if file.foreign:
        return "open", _BY_OTHERS
    return "open", "as released"


def _unknown(gate: Gate, version: str) -> str:
    newer = (
        f"; {version} is newer than {NEWEST_TESTED[gate.package]}, the newest tested" if newer_than_tested(gate.package, version) else ""
    )
    return f"the gate is not in a shape that is recognised{newer}"


def _closed_again(gate: Gate, version: str) -> str:
    """What an upstream that has taken a compute capability out again may have known, for a gate that is closed as released."""
    if not gate.open_since or version == UNKNOWN_VERSION or _order(version) < _order(gate.open_since):
        return ""
    return f"; upstream had it open from {gate.open_since} on, and {version} has closed it again: find out why before it is relied on"


def newer_than_tested(package: str, version: str) -> bool:
    """Whether ``version`` is later than the newest release that the catalogue was tested with."""
    return package in NEWEST_TESTED and _order(version) > _order(NEWEST_TESTED[package])


def _order(version: str) -> tuple[tuple[int, ...], int]:
    """A sortable form of a release number such as 0.6.16.post4; local parts (+cu130) do not count."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    post = re.search(r"\.post(\d+)", version)
    parts = [int(part) for part in numbers.group().split(".")] if numbers else []
    while parts and parts[-1] == 0:  # 0.6 is 0.6.0
        parts.pop()
    return tuple(parts), int(post.group(1)) if post else 0


def spelled(capabilities: Iterable[Capability]) -> str:
    """Compute capabilities as people write them: ``12.0 and 12.1``."""
    return " and ".join(f"{major}.{minor}" for major, minor in capabilities)


def half_open(findings: Iterable[Finding]) -> list[str]:
    """Sentences on gates that are open while one that they need is not: such a server crashes or computes nonsense."""
    findings = list(findings)
    verdicts = {finding.gate.id: finding.verdict for finding in findings}
    # An optional gate that is open as released lies on nobody's path; one that was opened is meant to be used.
    counted = {
        finding.gate.id
        for finding in findings
        if finding.verdict == "opened" or (finding.verdict == "open" and (not finding.gate.optional or finding.reason == _BY_OTHERS))
    }
    return [
        f"{gate} is {verdict}, and {need}, which it needs, is {verdicts[need]}"
        for gate, verdict in verdicts.items()
        for need in BY_ID[gate].needs
        if gate in counted and verdicts.get(need) in ("closed", "not_admitted", "conflict", "unknown")
    ]


def report(installation: Optional[Installation], capabilities: Iterable[Capability], findings: list[Finding]) -> dict[str, object]:
    """The findings as the modules return them, packages and counts included."""
    capabilities, counts = tuple(capabilities), dict.fromkeys(VERDICTS, 0)
    for finding in findings:
        counts[finding.verdict] += 1
    lacking = [finding for finding in findings if finding.verdict in ("closed", "unknown", "conflict")]
    return {
        "compute_capabilities": [spelled([capability]) for capability in capabilities],
        "packages": {
            package.name: {
                "version": package.version,
                "location": package.location,
                "newer_than_tested": newer_than_tested(package.name, package.version),
            }
            for package in (installation.packages() if installation else [])
        },
        "gates": [finding.row() for finding in findings],
        "summary": counts,
        "complete": not any(set(capabilities) & set(finding.gate.admits) for finding in lacking),
        "half_open": half_open(findings),
    }
