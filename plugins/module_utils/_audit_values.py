# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What expressions of Python sources mean on a host, as far as the file tells.

A name means what the file gives it. A name that the file is handed (a parameter, an import) means an architecture where
it is called like one: ``major``, ``sm_version``, ``is_sm90_supported``. Anything else stays unknown.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Callable, Optional, Union

from ansible_collections.blackwell.inference.plugins.module_utils._audit_excerpt import is_spelling
from ansible_collections.blackwell.inference.plugins.module_utils._predicate import Capability, FunctionNode, dotted_name


class Unknown:
    """The value of an expression that does not follow from the host.

    Args:
        architecture: Whether it speaks of one: then what depends on it is undecided.
    """

    def __init__(self, architecture: bool) -> None:
        self.architecture = architecture


_UNKNOWN, _UNDECIDED = Unknown(False), Unknown(True)


class Architecture(int):
    """A compute capability that code may compare as 120, as (12, 0) or as "sm_120a"."""

    capability: Capability

    def __new__(cls, capability: Capability) -> Architecture:
        """Return ``capability`` as the number major * 10 + minor."""
        self = super().__new__(cls, capability[0] * 10 + capability[1])
        self.capability = capability
        return self


_SPELLED = re.compile(r"(?:sm_?|compute_)?(\d{2,3})[af]?", re.IGNORECASE)
_PREFIX = r"_*(?:(?:device|dev|target|current|gpu|cuda|compute|runtime|host|sm|cc|cap|capability|arch|properties)_)*"
_MAJOR = re.compile(rf"{_PREFIX}(?<!cuda_)major", re.IGNORECASE)
_MINOR = re.compile(rf"{_PREFIX}(?<!cuda_)minor", re.IGNORECASE)
_WHOLE = re.compile(rf"{_PREFIX}(?:sm|sm_version|sm_arch|sm_num|arch|capability(?:_tuple|_int)?)", re.IGNORECASE)
_HOLDER = re.compile(r"prop|device|arch|cap|target|gpu|platform|(?:^|_)cc$", re.IGNORECASE)
_ASKS_WHOLE = re.compile(r"_?get_\w*(?:capability|sm_version|device_sm|arch)|\w*cuda_arch|_?\w*device_arch|_?current_arch", re.IGNORECASE)
_FLAG = re.compile(r"_*(?:is_\w*?|on_)?sm_?(\d{2,3}|\d\dx)([afx])?(?:_or_sm_?(\d{2,3}))?(?:_(\w+))?", re.IGNORECASE)
_NEWER_TOO = re.compile(r"newer|later|plus|min|above|ge\b")
_SAME = re.compile(r"(?:is_)?(?:supported|family|device|target|arch|gpu|capable|datacenter|only|range)")
_OTHER_VENDOR = re.compile(
    r"_*(?:is|use)_(?:hip|rocm|npu|xpu|musa|mps|hpu|cpu|gfx\w*|amd\w*|ascend\w*)(?:_supported|_available)?", re.IGNORECASE
)
_SAME_VENDOR = re.compile(r"_*is_(?:cuda|cuda_alike|nvidia)", re.IGNORECASE)
_FAMILIES: tuple[tuple[re.Pattern[str], Callable[[int], bool]], ...] = (
    (re.compile(r"_*is_(?:nvidia_)?hopper(?:_with_cuda_\w+|_supported)?", re.IGNORECASE), lambda major: major == 9),
    (re.compile(r"_*is_ampere(?:_with_cuda_\w+|_supported)?", re.IGNORECASE), lambda major: major == 8),
    (re.compile(r"_*is_blackwell(?:_supported)?", re.IGNORECASE), lambda major: major in (10, 11, 12)),
    (re.compile(r"_*is_arch_support_pdl", re.IGNORECASE), lambda major: major >= 9),
)
# `is_blackwell()` means the datacenter chips alone in this part of sglang, which has platform classes of its own.
_DATACENTER_ONLY = "sglang/multimodal_gen/"
_ASKS_AT_LEAST = frozenset({"has_device_capability", "is_device_capability_at_least"})
COPIES = frozenset({"tuple", "list", "set", "frozenset", "int", "str", "bool", "sorted"})
_FIXED: Mapping[str, object] = {"TYPE_CHECKING": False, "typing.TYPE_CHECKING": False, "__name__": "", "torch.version.hip": None}


@cache
def meaning(name: str, capability: Capability) -> object:
    """What a name that a file is handed stands for on a host; an Unknown where it is not called like an architecture."""
    major, minor = capability
    if _MAJOR.fullmatch(name):
        return major
    if _MINOR.fullmatch(name):
        return minor
    if _WHOLE.fullmatch(name):
        return Architecture(capability)
    if _OTHER_VENDOR.fullmatch(name):
        return False
    if _SAME_VENDOR.fullmatch(name):
        return True
    for pattern, admits in _FAMILIES:
        if pattern.fullmatch(name):
            return admits(major)
    flag = _FLAG.fullmatch(name)
    return _flagged(capability, *flag.groups()) if flag else _UNKNOWN


def _flagged(capability: Capability, number: str, suffix: Optional[str], other: Optional[str], rest: Optional[str]) -> object:
    """Whether a host is what ``is_sm<number><suffix>_<rest>`` asks for."""
    major, minor = capability
    if "x" in (number[-1].lower(), (suffix or "").lower()):
        return major == int(number.rstrip("xX"))
    rest = (rest or "").lower()
    if _NEWER_TOO.search(rest):
        return major * 10 + minor >= int(number)
    if rest and not _SAME.fullmatch(rest):
        return _UNDECIDED
    by_major = int(number) % 10 == 0 and not (number == "120" and (suffix or not rest))
    wanted = [int(item) for item in (number, other) if item]
    return any(item == major * 10 + minor or (by_major and item // 10 == major) for item in wanted)


class Reader:
    """What expressions of a file mean on a host. It is made for speed, and for names that the file does not explain.

    Args:
        capability: The host that is asked about.
        names: What names are bound to, attributes such as ``self.x`` included; None: it cannot be told.
        file: Path of the file, relative to site-packages.
    """

    def __init__(self, capability: Capability, names: Bindings, file: str) -> None:
        self.capability, self.names, self.file = capability, names, file
        self._worked_out: dict[int, object] = {}  # UNKNOWN while one is worked out: it may need itself

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
        return read(self, node) if read else _UNKNOWN

    def _constant(self, node: ast.Constant) -> object:
        return node.value

    def _name(self, node: ast.Name) -> object:
        name = node.id
        if name in _FIXED:
            return _FIXED[name]
        if name not in self.names:
            return meaning(name, self.capability)
        binding = self.names[name]
        if isinstance(binding, ast.alias):
            return meaning(binding.name.rpartition(".")[2], self.capability)
        return self._once(binding) if isinstance(binding, ast.expr) else _UNDECIDED if _speaks(name) else _UNKNOWN

    def _once(self, binding: ast.expr) -> object:
        if id(binding) not in self._worked_out:
            self._worked_out[id(binding)] = _UNKNOWN
            self._worked_out[id(binding)] = self.value(binding)
        return self._worked_out[id(binding)]

    def _attribute(self, node: ast.Attribute) -> object:
        dotted = dotted_name(node)
        if dotted in self.names:
            binding = self.names[dotted]
            return self._once(binding) if isinstance(binding, ast.expr) else _UNDECIDED if _speaks(node.attr) else _UNKNOWN
        if dotted in _FIXED:
            return _FIXED[dotted]
        if node.attr in ("major", "minor"):
            whole = self.value(node.value)
            whole = whole.capability if isinstance(whole, Architecture) else whole
            holder = node.value.func if isinstance(node.value, ast.Call) else node.value
            if not isinstance(whole, tuple) and not _HOLDER.search(last_name(holder)):
                return _UNKNOWN
            return (whole if isinstance(whole, tuple) else self.capability)[node.attr == "minor"]
        owner = dotted_name(node.value.func if isinstance(node.value, ast.Call) else node.value)
        if _WHOLE.fullmatch(node.attr) and owner not in ("self", "cls") and not _HOLDER.search(owner):
            return _UNKNOWN  # the architecture of something else
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
        if name == "get" and node.args and isinstance(function, ast.Attribute):
            return self._looked_up(function.value, node.args)
        if name in _ASKS_AT_LEAST and node.args:
            least = self.value(node.args[0])
            own = self.capability if isinstance(least, tuple) else Architecture(self.capability)
            return own >= least if isinstance(least, (int, tuple)) else _UNDECIDED  # type: ignore[operator]
        if name == "is_available" and dotted_name(function) == "torch.cuda.is_available":
            return True
        binding = self.names.get(name) if isinstance(function, ast.Name) else None
        if isinstance(binding, ast.alias):
            name = binding.name.rpartition(".")[2]
        elif isinstance(binding, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if id(binding) not in self._worked_out:
                self._worked_out[id(binding)] = _UNKNOWN
                self._worked_out[id(binding)] = self._returned(binding)
            value = self._worked_out[id(binding)]
            if not isinstance(value, Unknown):
                return value
        if _ASKS_WHOLE.fullmatch(name) or name == "to_int":
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
        keys, key = self.value(table), self.value(arguments[0])
        if not isinstance(keys, tuple) or isinstance(key, Unknown):
            return _UNKNOWN
        if any(equal(key, item) is not False for item in keys):
            return _UNKNOWN
        return self.value(arguments[1]) if len(arguments) > 1 else None

    def _returned(self, function: FunctionNode) -> object:
        """What a function of the file returns whatever it is handed."""
        handed = parameters(function)
        names = {name: value for name, value in {**self.names, **bindings(function.body)}.items() if name not in handed}
        inner = Reader(self.capability, names, self.file)
        inner._worked_out = self._worked_out
        values: list[object] = []
        if inner._run(function.body, values) is not True:
            values.append(None)
        known = [value for value in values if not isinstance(value, Unknown)]
        if not known or len(known) < len(values) or any(type(value) is not type(known[0]) or value != known[0] for value in known):
            return _UNDECIDED if any(isinstance(value, Unknown) and value.architecture for value in values) else _UNKNOWN
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
                gone = None if any(item is not False for item in left) else False
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
        return -value if isinstance(node.op, ast.USub) and isinstance(value, int) else _UNKNOWN

    def _sequence(self, node: Union[ast.Tuple, ast.List, ast.Set]) -> object:
        return tuple(self.value(item) for item in node.elts)

    def _dict(self, node: ast.Dict) -> object:
        return tuple(self.value(key) for key in node.keys if key is not None)

    def _subscript(self, node: ast.Subscript) -> object:
        whole, index = self.value(node.value), self.value(node.slice)
        whole = whole.capability if isinstance(whole, Architecture) else whole
        if not isinstance(whole, tuple) or not isinstance(index, int) or isinstance(node.value, ast.Dict):
            return whole if isinstance(whole, Unknown) else _UNKNOWN
        return whole[index] if -len(whole) <= index < len(whole) else _UNKNOWN

    def _arithmetic(self, node: ast.BinOp) -> object:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(left, Unknown) or isinstance(right, Unknown):
            return _UNDECIDED if getattr(left, "architecture", False) or getattr(right, "architecture", False) else _UNKNOWN
        calculate = _BINARY.get(type(node.op))
        if isinstance(left, tuple) and isinstance(right, tuple) and isinstance(node.op, ast.Add):
            return left + right
        if (
            calculate is None
            or not isinstance(left, int)
            or not isinstance(right, int)
            or (right == 0 and not isinstance(node.op, ast.Add))
        ):
            return _UNKNOWN
        return calculate(int(left), int(right))

    def _choice(self, node: ast.IfExp) -> object:
        truth = self.truth(node.test)
        if truth is not None:
            return self.value(node.body if truth else node.orelse)
        there = [branch for branch in (node.body, node.orelse) if not (isinstance(branch, ast.Constant) and branch.value is None)]
        return self.value(there[0]) if len(there) == 1 else _UNKNOWN  # what may be None is what it is otherwise

    def _comprehension(self, node: Union[ast.GeneratorExp, ast.ListComp]) -> object:
        """The items of something as they are, such as ``int(x) for x in capability``."""
        generator, item = node.generators[0], node.elt
        if isinstance(item, ast.Call) and last_name(item.func) in COPIES and len(item.args) == 1:
            item = item.args[0]
        as_they_are = len(node.generators) == 1 and not generator.ifs and dotted_name(item) == dotted_name(generator.target) != ""
        return self.value(generator.iter) if as_they_are else _UNKNOWN

    def _text(self, node: ast.JoinedStr) -> object:
        if not is_spelling(node):
            return _UNKNOWN
        return _joined(tuple(map(self.value, node.values)))

    def _formatted(self, node: ast.FormattedValue) -> object:
        return _UNKNOWN if node.format_spec or node.conversion not in _AS_IT_IS else self.value(node.value)

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
        return _UNKNOWN
    found = range(*numbers)
    return tuple(found) if len(found) <= _MOST_NUMBERS else _UNKNOWN


def _joined(parts: object) -> object:
    """The text of numbers and texts one after the other."""
    parts = parts.capability if isinstance(parts, Architecture) else parts
    if not isinstance(parts, tuple):
        return parts if isinstance(parts, Unknown) else _UNKNOWN
    unknown = [part for part in parts if isinstance(part, Unknown)]
    return "".join(map(str, parts)) if not unknown else _UNDECIDED if any(part.architecture for part in unknown) else _UNKNOWN


def _speaks(name: str) -> bool:
    return not isinstance(meaning(name, (12, 0)), Unknown)


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


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _compared(comparison: ast.cmpop, left: object, right: object) -> object:
    """True, False or an Unknown; an Architecture takes the form that the other side has."""
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        asked = getattr(left, "architecture", isinstance(left, Architecture)) or getattr(
            right, "architecture", isinstance(right, Architecture)
        )
        return _UNDECIDED if asked else _UNKNOWN
    if isinstance(comparison, (ast.Is, ast.IsNot)):
        return (left is right) is isinstance(comparison, ast.Is)
    if isinstance(comparison, (ast.In, ast.NotIn)):
        if isinstance(left, str) and isinstance(right, str):
            return (left in right) is isinstance(comparison, ast.In)
        if not isinstance(right, tuple):
            return _UNDECIDED
        answers = [equal(left, item) for item in right]
        found = True if True in answers else None if None in answers else False
        return _UNDECIDED if found is None else found is isinstance(comparison, ast.In)
    pair = _aligned(left, right)
    if isinstance(comparison, (ast.Eq, ast.NotEq)):
        same = left == right if pair is None and isinstance(left, str) and isinstance(right, str) else pair and pair[0] == pair[1]
        return _UNDECIDED if same is None else same is isinstance(comparison, ast.Eq)
    if pair is None:
        return _UNDECIDED
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
        spelled = _SPELLED.fullmatch(right)
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


# --- bindings ---------------------------------------------------------------------------------------------------

# What a name is bound to: an expression, a function, or an import; None: several things, or something that is not seen.
Binding = Union[ast.expr, ast.FunctionDef, ast.AsyncFunctionDef, ast.alias, None]
Bindings = Mapping[str, Binding]
Assignments = dict[str, list[Optional[ast.AST]]]


def bindings(body: Iterable[ast.stmt]) -> Bindings:
    """What the statements of ``body`` bind names to."""
    return told(assigned(body))


def parameters(function: FunctionNode) -> list[str]:
    """The names of the parameters of ``function``."""
    arguments = function.args
    return [item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def told(found: Assignments) -> Bindings:
    """The one thing that each name is bound to. A default that something else replaces does not count."""
    bound: dict[str, Binding] = {}
    for name, values in found.items():
        telling = [value for value in values if not _is_literal(value)] or values
        first = telling[0]
        same = len(telling) == 1 or all(value and first and ast.dump(value) == ast.dump(first) for value in telling)
        bound[name] = first if same and isinstance(first, (ast.expr, ast.FunctionDef, ast.AsyncFunctionDef, ast.alias)) else None
    return bound


def _is_literal(node: Optional[ast.AST]) -> bool:
    if isinstance(node, ast.Tuple):
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
                found.setdefault(alias.asname or alias.name.split(".", 1)[0], [alias])
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
    found: Assignments = {}
    _collect(body, found)
    return found


# --- what asks for an architecture -------------------------------------------------------------------------------------


def asks_architecture(node: Union[ast.Compare, ast.Call]) -> bool:
    """Whether ``node`` compares an architecture, or calls something that is named after one."""
    if isinstance(node, ast.Call):
        name = last_name(node.func)
        return name.startswith(("is_sm", "_is_sm")) and bool(_FLAG.fullmatch(name))
    operands = [node.left, *node.comparators]
    items = [item for operand in operands for item in (operand.elts if isinstance(operand, (ast.Tuple, ast.List, ast.Set)) else [operand])]
    texts = [item.value for item in items if isinstance(item, ast.Constant) and (item.value is None or isinstance(item.value, str))]
    if any(text is None or not _SPELLED.fullmatch(text) for text in texts) or any("model" in dotted_name(item).lower() for item in items):
        return False  # the architecture of a model, or whether there is one at all
    return any(map(_is_architecture, operands))


def _is_architecture(node: ast.expr) -> bool:
    """Whether ``node`` is the host's compute capability, or a part of it, by its name."""
    if isinstance(node, ast.Call) and last_name(node.func) in COPIES and len(node.args) == 1:
        return _is_architecture(node.args[0])
    if isinstance(node, ast.Call):
        name = last_name(node.func)
        return bool(_ASKS_WHOLE.fullmatch(name) or _WHOLE.fullmatch(name))
    if isinstance(node, ast.Subscript):
        return _is_architecture(node.value)
    if isinstance(node, ast.Tuple):
        return bool(node.elts) and all(map(_is_architecture, node.elts))
    if isinstance(node, ast.BinOp):
        return _is_architecture(node.left) or _is_architecture(node.right)
    if isinstance(node, ast.Attribute):
        owner = last_name(node.value.func if isinstance(node.value, ast.Call) else node.value)
        held = owner in ("self", "cls") or bool(_HOLDER.search(owner))
        return held and bool(_WHOLE.fullmatch(node.attr) or _MAJOR.fullmatch(node.attr) or _MINOR.fullmatch(node.attr))
    return isinstance(node, ast.Name) and bool(_MAJOR.fullmatch(node.id) or _MINOR.fullmatch(node.id) or _WHOLE.fullmatch(node.id))
