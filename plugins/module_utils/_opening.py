# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Open and restore gates: planned from pristine bytes, all files together, verified before anything is written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple, Optional

from ansible_collections.blackwell.inference.plugins.module_utils._catalogue import BY_ID, GATES, NEWEST_TESTED, Gate
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._gpu import KNOWN_CAPABILITIES, parse_capability
from ansible_collections.blackwell.inference.plugins.module_utils._packages import Package
from ansible_collections.blackwell.inference.plugins.module_utils._predicate import Capability, Host
from ansible_collections.blackwell.inference.plugins.module_utils._shapes import Reading, Shape, ShapeError, read
from ansible_collections.blackwell.inference.plugins.module_utils._source import Edit
from ansible_collections.blackwell.inference.plugins.module_utils._store import Entry, checksum
from ansible_collections.blackwell.inference.plugins.module_utils._survey import (
    Finding,
    Installation,
    InstalledFile,
    newer_than_tested,
    spelled,
    survey,
)
from ansible_collections.blackwell.inference.plugins.module_utils._transaction import (
    Replacement,
    leftovers,
    refuse_irreplaceable,
    replace_all,
)

NOTHING_CHANGED = "Nothing was changed."


class Plan(NamedTuple):
    """What a run does: the verdicts before and after it, and the files that lead from one to the other."""

    before: list[Finding]
    after: list[Finding]
    changes: list[tuple[InstalledFile, InstalledFile]]  # each file as it is and as it will be
    ledgers: dict[str, dict[str, Entry]]  # what the ledgers say afterwards, by site-packages folder
    leftovers: list[str]  # temporary files of a run that was killed
    writes: bool  # whether anything is written, be it only in the state folder

    def roots(self, installation: Installation) -> list[str]:
        """The site-packages folders that are written to."""
        return sorted({_package(installation, old).root for old, _new in self.changes})

    def replacements(self, installation: Installation) -> list[Replacement]:
        """The changes as they are written."""
        return [Replacement(old.path, _package(installation, old).location, old.content, new.content) for old, new in self.changes]

    def diffs(self, installation: Installation) -> list[dict[str, str]]:
        """The changes as Ansible shows them, one for each file."""
        packages = [(old, new, _package(installation, old)) for old, new in self.changes]
        return [
            {
                "before_header": f"{old.name} ({package.name} {package.version})",
                "after_header": f"{old.name} ({package.name} {package.version})",
                "before": old.shown,
                "after": new.shown,
            }
            for old, new, package in packages
        ]

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
            opened, opened_for = _opened(file)
            wanted, opened_for = opened | targets[file.name], opened_for | set(capabilities)
            changes.append((file, _edited(installation, file, _pristine(installation, file), wanted, opened_for, author)))
    later = installation.holding(new for _old, new in changes)
    _refuse_half(later, capabilities, {gate for names in targets.values() for gate in names})
    return _plan(installation, before, survey(later, capabilities, gates), changes)


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
    selected, touched = {gate.id for gate in gates}, {place.file for gate in gates for place in gate.places}
    changes = []
    for file in installation.files():
        opened, opened_for = _opened(file)
        wanted = opened - selected
        if file.foreign and file.name in touched:
            stored = _foreign_pristine(installation, file, force)
            if stored is not None:
                changes.append((file, file.holding(stored, None)))
        elif file.ours and file.entry and wanted != set(file.entry.gates):
            changes.append((file, _edited(installation, file, _pristine(installation, file), wanted, opened_for, author)))
    later = installation.holding(new for _old, new in changes)
    for file in later.files():
        staying, opened_for = _opened(file)
        _refuse_half(later, tuple(opened_for), staying)
    return _plan(installation, before, survey(later, capabilities, gates), changes)


def recovered(installation: Installation, author: str) -> Installation:
    """The same installation with the ledger entries that are lost, or that a kill left behind or ahead of their file.

    A file is ours if it is what this collection makes of stored pristine bytes, whatever the ledger says.
    """
    found: list[InstalledFile] = []
    for file in installation.files():
        # Where neither ledger nor RECORD tells its checksum, it may have been made of any of them.
        candidates = file.pristine_checksums if file.foreign else [] if file.pristine_checksums else installation.store.pristine_checksums()
        for original in map(installation.store.pristine, candidates):
            edits = _possible_edits(installation, file, original, author) if original is not None else ()
            found.extend(edit for edit in edits if edit.content == file.content)
    return installation.holding(found)


def execute(plan: Plan, installation: Installation, pycache_prefix: str = "") -> None:
    """Carry out ``plan``. The store's lock is held by the caller.

    Ledger and pristine bytes are on disk before the first file is replaced, and an entry goes only after its file is
    restored; so after a kill at any instant the next run knows whose bytes it sees.

    Raises:
        InferenceError: Nothing was changed, unless the message says so.
    """
    store = installation.store
    new_entries = [(old, new.entry) for old, new in plan.changes if new.entry]
    modules = plan.stale_jit_modules()
    jit_root = installation.package("flashinfer").root if modules else ""
    marked = store.stale_modules(jit_root) if modules else []

    def remember() -> None:
        store.mark_stale(jit_root, modules)
        for root, entries in plan.ledgers.items():
            store.write_ledger(root, {**installation.ledgers[root], **entries})
        for old, entry in new_entries:
            if old.sha256 == entry.sha256_before:
                store.keep_pristine(old.content)

    try:
        replace_all(plan.replacements(installation), pycache_prefix, before_first=remember)
    except InferenceError:
        if not any(_differs(old) for old, _new in plan.changes):
            with suppress(InferenceError):
                store.settle(installation.ledgers, instead_of=plan.ledgers)
                store.forget_stale(jit_root, set(modules) - set(marked))
        raise
    for path in plan.leftovers:
        with suppress(OSError):
            os.remove(path)
    store.settle(plan.ledgers, instead_of=installation.ledgers)


def refuse_unwritable(plan: Plan, installation: Installation) -> None:
    """Raise InferenceError where carrying out ``plan`` would fail for want of a permission. Writes nothing."""
    if plan.changes:
        refuse_irreplaceable(plan.replacements(installation))
        installation.store.refuse_unwritable()


def refuse_untested(plan: Plan, installation: Installation) -> None:
    """Raise InferenceError where a release is edited that is newer than the newest one tested."""
    for package in (_package(installation, old) for old, _new in plan.changes):
        if newer_than_tested(package.name, package.version):
            tested = NEWEST_TESTED[package.name]
            raise InferenceError(
                f"{package.distribution} {package.version}",
                f"a gate is closed in it, and it is newer than {tested}",
                f"{tested}, the newest release tested, or an older one (untested=refuse)",
                f"{NOTHING_CHANGED} Install that, or run with untested=open (fusion_gates_untested in a play).",
            )


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
        if gate not in readings:
            raise ShapeError(1, f"gate {gate} is not recognised")
        reading = readings[gate][1]
        closed = {known for known in capabilities if known in BY_ID[gate].admits and reading.answer(Host(known)) is False}
        edits.extend(edit for capability in sorted(closed) for edit in reading.open_for(capability))
        opened[gate] = closed
    content = original.source.edited(edits)
    if any(opened.values()):
        _verify(readings, original.holding(content, None), opened)
    return content


_Readings = dict[str, tuple[Shape, Reading]]


def _readings(file: InstalledFile) -> _Readings:
    """Every catalogued gate that is recognised in ``file``, by id."""
    found: _Readings = {}
    for gate in GATES:
        for shape in (place.shape for place in gate.places if place.file == file.name):
            try:
                reading = read(shape, file.source)
            except ShapeError:
                reading = None
            if reading is not None:
                found.setdefault(gate.id, (shape, reading))
    return found


def _verify(before: _Readings, edited: InstalledFile, opened: dict[str, set[Capability]]) -> None:
    """Evaluate every gate of the file at every capability: open where asked for, unchanged everywhere else."""
    try:
        edited.source.compile()
    except SyntaxError as error:
        raise ShapeError(error.lineno or 1, f"the edit would not compile ({error.msg})") from None
    after = _readings(edited)
    for gate, (shape, old) in before.items():
        if gate not in after:
            raise ShapeError(old.line, f"the edit would hide {gate}")
        new, targets = after[gate][1], opened.get(gate, set())
        followed = {known for need in BY_ID[gate].needs for known in opened.get(need, set())}  # one that asks another changes with it
        may_change = {known for target in targets for known in shape.spreads(target)} | followed
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
            conflict = finding.verdict == "conflict"
            problem = "is in conflict" if conflict else "is not recognised"
            keep = ", or run with force=true (fusion_gates_force in a play) to keep that edit and open the gate" if conflict else ""
            raise InferenceError(
                f"{finding.place.file}:{finding.line}",
                f"gate {finding.gate.id} {problem} ({finding.expression}; {finding.reason})",
                f"{finding.gate.package} {finding.version} as released",
                f"{NOTHING_CHANGED} {installation.package(finding.gate.package).reinstall}{keep}",
            )
        if finding.verdict in ("closed", "conflict"):
            targets.setdefault(finding.place.file, set()).add(finding.gate.id)
    return targets


def _refuse_half(installation: Installation, capabilities: tuple[Capability, ...], opened: set[str]) -> None:
    """Refuse a gate that is open while one that it needs is closed: such a server crashes or computes nonsense."""
    installed = installation.site.packages
    needed = {need: gate for gate in sorted(opened) for need in BY_ID[gate].needs if BY_ID[need].package in installed}
    for finding in survey(installation, capabilities, [BY_ID[need] for need in needed]):
        if finding.verdict in ("closed", "conflict", "unknown"):
            raise InferenceError(
                "gates",
                f"{needed[finding.gate.id]} would be open and {finding.gate.id}, which it needs, {finding.verdict}",
                "both or neither",
                NOTHING_CHANGED,
            )


def _foreign_pristine(installation: Installation, file: InstalledFile, force: bool) -> Optional[bytes]:
    """The pristine bytes for a file that somebody else edited; None where nothing shows that this collection edited it, too.

    An open gate shows it only where no ledger is left that would name the file.
    """
    stored = next(filter(None, map(installation.store.pristine, reversed(file.pristine_checksums))), None)
    if stored is not None and force:
        return stored
    readings = [(BY_ID[gate].admits, reading) for gate, (_shape, reading) in _readings(file).items()]
    is_open = any(reading.answer(Host(known)) for admits, reading in readings for known in admits)
    lost = is_open and not force and not installation.ledgers[_package(installation, file).root]
    if file.entry is None and stored is None and not lost:
        return None
    reinstall = f"{_package(installation, file).reinstall}, or leave its gates out of the option gates."
    remedy = "Run with force=true (fusion_gates_force in a play) to restore it." if stored is not None else reinstall
    raise InferenceError(
        file.path,
        "it is not as released, and not as this collection left it",
        "a file that nobody else edited",
        f"{NOTHING_CHANGED} {remedy}",
    )


def _opened(file: InstalledFile) -> tuple[set[str], set[Capability]]:
    """The gates that this collection opened in ``file``, as far as they are still in the catalogue, and what for."""
    if not file.ours or file.entry is None:
        return set(), set()
    return set(file.entry.gates) & BY_ID.keys(), {parse_capability(text) for text in file.entry.capabilities}


def _possible_edits(installation: Installation, file: InstalledFile, pristine: bytes, author: str) -> Iterator[InstalledFile]:
    """What this collection may have made of ``pristine``."""
    gates = [gate for gate in _readings(file.holding(pristine, None)) if BY_ID[gate].admits]
    admitted = {known for gate in gates for known in BY_ID[gate].admits}
    for mask in range(1, 1 << len(gates)):
        subset = {gate for index, gate in enumerate(gates) if mask >> index & 1}
        with suppress(InferenceError):
            yield _edited(installation, file, pristine, subset, admitted, author)


def _plan(
    installation: Installation, before: list[Finding], after: list[Finding], changes: list[tuple[InstalledFile, InstalledFile]]
) -> Plan:
    later = installation.holding(new for _old, new in changes)
    ledgers = {root: _elsewhere(root, entries) for root, entries in installation.ledgers.items()}
    for file in later.files():
        if file.entry and not file.as_released:  # a reinstall or a restore ends what the ledger says of it
            ledgers[_package(installation, file).root][file.name] = file.entry
    left = [path for file in installation.files() for path in leftovers(file.path)]
    writes = bool(changes or left or ledgers != installation.ledgers or not installation.store.is_settled())
    return Plan(before, after, changes, ledgers, left, writes)


def _elsewhere(root: str, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The entries of files that are there and that the catalogue has no more gate in."""
    known = {place.file for gate in GATES for place in gate.places}
    return {name: entry for name, entry in entries.items() if name not in known and os.path.lexists(os.path.join(root, name))}


def _differs(file: InstalledFile) -> bool:
    """Whether what is on disk is something else by now."""
    with suppress(OSError), open(file.path, "rb") as on_disk:
        return on_disk.read() != file.content
    return True


def _edited(
    installation: Installation, file: InstalledFile, pristine: bytes, gates: set[str], capabilities: set[Capability], author: str
) -> InstalledFile:
    """``file`` with exactly ``gates`` open for ``capabilities``, and its ledger entry."""
    package = _package(installation, file)
    admitted = {known for gate in gates for known in BY_ID[gate].admits}
    opened_for = tuple(sorted(capabilities & admitted))
    try:
        content = compose(file.holding(pristine, None), gates, opened_for)
    except ShapeError as error:
        raise InferenceError(
            f"{file.name}:{error.line}", error.found, f"a shape of {package.name} that can be opened here", NOTHING_CHANGED
        ) from None
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    entry = Entry(
        package.name,
        package.version,
        tuple(sorted(gates)),
        tuple(spelled([capability]) for capability in opened_for),
        checksum(pristine),
        checksum(content),
        now,
        author,
    )
    return file.holding(content, entry if gates else None)


def _pristine(installation: Installation, file: InstalledFile) -> bytes:
    """The bytes to edit from: those that it was edited from before, else those that are there."""
    if not file.ours or file.entry is None:
        return file.content
    stored = installation.store.pristine(file.entry.sha256_before)
    if stored is None:
        raise InferenceError(
            file.path,
            "its pristine bytes are lost",
            f"{installation.store.folder}/pristine/{file.entry.sha256_before}",
            f"{NOTHING_CHANGED} {_package(installation, file).reinstall}",
        )
    return stored


def _package(installation: Installation, file: InstalledFile) -> Package:
    return installation.package(file.name.split("/", 1)[0])
