# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the statements of a Python file bind its names to."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Optional, Union

from ansible_collections.blackwell.inference.plugins.module_utils._audit_names import is_architectural
from ansible_collections.blackwell.inference.plugins.module_utils._predicate import FunctionNode, dotted_name


class Imported(ast.alias):
    """A name that a file imports, with where it is from."""

    module = ""
    level = 0  # dots before it


# What a name is bound to: an expression, a function, or an import; None: several things, or something that is not seen.
Binding = Union[ast.expr, ast.FunctionDef, ast.AsyncFunctionDef, Imported, None]
Bindings = Mapping[str, Binding]
Assignments = dict[str, list[Optional[ast.AST]]]


def bindings(body: Iterable[ast.stmt]) -> Bindings:
    """What the statements of ``body`` bind names to."""
    return told(assigned(body))


def parameters(function: FunctionNode) -> list[str]:
    """The names of the parameters of ``function``."""
    arguments = function.args
    return [item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def literals(function: FunctionNode, call: ast.Call) -> dict[str, ast.expr]:
    """The literals that ``call`` hands to ``function``, by the name of the parameter: they mean the same in both places."""
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return {}
    given = dict(zip(parameters(function), call.args))
    given.update((item.arg, item.value) for item in call.keywords if item.arg)
    return {name: value for name, value in given.items() if _is_literal(value)}


def told(found: Assignments) -> Bindings:
    """The one thing that each name is bound to. A default that something else replaces does not count."""
    bound: dict[str, Binding] = {}
    for name, values in found.items():
        telling = [value for value in values if not _is_literal(value)] or values
        if len(telling) > 1:  # what was kept from an earlier time, or the capability itself
            telling = [value for value in telling if _reads_architecture(value)] or telling
        first = telling[0]
        same = len(telling) == 1 or all(value and first and ast.dump(value) == ast.dump(first) for value in telling)
        bound[name] = first if same and isinstance(first, (ast.expr, ast.FunctionDef, ast.AsyncFunctionDef, Imported)) else None
    return bound


def _reads_architecture(node: Optional[ast.AST]) -> bool:
    return isinstance(node, (ast.Call, ast.Subscript, ast.Attribute)) and is_architectural(node)


def _is_literal(node: Optional[ast.AST]) -> bool:
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return all(map(_is_literal, node.elts))
    return isinstance(node, ast.Constant)


def _collect(body: Iterable[ast.stmt], found: Assignments) -> None:
    for statement in body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                _bind(target, statement.value, found)
        elif isinstance(statement, ast.AnnAssign):
            if statement.value is not None:
                _bind(statement.target, statement.value, found)
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.setdefault(statement.name, []).append(statement)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            for alias in statement.names:
                found.setdefault(alias.asname or alias.name.split(".", 1)[0], [_imported(alias, statement)])
        elif isinstance(statement, ast.AugAssign):
            _bind(statement.target, None, found)
        elif not isinstance(statement, ast.ClassDef):
            if isinstance(statement, (ast.For, ast.AsyncFor)):
                _bind(statement.target, None, found)
            test = getattr(statement, "test", None)
            for part in (test, *getattr(test, "values", ()), getattr(test, "left", None)):
                if isinstance(part, ast.NamedExpr):
                    _bind(part.target, part.value, found)
            for item in getattr(statement, "items", ()):
                if item.optional_vars is not None:
                    _bind(item.optional_vars, None, found)
            for block in ("body", "orelse", "finalbody"):
                _collect(getattr(statement, block, ()), found)
            for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
                _collect(part.body, found)


def _imported(alias: ast.alias, statement: Union[ast.Import, ast.ImportFrom]) -> Imported:
    imported = Imported(name=alias.name, asname=alias.asname)
    if isinstance(statement, ast.ImportFrom):
        imported.module, imported.level = statement.module or "", statement.level
    return imported


def _bind(target: ast.expr, value: Optional[ast.expr], found: Assignments) -> None:
    if isinstance(target, (ast.Tuple, ast.List)):
        parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts) else None
        for index, item in enumerate(target.elts):
            if isinstance(item, ast.Starred):
                _bind(item.value, None, found)
            else:
                part = parts[index] if parts else ast.Subscript(value, ast.Constant(index), ast.Load()) if value is not None else None
                _bind(item, part, found)
        return
    name = dotted_name(target)
    if name:
        found.setdefault(name, []).append(value)


def assigned(body: Iterable[ast.stmt]) -> Assignments:
    """Everything that the statements of ``body`` bind each name to, in order."""
    found: Assignments = {}
    _collect(body, found)
    return found
