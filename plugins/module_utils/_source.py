# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Source files as they lie on disk: decoded for reading, edited by spans, encoded again to the same form.

Encoding, byte order mark and line endings are kept, and every byte outside an edit stays as it was.
"""

from __future__ import annotations

import ast
import bisect
import codecs
import io
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple, Union

from ansible_collections.blackwell.inference.plugins.module_utils._predicate import Binding, FunctionNode, bound_name

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")


class Edit(NamedTuple):
    """Replace the characters from ``start`` to ``end`` (offsets into the text) by ``text``."""

    start: int
    end: int
    text: str


class Text:
    """A file of some kind of text; by default in an encoding in which every byte is a character, so that none is lost.

    Args:
        raw: The bytes of the file.

    Raises:
        SyntaxError: The bytes are not in that encoding.
    """

    def __init__(self, raw: bytes, encoding: str = "latin-1", bom: bytes = b"") -> None:
        self.raw, self._encoding, self._bom = raw, encoding, bom
        try:
            self.text = raw[len(bom) :].decode(encoding)
            if self.edited([]) != raw:
                raise SyntaxError(f"{encoding} does not lead back to the same bytes")
        except (UnicodeError, LookupError) as error:
            raise SyntaxError(f"not {encoding}: {error}") from None
        self._starts = [match.start() for match in _LINE.finditer(self.text)]
        self.readings: dict[int, object] = {}  # what shapes have read in it

    def line(self, offset: int) -> int:
        """The line (from 1) that the character at ``offset`` is in."""
        return bisect.bisect_right(self._starts, offset)

    def line_start(self, line: int) -> int:
        """The character offset at which ``line`` (from 1) starts."""
        return self._starts[line - 1]

    def line_end(self, line: int) -> int:
        """The character offset at which ``line`` (from 1) ends, before its line ending."""
        match = _LINE.match(self.text, self._starts[line - 1])
        return self._starts[line - 1] + (len(match.group().rstrip("\r\n")) if match else 0)

    def indentation(self, line: int) -> str:
        """The white space that ``line`` (from 1) starts with."""
        start = self._starts[line - 1]
        return self.text[start : start + len(self.text[start:]) - len(self.text[start:].lstrip(" \t"))]

    def newline(self, line: int) -> str:
        """The line ending of ``line`` (from 1)."""
        match = _LINE.match(self.text, self._starts[line - 1])
        ending = match.group()[len(match.group().rstrip("\r\n")) :] if match else ""
        return ending or "\n"

    def edited(self, edits: Iterable[Edit]) -> bytes:
        """The bytes of the file after ``edits``, which must not overlap."""
        text, tail = [], len(self.text)
        in_order = sorted(edits, key=lambda edit: (edit.start, edit.end))  # those at one place as they were given
        for edit in in_order[::-1]:
            if edit.end > tail:
                raise ValueError(f"edits overlap at offset {edit.start}")
            text.append(self.text[edit.end : tail])
            text.append(edit.text)
            tail = edit.start
        text.append(self.text[:tail])
        return self._bom + "".join(reversed(text)).encode(self._encoding)

    def compile(self) -> None:
        """Raise SyntaxError where it would not compile, as far as that can be told here."""


class Source(Text):
    """A Python source file.

    Args:
        raw: The bytes of the file.

    Raises:
        SyntaxError: The bytes are no Python source: wrong encoding, cut off, or newer than this interpreter.
    """

    def __init__(self, raw: bytes) -> None:
        encoding = tokenize.detect_encoding(io.BytesIO(raw).readline)[0].replace("utf-8-sig", "utf-8")
        super().__init__(raw, encoding, codecs.BOM_UTF8 if raw.startswith(codecs.BOM_UTF8) else b"")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # upstream's invalid escapes are none of ours
                self.tree = ast.parse(self.text)
        except (ValueError, RecursionError, MemoryError) as error:  # a null byte, before Python 3.12; nested beyond measure
            raise SyntaxError(str(error) or "nested too deeply") from None
        self.module = _bindings(self.tree)

    def compile(self) -> None:
        """See Text."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(self.text, "source", "exec", dont_inherit=True)

    def offset(self, line: int, column: int) -> int:
        """The character offset of ``line`` (from 1) and ``column`` (in UTF-8 bytes, from 0), as syntax nodes count."""
        start = self._starts[line - 1]
        end = self._starts[line] if line < len(self._starts) else len(self.text)
        return start + len(self.text[start:end].encode()[:column].decode())

    def span(self, node: Union[ast.expr, ast.stmt]) -> tuple[int, int]:
        """The character offsets where ``node`` starts and ends."""
        return (
            self.offset(node.lineno, node.col_offset),
            self.offset(node.end_lineno or node.lineno, node.end_col_offset or node.col_offset),
        )

    def segment(self, node: Union[ast.expr, ast.stmt]) -> str:
        """The text of ``node`` as it stands in the file."""
        start, end = self.span(node)
        return self.text[start:end]

    def fills_its_lines(self, statement: ast.stmt) -> bool:
        """Whether nothing but white space stands before ``statement`` on its first line, and a comment at most after its last."""
        start, end = self.span(statement)
        before = self.text[self.line_start(statement.lineno) : start]
        after = self.text[end : self.line_end(statement.end_lineno or statement.lineno)].strip()
        return not before.strip() and (not after or after.startswith("#"))

    def functions(self, name: str) -> list[FunctionNode]:
        """Every function or method that is called ``name``; ``Class.method`` narrows it to one class."""
        return self._functions.get(name, [])

    @cached_property
    def _functions(self) -> dict[str, list[FunctionNode]]:
        found: dict[str, list[FunctionNode]] = {}
        for parent in ast.walk(self.tree):
            if isinstance(parent, (ast.Module, ast.ClassDef)):
                owner = f"{parent.name}." if isinstance(parent, ast.ClassDef) else ""
                for node in ast.walk(parent):
                    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        found.setdefault(owner + node.name, []).append(node)
        return found


def _bindings(tree: ast.Module) -> dict[str, Binding]:
    """What the module binds each of its names to; None where it binds one twice, or in a way that is not seen through."""
    found: dict[str, Binding] = {}
    for name, binding in _bound(tree.body, True):
        known = found.setdefault(name, binding)
        same_import = isinstance(known, ast.alias) and isinstance(binding, ast.alias) and known.name == binding.name
        if known is not binding and not same_import:
            found[name] = None
    return found


def _bound(nodes: Iterable[ast.AST], certain: bool) -> Iterator[tuple[str, Binding]]:
    """Every name that ``nodes`` bind at module level, as often as they do; with what, where that is ``certain``."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node if certain and not isinstance(node, ast.ClassDef) else None
            yield from ((name, None) for part in ast.walk(node) if isinstance(part, ast.Global) for name in part.names)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((bound_name(alias), alias) for alias in node.names)
        elif certain and isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, node.value) for target in targets if isinstance(target, ast.Name))
            yield from _bound([node.value, *(target for target in targets if not isinstance(target, ast.Name))], False)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id, None
        elif isinstance(node, ast.Attribute) or (isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)):
            inner = node.value  # X[0] = 1; X.append(1)
            yield from [(inner.id, None)] if isinstance(inner, ast.Name) else _bound([inner], False)
        else:
            yield from _bound(ast.iter_child_nodes(node), False)
