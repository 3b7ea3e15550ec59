# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Constants that one Python file imports from another of the same packages, such as a table of supported architectures."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Optional

from ansible_collections.blackwell.inference.plugins.module_utils._audit_bindings import Imported
from ansible_collections.blackwell.inference.plugins.module_utils._audit_files import text_of
from ansible_collections.blackwell.inference.plugins.module_utils._audit_names import CONSTANT

_NEXT = re.compile(r"\n(?=[A-Za-z_@\"'#])")
_IMPORT = re.compile(r"^from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE)
_FARTHEST = 3  # files that a name may be handed on through


class Constants:
    """What constants of other files are bound to.

    Args:
        roots: For each package, by import name, the folder that it is in.
    """

    def __init__(self, roots: Mapping[str, str]) -> None:
        self._roots = roots
        self._texts: dict[str, str] = {}
        self._found: dict[tuple[str, str], Optional[ast.expr]] = {}

    def value(self, file: str, imported: Imported) -> Optional[ast.expr]:
        """What a name that ``file`` imports is bound to; None where it is no constant, or cannot be found."""
        if not CONSTANT.fullmatch(imported.name):
            return None
        return self._sought(file, imported.module, imported.level, imported.name, _FARTHEST)

    def _sought(self, file: str, module: str, level: int, name: str, further: int) -> Optional[ast.expr]:
        folders = file.split("/")[:-level] if level else []
        path = "/".join([*folders, *filter(None, module.split("."))])
        for source in (f"{path}.py", f"{path}/__init__.py"):
            text = self._text(source)
            if text and (source, name) not in self._found:
                self._found[source, name] = self._bound(source, text, name, further)
            if text:
                return self._found[source, name]
        return None

    def _bound(self, source: str, text: str, name: str, further: int) -> Optional[ast.expr]:
        match = re.search(rf"^{name}[ \t]*(?::[^=\n]+)?=(?!=)", text, re.MULTILINE)
        if match:
            end = _NEXT.search(text, match.end())
            try:
                (statement,) = ast.parse(text[match.start() : end.start() if end else len(text)]).body
            except (SyntaxError, ValueError):
                return None
            return statement.value if isinstance(statement, (ast.Assign, ast.AnnAssign)) else None
        for dots, module, names in _IMPORT.findall(text) if further else ():
            if re.search(rf"\b{name}\b(?![ \t]+as\b)", names):
                return self._sought(source, module, len(dots), name, further - 1)
        return None

    def _text(self, file: str) -> str:
        if file not in self._texts:
            self._texts[file] = text_of(self._roots, file)
        return self._texts[file]
