# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The shapes that gates have in CUDA and C++ sources, and in compiled modules; what a shape is, says _shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, Optional

from ansible_collections.blackwell.inference.plugins.module_utils._c_expression import Meaning, cpp_meaning, evaluate, parse
from ansible_collections.blackwell.inference.plugins.module_utils._gpu import KNOWN_CAPABILITIES
from ansible_collections.blackwell.inference.plugins.module_utils._jit_cache_elf import images, runs_on
from ansible_collections.blackwell.inference.plugins.module_utils._predicate import Capability, Host
from ansible_collections.blackwell.inference.plugins.module_utils._shapes import Reading, ShapeError, nothing, one_line
from ansible_collections.blackwell.inference.plugins.module_utils._source import Edit, Text

_MACRO = "__CUDA_ARCH__"  # what nvcc defines while it compiles for a GPU: 1200 for 12.0
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(if|elif|ifdef|ifndef)\b((?:[^\r\n\\]|\\\r?\n|\\.)*)", re.MULTILINE)
_UPPER_BOUND = re.compile(rf"{_MACRO}\s*<=?\s*\d+")
_NO_CODE = re.compile(r"//[^\r\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\r\n])*\"|(?<!\w)'(?:\\.|[^'\\\r\n])+'", re.DOTALL)


class ArchGuards(NamedTuple):
    """The preprocessor conditions of a file over ``__CUDA_ARCH__``: closed where one of them leaves its code out."""

    def read(self, source: Text) -> Optional[Reading]:
        """See Shape."""
        guards = [guard for guard in _directives(source) if _MACRO in guard.condition]
        if not guards:
            return None
        other = next((guard for guard in guards if guard.kind != "if"), None)
        if other:
            raise ShapeError(source.line(other.start), f"#{other.kind} {other.condition}")

        def shut(capability: Capability) -> list[_Directive]:
            return [guard for guard in guards if not _compiled(guard, capability)]

        def answer(host: Host) -> Optional[bool]:
            undecided = any(_compiled(guard, host.capability) is None for guard in guards)
            return None if undecided else not shut(host.capability)

        def open_for(capability: Capability) -> list[Edit]:
            return [edit for guard in shut(capability) for edit in _lift_upper_bound(source, guard, capability)]

        shown = next((guard for known in reversed(KNOWN_CAPABILITIES) for guard in shut(known)), guards[0])
        alike = sum(guard.condition == shown.condition for guard in guards)
        expression = f"#if {shown.condition}" + (f" ({alike} times)" if alike > 1 else "")
        return Reading(source.line(shown.start), expression, answer, open_for)

    def spreads(self, capability: Capability) -> set[Capability]:
        """Nothing but ``capability`` itself."""
        return {capability}


class Companion(NamedTuple):
    """A statement that a gate is worth nothing without: closed, for every host alike, until it reads as it has to."""

    function: str
    replaces: str  # C++ as released; white space does not matter
    by: str
    also_open: str = ""  # how a later release says the same as ``by``

    def read(self, source: Text) -> Optional[Reading]:
        """See Shape."""
        code = _code(source)
        body = _body(source, code, self.function)
        if body is None:
            return None
        old = list(_alike(self.replaces).finditer(code, *body))
        new = [match for text in (self.by, self.also_open) if text for match in _alike(text).finditer(code, *body)]
        if bool(old) is bool(new):
            found = f"{self.function} has {'both' if old else 'neither'} `{one_line(self.replaces)}` and `{one_line(self.by)}`"
            raise ShapeError(source.line(body[0]), found)
        line, last = (source.line(offset) for offset in (old or new)[0].span())
        return Reading(
            line,
            one_line(source.text[source.line_start(line) : source.line_end(last)]),
            lambda host: bool(new),
            lambda capability: [Edit(match.start(), match.end(), self.by) for match in old],
        )

    def spreads(self, capability: Capability) -> set[Capability]:
        """Everything: it asks for no architecture."""
        return set(KNOWN_CAPABILITIES)


class RunTimeCheck(NamedTuple):
    """The one ``call`` of a file that must hold for ``variable``, the host's architecture as a number like 120. Never edited."""

    call: str
    variable: str

    def read(self, source: Text) -> Optional[Reading]:
        """See Shape."""
        code = _code(source)
        starts = [match.end() for match in re.finditer(rf"\b{self.call}\s*\(", code)]
        conditions = [(start, _matching(code, start - 1, ",")) for start in starts]
        asking = [(start, end) for start, end in conditions if re.search(rf"\b{self.variable}\b", code[start:end])]
        if not asking:
            return None
        start, end = asking[0]
        if len(asking) > 1:
            raise ShapeError(source.line(asking[1][0]), f"{len(asking)} calls of {self.call} over {self.variable}")
        condition = parse(code[start:end])

        def answer(host: Host) -> Optional[bool]:
            holds = evaluate(condition, cpp_meaning({self.variable: "version"}, host.capability))
            return None if holds is None else bool(holds)

        return Reading(source.line(start), f"{self.call}({one_line(source.text[start:end])})", answer, nothing)

    def spreads(self, capability: Capability) -> set[Capability]:
        """Nothing: it is never opened."""
        return set()


class DeviceCode(NamedTuple):
    """A shared library with code for some GPUs: open for those. Never edited."""

    def read(self, source: Text) -> Optional[Reading]:
        """See Shape."""
        try:
            held = images(source.raw)
        except ValueError:
            raise ShapeError(1, "it is not a whole ELF file") from None

        def answer(host: Host) -> Optional[bool]:
            return any(runs_on(image, "sm_{}{}".format(*host.capability)) for image in held)

        return Reading(1, f"code for {', '.join(held) or 'no GPU'}", answer, nothing)

    def spreads(self, capability: Capability) -> set[Capability]:
        """Nothing: it is never opened."""
        return set()


class _Directive(NamedTuple):
    kind: str  # if, elif, ifdef or ifndef
    condition: str  # on one line
    start: int  # offsets of the condition as it stands there
    end: int


def _directives(source: Text) -> Iterator[_Directive]:
    for match in _DIRECTIVE.finditer(_code(source)):
        yield _Directive(match[1], one_line(re.sub(r"\\\r?\n", " ", match[2])), *match.span(2))


def _compiled(guard: _Directive, capability: Capability) -> Optional[bool]:
    """Whether nvcc compiles what ``guard`` guards while it compiles for ``capability``."""
    macro = capability[0] * 100 + capability[1] * 10
    meaning = Meaning(lambda name: macro if name == _MACRO else None, lambda name: True if name == _MACRO else None)
    value = evaluate(parse(guard.condition), meaning)
    return None if value is None else bool(value)


def _lift_upper_bound(source: Text, guard: _Directive, capability: Capability) -> Iterator[Edit]:
    """Let ``capability``, and it alone, through the upper bound of ``guard``."""
    bounds = list(_UPPER_BOUND.finditer(_code(source), guard.start, guard.end))
    if len(bounds) != 1:
        raise ShapeError(source.line(guard.start), f"#{guard.kind} {guard.condition}")
    start, end = bounds[0].span()
    before, after = source.text[guard.start : start].rstrip(), source.text[end : guard.end].lstrip()
    alone = before.endswith("(") and after.startswith(")")
    if not alone:
        yield Edit(start, start, "(")
    yield Edit(end, end, f" || {_MACRO} == {capability[0] * 100 + capability[1] * 10}{'' if alone else ')'}")


def _code(source: Text) -> str:
    """The text with white space in place of comments and strings: what stands in those is no code, and offsets stay."""
    return _NO_CODE.sub(lambda match: re.sub(r"[^\r\n]", " ", match.group()), source.text)


def _body(source: Text, code: str, function: str) -> Optional[tuple[int, int]]:
    """Where the body of ``function`` starts and ends; None where it is not defined."""
    bodies = []
    for match in re.finditer(rf"\b{function}\s*\(", code):
        opening = re.compile(r"\s*\{").match(code, _matching(code, match.end() - 1) + 1)
        if opening:
            bodies.append((opening.end(), _matching(code, opening.end() - 1)))
    if len(bodies) > 1:
        raise ShapeError(source.line(bodies[1][0]), f"{len(bodies)} definitions of {function}")
    return bodies[0] if bodies else None


def _matching(code: str, start: int, separator: str = "") -> int:
    """Where the bracket at ``start`` is closed, or its first part ends; the end of the text where it never is."""
    depth = 0
    for match in re.compile(r"[(){}\[\]]" + (f"|{separator}" if separator else "")).finditer(code, start):
        character = match.group()
        if character == separator and depth == 1:
            return match.start()
        depth += {"(": 1, "{": 1, "[": 1, separator: 0}.get(character, -1)
        if not depth:
            return match.start()
    return len(code)


def _alike(text: str) -> re.Pattern[str]:
    """A pattern for the same tokens as ``text`` in any layout."""
    tokens = re.findall(r"\w+|[^\w\s]", text)
    return re.compile(r"\s*".join(rf"\b{token}\b" if token[0].isalnum() or token[0] == "_" else re.escape(token) for token in tokens))
