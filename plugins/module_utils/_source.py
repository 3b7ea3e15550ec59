# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Source files as they lie on disk: decoded for reading, edited by spans, encoded again to the same form.

Encoding, byte order mark and line endings are kept, and every byte outside an edit stays as it was.
"""

from __future__ import annotations

import ast
import codecs
import io
import re
import tokenize
from collections.abc import Iterable
from typing import NamedTuple, Union

from ansible_collections.blackwell.inference.plugins.module_utils._predicate import FunctionNode

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")


class Edit(NamedTuple):
    """Replace the characters from ``start`` to ``end`` (offsets into the text) by ``text``."""

    start: int
    end: int
    text: str


class Source:
    """A Python source file.

    Args:
        raw: The bytes of the file.

    Raises:
        SyntaxError: The bytes are no Python source: wrong encoding, cut off, or newer than this interpreter.
    """

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._bom = codecs.BOM_UTF8 if raw.startswith(codecs.BOM_UTF8) else b""
        self._encoding = tokenize.detect_encoding(io.BytesIO(raw).readline)[0].replace("utf-8-sig", "utf-8")
        try:
            self.text = raw[len(self._bom) :].decode(self._encoding)
        except UnicodeDecodeError as error:
            raise SyntaxError(f"not {self._encoding}: {error.reason} at byte {error.start}") from None
        try:
            self.tree = ast.parse(self.text)
        except ValueError as error:  # a null byte, before Python 3.12
            raise SyntaxError(str(error)) from None
        self._starts = [match.start() for match in _LINE.finditer(self.text)]
        self.module = _module_assignments(self.tree)

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

    def line_start(self, line: int) -> int:
        """The character offset at which ``line`` (from 1) starts."""
        return self._starts[line - 1]

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
        for edit in sorted(edits, reverse=True):
            if edit.end > tail:
                raise ValueError(f"edits overlap at offset {edit.start}")
            text.append(self.text[edit.end : tail])
            text.append(edit.text)
            tail = edit.start
        text.append(self.text[:tail])
        return self._bom + "".join(reversed(text)).encode(self._encoding)

    def functions(self, name: str) -> list[FunctionNode]:
        """Every function or method that is called ``name``; ``Class.method`` narrows it to one class."""
        *owner, function = name.split(".")
        inside = (
            [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef) and node.name == owner[0]] if owner else [self.tree]
        )
        return [
            node
            for parent in inside
            for node in ast.walk(parent)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == function
        ]


def _module_assignments(tree: ast.Module) -> dict[str, ast.expr]:
    """Names that the module assigns exactly once at its top level, with what it assigns."""
    found: dict[str, ast.expr] = {}
    assigned_twice = set()
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    if target.id in found:
                        assigned_twice.add(target.id)
                    found[target.id] = statement.value
    return {name: value for name, value in found.items() if name not in assigned_twice}
