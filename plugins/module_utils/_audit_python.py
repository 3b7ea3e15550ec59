# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Find the gates in Python sources: conditions, guards, decorators and lists that keep code from a host."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import NamedTuple, Optional, Union

from ansible_collections.blackwell.inference.plugins.module_utils._audit_bindings import (
    Assignments,
    Bindings,
    Imported,
    assigned,
    bindings,
    parameters,
    told,
)
from ansible_collections.blackwell.inference.plugins.module_utils._audit_hosts import REFERENCE, is_gate, is_left_over
from ansible_collections.blackwell.inference.plugins.module_utils._audit_names import (
    COPIES,
    Architecture,
    Unknown,
    asks_architecture,
    speaks,
)
from ansible_collections.blackwell.inference.plugins.module_utils._audit_values import Lookup, Reader, equal, walk
from ansible_collections.blackwell.inference.plugins.module_utils._predicate import Capability, FunctionNode, dotted_name


class Closed(NamedTuple):
    """A gate that is closed on a host."""

    line: int
    end_line: int
    expression: str  # on one line
    kind: str
    guards: str  # function that it stands in or decorates; empty at module level
    replaced: bool  # whether other code serves the host


class Undecided(NamedTuple):
    """A condition over an architecture whose value cannot be told."""

    line: int
    expression: str
    guards: str


_LISTED = re.compile(r"supported_(?:major|cc|compute|sm|arch|cuda)\w*|supported_capabilit\w*", re.IGNORECASE)
_DECORATOR = re.compile(r"supported_compute_capabilit\w*|supported_(?:sm|arch|cc)\w*|requires?_compute_capabilit\w*")
_QUIET = re.compile(r"(?:^|\.)(?:print|debug|info|warning|warn|error|exception|log_info_on_rank0|format|join|append|isinstance|hasattr)$")


class _Place:
    """Where a statement stands.

    Args:
        file: Path of the file, relative to site-packages.
        names: What names are bound to there.
        owner: The class and the functions around it.
        constants: Tells what an imported constant is bound to in its file.
    """

    def __init__(self, file: str, names: Bindings, owner: str, constants: Lookup) -> None:
        self.file, self.names, self.owner, self._constants = file, names, owner, constants
        self._readers: dict[Capability, Reader] = {}

    def inside(self, names: Bindings, name: str, handed: Iterable[str] = ()) -> _Place:
        """The place in a class or function called ``name``, which is ``handed`` some of its names."""
        inner = {**self.names, **names}
        for parameter in handed:
            inner.pop(parameter, None)
        return _Place(self.file, inner, f"{self.owner}.{name}" if self.owner else name, self._constants)

    def reader(self, capability: Capability) -> Reader:
        """What expressions mean there on a host."""
        if capability not in self._readers:
            self._readers[capability] = Reader(capability, self.names, self.file, self._constants)
        return self._readers[capability]


class _File:
    """One file, judged for one host.

    Args:
        tree: Its syntax tree, or an excerpt of that.
        file: Its path, relative to site-packages.
        host: Compute capability of the host.
        constants: Tells what an imported constant is bound to in its file.
    """

    def __init__(self, tree: ast.Module, file: str, host: Capability, constants: Lookup) -> None:
        self._host = host
        self.closed: list[Closed] = []
        self.undecided: list[Undecided] = []
        self._explained: set[str] = set()  # names that a finding says the meaning of
        self._flags: list[tuple[set[str], Closed]] = []  # names that got their value from closed predicates alone
        self._classes = [statement for statement in tree.body if isinstance(statement, ast.ClassDef)]
        self._block(tree.body, _Place(file, bindings(tree.body), "", constants))
        self.closed += [finding for names, finding in self._flags if names.isdisjoint(self._explained)]

    # -- values

    def _truth(self, node: ast.expr, place: _Place, leaning: bool = False, capability: Optional[Capability] = None) -> Optional[bool]:
        """Whether ``node`` holds; ``leaning``: as far as the host has a say, whatever its unknown parts are."""
        reader = place.reader(capability or self._host)
        return reader.leaning(node) if leaning else reader.truth(node)

    def _admits(self, node: ast.expr, place: _Place, wanted: bool, leaning: bool = False) -> list[Capability]:
        """The reference capabilities at which ``node`` may come out as ``wanted``."""
        return [other for other in REFERENCE if self._truth(node, place, leaning, other) is not (not wanted)]

    def _found(self, node: ast.AST, expression: str, kind: str, place: _Place, replaced: bool = False) -> Closed:
        line = getattr(node, "lineno", 0)
        return Closed(line, getattr(node, "end_lineno", None) or line, expression, kind, place.owner, replaced)

    def _report(self, node: ast.expr, kind: str, place: _Place, replaced: bool = False) -> None:
        self.closed.append(self._found(node, self._shown(node, place), kind, place, replaced))

    def _shown(self, node: ast.expr, place: _Place) -> str:
        """``node`` as source text, with what the names in it that tell nothing by themselves stand for."""
        text = ast.unparse(node)
        meant = []
        parts = {dotted_name(part): part for part in walk(node) if isinstance(part, (ast.Name, ast.Attribute))}
        for name, part in parts.items():
            value = place.names.get(name)
            if not isinstance(value, (ast.BoolOp, ast.Compare, ast.UnaryOp)) or name not in text:
                continue
            if self._truth(part, place) is not None:
                meant.append(f"{name} = {ast.unparse(value)}")
                self._explained.add(name)
        return f"{text}, where {', '.join(meant)}" if meant else text

    # -- statements

    def _block(self, body: list[ast.stmt], place: _Place) -> None:
        for index, statement in enumerate(body):
            if self._statement(statement, body[index + 1 :], place):
                return  # what follows is not reached here

    def _statement(self, statement: ast.stmt, rest: list[ast.stmt], place: _Place) -> bool:
        """Judge one statement; True where control does not go on behind it on this host."""
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._function(statement, place)
        elif isinstance(statement, ast.ClassDef):
            self._block(statement.body, place.inside(_attributes(statement, _heirs(statement, self._classes)), statement.name))
        elif isinstance(statement, ast.If):
            return self._if(statement, rest, place)
        elif isinstance(statement, ast.Assert):
            self._demand(statement.test, "assert", place)
        elif isinstance(statement, ast.While):
            if self._condition(statement.test, statement.body, [], [], place) is not False:
                self._block(statement.body, place)
        elif isinstance(statement, (ast.For, ast.AsyncFor, ast.With, ast.AsyncWith)):
            self._block(statement.body, place)
        elif isinstance(statement, ast.Try):
            for block in (statement.body, *(handler.body for handler in statement.handlers), statement.orelse, statement.finalbody):
                self._block(block, place)
        elif isinstance(statement, ast.Return):
            if statement.value is not None:
                self._returned(statement.value, place)
            return True
        elif isinstance(statement, (ast.Raise, ast.Continue, ast.Break)):
            return True
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            self._assignment(statement, place)
        elif isinstance(statement, (ast.Expr, ast.AugAssign)):
            self._expression(statement.value, place)
        elif hasattr(statement, "cases"):
            for case in statement.cases:
                self._block(case.body, place)
        return False

    def _function(self, function: FunctionNode, place: _Place) -> None:
        inner = place.inside(bindings(function.body), function.name, parameters(function))
        for decorator in function.decorator_list:
            self._decorator(decorator, inner, place)
        self._block(function.body, inner)

    def _if(self, statement: ast.If, rest: list[ast.stmt], place: _Place) -> bool:
        truth = self._condition(statement.test, statement.body, statement.orelse, rest, place)
        self._expression(statement.test, place)
        left = []
        for taken, block in ((True, statement.body), (False, statement.orelse)):
            if truth is not (not taken):
                self._block(block, place)
                left.append(_leaves(block))
        return all(left)

    def _condition(
        self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt], rest: list[ast.stmt], place: _Place
    ) -> Optional[bool]:
        """Judge the condition of ``body``; its value."""
        truth = self._truth(test, place)
        otherwise = orelse or (rest if _leaves(body) else [])
        if not self._serves(body, place):
            gone = _leaves(body) or bool(orelse)
            if gone and self._truth(test, place, leaning=True) and self._admits(test, place, False, leaning=True):
                self._report(test, "raise" if isinstance(body[-1], ast.Raise) else "early return", place)
        elif truth is False and is_gate(self._host, self._admits(test, place, True)):
            self._report(test, "condition", place, self._serves(otherwise, place))
        elif truth is True and otherwise:
            takers = self._admits(test, place, False)
            if is_gate(self._host, takers) and not is_left_over(self._host, takers) and self._serves(otherwise, place):
                self._report(test, "condition", place, True)
        if truth is None:
            self._doubt(test, place)
        return truth

    def _serves(self, block: list[ast.stmt], place: _Place) -> bool:
        """Whether ``block`` does something for the host, other than to refuse it or to return at once with nothing."""
        refused = bool(block) and isinstance(block[-1], ast.Raise)
        for statement in block:
            if isinstance(statement, ast.If):
                truth = self._truth(statement.test, place)
                taken = [branch for value, branch in ((True, statement.body), (False, statement.orelse)) if truth is not (not value)]
                if any(self._serves(branch, place) and not (refused and not _leaves(branch)) for branch in taken):
                    return True
                if all(_leaves(branch) for branch in taken):
                    return False
            elif isinstance(statement, ast.Return):
                return statement.value is not None and not _is_nothing(statement.value)
            elif isinstance(statement, (ast.Raise, ast.Continue, ast.Break)):
                return False
            elif not refused and not isinstance(statement, ast.Pass) and not _is_quiet(statement):
                return True
        return False

    def _demand(self, test: ast.expr, kind: str, place: _Place) -> None:
        if self._truth(test, place, leaning=True) is False and self._admits(test, place, True, leaning=True):
            self._report(test, kind, place)
        elif self._truth(test, place) is None:
            self._doubt(test, place)

    def _returned(self, value: ast.expr, place: _Place) -> None:
        if _is_predicate(value):
            answer = place.reader(self._host).value(value)
            if (answer is False or answer is None) and is_gate(self._host, self._admits(value, place, True)):
                self._report(value, "return", place)
            elif self._truth(value, place) is None:
                self._doubt(value, place)
        self._expression(value, place)

    def _assignment(self, statement: Union[ast.Assign, ast.AnnAssign], place: _Place) -> None:
        value = statement.value
        if value is None:
            return
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = {dotted_name(target) for target in targets}
        if isinstance(value, (ast.BoolOp, ast.Compare, ast.UnaryOp)):
            if place.reader(self._host).value(value) is False and is_gate(self._host, self._admits(value, place, True)):
                compares = any(isinstance(part, ast.Compare) for part in walk(value))
                self._flags.append((set() if compares else names, self._found(value, ast.unparse(value), "assignment", place)))
        elif any(_LISTED.fullmatch(name.rpartition(".")[2]) for name in names) and not isinstance(value, ast.Call):
            return  # a table; the gate is where it is asked
        self._expression(value, place)

    # -- expressions

    def _expression(self, node: ast.expr, place: _Place) -> None:
        """Judge the conditional expressions, the lists and the arguments in ``node``."""
        for part in walk(node):
            if isinstance(part, ast.IfExp):
                self._choice(part, place)
            elif isinstance(part, ast.Call):
                self._arguments(part, place)
            elif isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Load):
                self._lookup(part, place)

    def _lookup(self, node: ast.Subscript, place: _Place) -> None:
        """Judge a table that fails where it has no entry."""
        if not place.reader(self._host).lacks(node.value, node.slice):
            return
        if is_gate(self._host, [other for other in REFERENCE if not place.reader(other).lacks(node.value, node.slice)]):
            self._report(node, "lookup", place)

    def _choice(self, node: ast.IfExp, place: _Place) -> None:
        truth = self._truth(node.test, place)
        if truth is None:
            self._doubt(node.test, place)
            return
        lost, left = (node.orelse, node.body) if truth else (node.body, node.orelse)
        takers = self._admits(node.test, place, not truth)
        replaced = not _is_nothing(left)
        if is_gate(self._host, takers) and not (truth and replaced and is_left_over(self._host, takers)) and not _is_nothing(lost):
            self._report(node.test, "condition", place, replaced)

    def _arguments(self, call: ast.Call, place: _Place) -> None:
        name = dotted_name(call.func)
        own = name.rpartition(".")[2]
        for keyword in call.keywords:
            if keyword.arg and _LISTED.fullmatch(keyword.arg):
                self._list(keyword.value, f"{keyword.arg}={ast.unparse(keyword.value)}", "list", place, place)
            elif not _QUIET.search(name):
                self._argument(keyword.value, place)
        if own == "get_nvcc_flags_list" and call.args:
            self._list(call.args[0], ast.unparse(call.args[0]), "list", place, place)
        elif not _QUIET.search(name) and own not in COPIES:
            for argument in call.args:
                self._argument(argument, place)

    def _argument(self, value: ast.expr, place: _Place) -> None:
        asks = isinstance(value, (ast.BoolOp, ast.Compare, ast.UnaryOp))
        if asks and place.reader(self._host).value(value) is False and is_gate(self._host, self._admits(value, place, True)):
            self._report(value, "argument", place, True)

    def _list(self, value: ast.expr, expression: str, kind: str, place: _Place, owner: _Place) -> None:
        """Judge a list of what is supported; None or an empty one supports everything."""
        if isinstance(value, ast.Constant) and value.value is None:
            return
        admitted = self._listed(value, place)
        if admitted is None:
            self.undecided.append(Undecided(value.lineno, expression, owner.owner))
        elif self._host not in admitted and admitted:
            self.closed.append(self._found(value, expression, kind, owner))

    def _listed(self, value: ast.expr, place: _Place) -> Optional[list[Capability]]:
        """The reference capabilities, and the host, that a list names by major version, number, pair or name."""
        items = place.reader(self._host).value(value)
        if not isinstance(items, tuple) or any(isinstance(item, Unknown) for item in items):
            return None
        admitted = []
        for capability in dict.fromkeys((*REFERENCE, self._host)):
            for item in items:
                major_only = isinstance(item, int) and item < 30
                if (item == capability[0]) if major_only else equal(Architecture(capability), item):
                    admitted.append(capability)
                    break
        return admitted or ([(0, 0)] if items else [])

    def _decorator(self, decorator: ast.expr, inner: _Place, place: _Place) -> None:
        if not isinstance(decorator, ast.Call):
            return
        name = dotted_name(decorator.func).rpartition(".")[2]
        imported = place.names.get(name)
        name = imported.name if isinstance(imported, Imported) else name
        if _DECORATOR.fullmatch(name) and decorator.args:
            self._list(decorator.args[0], f"@{ast.unparse(decorator)}", "decorator", place, inner)
        elif name == "backend_requirement":
            self._backends(decorator, inner, place)
        else:
            self._arguments(decorator, inner)

    def _backends(self, decorator: ast.Call, inner: _Place, place: _Place) -> None:
        """A decorator that names a check for each backend: closed where no backend's check admits the host."""
        table = (
            decorator.args[0] if decorator.args else next((item.value for item in decorator.keywords if item.arg == "backend_checks"), None)
        )
        common = next((item.value for item in decorator.keywords if item.arg == "common_check"), None)
        checks = table.values if isinstance(table, ast.Dict) and table.values else [common] if common is not None else []
        answers = []
        for check in checks:
            function = place.names.get(dotted_name(check))
            lists = [
                self._listed(item.args[0], place)
                for item in getattr(function, "decorator_list", ())
                if isinstance(item, ast.Call) and item.args and _DECORATOR.fullmatch(dotted_name(item.func).rpartition(".")[2])
            ]
            answers.append(not lists or lists[0] is None or self._host in lists[0])
        if answers and not any(answers):
            self.closed.append(self._found(decorator, f"@{ast.unparse(decorator)}", "decorator", inner))

    def _doubt(self, node: ast.expr, place: _Place) -> None:
        """List ``node`` where a part of it asks for an architecture and cannot be told."""
        reader = place.reader(self._host)
        for part in walk(node):
            if isinstance(part, (ast.Compare, ast.Call)) and asks_architecture(part):
                if not isinstance(reader.value(part), Unknown):
                    continue
                names = [reader.value(item) for item in walk(part) if isinstance(item, ast.Name) and speaks(item.id)]
                if not any(isinstance(value, Unknown) and not value.architecture for value in names):
                    self.undecided.append(Undecided(node.lineno, ast.unparse(node), place.owner))
                    return


def judged(tree: ast.Module, file: str, host: Capability, constants: Lookup = lambda name: None) -> tuple[list[Closed], list[Undecided]]:
    """The gates in ``tree`` that are closed on a host, and the conditions that cannot be decided.

    Args:
        tree: Syntax tree of a file, or an excerpt of it.
        file: Its path, relative to site-packages.
        host: Compute capability of the host.
        constants: Tells what an imported constant is bound to in its file.
    """
    found = _File(tree, file, host, constants)
    return list(dict.fromkeys(found.closed)), list(dict.fromkeys(found.undecided))


def _attributes(node: ast.ClassDef, heirs: Iterable[ast.ClassDef]) -> Bindings:
    """What ``self.x`` and ``cls.x`` are bound to in a class, but for switches and defaults: others set those."""
    found: Assignments = {}
    own = _class_level(node)
    for name, values in own.items():
        for prefix in ("self", "cls", node.name):
            found[f"{prefix}.{name}"] = list(values)
    for method in node.body:
        if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for name, values in assigned(method.body).items():
                if name.startswith("self."):
                    found.setdefault(name, []).extend(values)
    for name in own.keys() & {name for heir in heirs for name in _class_level(heir)}:
        found[f"self.{name}"] = found[f"cls.{name}"] = [None]
    return {name: binding for name, binding in told(found).items() if not isinstance(binding, ast.Constant)}


def _class_level(node: ast.ClassDef) -> Assignments:
    kinds = (ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.AsyncFunctionDef)
    return assigned(statement for statement in node.body if isinstance(statement, kinds))


def _heirs(node: ast.ClassDef, classes: Iterable[ast.ClassDef]) -> list[ast.ClassDef]:
    """The classes among ``classes`` that derive from ``node``, in the order in which they stand."""
    names, heirs = {node.name}, []
    for other in classes:
        if other is not node and not names.isdisjoint(dotted_name(base) for base in other.bases):
            names.add(other.name)
            heirs.append(other)
    return heirs


def _is_quiet(statement: ast.stmt) -> bool:
    """Whether ``statement`` only tells somebody something."""
    value = getattr(statement, "value", None)
    text = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return isinstance(statement, ast.Expr) and (text or (isinstance(value, ast.Call) and bool(_QUIET.search(dotted_name(value.func)))))


def _leaves(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))


def _is_nothing(node: ast.expr) -> bool:
    if isinstance(node, (ast.Tuple, ast.List)):
        return all(_is_nothing(item) for item in node.elts)
    return isinstance(node, ast.Constant) and (node.value is None or node.value is False or node.value == "")


def _is_predicate(node: ast.expr) -> bool:
    return isinstance(node, (ast.BoolOp, ast.Compare, ast.UnaryOp, ast.Call, ast.Name, ast.Attribute))
