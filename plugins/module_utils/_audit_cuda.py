# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Find the gates in CUDA and C++ sources that the preprocessor keeps from a host.

Expressions are three-valued, as in Python sources: what does not follow from the host (a compiler flag, the version
of the toolkit) is None, and None decides nothing. A macro that a header defines under an architecture condition means
that condition, whatever it is called.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple, Optional, Union

from ansible_collections.blackwell.inference.plugins.module_utils._audit_hosts import REFERENCE, is_gate, is_left_over
from ansible_collections.blackwell.inference.plugins.module_utils._audit_refusals import LONGEST_REFUSAL, NOISE, only_directs, refuses
from ansible_collections.blackwell.inference.plugins.module_utils._c_expression import Meaning, Value, evaluate, parse
from ansible_collections.blackwell.inference.plugins.module_utils._predicate import Capability

Buffer = Union[bytes, bytearray]

# --- macros -----------------------------------------------------------------------------------------------------


class Definition(NamedTuple):
    """One ``#define``."""

    conditions: tuple[tuple[str, bool], ...]  # the expressions around it, each with the value that it must have
    value: str


Definitions = Mapping[str, tuple[Definition, ...]]

# What nvcc defines, or does not define, whatever the host is.
_FIXED: Mapping[str, int] = {"__CUDACC__": 1, "__NVCC__": 1, "_CCCL_CUDA_COMPILER(NVCC)": 1, "_CCCL_CUDA_COMPILER(NVHPC)": 0}
_NEVER_DEFINED = frozenset(
    {
        "__HIP_PLATFORM_AMD__",
        "__HIPCC__",
        "__HIP__",
        "USE_ROCM",
        "USE_MUSA",
        "_MSC_VER",
        "__CUDACC_RTC__",
        "__CLION_IDE__",
        "__INTELLISENSE__",
        "__VSCODE_IDE__",
    }
)
_ARCHITECTURE_MACRO = re.compile(r"__CUDA_ARCH(?:_SPECIFIC|_FAMILY_SPECIFIC)?__|SGL_CUDA_ARCH")
_FEATURE_MACRO = re.compile(r"__CUDA_ARCH_FEAT_SM(\d+)_ALL")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@cache
def identifiers(text: str) -> frozenset[str]:
    """The names in a C expression."""
    return frozenset(_IDENTIFIER.findall(text))


def names_architecture(names: frozenset[str]) -> bool:
    """Whether one of ``names`` is what the compiler calls the architecture."""
    return any(name.startswith("__CUDA_ARCH") or name == "SGL_CUDA_ARCH" for name in names)


class Macros:
    """What macros mean for device code that is compiled for a host, with the suffix (a or f) that the host has.

    Args:
        shared: Definitions of all files, by name.
    """

    def __init__(self, shared: Definitions) -> None:
        self._definitions = shared
        self._outer: Optional[Macros] = None
        self._defined: dict[tuple[str, Capability], Optional[bool]] = {}
        self._values: dict[tuple[str, Capability], Value] = {}
        self._truths: dict[tuple[str, Capability], Optional[bool]] = {}

    def within(self, local: Definitions) -> Macros:
        """The same, where the definitions of one file win."""
        inner = Macros(local)
        inner._outer = self
        return inner

    def depending(self) -> frozenset[str]:
        """The names of those that do not mean the same on every host."""
        return frozenset(
            name for name in self._definitions if len({(self._is_defined(name, host), self._value(name, host)) for host in REFERENCE}) > 1
        )

    def truth(self, text: str, capability: Capability) -> Optional[bool]:
        """Whether the condition ``text`` holds on a host; None where the host does not decide."""
        if self._outer and identifiers(text).isdisjoint(self._definitions):
            return self._outer.truth(text, capability)
        key = text, capability
        if key not in self._truths:
            value = self._evaluated(text, capability)
            self._truths[key] = None if value is None else bool(value)
        return self._truths[key]

    def _is_defined(self, name: str, capability: Capability) -> Optional[bool]:
        if name in _FIXED or _ARCHITECTURE_MACRO.fullmatch(name):
            return True
        feature = _FEATURE_MACRO.fullmatch(name)
        if feature:
            return feature[1] == "{}{}".format(*capability)
        if name in _NEVER_DEFINED:
            return False
        key = name, capability
        if key not in self._defined:
            self._defined[key] = False  # while it is looked up: `#ifndef X` around `#define X`
            holding = [self._holds(definition, capability) for definition in self._found(name)]
            self._defined[key] = True if True in holding else False if holding and None not in holding else None
        return self._defined[key]

    def _value(self, name: str, capability: Capability) -> Value:
        if name in _FIXED:
            return _FIXED[name]
        if _ARCHITECTURE_MACRO.fullmatch(name):
            return capability[0] * 100 + capability[1] * 10
        if _FEATURE_MACRO.fullmatch(name) or name in _NEVER_DEFINED:
            return int(bool(self._is_defined(name, capability)))
        key = name, capability
        if key not in self._values:
            self._values[key] = None  # while it is looked up
            self._values[key] = self._defined_value(name, capability)
        return self._values[key]

    def _defined_value(self, name: str, capability: Capability) -> Value:
        definitions = self._found(name)
        holding = [(self._holds(definition, capability), definition) for definition in definitions]
        certain = [definition for holds, definition in holding if holds]
        possible = {definition.value for holds, definition in holding if holds is not False}
        if not possible:
            return 0 if definitions else None  # C: a macro that is not defined is 0
        if len(possible) > 1 and not certain:
            return None
        text = (certain[-1].value if certain else possible.pop()) or "1"
        return self._evaluated(text, capability)

    def _evaluated(self, text: str, capability: Capability) -> Value:
        return evaluate(parse(text), Meaning(lambda name: self._value(name, capability), lambda name: self._is_defined(name, capability)))

    def _found(self, name: str) -> tuple[Definition, ...]:
        name = name.partition("(")[0]
        return self._definitions.get(name) or (self._outer._found(name) if self._outer else ())

    def _holds(self, definition: Definition, capability: Capability) -> Optional[bool]:
        answers = []
        for text, wanted in definition.conditions:
            truth = self.truth(text, capability)
            answers.append(None if truth is None else truth is wanted)
        return False if False in answers else None if None in answers else True


# --- conditional groups -----------------------------------------------------------------------------------------

# Condition lines alone, to look a file through; and every directive that a structure is made of.
CONDITION = re.compile(rb"#[ \t]*(?:el)?if(?:n?def)?\b[ \t]*((?:[^\\\n]+|\\\r?\n|\\)*)")
_DIRECTIVE = re.compile(rb"#[ \t]*(ifdef|ifndef|if|elifdef|elifndef|elif|else|endif|define)\b[ \t]*((?:[^\\\n]+|\\\r?\n|\\)*)")
_DEFINE = re.compile(r"(\w+)(?:\([^)]*\))?\s*(.*)", re.DOTALL)
_Conditions = tuple[tuple[str, bool], ...]


class Group(NamedTuple):
    """An ``#if`` with its ``#elif``, ``#else`` and ``#endif``."""

    conditions: tuple[str, ...]  # C expressions, one a branch; empty for #else
    offsets: tuple[tuple[int, int], ...]  # of each directive, #endif included: its start and its end
    around: _Conditions  # the conditions around it, each with the value that it must have


class Structure(NamedTuple):
    """What the directives of a file say about the architecture."""

    groups: list[Group]
    definitions: dict[str, tuple[Definition, ...]]  # macros that depend on it
    names: frozenset[str]  # every other name that its conditions ask for


@cache
def _condition(directive: bytes, raw: bytes) -> str:
    """The expression of ``#if``, ``#ifdef``, ``#ifndef`` and their ``#el`` forms."""
    text = NOISE.sub(" ", raw.decode("utf-8", "replace")).strip()
    if directive.endswith(b"def"):
        name = text.split(None, 1)[0] if text else ""
        return f"!defined({name})" if directive.endswith(b"ndef") else f"defined({name})"
    return text


class _Open:
    """A group that is not ended yet."""

    __slots__ = ("asks", "conditions", "offsets")

    def __init__(self) -> None:
        self.conditions: list[str] = []
        self.offsets: list[tuple[int, int]] = []
        self.asks = False  # for the architecture


def structure(raw: Buffer, end: int, macros: frozenset[str] = frozenset()) -> Structure:
    """Read the directives of ``raw[:end]``; a group that does not end in it is left out.

    Args:
        raw: The file.
        end: Its length.
        macros: Names of macros that depend on the architecture, besides the compiler's own.
    """
    groups: list[Group] = []
    definitions: dict[str, tuple[Definition, ...]] = {}
    depending, conditions = set(macros), set()
    stack: list[_Open] = []
    for match in _DIRECTIVE.finditer(raw, 0, end):
        start = match.start()
        if start and raw[start - 1] != 10 and raw[raw.rfind(b"\n", 0, start) + 1 : start].strip():
            continue
        word = match[1]
        if word == b"endif":
            if stack:
                ended = stack.pop()
                if ended.asks:
                    groups.append(Group(tuple(ended.conditions), (*ended.offsets, (start, start)), _around(stack)))
        elif word == b"define":
            if b"ARCH" in match[2] or any(around.asks for around in stack):
                named = _DEFINE.match(NOISE.sub(" ", match[2].decode("utf-8", "replace")))
                if named and not named[1].startswith("__CUDA_ARCH"):
                    definitions[named[1]] = (*definitions.get(named[1], ()), Definition(_around(stack), named[2].strip()))
                    depending.add(named[1])
        else:
            if word.startswith(b"if"):
                stack.append(_Open())
            if stack:
                condition = "" if word == b"else" else _condition(word, match[2])
                conditions.add(condition)
                stack[-1].conditions.append(condition)
                stack[-1].offsets.append((start, match.end()))
                if not stack[-1].asks and (_asks(condition) or (depending and not identifiers(condition).isdisjoint(depending))):
                    stack[-1].asks = True
    names = frozenset(name for condition in conditions for name in identifiers(condition) if not name.startswith("__CUDA_ARCH"))
    return Structure(groups, definitions, names)


def _around(stack: list[_Open]) -> _Conditions:
    """The conditions of what comes next inside the groups of ``stack``."""
    found: list[tuple[str, bool]] = []
    for group in stack:
        found.extend((condition, False) for condition in group.conditions[:-1])
        if group.conditions[-1]:
            found.append((group.conditions[-1], True))
    return tuple(found)


@cache
def _asks(condition: str) -> bool:
    return names_architecture(identifiers(condition))


def condition_names(raw: Buffer, end: int) -> frozenset[str]:
    """The names that the conditions of ``raw[:end]`` ask for."""
    return frozenset().union(*map(_names, set(CONDITION.findall(raw, 0, end))))


@cache
def _names(text: bytes) -> frozenset[str]:
    return identifiers(NOISE.sub(" ", text.decode("utf-8", "replace")))


# --- what a host is kept from -----------------------------------------------------------------------------------


class Closed(NamedTuple):
    """A gate that is closed on a host."""

    start: int  # offset in the file
    end: int  # offset behind the expression
    expression: str  # on one line
    kind: str
    guards: str  # function or kernel; empty where it has no name
    replaced: bool  # whether other code serves the host


class _Branches(NamedTuple):
    """Which branches of a group a host takes, by index."""

    # Those that it is kept from, each with whether that is no gate unless the host is refused: it is for older hosts, or
    # left over by a condition that let this one through.
    lost: list[tuple[int, bool]]
    left: list[int]  # those that it takes or may take
    forced: list[int]  # those of them that it takes for certain, and that other hosts need not take


_NONE = _Branches([], [], [])
_ERROR = re.compile(rb"\s*#[ \t]*error\b")


class Judge:
    """Tells which code a host is kept from.

    Args:
        shared: Macros that depend on the architecture, from all files.
        host: Its compute capability.
    """

    def __init__(self, shared: Definitions, host: Capability) -> None:
        self.macros, self.host = Macros(shared), host
        self._known: dict[tuple[tuple[str, ...], _Conditions], _Branches] = {}

    def closed(self, raw: Buffer, end: int, found: Structure) -> Iterator[Closed]:
        """The branches that other hosts take and this one does not, and the conditions under which it meets an ``#error``."""
        local = self.macros.within(found.definitions) if found.definitions else self.macros
        owners = _Owners(raw, end)
        for group in found.groups:
            branches = self._branches(group, local, found.definitions)
            bodies = [_body(raw, group, index) for index in branches.left] if branches.lost else []
            served = not all(map(refuses, bodies))
            refused = not served and not all(map(only_directs, bodies))
            kept_from = [
                index
                for index, is_other in branches.lost
                if (not is_other or refused) and not refuses(_body(raw, group, index)) and is_code(raw, group.offsets[index][0])
            ]
            for index in kept_from or self._errors(raw, group, branches):
                start, stop = group.offsets[index]
                owner = owners.kernel(start) if served else guarded(raw, start, group.offsets[index + 1][0])
                yield Closed(start, stop, _shown(raw, group, index), "preprocessor", owner, served)

    @staticmethod
    def _errors(raw: Buffer, group: Group, branches: _Branches) -> list[int]:
        errors = (index for index in branches.forced if group.conditions[index] and _ERROR.match(raw, group.offsets[index][1]))
        return [index for index in errors if is_code(raw, group.offsets[index][0])]

    def _branches(self, group: Group, local: Macros, definitions: Mapping[str, object]) -> _Branches:
        conditions, around = group.conditions, group.around
        texts = (*conditions, *(text for text, _wanted in around))
        shared = not definitions or all(identifiers(text).isdisjoint(definitions) for text in texts)
        if not shared:
            return self._worked_out(conditions, around, local)
        if (conditions, around) not in self._known:
            self._known[conditions, around] = self._worked_out(conditions, around, self.macros)
        return self._known[conditions, around]

    def _worked_out(self, conditions: tuple[str, ...], around: _Conditions, macros: Macros) -> _Branches:
        if not _reaches(around, macros, self.host):
            return _NONE
        taken = _taken(conditions, macros, self.host)
        others = [_taken(conditions, macros, other) if _reaches(around, macros, other) else None for other in REFERENCE]
        lost, forced = [], []
        for index, own in enumerate(taken):
            let_through = any(before and condition for before, condition in zip(taken[:index], conditions))
            takers = [other for other, theirs in zip(REFERENCE, others) if theirs and theirs[index] is not False]
            spared = [other for other, theirs in zip(REFERENCE, others) if theirs and theirs[index] is not True]
            if own is False and takers:
                lost.append((index, not is_gate(self.host, takers) or (let_through and is_left_over(self.host, takers))))
            elif own and is_gate(self.host, spared):
                forced.append(index)
        return _Branches(lost, [index for index, own in enumerate(taken) if own is not False], forced)


def _reaches(around: _Conditions, macros: Macros, capability: Capability) -> bool:
    """Whether a host may get to what is inside the conditions ``around``."""
    return not any(macros.truth(text, capability) is (not wanted) for text, wanted in around)


def _taken(conditions: tuple[str, ...], macros: Macros, capability: Capability) -> list[Optional[bool]]:
    remaining: Optional[bool] = True
    taken: list[Optional[bool]] = []
    for condition in conditions:
        truth = macros.truth(condition, capability) if condition else True
        taken.append(False if False in (remaining, truth) else None if None in (remaining, truth) else True)
        if truth is not False:
            remaining = False if truth or remaining is False else None
    return taken


def _body(raw: Buffer, group: Group, index: int) -> str:
    start, stop = group.offsets[index][1], group.offsets[index + 1][0]
    return raw[start : min(stop, start + LONGEST_REFUSAL + 1)].decode("utf-8", "replace")


def _shown(raw: Buffer, group: Group, index: int) -> str:
    first, own = (one_line(raw[start:stop].decode("utf-8", "replace")) for start, stop in (group.offsets[0], group.offsets[index]))
    return own if group.conditions[index] else f"{own} of {first}"


class _Owners:
    """The kernels of a file, for offsets that are asked for in about their order."""

    def __init__(self, raw: Buffer, end: int) -> None:
        self._raw, self._end = raw, end
        self._asked, self._start = 0, -1

    def kernel(self, offset: int) -> str:
        """The name of the last kernel that starts before ``offset``."""
        if offset < self._asked:
            self._asked, self._start = 0, -1
        start = self._raw.rfind(b"__global__", self._asked, offset)
        self._asked, self._start = max(0, offset - len(b"__global__")), start if start >= 0 else self._start
        named = _KERNEL.match(self._raw, self._start, min(self._end, self._start + 600)) if self._start >= 0 else None
        return named[1].decode() if named else ""


_LONGEST_COMMENT = 1 << 14  # bytes; what is farther from the start of a block comment is taken for code
_RAW_STRING = re.compile(rb'R"([^()\\\s]{0,16})\(')


def is_code(raw: Buffer, offset: int) -> bool:
    """Whether ``offset`` is neither in a block comment nor in a raw string."""
    lower = max(0, offset - _LONGEST_COMMENT)
    start = raw.rfind(b"/*", lower, offset)
    if start >= 0 and raw.find(b"*/", start + 2, offset) < 0 and raw.find(b"//", raw.rfind(b"\n", 0, start) + 1, start) < 0:
        return False
    string = _RAW_STRING.match(raw, max(raw.rfind(b'R"', lower, offset), 0))
    return string is None or raw.find(b")" + string[1] + b'"', string.end(), offset) >= 0


def one_line(text: str) -> str:
    """Source text without comments, continuations and line breaks."""
    return " ".join(NOISE.sub(" ", text).split())


_KERNEL = re.compile(rb"__global__(?:[^;{}()]|\((?:[^()]|\([^()]*\))*\))*?\b(?!__launch_bounds__)(\w+)\s*\((?!\()")
_FUNCTION = re.compile(rb"\b(\w+)\s*\([^;{}]*?\)\s*(?:const\s*)?(?:noexcept\s*)?(?:->[^;{}]*)?\{")
_NO_FUNCTION = frozenset(
    {b"if", b"for", b"while", b"switch", b"catch", b"return", b"constexpr", b"__launch_bounds__", b"sizeof", b"defined"}
)
_LONGEST_KERNEL = 1 << 16  # bytes; a kernel that starts farther away has no name here
_NEAR = 6000  # bytes, the same for a function


def guarded(raw: Buffer, start: int, stop: int) -> str:
    """The kernel or function around ``start``, or the first one between ``start`` and ``stop``."""
    lower = max(0, start - _LONGEST_KERNEL)
    lower = max(lower, raw.rfind(b"\n}", lower, start))  # behind the last thing that ended at column 0
    kernels = _KERNEL.findall(raw, lower, start)
    functions = [name for name in _FUNCTION.findall(raw, max(lower, start - _NEAR), start) if name not in _NO_FUNCTION]
    if kernels or functions:
        return bytes((kernels or functions)[-1]).decode()
    stop = min(stop, start + _NEAR)
    names = [name for name in _KERNEL.findall(raw, start, stop) or _FUNCTION.findall(raw, start, stop) if name not in _NO_FUNCTION]
    return bytes(names[0]).decode() if names else ""
