# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Evaluate conditions of C++ and its preprocessor, three-valued: what does not follow from the host is None and decides nothing."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from functools import cache
from typing import Callable, NamedTuple, Optional

from ansible_collections.blackwell.inference.plugins.module_utils._predicate import Capability

Value = Optional[int]  # None: it does not follow from the host

_TO_PYTHON: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\s+"), " "),
    (re.compile(r"\bdefined\s*\(?\s*(\w+)\s*\)?"), r" defined(\1) "),
    (re.compile(r"(?:\b\w+\s*)?::\s*"), ""),
    (re.compile(r"\b(\w+_v)\s*<\s*(\d+)\s*>"), r"\1_\2"),  # a constant such as is_major_v<10>
    (re.compile(r"->"), "."),
    (re.compile(r"&&"), " and "),
    (re.compile(r"\|\|"), " or "),
    (re.compile(r"!(?!=)"), "~"),  # `not` would bind weaker than C's `!`
    (re.compile(r"\b(0x[0-9a-fA-F]+|\d+)[uUlL]+\b"), r"\1"),
    (re.compile(r"\btrue\b"), "1"),
    (re.compile(r"\bfalse\b"), "0"),
)
_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


@cache
def parse(text: str) -> Optional[ast.expr]:
    """The syntax tree of a C expression, in Python's terms; None where it is beyond them (a template, a ternary)."""
    for pattern, replacement in _TO_PYTHON:
        text = pattern.sub(replacement, text)
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


class Meaning(NamedTuple):
    """What the names of an expression stand for on one host."""

    name: Callable[[str], Value]
    defined: Callable[[str], Optional[bool]]


_CONSTANT = re.compile(r"kSM_(\d+)")  # what upstream calls the version of an architecture
_ARCH_CONDITION = re.compile(r"is_(major|match)_v_(\d+)")  # as parse() writes those of flashinfer/arch_condition.h


def cpp_meaning(roles: Mapping[str, str], capability: Capability) -> Meaning:
    """What names mean in C++, outside of preprocessor conditions.

    Args:
        roles: For each name, with or without ``()``, what it holds of a host: the ``version`` (120), the ``macro`` (1200), the
            ``major`` or the ``minor``.
        capability: The host.
    """
    major, minor = capability
    values = {"version": major * 10 + minor, "macro": major * 100 + minor * 10, "major": major, "minor": minor}

    def name(text: str) -> Value:
        constant, condition = _CONSTANT.fullmatch(text), _ARCH_CONDITION.fullmatch(text)
        if condition:
            return int(int(condition[2]) == (major if condition[1] == "major" else major * 10 + minor))
        return int(constant[1]) if constant else values.get(roles.get(text.replace("()", ""), ""))

    return Meaning(name, lambda text: None)


def evaluate(node: Optional[ast.expr], meaning: Meaning) -> Value:
    """The value of an expression of ``parse``."""
    if isinstance(node, ast.Constant):
        return int(node.value) if isinstance(node.value, int) else None
    if isinstance(node, (ast.Name, ast.Attribute)):
        return meaning.name(node.attr if isinstance(node, ast.Attribute) else node.id)
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called == "defined":
            answer = meaning.defined(getattr(node.args[0], "id", ""))
            return None if answer is None else int(answer)
        arguments = ", ".join(ast.unparse(argument) for argument in node.args)
        return meaning.name(f"{called}({arguments})")
    if isinstance(node, ast.UnaryOp):
        operand = evaluate(node.operand, meaning)
        if operand is None:
            return None
        return int(not operand) if isinstance(node.op, (ast.Invert, ast.Not)) else -operand if isinstance(node.op, ast.USub) else operand
    if isinstance(node, ast.BoolOp):
        values = [evaluate(operand, meaning) for operand in node.values]
        settles = isinstance(node.op, ast.Or)
        if any(value is not None and bool(value) is settles for value in values):
            return int(settles)
        return None if None in values else int(not settles)
    if isinstance(node, (ast.BinOp, ast.Compare)):
        if isinstance(node, ast.Compare) and len(node.ops) > 1:
            return None  # to Python a chain, to C something else
        if isinstance(node, ast.Compare):
            left, operation, right = evaluate(node.left, meaning), _OPERATORS.get(type(node.ops[0])), evaluate(node.comparators[0], meaning)
        else:
            left, operation, right = evaluate(node.left, meaning), _OPERATORS.get(type(node.op)), evaluate(node.right, meaning)
        if left is None or right is None or operation is None or (operation in (operator.floordiv, operator.mod) and not right):
            return None
        return int(operation(left, right))
    return None
