# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Evaluate arch gates: expressions and functions that depend on a GPU's compute capability.

Everything here is three-valued. An expression whose value does not follow from the host alone (the batch size, a
command line flag) is UNKNOWN, and ``False and UNKNOWN`` is still False: a gate is closed when it comes out False
whatever the unknown parts are.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Callable, NamedTuple, Optional, Union

from ansible_collections.blackwell.inference.plugins.module_utils._gpu import KNOWN_CAPABILITIES

Capability = tuple[int, int]
FunctionNode = Union[ast.FunctionDef, ast.AsyncFunctionDef]


class Unknown:
    """The value of an expression that does not follow from the host."""

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
    "is_sm90": _major(9),
    "is_sm100": _major(10),
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
        module: Expressions of module-level assignments, by name.
        assumed: Values of parameters and attributes on the path of interest, by dotted name, e.g.
            ``{"backend": "trtllm", "self._enable_multicast": False}``.
    """

    def __init__(self, host: Host, module: Mapping[str, ast.expr], assumed: Optional[Mapping[str, object]] = None) -> None:
        self.host = host
        self.module = module
        self.values: dict[str, object] = dict(assumed or {})
        self._resolving: set[str] = set()

    def copy(self) -> Scope:
        """A scope of its own for one branch of a condition."""
        return Scope(self.host, self.module, self.values)

    def value(self, node: ast.expr) -> object:
        """The value of ``node`` on this host, or UNKNOWN."""
        try:
            return self._value(node)
        except (TypeError, ValueError, IndexError, ZeroDivisionError, AttributeError):
            return UNKNOWN  # e.g. an ordering of None: it fails at run time too, and not because of the host

    def truth(self, node: ast.expr) -> Optional[bool]:
        """True, False, or None where the host does not decide."""
        value = self.value(node)
        return None if value is UNKNOWN else bool(value)

    def _value(self, node: ast.expr) -> object:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._name(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.BoolOp):
            return self._bool_op(node)
        if isinstance(node, ast.UnaryOp):
            operand = self._value(node.operand)
            return UNKNOWN if operand is UNKNOWN or type(node.op) not in _UNARY else _UNARY[type(node.op)](operand)
        if isinstance(node, ast.Compare):
            return self._compare(node)
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            items = [self._value(item) for item in node.elts]
            return UNKNOWN if any(item is UNKNOWN for item in items) else tuple(items)
        if isinstance(node, ast.Subscript):
            whole, index = self._value(node.value), self._value(node.slice)
            return UNKNOWN if whole is UNKNOWN or index is UNKNOWN else whole[index]  # type: ignore[index]
        if isinstance(node, ast.BinOp):
            left, right = self._value(node.left), self._value(node.right)
            if left is UNKNOWN or right is UNKNOWN or type(node.op) not in _BINARY:
                return UNKNOWN
            return _BINARY[type(node.op)](left, right)
        if isinstance(node, ast.IfExp):
            test = self.truth(node.test)
            return UNKNOWN if test is None else self._value(node.body if test else node.orelse)
        return UNKNOWN

    def _name(self, node: ast.expr) -> object:
        dotted = dotted_name(node)
        if dotted in self.values:
            return self.values[dotted]
        if isinstance(node, ast.Attribute) and _is_platform(node.value) and node.attr in _PLATFORM_ATTRIBUTES:
            return _PLATFORM_ATTRIBUTES[node.attr](self.host)
        if isinstance(node, ast.Name) and node.id in self.module and node.id not in self._resolving:
            self._resolving.add(node.id)
            try:
                return self._value(self.module[node.id])
            finally:
                self._resolving.discard(node.id)
        return UNKNOWN

    def _call(self, node: ast.Call) -> object:
        if any(isinstance(part, ast.Attribute) and part.attr == _MULTICAST_ATTRIBUTE for part in ast.walk(node)):
            return int(self.host.multicast)
        name = dotted_name(node.func).rsplit(".", 1)[-1]
        if name == "bool" and len(node.args) == 1:
            value = self._value(node.args[0])
            return UNKNOWN if value is UNKNOWN else bool(value)
        return _HELPERS[name](self.host) if name in _HELPERS else UNKNOWN

    def _bool_op(self, node: ast.BoolOp) -> object:
        settles = isinstance(node.op, ast.Or)  # True settles an `or`, False an `and`
        unknown, value = False, None
        for operand in node.values:
            value = self.value(operand)
            if value is UNKNOWN:
                unknown = True
            elif bool(value) is settles:
                return value
        return UNKNOWN if unknown else value

    def _compare(self, node: ast.Compare) -> object:
        left, unknown = self._value(node.left), False
        for comparison, comparator in zip(node.ops, node.comparators):
            right = self._value(comparator)
            if left is UNKNOWN or right is UNKNOWN:
                unknown = True
            elif not _COMPARISONS[type(comparison)](left, right):
                return False
            left = right
        return UNKNOWN if unknown else True


_UNARY: Mapping[type, Callable[..., object]] = {ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos}
_BINARY: Mapping[type, Callable[..., object]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
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


def every_host(module: Mapping[str, ast.expr], assumed: Optional[Mapping[str, object]] = None) -> list[Scope]:
    """A scope for each known compute capability."""
    return [Scope(Host(capability), module, assumed) for capability in KNOWN_CAPABILITIES]


def depends_on_host(node: ast.expr, scopes: Iterable[Scope]) -> bool:
    """Whether the value of ``node`` differs between ``scopes``, which stand for different hosts."""
    return len({repr(scope.value(node)) for scope in scopes}) > 1


def unresolved_architecture(node: ast.expr, scope: Scope) -> Optional[str]:
    """The first part of ``node`` that speaks of an architecture and has no value here, as source text."""
    for part in ast.walk(node):
        if isinstance(part, (ast.Name, ast.Attribute)):
            word = part.attr if isinstance(part, ast.Attribute) else part.id
            if _ARCHITECTURE_NAME.search(word) and not _resolved(part, node, scope):
                return ast.unparse(part)
    return None


def _resolved(part: ast.expr, whole: ast.expr, scope: Scope) -> bool:
    """Whether ``part``, or the smallest call or chain in ``whole`` around it, has a value."""
    if scope.value(part) is not UNKNOWN:
        return True
    return any(
        isinstance(around, (ast.Call, ast.Attribute, ast.Subscript)) and part is not around and part in ast.walk(around)
        for around in ast.walk(whole)
        if isinstance(around, ast.expr) and scope.value(around) is not UNKNOWN
    )


class Step(NamedTuple):
    """A raise, return, call or condition that a function runs through."""

    node: ast.AST
    inside: tuple[ast.If, ...]  # the conditional statements around it, outermost first
    undecided: tuple[ast.expr, ...]  # the conditions on the way that the host does not decide; none: it is certain
    scope: Scope  # what is known there


def steps(function: FunctionNode, scope: Scope) -> list[Step]:
    """The raises, returns, calls and conditions that ``function`` reaches on this host, in order."""
    collected: list[Step] = []
    _run(function.body, scope.copy(), (), (), collected)
    return collected


_Conditions = tuple[ast.If, ...]
_Tests = tuple[ast.expr, ...]


def _run(body: list[ast.stmt], scope: Scope, inside: _Conditions, tests: _Tests, collected: list[Step]) -> Optional[bool]:
    """Run ``body``: True where control certainly leaves the function in it, None where it may, False where not."""
    leaves: Optional[bool] = False
    for statement in body:
        for expression in _own_expressions(statement):
            collected.extend(Step(call, inside, tests, scope.copy()) for call in ast.walk(expression) if isinstance(call, ast.Call))
        if isinstance(statement, (ast.Raise, ast.Return)):
            collected.append(Step(statement, inside, tests, scope.copy()))
            return True
        gone: Optional[bool] = False
        if isinstance(statement, ast.If):
            gone = _branch(statement, scope, inside, tests, collected)
        elif isinstance(statement, (ast.For, ast.While)):
            _run(statement.body, scope, inside, tests, collected)  # the first turn stands for all
        elif isinstance(statement, (ast.With, ast.Try)):
            gone = _run(statement.body, scope, inside, tests, collected)
        else:
            _assign(statement, scope)
        if gone is True:
            return True
        if gone is None:
            leaves = None
            tests = (*tests, *(part.test for part in ast.walk(statement) if isinstance(part, ast.If)))
    return leaves


def _branch(statement: ast.If, scope: Scope, inside: _Conditions, tests: _Tests, collected: list[Step]) -> Optional[bool]:
    collected.append(Step(statement, inside, tests, scope.copy()))
    taken, inside = scope.truth(statement.test), (*inside, statement)
    if taken is not None:
        return _run(statement.body if taken else statement.orelse, scope, inside, tests, collected)
    tests, scopes = (*tests, statement.test), (scope.copy(), scope.copy())
    left = [_run(body, own, inside, tests, collected) for body, own in zip((statement.body, statement.orelse), scopes)]
    for name in {*scopes[0].values, *scopes[1].values}:
        values = [own.values.get(name, UNKNOWN) for own in scopes]
        scope.values[name] = values[0] if values[0] is values[1] else UNKNOWN
    return left[0] if left[0] is left[1] else None


def _assign(statement: ast.stmt, scope: Scope) -> None:
    if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        value = scope.value(statement.value)
        for target in targets:
            name = dotted_name(target)
            if name:
                scope.values[name] = value
            elif isinstance(target, (ast.Tuple, ast.List)):
                for item in target.elts:
                    scope.values[dotted_name(item)] = UNKNOWN
    elif isinstance(statement, ast.AugAssign):
        scope.values[dotted_name(statement.target)] = UNKNOWN


def _own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement itself, not of the statements inside it."""
    for field in ast.iter_child_nodes(statement):
        if isinstance(field, ast.expr):
            yield field
        elif isinstance(field, ast.withitem):
            yield field.context_expr
