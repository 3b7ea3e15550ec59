# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Open and restore gates: planned from pristine bytes, all files together, verified before anything is written."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple, Optional

from ansible_collections.blackwell.inference.plugins.module_utils._catalogue import BY_ID, GATES, Gate
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._gpu import KNOWN_CAPABILITIES
from ansible_collections.blackwell.inference.plugins.module_utils._packages import Package
from ansible_collections.blackwell.inference.plugins.module_utils._predicate import Capability, Host
from ansible_collections.blackwell.inference.plugins.module_utils._shapes import Reading, Shape, ShapeError
from ansible_collections.blackwell.inference.plugins.module_utils._source import Edit
from ansible_collections.blackwell.inference.plugins.module_utils._store import Entry, checksum
from ansible_collections.blackwell.inference.plugins.module_utils._survey import (
    Finding,
    Installation,
    InstalledFile,
    spelled,
    survey,
)
from ansible_collections.blackwell.inference.plugins.module_utils._transaction import Replacement, replace_all

NOTHING_CHANGED = "Nothing was changed."


class Plan(NamedTuple):
    """What a run does: the verdicts before and after it, and the files that lead from one to the other."""

    before: list[Finding]
    after: list[Finding]
    changes: list[tuple[InstalledFile, InstalledFile]]  # each file as it is and as it will be
    forgotten: list[InstalledFile]  # files whose ledger entry is out of date: a reinstall has replaced what was written

    @property
    def writes(self) -> bool:
        """Whether anything is written, be it only to the ledger."""
        return bool(self.changes or self.forgotten)

    def roots(self, installation: Installation) -> list[str]:
        """The site-packages folders that are written to."""
        return sorted({_package(installation, old).root for old, _new in self.changes})

    def stale_jit_modules(self) -> list[str]:
        """JIT modules whose build depends on a gate that changes."""
        changed = [old.gate for old, new in zip(self.before, self.after) if old.verdict != new.verdict]
        return sorted({gate.jit_module for gate in changed if gate.jit_module})


def plan_opening(
    installation: Installation, capabilities: tuple[Capability, ...], gates: tuple[Gate, ...], force: bool, author: str
) -> Plan:
    """How to open ``gates``, as far as they may be, on a host whose GPUs have ``capabilities``.

    Args:
        force: Edit files that somebody else has edited, too; never a gate that is not recognised or not admitted.
        author: The version of this collection, for the ledger.

    Raises:
        InferenceError: A gate is not recognised, is in conflict, or needs a gate that stays closed.
    """
    before = survey(installation, capabilities, gates)
    targets = _to_open(installation, before, capabilities, force)
    changes = []
    for file in installation.files():
        if targets.get(file.name):
            wanted = targets[file.name] | (set(file.entry.gates) if file.entry and file.ours else set())
            pristine = file.content if force and file.foreign else _pristine(installation, file)
            changes.append((file, _edited(installation, file, pristine, wanted, capabilities, author)))
    later = installation.holding(new for _old, new in changes)
    _refuse_half(later, capabilities, {gate for names in targets.values() for gate in names})
    return Plan(before, survey(later, capabilities, gates), changes, _forgotten(installation))


def plan_restoring(
    installation: Installation, capabilities: tuple[Capability, ...], gates: tuple[Gate, ...], force: bool, author: str
) -> Plan:
    """How to undo what this collection did to ``gates``.

    Args:
        force: Restore a file although somebody else has edited it since.

    Raises:
        InferenceError: A file was edited by somebody else, its pristine bytes are lost, or a gate that stays open
            needs one that is to be closed.
    """
    before = survey(installation, capabilities, gates)
    selected = {gate.id for gate in gates}
    changes = []
    for file in installation.files():
        if file.foreign:
            stored = _abandoned(installation, file, force)
            if stored is not None:
                changes.append((file, file.holding(stored, None)))
        elif file.ours and file.entry and selected & set(file.entry.gates):
            wanted = set(file.entry.gates) - selected
            changes.append((file, _edited(installation, file, _pristine(installation, file), wanted, capabilities, author)))
    later = installation.holding(new for _old, new in changes)
    staying = {gate for file in later.files() if file.ours and file.entry for gate in file.entry.gates}
    _refuse_half(later, capabilities, staying)
    return Plan(before, survey(later, capabilities, gates), changes, _forgotten(installation))


def execute(plan: Plan, installation: Installation, pycache_prefix: str = "") -> None:
    """Carry out ``plan``. The store's lock is held by the caller.

    Pristine bytes and ledger are on disk before the first file is replaced, and an entry goes only after its file is
    restored; so after a kill at any instant the next run knows whose bytes it sees.
    """
    store = installation.store
    ledgers = {root: dict(entries) for root, entries in installation.ledgers.items()}

    def remember() -> None:
        for old, new in plan.changes:
            if new.entry:
                ledgers[_package(installation, old).root][old.name] = new.entry
        for root, entries in ledgers.items():
            store.write_ledger(root, entries)

    for old, new in plan.changes:
        if new.entry and checksum(old.content) == new.entry.sha256_before:
            store.keep_pristine(old.content)
    replace_all(
        (Replacement(old.path, _package(installation, old).location, old.content, new.content) for old, new in plan.changes),
        pycache_prefix,
        before_first=remember,
    )
    for file in [*plan.forgotten, *(old for old, new in plan.changes if new.entry is None)]:
        ledgers[_package(installation, file).root].pop(file.name, None)
    for root, entries in ledgers.items():
        store.write_ledger(root, entries)
    store.tidy()


def verify_on_disk(plan: Plan, installation: Installation, capabilities: tuple[Capability, ...], gates: tuple[Gate, ...]) -> None:
    """Raise InferenceError unless ``installation``, read again, has the verdicts that ``plan`` promised."""
    for promised, found in zip(plan.after, survey(installation, capabilities, gates)):
        if promised.verdict != found.verdict:
            raise InferenceError(
                f"{found.gate.package} {found.version}",
                f"gate {found.gate.id} is {found.verdict} on disk ({found.reason})",
                promised.verdict,
                "See who else writes there, and run again.",
            )


def compose(original: InstalledFile, gates: Iterable[str], capabilities: tuple[Capability, ...]) -> bytes:
    """The bytes of ``original``, which is pristine, with ``gates`` open for ``capabilities``; verified.

    Raises:
        ShapeError: A gate cannot be opened as it stands, or opening it would change another answer.
    """
    readings = _readings(original)
    edits: list[Edit] = []
    opened: dict[str, set[Capability]] = {}
    for gate in sorted(gates):
        reading = readings[gate][1]
        closed = {known for known in capabilities if known in BY_ID[gate].admits and reading.answer(Host(known)) is False}
        edits.extend(edit for capability in sorted(closed) for edit in reading.open_for(capability))
        opened[gate] = closed
    content = original.source.edited(edits)
    if edits:
        _verify(readings, original.holding(content, None), opened)
    return content


_Readings = dict[str, tuple[Shape, Reading]]


def _readings(file: InstalledFile) -> _Readings:
    """Every catalogued gate that is recognised in ``file``, by id."""
    found: _Readings = {}
    for gate in GATES:
        for shape in (place.shape for place in gate.places if place.file == file.name):
            try:
                reading = shape.read(file.source)
            except ShapeError:
                reading = None
            if reading is not None:
                found.setdefault(gate.id, (shape, reading))
    return found


def _verify(before: _Readings, edited: InstalledFile, opened: dict[str, set[Capability]]) -> None:
    """Evaluate every gate of the file at every capability: open where asked for, unchanged everywhere else."""
    try:
        compile(edited.source.text, edited.name, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise ShapeError(error.lineno or 1, f"the edit would not compile ({error.msg})") from None
    after = _readings(edited)
    for gate, (shape, old) in before.items():
        if gate not in after:
            raise ShapeError(old.line, f"the edit would hide {gate}")
        new, targets = after[gate][1], opened.get(gate, set())
        may_change = {known for target in targets for known in shape.spreads(target)}
        for known in KNOWN_CAPABILITIES:
            answer = new.answer(Host(known))
            if (known in targets and answer is not True) or (known not in may_change and answer is not old.answer(Host(known))):
                raise ShapeError(new.line, f"the edit would give {gate} the answer {answer} at {spelled([known])}")


def _to_open(installation: Installation, findings: list[Finding], capabilities: tuple[Capability, ...], force: bool) -> dict[str, set[str]]:
    """The ids of closed gates that may be opened, by file."""
    targets: dict[str, set[str]] = {}
    for finding in findings:
        if finding.place is None or not set(capabilities) & set(finding.gate.admits):
            continue
        if finding.verdict == "unknown" or (finding.verdict == "conflict" and not force):
            raise InferenceError(
                f"{finding.place.file}:{finding.line}",
                f"gate {finding.gate.id} is in {finding.verdict} ({finding.expression}; {finding.reason})"
                if finding.verdict == "conflict"
                else f"gate {finding.gate.id} is not recognised ({finding.expression}; {finding.reason})",
                f"{finding.gate.package} {finding.version} as released",
                f"{NOTHING_CHANGED} {_reinstall(installation.package(finding.gate.package))}",
            )
        if finding.verdict in ("closed", "conflict"):
            targets.setdefault(finding.place.file, set()).add(finding.gate.id)
    return targets


def _refuse_half(installation: Installation, capabilities: tuple[Capability, ...], opened: set[str]) -> None:
    """Refuse a gate that is open while one that it needs is closed: such a server crashes or computes nonsense."""
    needed = {need: gate for gate in sorted(opened) for need in BY_ID[gate].needs}
    for finding in survey(installation, capabilities, [BY_ID[need] for need in needed]):
        if finding.verdict in ("closed", "conflict", "unknown"):
            raise InferenceError(
                "gates",
                f"{needed[finding.gate.id]} would be open and {finding.gate.id}, which it needs, {finding.verdict}",
                "both or neither",
                NOTHING_CHANGED,
            )


def _abandoned(installation: Installation, file: InstalledFile, force: bool) -> Optional[bytes]:
    """The pristine bytes for a file that is neither as released nor as the ledger says; None where it is not ours to restore."""
    stored = installation.store.pristine(file.recorded) if file.recorded else None
    if stored is not None and (force or file.content in _possible_edits(file, stored)):
        return stored  # the ledger was lost; RECORD and the stored bytes were not
    admitted = {gate: BY_ID[gate].admits for gate in _readings(file) if BY_ID[gate].admits}
    is_open = [all(_readings(file)[gate][1].answer(Host(known)) for known in admits) for gate, admits in admitted.items()]
    if file.entry is None and stored is None and not any(is_open):
        return None
    raise InferenceError(
        file.path,
        "it is not as released, and not as this collection left it",
        "a file that nobody else edited",
        f"{NOTHING_CHANGED} {_reinstall(_package(installation, file))}",
    )


def _possible_edits(file: InstalledFile, pristine: bytes) -> list[bytes]:
    """What this collection may have made of ``pristine``."""
    original = file.holding(pristine, None)
    gates = [gate for gate in _readings(original) if BY_ID[gate].admits]
    admitted = tuple({known for gate in gates for known in BY_ID[gate].admits})
    subsets = ([gate for index, gate in enumerate(gates) if mask >> index & 1] for mask in range(1, 1 << len(gates)))
    return [compose(original, subset, admitted) for subset in subsets]


def _edited(
    installation: Installation, file: InstalledFile, pristine: bytes, gates: set[str], capabilities: tuple[Capability, ...], author: str
) -> InstalledFile:
    """``file`` with exactly ``gates`` open, and its ledger entry."""
    package = _package(installation, file)
    try:
        content = compose(file.holding(pristine, None), gates, capabilities)
    except ShapeError as error:
        raise InferenceError(
            f"{file.name}:{error.line}", error.found, f"a shape of {package.name} that can be opened here", NOTHING_CHANGED
        ) from None
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    entry = Entry(package.name, package.version, tuple(sorted(gates)), checksum(pristine), checksum(content), now, author)
    return file.holding(content, entry if gates else None)


def _pristine(installation: Installation, file: InstalledFile) -> bytes:
    if not file.ours or file.entry is None:
        return file.content
    stored = installation.store.pristine(file.entry.sha256_before)
    if stored is None:
        raise InferenceError(
            file.path,
            "its pristine bytes are lost",
            f"{installation.store.folder}/pristine/{file.entry.sha256_before}",
            f"{NOTHING_CHANGED} {_reinstall(_package(installation, file))}",
        )
    return stored


def _forgotten(installation: Installation) -> list[InstalledFile]:
    return [file for file in installation.files() if file.entry and not file.ours and not file.foreign]


def _package(installation: Installation, file: InstalledFile) -> Package:
    return installation.package(file.name.split("/", 1)[0])


def _reinstall(package: Package) -> str:
    return f"Reinstall it: pip install --force-reinstall --no-deps {package.distribution}=={package.version}"
