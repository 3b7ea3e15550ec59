# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Evaluate arch gates: expressions and functions that depend on a GPU's compute capability.

Everything here is three-valued. An expression whose value does not follow from the host alone (the batch size, a
command line flag) is Unknown, and ``False and Unknown`` is still False: a gate is closed when it comes out False
whatever the unknown parts are. An Unknown remembers whether it speaks of an architecture: then nothing is decided.
"""

from __future__ import annotations

import ast
import builtins
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Callable, NamedTuple, Optional, Union

from ansible_collections.blackwell.inference.plugins.module_utils._gpu import KNOWN_CAPABILITIES

Capability = tuple[int, int]
FunctionNode = Union[ast.FunctionDef, ast.AsyncFunctionDef]


# What a module binds a name to, where it does so exactly once: an expression, a function, or an import; else None.
Binding = Union[ast.expr, ast.FunctionDef, ast.AsyncFunctionDef, ast.alias, None]
Bindings = Mapping[str, Binding]


class Unknown:
    """The value of an expression that does not follow from the host.

    Args:
        architecture: The part of it that speaks of an architecture, as source text; empty where none does.
    """

    def __init__(self, architecture: str = "") -> None:
        self.architecture = architecture

    def __bool__(self) -> bool:
        raise TypeError("an unknown value has no truth; compare with `is True` or `is False`")

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = Unknown()


class Host(NamedTuple):
    """What a gate can ask about a host: one GPU's compute capability and what follows from it."""

    capability: Capability

    @property
    def multicast(self) -> bool:
        """Whether NVLink multicast objects can exist: only the NVSwitch generations have them."""
        return self.capability[0] in (9, 10)


def _major(*majors: int) -> Callable[[Host], object]:
    return lambda host: host.capability[0] in majors


# Helpers without arguments, by the last part of their name, as sglang.srt.utils defines them; `get_platform().is_smXX`
# are attributes for the same probes. sglang's is_smXX_supported() mean a major version, so 12.1 is in is_sm120_supported().
_HELPERS: Mapping[str, Callable[[Host], object]] = {
    "is_cuda": lambda host: True,
    "is_hip": lambda host: False,
    "is_npu": lambda host: False,
    "is_xpu": lambda host: False,
    "is_sm80_supported": _major(8),
    "is_sm90_supported": _major(9),
    "is_sm100_supported": _major(10),
    "is_sm110_supported": _major(11),
    "is_sm100_or_sm110_supported": _major(10, 11),
    "is_sm120_supported": _major(12),
    "is_blackwell_supported": _major(10, 12),
    "is_blackwell": _major(10, 12),
    "is_sm120": lambda host: host.capability == (12, 0),
    "is_sm121": lambda host: host.capability == (12, 1),
    "get_device_capability": lambda host: host.capability,
    "get_device_sm": lambda host: host.capability[0] * 10 + host.capability[1],
    "is_multicast_supported": lambda host: host.multicast,
}
_PLATFORM_ATTRIBUTES: Mapping[str, Callable[[Host], object]] = {
    "is_cuda": lambda host: True,
    "is_hip": lambda host: False,
    "is_npu": lambda host: False,
    "is_xpu": lambda host: False,
    "is_musa": lambda host: False,
    "is_mps": lambda host: False,
    "is_cpu": lambda host: False,
    "has_amx": lambda host: False,
    "has_flashinfer": lambda host: True,
    "is_sm90": _major(9),
    "is_sm100": _major(10),
    "is_sm110": _major(11),
    "is_sm100_or_sm110": _major(10, 11),
    "is_sm120": _major(12),
    "is_blackwell": _major(10, 12),
    "device_capability": lambda host: host.capability,
    "device_sm": lambda host: host.capability[0] * 10 + host.capability[1],
}
_MULTICAST_ATTRIBUTE = "CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED"

# A name that speaks of an architecture. If such a name has no known value, the expression is undecidable, not open.
_ARCHITECTURE_NAME = re.compile(r"sm_?\d{2,3}|capability|blackwell|hopper|device_sm|multicast|(?:^|_)(?:arch|major)", re.IGNORECASE)


class Scope:
    """What names mean while a gate is evaluated.

    Args:
        host: The host that is asked about.
        module: What the module binds its names to.
        assumed: Values of parameters and attributes on the path of interest, by dotted name, e.g.
            ``{"backend": "trtllm", "self._enable_multicast": False}``.
    """

    def __init__(self, host: Host, module: Bindings, assumed: Optional[Mapping[str, object]] = None) -> None:
        self.host = host
        self.module = module
        self.values: dict[str, object] = dict(assumed or {})
        # Of module-level names and functions, shared with every copy. UNKNOWN while one is worked out: it may need itself.
        self._worked_out: dict[int, object] = {}

    def copy(self, values: Optional[Mapping[str, object]] = None) -> Scope:
        """A scope of its own for one branch of a condition, or with other ``values`` for another function."""
        other = Scope(self.host, self.module, self.values if values is None else values)
        other._worked_out = self._worked_out
        return other

    def value(self, node: ast.expr) -> object:
        """The value of ``node`` on this host, or an Unknown."""
        try:
            return self._value(node)
        except (TypeError, ValueError, IndexError, ArithmeticError, AttributeError):
            return Unknown(_speaks_of_architecture(node))  # e.g. an ordering of None: it fails at run time, too

    def truth(self, node: ast.expr) -> Optional[bool]:
        """True, False, or None where the host does not decide."""
        value = self.value(node)
        return None if isinstance(value, Unknown) else bool(value)

    def _value(self, node: ast.expr) -> object:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.BoolOp):
            return self._operands(node, [self.value(operand) for operand in node.values])
        if isinstance(node, ast.Compare):
            return self._compare(node)
        if isinstance(node, ast.IfExp):
            test = self._value(node.test)
            return test if isinstance(test, Unknown) else self._value(node.body if test else node.orelse)
        if isinstance(node, ast.NamedExpr):
            self.values[node.target.id] = value = self._value(node.value)
            return value
        if isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Subscript, ast.UnaryOp, ast.BinOp)):
            return self._composed(node, [self._value(part) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)])
        return Unknown(_speaks_of_architecture(node))

    @staticmethod
    def _composed(node: ast.expr, parts: list[object]) -> object:
        unknown = _unknown_of(parts, None)
        if unknown is not None:
            return unknown
        if isinstance(node, ast.Subscript):
            return parts[0][parts[1]]  # type: ignore[index]
        if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
            return _UNARY[type(node.op)](*parts)
        if isinstance(node, ast.BinOp):
            numbers = type(node.op) in _BINARY and all(isinstance(part, int) for part in parts)
            lists = isinstance(node.op, ast.Add) and all(isinstance(part, tuple) for part in parts)
            return _BINARY[type(node.op)](*parts) if numbers or lists else Unknown(_speaks_of_architecture(node))
        return tuple(parts)

    def _name(self, name: str) -> object:
        if name in self.values:
            value = self.values[name]
            return value if not isinstance(value, ast.AST) else _named(name)
        binding = self.module.get(name)
        if not isinstance(binding, ast.expr):
            return _named(name, binding.name if isinstance(binding, ast.alias) else "")
        return self._once(binding, lambda: self.copy({}).value(binding))

    def _attribute(self, node: ast.Attribute) -> object:
        dotted = dotted_name(node)
        if dotted and dotted in self.values:
            return self.values[dotted]
        if _is_platform(node.value):
            known = _PLATFORM_ATTRIBUTES.get(node.attr)
            return known(self.host) if known else Unknown(node.attr)  # a platform speaks of its GPU
        whole = self._value(node.value)
        return whole if isinstance(whole, Unknown) and whole.architecture else _named(node.attr)

    def _call(self, node: ast.Call) -> object:
        if _asks_for_multicast(node):
            return int(self.host.multicast)
        called = self._called(node.func)
        if called == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            return self.value(ast.Attribute(node.args[0], str(node.args[1].value), ast.Load()))
        if isinstance(called, str) and called in _HELPERS:
            return _HELPERS[called](self.host)
        if called in ("any", "all", "bool") and len(node.args) == 1 and not node.keywords:
            argument = node.args[0]
            items = argument.elts if isinstance(argument, (ast.Tuple, ast.List, ast.Set)) else []
            if called == "bool" or items:
                value = self._bool_op([self.value(item) for item in items or [argument]], called == "any")
                return value if isinstance(value, Unknown) else bool(value)
        result = self.values.get(dotted_name(node.func), UNKNOWN)  # a function that is defined in this one
        if isinstance(called, (ast.FunctionDef, ast.AsyncFunctionDef)):
            result = self._once(called, lambda: _returned(called, self.copy({})))
            if not isinstance(result, Unknown):
                return result
        # What the host decided, handed to code that is not seen, comes back as something that the host decides.
        decided = [part for part in node.args if not isinstance(part, ast.Constant) and not isinstance(self.value(part), Unknown)]
        architecture = _speaks_of_architecture(node) or (ast.unparse(decided[0]) if decided else "")
        return _unknown_of([result, Unknown(architecture)], UNKNOWN)

    def _called(self, function: ast.expr) -> Union[str, ast.AST, None]:
        """What ``function`` is: a function of this file, or else the last part of the name that it has where it is defined."""
        if isinstance(function, ast.Attribute):
            return function.attr
        if not isinstance(function, ast.Name):
            return None
        name = function.id
        if name not in self.values and name not in self.module and ("*" in self.module or hasattr(builtins, name)):
            return name
        bound = self.values.get(name, self.module.get(name))
        if isinstance(bound, ast.alias):
            return bound.name.rsplit(".", 1)[-1]
        if isinstance(bound, ast.Attribute) or (isinstance(bound, ast.Name) and bound.id != name):
            return self.copy({})._called(bound)
        return bound if isinstance(bound, ast.AST) else None

    def _once(self, node: ast.AST, work_out: Callable[[], object]) -> object:
        if id(node) not in self._worked_out:
            self._worked_out[id(node)] = UNKNOWN
            self._worked_out[id(node)] = work_out()
        return self._worked_out[id(node)]

    def _operands(self, node: ast.BoolOp, values: list[object]) -> object:
        result = self._bool_op(values, isinstance(node.op, ast.Or))
        if isinstance(node.op, ast.Or) and isinstance(result, Unknown):  # its architecture is refused, and something else may let it in
            known = (operand for operand, value in zip(node.values, values) if not isinstance(value, Unknown))
            return _unknown_of([result, Unknown(next(filter(None, map(_speaks_of_architecture, known)), ""))], result)
        return result

    @staticmethod
    def _bool_op(operands: list[object], settles: bool) -> object:
        """``or`` where True ``settles`` it, ``and`` where False does."""
        for operand in operands:
            if not isinstance(operand, Unknown) and bool(operand) is settles:
                return operand
        return _unknown_of(operands, operands[-1])

    def _compare(self, node: ast.Compare) -> object:
        items = [self._value(item) for item in (node.left, *node.comparators)]
        for comparison, left, right in zip(node.ops, items, items[1:]):
            known = not isinstance(left, Unknown) and not isinstance(right, Unknown)
            if known and not _COMPARISONS[type(comparison)](left, right):
                return False
        return _unknown_of([*items, Unknown(_speaks_of_architecture(node))] if _unknown_of(items, None) else [], True)


def _named(*names: str) -> Unknown:
    """The value of something that is only known by name."""
    return Unknown(next((name for name in names if _ARCHITECTURE_NAME.search(name)), ""))


def _unknown_of(values: Iterable[object], otherwise: object) -> object:
    """The unknown one among ``values``, one that speaks of an architecture first; ``otherwise`` where all are known."""
    unknown = [value for value in values if isinstance(value, Unknown)]
    return next((value for value in unknown if value.architecture), unknown[0] if unknown else otherwise)


@lru_cache(maxsize=8192)  # each is evaluated for every host
def _asks_for_multicast(node: ast.Call) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr == _MULTICAST_ATTRIBUTE for part in ast.walk(node))


@lru_cache(maxsize=8192)
def _calls(expression: ast.expr) -> list[ast.Call]:
    return [part for part in ast.walk(expression) if isinstance(part, ast.Call)]


@lru_cache(maxsize=8192)
def _speaks_of_architecture(node: ast.AST) -> str:
    """The first name in ``node`` that speaks of an architecture, or an empty string."""
    words = (getattr(part, "attr", getattr(part, "id", "")) for part in ast.walk(node))
    return next((word for word in words if _ARCHITECTURE_NAME.search(word)), "")


def _returned(function: FunctionNode, scope: Scope) -> object:
    """What a call of ``function`` without arguments that matter returns."""
    decorators = {dotted_name(item.func if isinstance(item, ast.Call) else item).rsplit(".", 1)[-1] for item in function.decorator_list}
    if decorators - {"lru_cache", "cache"} or any(isinstance(part, (ast.Yield, ast.YieldFrom, ast.Await)) for part in ast.walk(function)):
        return Unknown(_speaks_of_architecture(function))
    collected, leaves = _walk(function, scope)
    returns = [step for step in collected if isinstance(step.node, ast.Return)]
    values = [step.scope.value(step.node.value) if step.node.value else None for step in returns]  # type: ignore[attr-defined]
    values += [] if leaves is True else [None]
    tests = [step.scope.value(test) for step in returns for test in step.undecided]
    return values[0] if values and all(_same(value, values[0]) for value in values) else _unknown_of([*values, *tests], UNKNOWN)


def _same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and not isinstance(one, Unknown) and one == other)


_UNARY: Mapping[type, Callable[..., object]] = {ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos}
_BINARY: Mapping[type, Callable[..., object]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.BitOr: operator.or_, ast.BitAnd: operator.and_,
}  # fmt: skip
_COMPARISONS: Mapping[type, Callable[..., bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items, ast.NotIn: lambda item, items: item not in items,
}  # fmt: skip


def _is_platform(node: ast.expr) -> bool:
    name = dotted_name(node.func if isinstance(node, ast.Call) else node)
    return name.rsplit(".", 1)[-1] in ("get_platform", "platform", "current_platform")


def dotted_name(node: ast.expr) -> str:
    """``a.b.c`` for a Name or Attribute chain, else an empty string."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def every_host(module: Bindings, assumed: Optional[Mapping[str, object]] = None) -> list[Scope]:
    """A scope for each known compute capability."""
    return [Scope(Host(capability), module, assumed) for capability in KNOWN_CAPABILITIES]


def depends_on_host(node: ast.expr, scopes: Iterable[Scope]) -> bool:
    """Whether the value of ``node`` differs between ``scopes``, which stand for different hosts."""
    return len({repr(scope.value(node)) for scope in scopes}) > 1


def unresolved_architecture(node: ast.expr, scope: Scope) -> Optional[str]:
    """The part of ``node`` that speaks of an architecture and leaves its value unknown here, as source text."""
    value = scope.value(node)
    return value.architecture or None if isinstance(value, Unknown) else None


class Step(NamedTuple):
    """A raise, assert, return, call or condition that a function runs through."""

    node: ast.AST
    inside: tuple[ast.If, ...]  # the conditional statements around it, outermost first
    undecided: tuple[ast.expr, ...]  # the conditions on the way that the host does not decide; none: it is certain
    scope: Scope  # what is known there


def steps(function: FunctionNode, scope: Scope) -> list[Step]:
    """The raises, failing asserts, returns, calls and conditions that ``function`` reaches on this host, in order."""
    return _walk(function, scope)[0]


_Conditions = tuple[ast.If, ...]
_Tests = tuple[ast.expr, ...]
_Leaves = Optional[bool]  # whether control leaves the function: True certainly, None perhaps, False not
_MATCH: tuple[type[ast.stmt], ...] = tuple(filter(None, [getattr(ast, "Match", None)]))  # since Python 3.10


def _walk(function: FunctionNode, scope: Scope) -> tuple[list[Step], _Leaves]:
    collected: list[Step] = []
    scope, arguments = scope.copy(), function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            scope.values.setdefault(argument.arg, _named(argument.arg))
    return collected, _run(function.body, scope, (), (), collected)


def _run(body: list[ast.stmt], scope: Scope, inside: _Conditions, tests: _Tests, collected: list[Step]) -> _Leaves:
    """Run ``body`` on ``scope``, and tell whether control leaves the function in it."""
    leaves: _Leaves = False
    for statement in body:
        for expression in _own_expressions(statement):
            collected.extend(Step(call, inside, tests, scope.copy()) for call in _calls(expression))
        gone, doubts = _run_one(statement, scope, inside, tests, collected)
        if gone is True:
            return True
        if gone is None:
            leaves, tests = None, (*tests, *doubts, *(part.test for part in ast.walk(statement) if isinstance(part, ast.If)))
    return leaves


def _run_one(statement: ast.stmt, scope: Scope, inside: _Conditions, tests: _Tests, collected: list[Step]) -> tuple[_Leaves, _Tests]:
    """Run one statement: whether control leaves the function in it, and what that depends on besides the conditions in it."""
    if isinstance(statement, (ast.Raise, ast.Return)):
        collected.append(Step(statement, inside, tests, scope.copy()))
        return True, ()
    if isinstance(statement, ast.Assert):
        holds = scope.truth(statement.test)
        if holds is not True:
            collected.append(Step(statement, inside, tests if holds is False else (*tests, statement.test), scope.copy()))
        return holds is False, ()
    if isinstance(statement, ast.If):
        return _branch(statement, scope, inside, tests, collected), ()
    if isinstance(statement, (ast.For, ast.AsyncFor, ast.While)):
        doubt = statement.test if isinstance(statement, ast.While) else statement.iter
        # Whether the else branch is run, the conditions around a break decide.
        breaks = [part.test for part in ast.walk(statement) if isinstance(part, ast.If) and _holds_break(part)]
        turn, after, exits = scope.copy(), (*tests, doubt, *breaks), (ast.Return, ast.Raise, ast.Assert)
        if not isinstance(statement, ast.While):
            _bind(statement.target, UNKNOWN, turn)
        left = [_run(statement.body, turn, inside, tests, collected), _run(statement.orelse, scope, inside, after, collected)]
        _merge(scope, [scope.copy(), turn], UNKNOWN)  # the first turn stands for all
        return (None if left != [False, False] and any(isinstance(part, exits) for part in ast.walk(statement)) else False), (doubt,)
    if isinstance(statement, (ast.Continue, ast.Break)):
        return True, ()  # the rest of the loop's body is left out
    if isinstance(statement, _MATCH):
        scopes = [scope.copy() for _case in statement.cases]  # type: ignore[attr-defined]
        doubt = _handed_on(statement.subject)  # type: ignore[attr-defined]
        left = [
            _run(case.body, own, inside, (*tests, doubt), collected)
            for case, own in zip(statement.cases, scopes)  # type: ignore[attr-defined]
        ]
        _merge(scope, [scope.copy(), *scopes], scope.value(doubt))
        return (False if set(left) <= {False} else None), (doubt,)
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        for item in statement.items:
            if item.optional_vars is not None:
                _bind(item.optional_vars, UNKNOWN, scope)
        return _run(statement.body, scope, inside, tests, collected), ()
    if isinstance(statement, ast.Try):
        return _try(statement, scope, inside, tests, collected), ()
    _assign(statement, scope)
    return False, ()


@lru_cache(maxsize=1024)
def _handed_on(subject: ast.expr) -> ast.expr:
    """What becomes of ``subject`` in code that is not looked at, such as the patterns of a match statement."""
    return ast.Call(ast.Name("match", ast.Load()), [subject], [])


def _holds_break(statement: ast.stmt) -> bool:
    return any(isinstance(part, ast.Break) for part in ast.walk(statement))


def _branch(statement: ast.If, scope: Scope, inside: _Conditions, tests: _Tests, collected: list[Step]) -> _Leaves:
    collected.append(Step(statement, inside, tests, scope.copy()))
    test, inside = scope.value(statement.test), (*inside, statement)
    if not isinstance(test, Unknown):
        return _run(statement.body if test else statement.orelse, scope, inside, tests, collected)
    tests, scopes = (*tests, statement.test), (scope.copy(), scope.copy())
    left = [_run(body, own, inside, tests, collected) for body, own in zip((statement.body, statement.orelse), scopes)]
    _merge(scope, [own for own, gone in zip(scopes, left) if gone is not True], test)
    return left[0] if left[0] is left[1] else None


def _try(statement: ast.Try, scope: Scope, inside: _Conditions, tests: _Tests, collected: list[Step]) -> _Leaves:
    """What happens without an exception: it is not the host that raises one unseen."""
    gone = _run([*statement.body, *statement.orelse], scope, inside, tests, collected)
    if gone is True and not all(_run(handler.body, scope.copy(), inside, tests, []) for handler in statement.handlers):
        gone = None
    return _run(statement.finalbody, scope, inside, tests, collected) or gone


def _merge(scope: Scope, branches: list[Scope], test: object) -> None:
    """What ``scope`` knows after one of ``branches``, which ``test`` chose, was run."""
    for name in {name for own in branches for name in own.values}:
        values = [own.values.get(name, UNKNOWN) for own in branches]
        same = all(_same(value, values[0]) for value in values)
        scope.values[name] = values[0] if same else _unknown_of([*values, test], UNKNOWN)


def _assign(statement: ast.stmt, scope: Scope) -> None:
    if isinstance(statement, ast.Assign):
        value = scope.value(statement.value)
        for target in statement.targets:
            _bind(target, value, scope)
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        _bind(statement.target, scope.value(statement.value), scope)
    elif isinstance(statement, ast.AugAssign):
        _bind(statement.target, scope.value(ast.BinOp(statement.target, statement.op, statement.value)), scope)
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        scope.values.update({bound_name(alias): alias for alias in statement.names})
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        for part in ast.walk(statement.value):  # a list may come back from there with other items
            if isinstance(part, ast.Name) and isinstance(scope.value(part), tuple):
                scope.values[part.id] = UNKNOWN
    elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        scope.values[statement.name] = Unknown(_speaks_of_architecture(statement))


def _bind(target: ast.expr, value: object, scope: Scope) -> None:
    """Give ``target`` a value; names in a tuple get an unknown one."""
    if isinstance(target, (ast.Tuple, ast.List)):
        for item in target.elts:
            _bind(item, value if isinstance(value, Unknown) else UNKNOWN, scope)
    elif isinstance(target, (ast.Starred, ast.Subscript)):
        _bind(target.value, UNKNOWN, scope)
    elif dotted_name(target):
        scope.values[dotted_name(target)] = value


def bound_name(alias: ast.alias) -> str:
    """The name that an import binds."""
    return alias.asname or alias.name.split(".", 1)[0]


def _own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement itself, not of the statements inside it."""
    for field in ast.iter_child_nodes(statement):
        if isinstance(field, ast.expr):
            yield field
        elif isinstance(field, ast.withitem):
            yield field.context_expr
