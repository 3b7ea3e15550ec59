# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The shapes that gates have: how each is found in a source file, answered for a host, and opened.

A shape reads a file once and hands out a Reading; the same Reading detects, says what to edit, and, read again from
the edited bytes, verifies.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import takewhile
from typing import Any, NamedTuple, Optional, Protocol

from ansible_collections.blackwell.inference.plugins.module_utils._gpu import KNOWN_CAPABILITIES
from ansible_collections.blackwell.inference.plugins.module_utils._predicate import (
    UNKNOWN,
    Capability,
    FunctionNode,
    Host,
    Scope,
    Step,
    depends_on_host,
    dotted_name,
    every_host,
    steps,
    unresolved_architecture,
)
from ansible_collections.blackwell.inference.plugins.module_utils._source import Edit, Source, Text


class ShapeError(Exception):
    """The gate's function is there, but not in a shape that is recognised.

    Args:
        line: Line of the file, from 1.
        found: What stands there.
    """

    def __init__(self, line: int, found: str) -> None:
        super().__init__(found)
        self.line = line
        self.found = found


class Reading(NamedTuple):
    """One gate as it stands in one file."""

    line: int
    expression: str  # source text, on one line
    answer: Callable[[Host], Optional[bool]]  # True: open, False: closed, None: cannot be decided
    open_for: Callable[[Capability], list[Edit]]  # the edits that open it; raises ShapeError


class Shape(Protocol):
    """What the catalogue says about a gate's construct."""

    def read(self, source: Any) -> Optional[Reading]:
        """The gate in ``source``, a Source or a Text; None where its function is not there. Raises ShapeError."""

    def spreads(self, capability: Capability) -> set[Capability]:
        """The compute capabilities whose answer an opening for ``capability`` may change, itself included."""


def read(shape: Shape, source: Text) -> Optional[Reading]:
    """``shape.read(source)``, worked out once for each source, as are its answers."""
    if id(shape) not in source.readings:
        reading = shape.read(source)
        source.readings[id(shape)] = reading and reading._replace(answer=lru_cache(maxsize=None)(reading.answer))
    return source.readings[id(shape)]  # type: ignore[return-value]


_OTHER_OPTIONS = ("map_sm107_to_100f",)  # of a call that takes a list of majors; they leave no other GPU out


class MajorList(NamedTuple):
    """A list of major versions that a function hands to ``call``: open where it has the host's major version."""

    function: str
    call: str = "get_nvcc_flags_list"
    keyword: str = "supported_major_versions"

    def read(self, source: Source) -> Optional[Reading]:
        """See Shape."""
        function = _function(source, self.function)
        if function is None:
            return None
        calls = [node for node in _inside(function) if isinstance(node, ast.Call) and _last_name(node.func) == self.call]
        if not calls:
            return None
        if len(calls) > 1 or any(item.arg not in (self.keyword, *_OTHER_OPTIONS) for item in calls[0].keywords):
            raise ShapeError(calls[-1].lineno, f"{self.call} is called more than once, or with other options, in {self.function}")
        changed = _changed_later(function, calls[0])
        if changed is not None:
            raise ShapeError(changed.lineno, f"{one_line(source.segment(changed))} changes what {self.call} gives")
        given = next((item.value for item in calls[0].keywords if item.arg == self.keyword), None)
        majors = given or next(iter(calls[0].args), None)
        if majors is None:
            return Reading(calls[0].lineno, f"{self.call}() for every architecture", lambda host: True, nothing)

        def answer(host: Host) -> Optional[bool]:
            taken = steps(function, Scope(host, source.module))
            if any(_doubtful(step) for step in taken if isinstance(step.node, (ast.Raise, ast.Assert))) or _helper_raises(source, taken):
                return None
            reached = [step.scope for step in taken if step.node is calls[0]]
            value = reached[0].value(majors) if reached else UNKNOWN
            if value is None:
                return True
            if not isinstance(value, tuple) or not all(isinstance(item, int) for item in value):
                return None
            return not value or host.capability[0] in value

        def open_for(capability: Capability) -> list[Edit]:
            if not isinstance(majors, (ast.List, ast.Tuple, ast.Set)) or not majors.elts:
                raise ShapeError(majors.lineno, f"{self.keyword} is {one_line(source.segment(majors))}, not a list of numbers")
            end = source.span(majors.elts[-1])[1]
            return [Edit(end, end, f", {capability[0]}")]

        return Reading(majors.lineno, f"{self.keyword}={one_line(source.segment(majors))}", answer, open_for)

    def spreads(self, capability: Capability) -> set[Capability]:
        """A list of major versions cannot tell 12.0 from 12.1."""
        return {known for known in KNOWN_CAPABILITIES if known[0] == capability[0]}


class Condition(NamedTuple):
    """A condition that must not come out False: what ``function`` returns, or what stands before a call in it."""

    function: str
    before: str = ""  # the call that the condition guards; empty: the condition is what the function returns
    assumed: Mapping[str, object] = {}

    def read(self, source: Source) -> Optional[Reading]:
        """See Shape."""
        function = _function(source, self.function)
        if function is None:
            return None
        conditions = self._conditions(function)
        if not conditions:
            raise ShapeError(
                function.lineno, f"no {f'condition before {self.before}' if self.before else 'return value'} in {self.function}"
            )
        views = {id(condition): _Views() for condition in conditions}
        for scope in every_host(source.module, self.assumed):
            for step in steps(function, scope):
                if id(_value(step.node)) in views:
                    views[id(_value(step.node))][scope.host.capability] = step
        asking = [node for node in conditions if depends_on_host(node, _scopes(views[id(node)]))]
        shown = (asking or conditions)[-1]
        # What some host settles by itself is no matter of the batch size: where another one leaves it open, nothing is known.
        settled = [node for node in asking if any(step.scope.truth(node) is True for step in views[id(node)].values())]

        def answer(host: Host) -> Optional[bool]:
            reached = [(node, views[id(node)][host.capability]) for node in conditions if host.capability in views[id(node)]]
            for node, step in reached:
                if any(unresolved_architecture(part, step.scope) for part in (node, *step.undecided)):
                    return None
                if node in settled and step.scope.truth(node) is None:
                    return None
            shut = [node for node, step in reached if step.scope.truth(node) is False]
            return len(shut) < len(reached) and not any(node in asking for node in shut)

        def open_for(capability: Capability) -> list[Edit]:
            reached = [(node, views[id(node)]) for node in asking if capability in views[id(node)]]
            shut = [(node, view) for node, view in reached if view[capability].scope.truth(node) is False]
            if len(shut) != 1:
                raise ShapeError(shown.lineno, f"{len(shut)} conditions in {self.function} keep it closed")
            probe = _Probe(source, capability)
            return [*_widen(source, *shut[0], capability, True, probe), *probe.declarations]

        return Reading(shown.lineno, one_line(source.segment(shown)), answer, open_for)

    def _conditions(self, function: FunctionNode) -> list[ast.expr]:
        if not self.before:
            return [node.value for node in _inside(function) if isinstance(node, ast.Return) and node.value is not None]
        guards = [node for node in _inside(function) if isinstance(node, ast.If) and _calls(node.body, self.before)]
        return [node.test for node in guards if not any(other is not node and other in ast.walk(node) for other in guards)]

    def spreads(self, capability: Capability) -> set[Capability]:
        """Nothing but ``capability`` itself."""
        return {capability}


class Default(NamedTuple):
    """A place where a release turns ``option`` on by itself; open where any such place is reached. Never edited."""

    option: str

    def read(self, source: Source) -> Optional[Reading]:
        """See Shape."""
        sites = list(_sites(source.tree, self.option, ()))
        hosts = every_host(source.module)
        decisive = [(node, tests) for node, tests in sites if any(depends_on_host(test, hosts) for test in tests)]
        if not decisive:
            return None

        def answer(host: Host) -> Optional[bool]:
            here = Scope(host, source.module)
            return any(all(here.truth(test) is not False for test in tests) for node, tests in decisive)

        def open_for(capability: Capability) -> list[Edit]:
            raise ShapeError(decisive[0][0].lineno, f"{self.option} is a choice of the operator")

        tests = [test for node, tests in decisive for test in tests if depends_on_host(test, hosts)]
        return Reading(tests[0].lineno, "; ".join(one_line(source.segment(test)) for test in tests), answer, open_for)

    def spreads(self, capability: Capability) -> set[Capability]:
        """Nothing: it is never opened."""
        return set()


class NoRaise(NamedTuple):
    """A function that must not raise on the fusion path, where ``assumed`` holds."""

    function: str
    assumed: Mapping[str, object]
    admits: str = ""  # what to admit; empty: the compute capability that is opened
    first: str = ""  # a statement to put before the check

    def read(self, source: Source) -> Optional[Reading]:
        """See Shape."""
        function = _function(source, self.function)
        if function is None:
            return None
        reached = {scope.host.capability: steps(function, scope) for scope in every_host(source.module, self.assumed)}
        raises = {
            capability: [step for step in taken if isinstance(step.node, (ast.Raise, ast.Assert))] for capability, taken in reached.items()
        }

        def answer(host: Host) -> Optional[bool]:
            raised = raises[host.capability]
            if any(not step.undecided for step in raised):
                return False
            asked = any(_doubtful(step) for step in raised) or _helper_raises(source, reached[host.capability])
            return None if asked or any(depends(step) for step in raised) else True

        def depends(raised: Step) -> bool:
            """Whether the host has a say in reaching this raise, though it does not decide."""
            doubts = [step.undecided for steps in raises.values() for step in steps if step.node is raised.node]
            return len(doubts) < len(raises) or any(tests != raised.undecided for tests in doubts)

        def guard(capability: Capability) -> Optional[ast.If]:
            certain = [step for step in raises[capability] if not step.undecided]
            return certain[0].inside[-1] if certain and certain[0].inside else None

        def open_for(capability: Capability) -> list[Edit]:
            shut = guard(capability)
            if shut is None:
                raise ShapeError(function.lineno, f"{self.function} raises without a condition")
            views = {known: step for known, taken in reached.items() for step in taken if step.node is shut}
            probe = _Probe(source, capability, self.admits)
            edits = _widen(source, shut.test, views, capability, not views[capability].scope.truth(shut.test), probe)
            _refuse_unbound(function, shut, self.first, self.admits)
            return [*edits, *probe.declarations, *(_statement_before(source, shut, self.first) if self.first else [])]

        shown = next(filter(None, map(guard, reversed(KNOWN_CAPABILITIES))), None)
        if shown is None:
            return Reading(function.lineno, f"{self.function} has no architecture test", answer, open_for)
        return Reading(shown.test.lineno, f"if {one_line(source.segment(shown.test))}: raise", answer, open_for)

    def spreads(self, capability: Capability) -> set[Capability]:
        """Where something else than the capability is admitted, every capability that has no multicast."""
        return _without_multicast() if self.admits else {capability}


class MulticastQuery(NamedTuple):
    """A driver call for NVLink multicast that must not be reached where a device has none."""

    function: str
    call: str
    assumed: Mapping[str, object]
    only_if: str = ""  # the condition to put around the query; empty: any compute capability but the opened one
    otherwise: tuple[str, ...] = ()  # what the query would have set, to be set before the condition

    def read(self, source: Source) -> Optional[Reading]:
        """See Shape."""
        function = _function(source, self.function)
        if function is None:
            return None
        calls = [node for node in _inside(function) if isinstance(node, ast.Call) and _last_name(node.func) == self.call]
        if not calls and self.call in _mentioned_from(source, function):
            raise ShapeError(function.lineno, f"{self.call} is called in a function that {self.function} calls")
        if not calls:
            return Reading(function.lineno, f"{self.function} makes no multicast query", lambda host: True, nothing)
        if len(calls) > 1:
            raise ShapeError(calls[1].lineno, f"{len(calls)} calls of {self.call} in {self.function}")

        def answer(host: Host) -> Optional[bool]:
            if host.multicast:
                return True
            reached = [step for step in steps(function, Scope(host, source.module, self.assumed)) if step.node is calls[0]]
            if not reached:
                return True
            doubtful = any(unresolved_architecture(test, reached[0].scope) for test in reached[0].undecided)
            return None if doubtful else False

        def open_for(capability: Capability) -> list[Edit]:
            probe = _Probe(source, capability)
            block = _query_block(function, calls[0])
            _refuse_unbound(function, block[0], *self.otherwise, self.only_if)
            _refuse_lost(function, block, self.otherwise)
            return _wrap(source, block, self.only_if or probe.refused(), self.otherwise)

        return Reading(calls[0].lineno, f"{self.call} must succeed", answer, open_for)

    def spreads(self, capability: Capability) -> set[Capability]:
        """Where the condition is no compute capability, every capability that has no multicast."""
        return _without_multicast() if self.only_if else {capability}


class _Probe:
    """The expression that is true on what is to be admitted, and the statements that it needs.

    Args:
        source: The file that it goes into.
        capability: The compute capability to admit, exactly: 12.0 does not mean 12.1.
        expression: Another expression to admit by; empty: the compute capability.
    """

    def __init__(self, source: Source, capability: Capability, expression: str = "") -> None:
        self._source, self._capability, self._expression = source, capability, expression
        self.declarations: list[Edit] = []

    def admitted(self, beside: ast.expr) -> str:
        """The expression to add with ``or``; declared once at module level where ``beside`` is such a name, too."""
        if self._expression:
            return self._expression
        value = self._source.module.get(beside.id) if isinstance(beside, ast.Name) else None
        if isinstance(beside, ast.Name) and isinstance(value, ast.expr):
            return self._declared_like(beside.id, value)
        return self._comparison("==", beside)

    def refused(self) -> str:
        """The expression to add with ``and``, true on all that is not admitted."""
        if self._expression:
            return self._expression[len("not ") :] if self._expression.startswith("not ") else f"not {self._expression}"
        return self._comparison("!=")

    def _comparison(self, operator: str, beside: Optional[ast.expr] = None) -> str:
        """Ask the way that ``beside`` does: get_platform() answers without a CUDA context, which PyTorch would create at import."""
        for part in ast.walk(beside) if beside else ():
            if isinstance(part, ast.Call) and _last_name(part.func) == "get_platform":
                return f"{self._source.segment(part)}.device_sm {operator} {self._capability[0] * 10 + self._capability[1]}"
        imports = [node for node in self._source.tree.body if isinstance(node, ast.Import)]
        if not any(alias.name == "torch" and alias.asname is None for node in imports for alias in node.names):
            raise ShapeError(1, "no `import torch` in the file")
        return f"torch.cuda.get_device_capability() {operator} {self._capability}"

    def _declared_like(self, sibling: str, value: ast.expr) -> str:
        """Declare a name beside ``sibling`` in the sibling's own words, so the GPU is asked once, at import."""
        source, name = self._source, re.sub(r"\d+", "{}{}".format(*self._capability), sibling)
        parts = value.values if isinstance(value, ast.BoolOp) else [value]
        asking = [part for part in parts if depends_on_host(part, every_host(source.module))]
        statement = next(node for node in source.tree.body if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is value)
        taken = re.search(rf"\b{name}\b", source.text) is not None
        plain = isinstance(statement, ast.Assign) and len(statement.targets) == 1 and source.fills_its_lines(statement)
        if len(asking) != 1 or taken or not plain:
            found = f"{one_line(source.segment(statement))}"
            raise ShapeError(statement.lineno, f"{found}, and {name} is taken" if taken else found)
        (_start, end), (part_start, part_end) = source.span(statement), source.span(asking[0])
        before = source.text[source.span(statement)[0] + len(sibling) : part_start]
        text = name + before + self._comparison("==", asking[0]) + source.text[part_end:end]
        here = source.line_end(statement.end_lineno or statement.lineno)
        self.declarations = [Edit(here, here, f"{source.newline(statement.lineno)}{text}")]
        return name


_Views = dict[Capability, Step]  # where a condition is evaluated, on each host that comes there


def _scopes(views: _Views) -> list[Scope]:
    return [step.scope for step in views.values()]


def _widen(source: Source, node: ast.expr, views: _Views, capability: Capability, want: bool, probe: _Probe) -> list[Edit]:
    """The edits after which ``node``, now decided the other way at ``capability``, comes out as ``want`` where the probe holds."""
    if views[capability].scope.truth(node) is not (not want):
        return []
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _widen(source, node.operand, views, capability, not want, probe)
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) is not want:
        return [edit for operand in node.values for edit in _widen(source, operand, views, capability, want, probe)]
    if not depends_on_host(node, _scopes(views)):
        raise ShapeError(node.lineno, f"{one_line(source.segment(node))} does not depend on the architecture")
    start, end = source.span(node)
    if isinstance(node, ast.BoolOp):
        return [Edit(end, end, f" or {probe.admitted(node.values[-1])}" if want else f" and {probe.refused()}")]
    addition = f" or {probe.admitted(node)}" if want else f" and {probe.refused()}"
    return [Edit(start, start, "("), Edit(end, end, f"{addition})")]


def _statement_before(source: Source, statement: ast.stmt, text: str) -> list[Edit]:
    if not source.fills_its_lines(statement):
        raise ShapeError(statement.lineno, "the check shares its line with another statement")
    start = source.line_start(statement.lineno)
    return [Edit(start, start, f"{source.indentation(statement.lineno)}{text}{source.newline(statement.lineno)}")]


def _query_block(function: FunctionNode, call: ast.Call) -> list[ast.stmt]:
    """The statements that prepare ``call``, make it, and use what it gave: consecutive ones in one block."""
    for parent in ast.walk(function):
        for field in ("body", "orelse", "finalbody"):
            body: list[ast.stmt] = getattr(parent, field, []) if isinstance(parent, (ast.stmt, ast.ExceptHandler)) else []
            for index, statement in enumerate(body):
                if isinstance(statement, ast.Assign) and call in ast.walk(statement):
                    return _dependent(body[:index], statement, body[index + 1 :], call)
    raise ShapeError(call.lineno, "the result of the multicast query is not assigned")


def _dependent(before: list[ast.stmt], query: ast.Assign, after: list[ast.stmt], call: ast.Call) -> list[ast.stmt]:
    arguments = {node.id for node in call.args if isinstance(node, ast.Name)}
    results = {dotted_name(item) for target in query.targets for item in getattr(target, "elts", [target])}
    prepares = takewhile(lambda statement: isinstance(statement, ast.Assign) and _roots(statement.targets) <= arguments, reversed(before))
    uses = takewhile(lambda statement: not isinstance(statement, ast.Return) and bool(results & _mentions(statement)), after)
    return [*reversed(list(prepares)), query, *uses]


def _roots(targets: list[ast.expr]) -> set[str]:
    return {dotted_name(target).split(".", 1)[0] for target in targets}


def _mentions(statement: ast.stmt) -> set[str]:
    return {dotted_name(node) for node in ast.walk(statement) if isinstance(node, (ast.Name, ast.Attribute))}


def _wrap(source: Source, block: list[ast.stmt], condition: str, otherwise: tuple[str, ...]) -> list[Edit]:
    """Put ``block`` under ``if condition:``, with the statements ``otherwise`` before it."""
    whole = source.text[source.span(block[0])[0] : source.span(block[-1])[1]]
    if re.search(r"\\[\r\n]|\"{3}|'{3}", whole) or not all(source.fills_its_lines(statement) for statement in block):
        raise ShapeError(block[0].lineno, "lines of the multicast query that cannot be indented")
    first, last = block[0].lineno, block[-1].end_lineno or block[-1].lineno
    indentation, newline = source.indentation(first), source.newline(first)
    edits = [
        Edit(start, start, "    ")
        for start in (source.line_start(line) for line in range(first + 1, last + 1))
        if source.text[start : start + 1].strip("\r\n")
    ]
    head = "".join(f"{indentation}{text}{newline}" for text in (*otherwise, f"if {condition}:"))
    return [Edit(source.line_start(first), source.line_start(first), f"{head}    "), *edits]


def _refuse_unbound(function: FunctionNode, statement: ast.stmt, *texts: str) -> None:
    """Raise ShapeError if code that is to stand before ``statement`` uses a name that has no value there."""
    bound = _bound_before(function, statement)
    for node in ast.walk(ast.parse("\n".join(texts))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in bound:
            raise ShapeError(statement.lineno, f"{node.id} has no value in {function.name} before this line")


def _refuse_lost(function: FunctionNode, block: list[ast.stmt], otherwise: tuple[str, ...]) -> None:
    """Raise ShapeError if something that only ``block`` sets is used where ``block`` may be left out."""
    inside = {id(node) for statement in block for node in ast.walk(statement)}
    own = _stored(block)
    given = _stored(ast.parse("\n".join(otherwise)).body) | _bound_before(function, block[0])
    lost = {name for name in own - given if name.split(".", 1)[0] not in own or "." not in name}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id in lost and id(node) not in inside and node.lineno > block[0].lineno:
            raise ShapeError(node.lineno, f"{node.id} is used outside the multicast query that sets it")
    for name in sorted(lost):
        if "." in name:
            raise ShapeError(block[0].lineno, f"the multicast query sets {name}")


def _bound_before(function: FunctionNode, statement: ast.stmt) -> set[str]:
    """Names that certainly have a value before ``statement``: parameters, and what plain statements on the way there set."""
    arguments = function.args
    names = {item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    body: list[ast.stmt] = function.body
    while body:
        around = next(item for item in body if statement in ast.walk(item))
        names |= _stored([item for item in body[: body.index(around)] if isinstance(item, (ast.Assign, ast.AnnAssign, ast.AugAssign))])
        names |= _stored([around.target]) if isinstance(around, (ast.For, ast.AsyncFor)) else set()
        bodies = [getattr(around, field, []) for field in ("body", "orelse", "finalbody")] if around is not statement else []
        body = next((inner for inner in bodies if any(statement in ast.walk(item) for item in inner)), [])
    return names


def _stored(nodes: Iterable[ast.AST]) -> set[str]:
    """Names and dotted names that are assigned to in ``nodes``."""
    parts = [part for node in nodes for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute))]
    return {dotted_name(part) for part in parts if isinstance(part.ctx, ast.Store)} - {""}


def _function(source: Source, name: str) -> Optional[FunctionNode]:
    found = source.functions(name)
    if len(found) > 1:
        raise ShapeError(found[1].lineno, f"{len(found)} functions are called {name}")
    if not found:
        return None
    function = found[0]
    wrapped = [item for item in function.decorator_list if dotted_name(item) not in ("staticmethod", "classmethod")]
    if wrapped:
        raise ShapeError(wrapped[0].lineno, f"{name} is wrapped in @{one_line(source.segment(wrapped[0]))}")
    if "." not in name and function in source.tree.body and source.module.get(name) is not function:
        raise ShapeError(function.lineno, f"{name} is bound to something else, too")
    return function


def _doubtful(step: Step) -> bool:
    """Whether an architecture decides if ``step`` is reached, and it cannot be told how."""
    return any(unresolved_architecture(test, step.scope) for test in step.undecided)


def _helper_raises(source: Source, taken: Iterable[Step], depth: int = 3) -> bool:
    """Whether a function of the same file that is called on the way may raise, as far as the host has a say in it."""
    for step in taken:
        called = source.module.get(step.node.func.id) if isinstance(step.node, ast.Call) and isinstance(step.node.func, ast.Name) else None
        if isinstance(called, (ast.FunctionDef, ast.AsyncFunctionDef)) and isinstance(step.node, ast.Call):
            given = dict(zip((item.arg for item in called.args.args), map(step.scope.value, step.node.args)))
            given.update({item.arg: step.scope.value(item.value) for item in step.node.keywords if item.arg})
            inside = steps(called, step.scope.copy(given))
            raises = [item for item in inside if isinstance(item.node, (ast.Raise, ast.Assert))]
            if any(not item.undecided or _doubtful(item) for item in raises) or (depth and _helper_raises(source, inside, depth - 1)):
                return True
    return False


def _changed_later(function: FunctionNode, call: ast.Call) -> Optional[ast.stmt]:
    """The statement that gives the name which holds what ``call`` returned another value, if there is one."""
    statements = [node for node in _inside(function) if isinstance(node, (ast.Assign, ast.AnnAssign))]
    holders = {name for node in statements if call in ast.walk(node) for name in _stored([node])}
    return next((node for node in statements if call not in ast.walk(node) and _stored([node]) & holders), None)


def _mentioned_from(source: Source, function: FunctionNode) -> set[str]:
    """Every name that ``function`` uses, or a function of the same file that it uses in turn."""
    found: set[str] = set()
    pending = [function]
    while pending:
        words = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(pending.pop())} - found
        found |= words
        pending.extend(other for word in words for other in source.functions(word))
    return found


def _inside(function: FunctionNode) -> Iterator[ast.AST]:
    """Every node of ``function`` but those of functions defined in it."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop(0)
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending[:0] = ast.iter_child_nodes(node)


def _value(node: ast.AST) -> Optional[ast.AST]:
    """What a return statement returns, what a conditional statement tests."""
    return getattr(node, "value", None) if isinstance(node, ast.Return) else getattr(node, "test", None)


def _sites(node: ast.AST, option: str, tests: tuple[ast.expr, ...]) -> Iterator[tuple[ast.stmt, tuple[ast.expr, ...]]]:
    """Statements that set ``option`` to something else than None or False, each with the conditions around it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt) and _sets(child, option):
            yield child, tests
        elif isinstance(child, ast.If):
            for statement in child.body:
                yield from _sites(ast.Module([statement], []), option, (*tests, child.test))
            yield from _sites(ast.Module(child.orelse, []), option, tests)
        else:
            yield from _sites(child, option, tests)


def _sets(statement: ast.stmt, option: str) -> bool:
    value: Optional[ast.expr] = None
    if isinstance(statement, ast.Assign) and any(
        isinstance(target, ast.Attribute) and target.attr == option for target in statement.targets
    ):
        value = statement.value
    elif isinstance(statement, ast.Return) and isinstance(statement.value, ast.Dict):
        pairs = zip(statement.value.keys, statement.value.values)
        value = next((item for key, item in pairs if isinstance(key, ast.Constant) and key.value == option), None)
    return value is not None and not (isinstance(value, ast.Constant) and value.value in (None, False))


def _calls(body: list[ast.stmt], name: str) -> bool:
    return any(isinstance(node, ast.Call) and _last_name(node.func) == name for statement in body for node in ast.walk(statement))


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def one_line(text: str) -> str:
    """``text`` without comments and line breaks."""
    lines = (re.sub(r"(?:^|\s)#.*$", "", line).strip() for line in text.splitlines())
    return re.sub(r"([(\[{]) | (?=[)\]}])", r"\1", " ".join(line for line in lines if line))


def nothing(capability: Capability) -> list[Edit]:
    return []


def _without_multicast() -> set[Capability]:
    return {known for known in KNOWN_CAPABILITIES if not Host(known).multicast}
