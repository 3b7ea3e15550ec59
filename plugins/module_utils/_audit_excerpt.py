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
import keyword
import re
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Iterator
from functools import cache, cached_property
from typing import NamedTuple, Optional, Union

from ansible_collections.blackwell.inference.plugins.module_utils._audit_mentions import mentions
from ansible_collections.blackwell.inference.plugins.module_utils._audit_names import speaks
from ansible_collections.blackwell.inference.plugins.module_utils._predicate import dotted_name


class Line(NamedTuple):
    """A logical line: one statement, or the head of one, however many physical lines it takes."""

    start: int  # offset of its first character, white space included
    end: int  # offset behind its line ending
    indent: int
    word: str  # what it starts with: a keyword, a name, or another character


_STRING = (
    r"\"{3}[^\"\\]*(?:(?:\\.|\"(?!\"\"))[^\"\\]*)*\"{3}|'{3}[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'{3}"
    r"|\"[^\"\\\n]*(?:\\.[^\"\\\n]*)*\"|'[^'\\\n]*(?:\\.[^'\\\n]*)*'"
)
_CLOSED_AT_ONCE = r"\([^()\[\]{}\n\"'#\\]*\)|\[[^()\[\]{}\n\"'#\\]*\]"
# The next bracket or line ending, and all before it that is neither, strings and comments included. A lookahead is not
# tried again once it has matched: without that, a run that leads nowhere would be cut in every possible way.
_NEXT_EVENT = re.compile(
    rf"(?=((?:[^\"'#\\()\[\]{{}}\n]+|{_STRING}|\#[^\n]*|\\(?:\r?\n)?|{_CLOSED_AT_ONCE})*))\1([()\[\]{{}}\n\"'])", re.DOTALL
)
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_FIRST = re.compile(r"[ \t]*(\w+|\S|$)")


def logical_lines(text: str, start: int, end: int) -> list[Line]:
    """The logical lines of ``text[start:end]``, which starts with a statement; blank ones and comments are left out."""
    lines: list[Line] = []
    depth, begin = 0, start
    for match in _NEXT_EVENT.finditer(text, start, end):
        found = match[2]
        if found == "\n":
            if depth <= 0:
                _add(lines, text, begin, match.end())
                depth, begin = 0, match.end()
        elif found in _BRACKETS:
            depth += _BRACKETS[found]
    if begin < end:
        _add(lines, text, begin, end)
    return lines


def _add(lines: list[Line], text: str, start: int, end: int) -> None:
    first = _FIRST.match(text, start, end)
    if first and first[1] and first[1] not in "#\n\r":
        lines.append(Line(start, end, first.start(1) - start, first[1]))


_QUIET = re.compile(r"[ \t]*(?:print|(?:self\.)?_?log\w*(?:\.\w+)?|warnings\.warn)\(", re.IGNORECASE)
_OTHER = "__other__"  # stands for an expression that is left out
_HEAD = re.compile(r"def\s+(\w+)\s*\(")
_PROPERTY = re.compile(r"\s*@(?:functools\.)?(?:cached_)?property\s")
_YES_OR_NO = re.compile(r"\s*return (?:True|False)\s*(?:#.*\s*)?\Z")
_PARAMETER = re.compile(r"(?:^|[(,\n])[ \t]*([A-Za-z_]\w*)[ \t]*(?=[:=,)\n])")
_SHORT = 24  # characters; what is returned is longer than None, False or nothing
_LONGEST_TABLE = 1500  # characters
_CLAUSES = frozenset({"elif", "else", "except", "finally"})
_LEAVING = frozenset({"return", "raise", "pass", "continue", "break"})


def pruned(text: str, lines: list[Line], wanted: set[int]) -> str:
    """The text of ``lines`` without what is not needed to understand the lines at the indexes ``wanted``.

    Kept are the statements around a wanted line, all clauses of those statements, and how control leaves them. Other
    code leaves a ``0`` behind, or a condition where it may return something, and a message ``pass``. Physical lines stay where they are, so
    that numbers of lines hold.
    """
    kept = _with_surroundings(lines, wanted)
    kept |= {index for index in range(len(lines) - 1) if index + 1 in kept and _PROPERTY.match(text, lines[index].start)}
    out: list[str] = []
    at = lines[0].start
    dropped: Optional[int] = None  # the indentation of the code that the last of ``out`` stands for
    for index, line in enumerate(lines):
        if index not in kept and dropped is not None and line.indent >= dropped:
            if line.word == "return":
                out[-1] = _returning(out[-1], text[line.start : line.end].strip())
            continue
        out.append("\n" * text.count("\n", at, line.start))
        if index in kept:
            dropped, at = None, line.end
            out.append(_shortened(text[line.start : line.end], line, index in wanted))
        else:
            at = text.find("\n", line.start) + 1 or line.end
            quiet = _QUIET.match(text, line.start)
            dropped = None if quiet else line.indent
            out.append(f"{' ' * line.indent}{'pass' if quiet else '0'}\n")
    return "".join(out) + "\n" * text.count("\n", at, lines[-1].end)


def _returning(dropped: str, statement: str) -> str:
    """What stands for ``dropped`` code that holds a return as well. Where all that it returns is the same constant, that is kept."""
    if statement in ("return", "return None"):
        return dropped
    if dropped.endswith("0\n"):
        value = statement[len("return ") :] if statement in ("return False", "return True") else _OTHER
        return f"{dropped[:-2]}if {_OTHER}: return {value}\n"
    return dropped if dropped.endswith(f"{statement}\n") else re.sub(r"return \w+\n\Z", f"return {_OTHER}\n", dropped)


def _shortened(text: str, line: Line, wanted: bool) -> str:
    """``text`` of a kept line, without what only costs time: annotations, messages, what is returned."""
    short = ""
    if line.word == "raise" or (line.word == "return" and not wanted and len(text.strip()) > _SHORT):
        short = f"{' ' * line.indent}{line.word} {_OTHER}"
    elif line.word == "def" and text.count("\n") > 1:
        named = _HEAD.search(text)
        short = f"{' ' * line.indent}def {named[1]}({', '.join(_parameters(text[named.end() :]))}):" if named else ""
    return short + "\n" * text.count("\n") if short else text


def _parameters(text: str) -> list[str]:
    """The names of parameters in a signature, and perhaps a name of a default or an annotation: that does no harm."""
    return list(dict.fromkeys(name for name in _PARAMETER.findall(text) if not keyword.iskeyword(name)))


def _with_surroundings(lines: list[Line], wanted: set[int]) -> set[int]:
    kept: set[int] = set()
    for index in wanted:
        kept |= _around(lines, index, kept)
        while lines[index].word == "@" and index + 1 < len(lines):
            index += 1
            kept.add(index)
    parents: list[tuple[int, bool]] = []  # indentation of the statements around, and whether their head is kept
    for index, line in enumerate(lines):
        while parents and parents[-1][0] >= line.indent:
            was = parents.pop()
            if line.word in _CLAUSES and was == (line.indent, True):
                kept.add(index)  # another clause of a kept statement
        if line.word in _LEAVING and parents and parents[-1][1]:
            kept.add(index)
        parents.append((line.indent, index in kept))
    return kept


def _around(lines: list[Line], index: int, known: set[int]) -> set[int]:
    """``index``, the heads of the statements around it, and those that their clauses belong to."""
    found = {index}
    indent, clause = lines[index].indent, lines[index].word in _CLAUSES
    for above in range(index - 1, -1, -1):
        line = lines[above]
        if line.indent < indent or (clause and line.indent == indent):
            found.add(above)
            if above in known and line.word not in _CLAUSES:
                break
            indent, clause = line.indent, line.word in _CLAUSES
    return found


# --- the pieces of a file ---------------------------------------------------------------------------------------

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
_OTHER_SOURCE = re.compile(r"[ \t(]*\w+[ \t]*(?:/|%)|[^\n]*?(?:(?<!sm_)version|\.shape\b|nvcc|driver|gfx|gcn)", re.IGNORECASE)
_IMPORT = re.compile(r"\nfrom[ \t]+[\w.]+[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)")
_CONSTANT_NAME = re.compile(r"\b_*[A-Z][A-Z0-9_]+\b")
_NEXT = re.compile(r"\n(?: {4})?(?=[A-Za-z_@\"'#])")
_GIVEN = re.compile(r"[ \t]*(?::[^=\n]+)?=(?!=)")
_ASSIGNMENT = re.compile(r"[ \t]*[\w., \t]+(?::[^=\n]+)?=(?!=)")
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
        """Where names that a line gives a value are used, and where what it compares something with gets its value."""
        line, local = self._lines[piece][index], self._local[piece]
        text = self.text[line.start : line.end]
        helpers = self._answering(piece, index) if line.word in ("return", "if", "elif") else []
        answers = len(helpers) == 1
        named: Iterable[str] = ()
        if helpers:
            named = [f"{owner}.{helpers[0]}" for owner in ("self", "cls")] if piece.owner and answers else helpers[:1]
        elif line.word in ("from", "import"):
            named = _renamed(text)
        elif _ASSIGNMENT.match(text):
            named = _handed_on(text, self._names | local)
        if piece.owner and index == 0 and not helpers:  # an attribute of the class
            named = [f"{owner}{name}" for name in named for owner in ("", "self.", "cls.")]
        for name in named:
            everywhere = answers or name.startswith(("self.", "cls.")) or (line.indent == 0 and not piece.owner)
            if everywhere and name not in self._names:
                self._names.add(name)
                yield from self._uses(name, 0, len(self.text))
            elif not everywhere and name not in local:
                local.add(name)
                yield from self._uses(name, piece.start, piece.end)
        for name in _MAY_BE_NONE.findall(text):
            yield from _all(self.text, f" {name} = ", piece.start, piece.end)
        compared = set(_COMPARED.findall(text)) - local
        local |= compared
        for name in compared:
            yield from _all(self.text, f" {name} = ", piece.start, piece.end)
        target, given, source = text.partition("=")
        of_what = _WORD.findall(source) if given and "(" not in source and any(map(speaks, _WORD.findall(target))) else []
        for name in {word for word in _WORD.findall(text) if speaks(word)}.union(of_what) - self._sought[piece]:
            self._sought[piece].add(name)
            yield from self._given_in(piece).get(name, ())
            yield from (at for at in self._top.get(name, ()) if _OTHER_SOURCE.match(self.text, self.text.find("=", at) + 1))
        for name in compared.union(_CONSTANT.findall(text)) - self._names:
            self._names.add(name)
            yield from self._given(name)

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
            for name in _CONSTANT_NAME.findall(match[1]):
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
                head = _HEAD.search(self.text, line.start, line.end) if line.word in ("def", "async") else None
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
    return [name for source, name in re.findall(r"(\w+)[ \t]+as[ \t]+(\w+)", text) if _SOURCE.search(source)]


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


_SOURCE = re.compile(r"capabilit|is_\w*sm_?\d|sm_version|device_sm|blackwell|hopper|_arch$|^arch$|arch_support", re.IGNORECASE)
_WRAPPERS = frozenset({"tuple", "int", "bool", "str", "max", "min", "any", "all", "map", "join", "lru_cache", "cache"})


def is_architectural(node: ast.expr, known: Container[str] = ()) -> bool:
    """Whether ``node`` is a predicate, or reads a capability, or one of the names ``known``, and hands it on as it is."""
    if isinstance(node, (ast.BoolOp, ast.Compare)):
        return True
    if isinstance(node, ast.UnaryOp):
        return is_architectural(node.operand, known)
    if isinstance(node, ast.BinOp):
        return is_architectural(node.left, known) or is_architectural(node.right, known)
    if isinstance(node, ast.IfExp):
        whole = is_architectural(node.body, known) or is_architectural(node.orelse, known)
        return whole or isinstance(node.test, (ast.BoolOp, ast.Compare))
    if isinstance(node, (ast.Tuple, ast.List)):
        return any(is_architectural(item, known) for item in node.elts)
    if isinstance(node, ast.JoinedStr):
        return is_spelling(node) and any(is_architectural(item, known) for item in node.values)
    if isinstance(node, ast.Subscript):
        return is_architectural(node.value, known) or is_architectural(node.slice, known)
    if isinstance(node, ast.FormattedValue):
        return is_architectural(node.value, known)
    if isinstance(node, (ast.GeneratorExp, ast.ListComp)):
        return is_architectural(node.generators[0].iter, known)
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if _SOURCE.search(name) or dotted_name(node.func) in known:
            return True
        return (name in _WRAPPERS or name == "get") and any(is_architectural(argument, known) for argument in node.args)
    if isinstance(node, (ast.Name, ast.Attribute)):
        own = node.attr if isinstance(node, ast.Attribute) else node.id
        return dotted_name(node) in known or bool(_SOURCE.search(own)) or own in ("major", "minor")
    return False


def is_spelling(node: ast.JoinedStr) -> bool:
    """Whether a formatted text may be a name of an architecture, such as ``f"sm_{major}{minor}"``; a message is longer."""
    return all(len(str(item.value)) <= len("compute_") for item in node.values if isinstance(item, ast.Constant))
