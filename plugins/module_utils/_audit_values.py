# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What expressions of Python sources mean on a host, as far as the file tells: a name means what the file gives it."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Callable, Optional, Union

from ansible_collections.blackwell.inference.plugins.module_utils._audit_bindings import Bindings, Imported, bindings, literals, parameters
from ansible_collections.blackwell.inference.plugins.module_utils._audit_names import (
    ASKS_WHOLE,
    COPIES,
    HOLDER,
    OTHERS,
    SPELLED,
    UNDECIDED,
    UNKNOWN,
    WHOLE,
    Architecture,
    Unknown,
    is_spelling,
    last_name,
    meaning,
    speaks,
)
from ansible_collections.blackwell.inference.plugins.module_utils._predicate import Capability, FunctionNode, dotted_name

# `is_blackwell()` means the datacenter chips alone in this part of sglang, which has platform classes of its own.
_DATACENTER_ONLY = "sglang/multimodal_gen/"
_OF_OTHER = re.compile(rf"{OTHERS}|^shape$", re.IGNORECASE)
_ASKS_AT_LEAST = frozenset({"has_device_capability", "is_device_capability_at_least"})
_FIXED: Mapping[str, object] = {"TYPE_CHECKING": False, "typing.TYPE_CHECKING": False, "__name__": "", "torch.version.hip": None}


Lookup = Callable[[Imported], Optional[ast.expr]]


class Keys(tuple[object, ...]):
    """The keys of a table."""


class Reader:
    """What expressions of a file mean on a host. It is made for speed, and for names that the file does not explain.

    Args:
        capability: The host that is asked about.
        names: What names are bound to, attributes such as ``self.x`` included; None: it cannot be told.
        file: Path of the file, relative to site-packages.
        constants: Tells what an imported constant is bound to in its file.
    """

    def __init__(self, capability: Capability, names: Bindings, file: str, constants: Lookup = lambda name: None) -> None:
        self.capability, self.names, self.file, self._constants = capability, names, file, constants
        # What was worked out, by what and for which call; UNKNOWN while it is worked out, since it may need itself.
        self._worked_out: dict[tuple[int, int], object] = {}
        self._call_of = 0

    def truth(self, node: ast.expr) -> Optional[bool]:
        """True, False, or None where the host does not decide."""
        value = self.value(node)
        return None if isinstance(value, Unknown) else bool(value)

    def leaning(self, node: ast.expr) -> Optional[bool]:
        """The same as far as the host has a say: operands of ``and`` and ``or`` that are unknown do not count."""
        if isinstance(node, ast.BoolOp):
            known = [value for value in map(self.leaning, node.values) if value is not None]
            return None if not known else any(known) if isinstance(node.op, ast.Or) else all(known)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            value = self.leaning(node.operand)
            return None if value is None else not value
        return self.truth(node)

    def value(self, node: ast.expr) -> object:
        """The value of ``node``, or an Unknown."""
        read = _READERS.get(type(node))
        return read(self, node) if read else UNKNOWN

    def _constant(self, node: ast.Constant) -> object:
        return node.value

    def _name(self, node: ast.Name) -> object:
        name = node.id
        if name in _FIXED:
            return _FIXED[name]
        if name not in self.names:
            return meaning(name, self.capability)
        binding = self.names[name]
        if isinstance(binding, Imported):
            constant = self._constants(binding)
            return meaning(binding.name.rpartition(".")[2], self.capability) if constant is None else self._once(constant)
        if not isinstance(binding, ast.expr):
            return UNDECIDED if speaks(name) else UNKNOWN
        value = self._once(binding)
        # What cannot be followed is what it is called, unless it is seen to be the version of something else.
        return (
            value if not isinstance(value, Unknown) or value.architecture or self._is_of_other(binding) else meaning(name, self.capability)
        )

    def _is_of_other(self, binding: ast.expr) -> bool:
        bound = (self.names.get(part.id) for part in walk(binding) if isinstance(part, ast.Name))
        return any(_names_other(part) for part in (binding, *bound) if isinstance(part, ast.expr))

    def _once(self, binding: ast.expr) -> object:
        key = id(binding), self._call_of
        if key not in self._worked_out:
            self._worked_out[key] = UNKNOWN
            self._worked_out[key] = self.value(binding)
        return self._worked_out[key]

    def _attribute(self, node: ast.Attribute) -> object:
        dotted = dotted_name(node)
        binding = self.names.get(dotted)
        if isinstance(binding, (ast.FunctionDef, ast.AsyncFunctionDef)):
            value = self._answer(binding, {}) if _is_property(binding) else UNKNOWN
            if not isinstance(value, Unknown):
                return value
        elif dotted in self.names:
            return self._once(binding) if isinstance(binding, ast.expr) else UNDECIDED if speaks(node.attr) else UNKNOWN
        if dotted in _FIXED:
            return _FIXED[dotted]
        spelled = SPELLED.fullmatch(node.attr)
        if spelled and last_name(node.value) == "Arch":  # CuTe's names for architectures
            return int(spelled[1])
        if node.attr in ("major", "minor"):
            whole = self.value(node.value)
            whole = whole.capability if isinstance(whole, Architecture) else whole
            holder = node.value.func if isinstance(node.value, ast.Call) else node.value
            if not isinstance(whole, tuple) and not HOLDER.search(last_name(holder)):
                return UNKNOWN
            return (whole if isinstance(whole, tuple) else self.capability)[node.attr == "minor"]
        owner = dotted_name(node.value.func if isinstance(node.value, ast.Call) else node.value)
        if WHOLE.fullmatch(node.attr) and owner not in ("self", "cls") and not HOLDER.search(owner):
            return UNKNOWN  # the architecture of something else
        return meaning(node.attr, self.capability)

    def _call(self, node: ast.Call) -> object:
        function = self._aliased(node.func)
        name = last_name(function)
        if name == "is_blackwell" and isinstance(function, ast.Attribute) and self.file.startswith(_DATACENTER_ONLY):
            return self.capability[0] == 10
        if name in COPIES and len(node.args) == 1:
            return _copied(name, self.value(node.args[0]))
        if name == "map" and len(node.args) == 2:  # of a capability, to int or str
            return self.value(node.args[1])
        if name == "join" and len(node.args) == 1:
            return _joined(self.value(node.args[0]))
        if name == "range":
            return _ranged([self.value(argument) for argument in node.args])
        if name in ("any", "all") and len(node.args) == 1 and isinstance(node.args[0], (ast.Tuple, ast.List, ast.Set)):
            return self._bool_op(ast.BoolOp(ast.Or() if name == "any" else ast.And(), node.args[0].elts))
        if name in ("any", "all") and len(node.args) == 1 and isinstance(node.args[0], ast.GeneratorExp):
            generator = node.args[0].generators[0]
            if last_name(generator.iter) == "TARGET_CUDA_ARCHS" and not generator.ifs:  # what is built for is what there is
                return self.value(node.args[0].elt)
        if name == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant) and isinstance(node.args[1].value, str):
            return self._attribute(ast.Attribute(node.args[0], node.args[1].value, ast.Load()))
        if name == "get" and node.args and isinstance(function, ast.Attribute):
            return self._looked_up(function.value, node.args)
        if name in _ASKS_AT_LEAST and node.args:
            least = self.value(node.args[0])
            own = self.capability if isinstance(least, tuple) else Architecture(self.capability)
            return own >= least if isinstance(least, (int, tuple)) else UNDECIDED  # type: ignore[operator]
        if name == "keys" and isinstance(function, ast.Attribute) and not node.args:
            return self.value(function.value)
        if name == "is_available" and dotted_name(function) == "torch.cuda.is_available":
            return True
        binding = self.names.get(dotted_name(function))
        if isinstance(binding, Imported):
            name = binding.name.rpartition(".")[2]
        elif isinstance(binding, (ast.FunctionDef, ast.AsyncFunctionDef)):
            value = self._answer(binding, literals(binding, node))
            if not isinstance(value, Unknown):
                return value
        if ASKS_WHOLE.fullmatch(name) or name == "to_int":
            return Architecture(self.capability)
        return meaning(name, self.capability)

    def _aliased(self, function: ast.expr) -> ast.expr:
        """What is called where ``function`` is another name for it."""
        seen: set[str] = set()
        while isinstance(function, ast.Name) and function.id not in seen:
            seen.add(function.id)
            binding = self.names.get(function.id)
            if not isinstance(binding, (ast.Name, ast.Attribute)):
                break
            function = binding
        return function

    def _looked_up(self, table: ast.expr, arguments: list[ast.expr]) -> object:
        """What ``table.get(key)`` gives, as far as it is known: None where the key is not there."""
        if not self.lacks(table, arguments[0]):
            return UNKNOWN
        return self.value(arguments[1]) if len(arguments) > 1 else None

    def lacks(self, table: ast.expr, key: ast.expr) -> bool:
        """Whether a table is known not to have an entry for ``key``."""
        keys, wanted = self.value(table), self.value(key)
        return isinstance(keys, Keys) and not isinstance(wanted, Unknown) and all(equal(wanted, item) is False for item in keys)

    def _answer(self, function: FunctionNode, handed: Mapping[str, ast.expr]) -> object:
        """What a function of the file returns, whatever it is handed besides the literals ``handed``."""
        key = id(function), id(next(iter(handed.values()))) if handed else 0
        if key not in self._worked_out:
            self._worked_out[key] = UNKNOWN
            self._worked_out[key] = self._returned(function, handed, key[1])
        return self._worked_out[key]

    def _returned(self, function: FunctionNode, handed: Mapping[str, ast.expr], call: int) -> object:
        own = bindings(function.body)
        names = {name: value for name, value in {**self.names, **own}.items() if name not in parameters(function)}
        names.update((name, value) for name, value in handed.items() if name not in own)
        inner = Reader(self.capability, names, self.file, self._constants)
        inner._worked_out, inner._call_of = self._worked_out, call
        values: list[object] = []
        if inner._run(function.body, values) is not True:
            values.append(None)
        known = [value for value in values if not isinstance(value, Unknown)]
        if not known or len(known) < len(values) or any(type(value) is not type(known[0]) or value != known[0] for value in known):
            return UNDECIDED if any(isinstance(value, Unknown) and value.architecture for value in values) else UNKNOWN
        return known[0]

    def _run(self, body: list[ast.stmt], values: list[object]) -> Optional[bool]:
        """Collect what ``body`` may return; True where it leaves the function certainly, None where it may."""
        leaves: Optional[bool] = False
        for statement in body:
            gone: Optional[bool] = False
            if isinstance(statement, ast.Return):
                values.append(self.value(statement.value) if statement.value else None)
                return True
            if isinstance(statement, ast.Raise):
                return True
            if isinstance(statement, ast.If):
                truth = self.truth(statement.test)
                blocks = [block for taken, block in ((True, statement.body), (False, statement.orelse)) if truth is not (not taken)]
                left = [self._run(block, values) for block in blocks]
                gone = True if all(left) else None if any(item is not False for item in left) else False
            elif isinstance(statement, (ast.For, ast.While, ast.With, ast.Try)):
                blocks = [statement.body, *(handler.body for handler in getattr(statement, "handlers", ()))]
                left = [self._run(block, values) for block in blocks]
                whole = isinstance(statement, (ast.With, ast.Try)) and all(left)
                gone = True if whole else None if any(item is not False for item in left) else False
            if gone:
                return True
            leaves = None if gone is None else leaves
        return leaves

    def _bool_op(self, node: ast.BoolOp) -> object:
        settles = isinstance(node.op, ast.Or)
        unknown: Optional[Unknown] = None
        value: object = None
        for operand in node.values:
            value = self.value(operand)
            if isinstance(value, Unknown):
                unknown = value if value.architecture or unknown is None else unknown
            elif bool(value) is settles:
                return value
        return value if unknown is None else unknown

    def _unary(self, node: ast.UnaryOp) -> object:
        value = self.value(node.operand)
        if isinstance(value, Unknown):
            return value
        if isinstance(node.op, ast.Not):
            return not value
        return -value if isinstance(node.op, ast.USub) and isinstance(value, int) else UNKNOWN

    def _sequence(self, node: Union[ast.Tuple, ast.List, ast.Set]) -> object:
        return tuple(self.value(item) for item in node.elts)

    def _dict(self, node: ast.Dict) -> object:
        return Keys(self.value(key) for key in node.keys if key is not None)

    def _subscript(self, node: ast.Subscript) -> object:
        whole, index = self.value(node.value), self.value(node.slice)
        whole = whole.capability if isinstance(whole, Architecture) else whole
        if not isinstance(whole, tuple) or not isinstance(index, int) or isinstance(whole, Keys):
            return whole if isinstance(whole, Unknown) else UNKNOWN
        return whole[index] if -len(whole) <= index < len(whole) else UNKNOWN

    def _arithmetic(self, node: ast.BinOp) -> object:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(left, Unknown) or isinstance(right, Unknown):
            return UNDECIDED if getattr(left, "architecture", False) or getattr(right, "architecture", False) else UNKNOWN
        calculate = _BINARY.get(type(node.op))
        if isinstance(left, tuple) and isinstance(right, tuple) and isinstance(node.op, ast.Add):
            return left + right
        if (
            calculate is None
            or not isinstance(left, int)
            or not isinstance(right, int)
            or (right == 0 and not isinstance(node.op, ast.Add))
        ):
            return UNKNOWN
        return calculate(int(left), int(right))

    def _choice(self, node: ast.IfExp) -> object:
        truth = self.truth(node.test)
        if truth is not None:
            return self.value(node.body if truth else node.orelse)
        there = [branch for branch in (node.body, node.orelse) if not (isinstance(branch, ast.Constant) and branch.value is None)]
        return self.value(there[0]) if len(there) == 1 else UNKNOWN  # what may be None is what it is otherwise

    def _comprehension(self, node: Union[ast.GeneratorExp, ast.ListComp]) -> object:
        """The items of something as they are, such as ``int(x) for x in capability``."""
        generator, item = node.generators[0], node.elt
        if isinstance(item, ast.Call) and last_name(item.func) in COPIES and len(item.args) == 1:
            item = item.args[0]
        as_they_are = len(node.generators) == 1 and not generator.ifs and dotted_name(item) == dotted_name(generator.target) != ""
        return self.value(generator.iter) if as_they_are else UNKNOWN

    def _text(self, node: ast.JoinedStr) -> object:
        if not is_spelling(node):
            return UNKNOWN
        return _joined(tuple(map(self.value, node.values)))

    def _formatted(self, node: ast.FormattedValue) -> object:
        return UNKNOWN if node.format_spec or node.conversion not in _AS_IT_IS else self.value(node.value)

    def _walrus(self, node: ast.NamedExpr) -> object:
        return self.value(node.value)

    def _compare(self, node: ast.Compare) -> object:
        items = [self.value(item) for item in (node.left, *node.comparators)]
        unknown: Optional[Unknown] = None
        for comparison, left, right in zip(node.ops, items, items[1:]):
            answer = _compared(comparison, left, right)
            if answer is False:
                return False
            unknown = answer if isinstance(answer, Unknown) else unknown
        return True if unknown is None else unknown


_READERS: Mapping[type, Callable[..., object]] = {
    ast.Constant: Reader._constant, ast.Name: Reader._name, ast.Attribute: Reader._attribute, ast.Call: Reader._call,
    ast.BoolOp: Reader._bool_op, ast.UnaryOp: Reader._unary, ast.Compare: Reader._compare, ast.IfExp: Reader._choice,
    ast.Tuple: Reader._sequence, ast.List: Reader._sequence, ast.Set: Reader._sequence, ast.Dict: Reader._dict,
    ast.Subscript: Reader._subscript, ast.BinOp: Reader._arithmetic, ast.NamedExpr: Reader._walrus,
    ast.GeneratorExp: Reader._comprehension, ast.ListComp: Reader._comprehension, ast.JoinedStr: Reader._text,
    ast.FormattedValue: Reader._formatted,
}  # fmt: skip
_BINARY: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


_AS_IT_IS = (-1, ord("s"))  # the conversions of a formatted value that leave a text as it is


@lru_cache(maxsize=1 << 12)
def _names_other(node: ast.expr) -> bool:
    """Whether an expression names the version of something else."""
    return any(_OF_OTHER.search(getattr(part, "attr", getattr(part, "id", ""))) for part in walk(node))


def _is_property(function: FunctionNode) -> bool:
    return any(last_name(decorator) in ("property", "cached_property") for decorator in function.decorator_list)


def _copied(kind: str, value: object) -> object:
    """What ``int(value)`` and the like give; an architecture and a sequence stay what they are."""
    if isinstance(value, Unknown):
        return value
    if kind == "int" and isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value):
        return int(value)
    return bool(value) if kind == "bool" else value


_MOST_NUMBERS = 200


def _ranged(ends: list[object]) -> object:
    """The numbers of ``range(*ends)``, where there are few."""
    numbers = [int(end) for end in ends if isinstance(end, int)]
    if len(numbers) < len(ends) or not 1 <= len(ends) <= 2:
        return UNKNOWN
    found = range(*numbers)
    return tuple(found) if len(found) <= _MOST_NUMBERS else UNKNOWN


def _joined(parts: object) -> object:
    """The text of numbers and texts one after the other."""
    parts = parts.capability if isinstance(parts, Architecture) else parts
    if not isinstance(parts, tuple):
        return parts if isinstance(parts, Unknown) else UNKNOWN
    unknown = [part for part in parts if isinstance(part, Unknown)]
    return "".join(map(str, parts)) if not unknown else UNDECIDED if any(part.architecture for part in unknown) else UNKNOWN


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and everything in it but operators and contexts: what ast.walk gives, in another order and in a third of the time."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        for field in _PARTS[type(node)]:
            value = getattr(node, field)
            if isinstance(value, list):
                pending.extend(filter(None, value))  # `**rest` in a dict has no key
            elif value is not None:
                pending.append(value)


_NO_PART = frozenset({"ctx", "op", "ops", "id", "attr", "arg", "kind", "conversion", "is_async", "str"})


class _Parts(dict[type, tuple[str, ...]]):
    """For each kind of expression, the fields that hold expressions."""

    def __missing__(self, kind: type[ast.AST]) -> tuple[str, ...]:
        self[kind] = () if kind is ast.Constant else tuple(field for field in kind._fields if field not in _NO_PART)
        return self[kind]


_PARTS = _Parts()


def _compared(comparison: ast.cmpop, left: object, right: object) -> object:
    """True, False or an Unknown; an Architecture takes the form that the other side has."""
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        asked = getattr(left, "architecture", isinstance(left, Architecture)) or getattr(
            right, "architecture", isinstance(right, Architecture)
        )
        return UNDECIDED if asked else UNKNOWN
    if isinstance(comparison, (ast.Is, ast.IsNot)):
        return (left is right) is isinstance(comparison, ast.Is)
    if isinstance(comparison, (ast.In, ast.NotIn)):
        if isinstance(left, str) and isinstance(right, str):
            return (left in right) is isinstance(comparison, ast.In)
        if not isinstance(right, tuple):
            return UNDECIDED
        answers = [equal(left, item) for item in right]
        found = True if True in answers else None if None in answers else False
        return UNDECIDED if found is None else found is isinstance(comparison, ast.In)
    pair = _aligned(left, right)
    if isinstance(comparison, (ast.Eq, ast.NotEq)):
        same = left == right if pair is None and isinstance(left, str) and isinstance(right, str) else pair and pair[0] == pair[1]
        return UNDECIDED if same is None else same is isinstance(comparison, ast.Eq)
    if pair is None:
        return UNDECIDED
    if isinstance(comparison, (ast.LtE, ast.GtE)) and pair[0] == pair[1]:
        return True
    return pair[0] < pair[1] if isinstance(comparison, (ast.Lt, ast.LtE)) else pair[0] > pair[1]  # type: ignore[operator]


def equal(one: object, other: object) -> Optional[bool]:
    if isinstance(one, Unknown) or isinstance(other, Unknown):
        return None
    if isinstance(one, str) and isinstance(other, str):
        return one == other
    pair = _aligned(one, other)
    return None if pair is None else pair[0] == pair[1]


_Comparable = Union[int, tuple[object, ...]]


def _aligned(left: object, right: object) -> Optional[tuple[_Comparable, _Comparable]]:
    """Both values in one form; None where they cannot be compared."""
    if isinstance(right, Architecture) and not isinstance(left, Architecture):
        turned = _aligned(left=right, right=left)
        return turned and (turned[1], turned[0])
    if isinstance(left, Architecture) and isinstance(right, str):
        spelled = SPELLED.fullmatch(right)
        return (int(left), int(spelled[1])) if spelled else None
    if isinstance(left, Architecture) and isinstance(right, tuple):
        return left.capability, right
    if isinstance(left, Architecture) and isinstance(right, int) and not isinstance(right, Architecture):
        form = next(
            (value for low, high, value in ((5, 14, left // 10), (50, 140, int(left)), (500, 1400, left * 10)) if low <= right < high), None
        )
        return None if form is None else (form, right)
    if isinstance(left, tuple) and isinstance(right, tuple) and all(isinstance(item, int) for item in (*left, *right)):
        return left, right
    return (left, right) if isinstance(left, int) and isinstance(right, int) else None
