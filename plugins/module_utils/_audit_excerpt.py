# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read only those parts of a Python file that can hold a condition over the architecture.

A syntax tree of everything would take most of an audit's time. An excerpt keeps the lines that mention an architecture,
or a name that got its value from such a line, with the statements around them, and drops what lies between. What is
dropped leaves a trace where it matters: a block that holds other code still holds something.
"""

from __future__ import annotations

import ast
import re
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Iterator
from functools import cache, cached_property
from typing import NamedTuple, Optional, Union

from ansible_collections.blackwell.inference.plugins.module_utils._audit_lines import HEAD, Line, logical_lines, pruned
from ansible_collections.blackwell.inference.plugins.module_utils._audit_mentions import mentions
from ansible_collections.blackwell.inference.plugins.module_utils._audit_names import CONSTANT, OTHERS, SOURCE, is_architectural, speaks
from ansible_collections.blackwell.inference.plugins.module_utils._predicate import dotted_name

_TOP = re.compile(r"\n(?=[A-Za-z_@(\[])(?!(?:else|elif|except|finally)\b)")
_CLASS = re.compile(r"class\s+(\w+(?:\([^()\n]*\))?)")
_BODY = re.compile(r"\n([ \t]+)(?=[^\s#])")
_MAY_BE_NONE = re.compile(r"\b(\w*arch) is\b")  # what a table gave for a capability
# What something is compared with, or may be; then a list of what is supported, by any name.
_WORD = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_CONSTANT = re.compile(r"(?:[=<>(\[]|\bin|\breturn)\s*(_*[A-Z][A-Z0-9_]{2,}\b|(?:cls|self)\.\w+|_?supported_\w+)")
_COMPARED = re.compile(r"(?:[=!<>]=|[<>]|\bin\b|supported_\w+[ \t]*=|capabilit\w*\()\s*([A-Za-z_]\w*)\b(?!\s*[(.\[])")
_TOP_ASSIGNMENT = re.compile(r"\n([A-Za-z_]\w*)(?=[ \t]*(?::[^=\n]+)?=(?!=))")
_INNER_ASSIGNMENT = re.compile(r"\n[ \t]+\(?([\w.]+(?:[ \t]*,[ \t]*[\w.*]+)*)\)?[ \t]*(?::[^=\n]+)?=(?!=)")
_OTHER_SOURCE = re.compile(r"[ \t(]*\w+[ \t]*(?:/|%)|[^\n]*?(?:" + OTHERS + r"|\.shape\b)", re.IGNORECASE)
_IMPORT = re.compile(r"\nfrom[ \t]+[\w.]+[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)")
_NEXT = re.compile(r"\n(?: {4})?(?=[A-Za-z_@\"'#])")
_GIVEN = re.compile(r"[ \t]*(?::[^=\n]+)?=(?!=)")
_ASSIGNMENT = re.compile(r"[ \t]*[\w., \t]+(?::[^=\n]+)?=(?!=)")
_YES_OR_NO = re.compile(r"\s*return (?:True|False)\s*(?:#.*\s*)?\Z")
_LONGEST_TABLE = 1500  # characters
_ROUNDS = 6  # how often a name may hand its value on to another one


class _Piece(NamedTuple):
    """A statement at module level, or a member of a class."""

    start: int
    end: int
    owner: str  # name of the class, with what it derives from; empty at module level


def excerpt(raw: bytes) -> Optional[ast.Module]:
    """The syntax tree of what may hold a predicate over the architecture in a Python file; None where nothing does.

    Raises:
        SyntaxError: The file is no Python source.
    """
    offsets = mentions(raw)
    if not offsets:
        return None
    text = raw.decode("latin-1")  # one character a byte: offsets stay
    quotes = [list(_all(text, mark)) for mark in ('"""', "'''")]
    if any(len(marks) % 2 for marks in quotes):
        return _parsed(raw)  # where its strings start and end cannot be told from afar
    try:
        return _parsed(_Excerpt(text, quotes).around(offsets))
    except (SyntaxError, ValueError):
        return _parsed(raw)


def _parsed(source: Union[str, bytes]) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # upstream's invalid escapes are none of ours
        return ast.parse(source)


class _Excerpt:
    """The pieces of a file that are wanted, and which of their lines.

    Args:
        text: The file.
        quotes: The offsets of each kind of triple quotes in it.
    """

    def __init__(self, text: str, quotes: Iterable[list[int]]) -> None:
        self.text, self._quotes = text, tuple(quotes)
        self._lines: dict[_Piece, list[Line]] = {}
        self._wanted: dict[_Piece, set[int]] = {}
        # Names that hold something of the architecture, and what it is compared with: of the module, and of one piece.
        self._names: set[str] = set()
        self._local: dict[_Piece, set[str]] = {}
        self._assigned: dict[_Piece, dict[str, list[int]]] = {}
        self._sought: dict[_Piece, set[str]] = {}  # names of which it was looked up what gives them a value

    def around(self, offsets: Iterable[int]) -> str:
        """The text of the lines at ``offsets`` and of every line that uses what those give a name to."""
        for _round in range(_ROUNDS):
            new = list(self._want(offsets))
            if not new:
                break
            offsets = [place for piece, index in new for place in self._related(piece, index)]
        return self._joined()

    def _want(self, offsets: Iterable[int]) -> Iterator[tuple[_Piece, int]]:
        piece = _Piece(0, 0, "")
        for offset in sorted(set(offsets)):
            if not piece.start <= offset < piece.end:
                found = self._piece(offset)
                if found is None:
                    continue
                piece = found
            if piece not in self._lines:
                self._lines[piece] = logical_lines(self.text, piece.start, piece.end)
                self._wanted[piece], self._local[piece], self._sought[piece] = set(), set(), set()
            lines, wanted = self._lines[piece], self._wanted[piece]
            index = bisect_right(lines, (offset, len(self.text))) - 1
            if index >= 0 and index not in wanted and lines[index].word != "raise" and not _is_string(self.text, lines[index]):
                wanted.add(index)
                yield piece, index

    def _piece(self, offset: int) -> Optional[_Piece]:
        """The piece that holds ``offset``; None in a string, and in the head of a class."""
        start = _last(_TOP, self.text, offset + 1)
        if self._in_string(start):
            return None
        end, owner, pattern, head, named = len(self.text), "", _TOP, 0, _CLASS.match(self.text, start)
        if named:
            owner, end = named[1], self._end(_TOP, start, end)
            head, body = start, _BODY.search(self.text, start, end)
            pattern = _member(body[1]) if body else _TOP
            start = _last(pattern, self.text, offset + 1, head)
            if start == head or self._in_string(start):
                return None
        first, stop, lower = start, self._end(pattern, start, end), head
        while first > lower:
            above = _last(pattern, self.text, first, lower)
            if above == first or self.text[above:first].lstrip()[:1] != "@":
                break
            first = above  # what is decorated goes with its decorators
        while stop < end and self.text[start:stop].lstrip()[:1] == "@":
            start, stop = stop, self._end(pattern, stop, end)  # a decorator goes with what it decorates
        return _Piece(first, stop, owner)

    def _end(self, pattern: re.Pattern[str], start: int, end: int) -> int:
        match = pattern.search(self.text, start + 1, end)
        while match and self._in_string(match.end()):
            match = pattern.search(self.text, match.end(), end)
        return match.end() if match else end

    def _in_string(self, offset: int) -> bool:
        return any(bisect_left(quotes, offset) % 2 for quotes in self._quotes)

    def _related(self, piece: _Piece, index: int) -> Iterator[int]:
        """The offsets of what a line has to do with: see the three."""
        line = self._lines[piece][index]
        text = self.text[line.start : line.end]
        yield from self._used(piece, index, text)
        yield from self._compared_with(piece, text)
        yield from self._of_other(piece, text)

    def _used(self, piece: _Piece, index: int, text: str) -> Iterator[int]:
        """Where names that a line gives something of the architecture are used."""
        line, local = self._lines[piece][index], self._local[piece]
        helpers = self._answering(piece, index) if line.word in ("return", "if", "elif") else []
        of_class = bool(piece.owner) and (len(helpers) == 1 or (index == 0 and not helpers))  # a method, or an attribute
        named: Iterable[str] = ()
        if helpers:
            named = helpers[:1]
        elif line.word in ("from", "import"):
            named = _renamed(text)
        elif _ASSIGNMENT.match(text):
            named = _handed_on(text, self._names | local)
        for name in [f"{owner}{name}" for name in named for owner in (("self.", "cls.") if of_class else ("",))]:
            everywhere = len(helpers) == 1 or name.startswith(("self.", "cls.")) or (line.indent == 0 and not piece.owner)
            if everywhere and name not in self._names:
                self._names.add(name)
                yield from self._uses(name, 0, len(self.text))
            elif not everywhere and name not in local:
                local.add(name)
                yield from self._uses(name, piece.start, piece.end)

    def _compared_with(self, piece: _Piece, text: str) -> Iterator[int]:
        """Where that gets its value which a line compares something with."""
        local = self._local[piece]
        compared = set(_COMPARED.findall(text)) - local
        local |= compared
        for name in (*_MAY_BE_NONE.findall(text), *compared):
            yield from _all(self.text, f" {name} = ", piece.start, piece.end)
        for name in compared.union(_CONSTANT.findall(text)) - self._names:
            self._names.add(name)
            yield from self._given(name)

    def _of_other(self, piece: _Piece, text: str) -> Iterator[int]:
        """Where names that are called like an architecture are given something else."""
        target, given, source = text.partition("=")
        of_what = _WORD.findall(source) if given and "(" not in source and any(map(speaks, _WORD.findall(target))) else []
        for name in {word for word in _WORD.findall(text) if speaks(word)}.union(of_what) - self._sought[piece]:
            self._sought[piece].add(name)
            yield from self._given_in(piece).get(name, ())
            yield from (at for at in self._top.get(name, ()) if _OTHER_SOURCE.match(self.text, self.text.find("=", at) + 1))

    def _given_in(self, piece: _Piece) -> dict[str, list[int]]:
        """Where the statements of ``piece`` give a name what may have nothing to do with the architecture, whatever the name says."""
        if piece not in self._assigned:
            places: dict[str, list[int]] = {}
            self._assigned[piece] = places
            for match in _INNER_ASSIGNMENT.finditer(self.text, piece.start, piece.end):
                if _OTHER_SOURCE.match(self.text, match.end()):
                    for name in _WORD.findall(match[1]):
                        places.setdefault(name, []).append(match.end() - 1)
        return self._assigned[piece]

    def _given(self, name: str) -> Iterator[int]:
        """Where ``name`` gets its value at module level, or ``self.name`` and ``cls.name`` in a class, unless that is long."""
        own = name.rpartition(".")[2]
        places = list(self._top.get(own) or self._imports.get(own) or [])
        if own != name:
            opening = f"\n    {own}"
            ends = (at + len(opening) for at in _all(self.text, opening))
            places += [end - len(own) for end in ends if _GIVEN.match(self.text, end)]
        yield from (at for at in places if self._length(at) < _LONGEST_TABLE)

    @cached_property
    def _top(self) -> dict[str, list[int]]:
        """Where the module gives each of its names a value."""
        places: dict[str, list[int]] = {}
        for match in _TOP_ASSIGNMENT.finditer(f"\n{self.text}"):  # it is fast because it starts with a character
            places.setdefault(match[1], []).append(match.start())
        return places

    @cached_property
    def _imports(self) -> dict[str, list[int]]:
        """Where the module imports each of its constants."""
        places: dict[str, list[int]] = {}
        for match in _IMPORT.finditer(f"\n{self.text}"):
            for name in CONSTANT.findall(match[1]):
                places.setdefault(name, []).append(match.start())
        return places

    def _answering(self, piece: _Piece, index: int) -> list[str]:
        """The functions around a line that returns the answer to a predicate, from the inside outwards; none where it does not."""
        lines = self._lines[piece]
        text = self.text[lines[index].start : lines[index].end]
        if lines[index].word == "return":
            answers = _answers(text, self._names | self._local[piece])
        else:
            following = lines[index + 1] if index + 1 < len(lines) else lines[index]
            answers = bool(_YES_OR_NO.search(text) or _YES_OR_NO.fullmatch(self.text[following.start : following.end]))
        heads: list[str] = []
        indent = lines[index].indent
        for line in reversed(lines[:index]) if answers else ():
            if line.indent < indent:
                indent = line.indent
                head = HEAD.search(self.text, line.start, line.end) if line.word in ("def", "async") else None
                heads += [head[1]] if head else []
        return heads

    def _length(self, offset: int) -> int:
        """How long the statement is that starts at ``offset``."""
        match = _NEXT.search(self.text, offset + 1)
        return (match.start() if match else len(self.text)) - offset

    def _uses(self, name: str, start: int, end: int) -> Iterator[int]:
        for at in _all(self.text, name, start, end):
            before, behind = self.text[at - 1 : at], self.text[at + len(name) : at + len(name) + 1]
            if before != "." and not _is_word(before) and not _is_word(behind):
                yield at

    def _joined(self) -> str:
        out: list[str] = []
        at, owner = 0, ""
        for piece in sorted(piece for piece, wanted in self._wanted.items() if wanted):
            gap = self.text.count("\n", at, piece.start)
            headed = piece.owner and piece.owner != owner
            out.append("\n" * (gap - 1) + f"class {piece.owner}:\n" if headed else "\n" * gap)
            out.append(pruned(self.text, self._lines[piece], self._wanted[piece]))
            at, owner = self._lines[piece][-1].end, piece.owner
        return "".join(out)


def _all(text: str, part: str, start: int = 0, end: Optional[int] = None) -> Iterator[int]:
    """Every offset of ``part`` in ``text[start:end]``."""
    end = len(text) if end is None else end
    at = text.find(part, start, end)
    while at >= 0:
        yield at
        at = text.find(part, at + len(part), end)


def _last(pattern: re.Pattern[str], text: str, end: int, start: int = 0) -> int:
    """Where the last match of ``pattern`` in ``text[start:end]`` ends; ``start`` without one."""
    reach = 2000
    while True:
        lower = max(start, end - reach)
        found = start
        for match in pattern.finditer(text, lower, end):
            found = match.end()
        if found > start or lower == start:
            return found
        reach *= 4


@cache
def _member(indentation: str) -> re.Pattern[str]:
    return re.compile(rf"\n(?={re.escape(indentation)}[A-Za-z_@(\[])(?!\s*(?:else|elif|except|finally)\b)")


def _is_string(text: str, line: Line) -> bool:
    return text[line.start : line.end].lstrip().lstrip("rRbBuU")[:1] in ("'", '"')


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _answers(text: str, known: Container[str]) -> bool:
    """Whether a statement returns the answer to a predicate, or one of ``known`` names."""
    try:
        statement = ast.parse(f"def f():\n {text.strip()}").body[0]
    except (SyntaxError, ValueError):
        return False
    value = getattr(getattr(statement, "body", [None])[0], "value", None)
    if isinstance(value, ast.Name):
        return value.id in known
    return isinstance(value, (ast.BoolOp, ast.Compare, ast.UnaryOp)) or (isinstance(value, ast.Call) and is_architectural(value))


def _renamed(text: str) -> list[str]:
    """The names that an import gives to what asks for an architecture."""
    return [name for source, name in re.findall(r"(\w+)[ \t]+as[ \t]+(\w+)", text) if SOURCE.search(source)]


def _handed_on(text: str, known: Container[str]) -> Iterator[str]:
    """The names that an assignment gives a capability, a part of one, the answer to a predicate, or one of ``known``."""
    try:
        statement = ast.parse(text.strip()).body[0]
    except (SyntaxError, IndexError, ValueError):
        return
    value = getattr(statement, "value", None)
    if value is None or not is_architectural(value, known):
        return
    for target in statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", value)]:
        for item in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
            name = dotted_name(item)
            if name and name != "_":
                yield name
