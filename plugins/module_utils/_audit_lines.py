# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Cut a Python file into statements, and leave out those that tell nothing about the wanted ones."""

from __future__ import annotations

import keyword
import re
from typing import NamedTuple, Optional


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
HEAD = re.compile(r"def\s+(\w+)\s*\(")
_PROPERTY = re.compile(r"\s*@(?:functools\.)?(?:cached_)?property\s")
_PARAMETER = re.compile(r"(?:^|[(,\n])[ \t]*([A-Za-z_]\w*)[ \t]*(?=[:=,)\n])")
_SHORT = 24  # characters; what is returned is longer than None, False or nothing
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
        named = HEAD.search(text)
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
