# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What names stand for: a name that a file is handed means an architecture where it is called like one."""

from __future__ import annotations

import ast
import re
from collections.abc import Container
from functools import cache
from typing import Callable, Optional, Union

from ansible_collections.blackwell.inference.plugins.module_utils._predicate import Capability, dotted_name

COPIES = frozenset({"tuple", "list", "set", "frozenset", "int", "str", "bool", "sorted", "const_expr"})


class Unknown:
    """The value of an expression that does not follow from the host.

    Args:
        architecture: Whether it speaks of one: then what depends on it is undecided.
    """

    def __init__(self, architecture: bool) -> None:
        self.architecture = architecture


UNKNOWN, UNDECIDED = Unknown(False), Unknown(True)


class Architecture(int):
    """A compute capability that code may compare as 120, as (12, 0) or as "sm_120a"."""

    capability: Capability

    def __new__(cls, capability: Capability) -> Architecture:
        """Return ``capability`` as the number major * 10 + minor."""
        self = super().__new__(cls, capability[0] * 10 + capability[1])
        self.capability = capability
        return self


SPELLED = re.compile(r"(?:sm_?|compute_)?(\d{2,3})[af]?", re.IGNORECASE)
_PREFIX = r"_*(?:(?:device|dev|target|current|gpu|cuda|compute|runtime|host|sm|cc|cap|capability|arch|properties)_)*"
MAJOR = re.compile(rf"{_PREFIX}(?<!cuda_)major", re.IGNORECASE)
MINOR = re.compile(rf"{_PREFIX}(?<!cuda_)minor", re.IGNORECASE)
WHOLE = re.compile(rf"{_PREFIX}(?:sm|sm_version|sm_arch|sm_num|arch|capability(?:_tuple|_int)?)", re.IGNORECASE)
HOLDER = re.compile(r"prop|device|arch|cap|target|gpu|platform|(?:^|_)cc$", re.IGNORECASE)
ASKS_WHOLE = re.compile(r"_?get_\w*(?:capability|sm_version|device_sm|arch)|\w*cuda_arch|_?\w*device_arch|_?current_arch", re.IGNORECASE)
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


CONSTANT = re.compile(r"\b_*[A-Z][A-Z0-9_]+\b")
# Names of the version, or of the kind, of something else than the architecture.
OTHERS = r"(?<!sm_)version|nvcc|driver|gfx|gcn"


@cache
def meaning(name: str, capability: Capability) -> object:
    """What a name that a file is handed stands for on a host; an Unknown where it is not called like an architecture."""
    major, minor = capability
    if MAJOR.fullmatch(name):
        return major
    if MINOR.fullmatch(name):
        return minor
    if WHOLE.fullmatch(name):
        return Architecture(capability)
    if _OTHER_VENDOR.fullmatch(name):
        return False
    if _SAME_VENDOR.fullmatch(name):
        return True
    for pattern, admits in _FAMILIES:
        if pattern.fullmatch(name):
            return admits(major)
    flag = _FLAG.fullmatch(name)
    return _flagged(capability, *flag.groups()) if flag else UNKNOWN


def _flagged(capability: Capability, number: str, suffix: Optional[str], other: Optional[str], rest: Optional[str]) -> object:
    """Whether a host is what ``is_sm<number><suffix>_<rest>`` asks for."""
    major, minor = capability
    if "x" in (number[-1].lower(), (suffix or "").lower()):
        return major == int(number.rstrip("xX"))
    rest = (rest or "").lower()
    if _NEWER_TOO.search(rest):
        return major * 10 + minor >= int(number)
    if rest and not _SAME.fullmatch(rest):
        return UNDECIDED
    by_major = int(number) % 10 == 0 and not (number == "120" and (suffix or not rest))
    wanted = [int(item) for item in (number, other) if item]
    return any(item == major * 10 + minor or (by_major and item // 10 == major) for item in wanted)


@cache
def speaks(name: str) -> bool:
    """Whether a name that a file is handed stands for an architecture."""
    return not isinstance(meaning(name, (12, 0)), Unknown)


def last_name(node: ast.expr) -> str:
    """``c`` of ``a.b.c``; empty where ``node`` is no name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def asks_architecture(node: Union[ast.Compare, ast.Call]) -> bool:
    """Whether ``node`` compares an architecture, or calls something that is named after one."""
    if isinstance(node, ast.Call):
        name = last_name(node.func)
        return name.startswith(("is_sm", "_is_sm")) and bool(_FLAG.fullmatch(name))
    operands = [node.left, *node.comparators]
    items = [item for operand in operands for item in (operand.elts if isinstance(operand, (ast.Tuple, ast.List, ast.Set)) else [operand])]
    texts = [item.value for item in items if isinstance(item, ast.Constant) and (item.value is None or isinstance(item.value, str))]
    if any(text is None or not SPELLED.fullmatch(text) for text in texts) or any("model" in dotted_name(item).lower() for item in items):
        return False  # the architecture of a model, or whether there is one at all
    return any(map(_is_architecture, operands))


def _is_architecture(node: ast.expr) -> bool:
    """Whether ``node`` is the host's compute capability, or a part of it, by its name."""
    if isinstance(node, ast.Call) and last_name(node.func) in COPIES and len(node.args) == 1:
        return _is_architecture(node.args[0])
    if isinstance(node, ast.Call):
        name = last_name(node.func)
        return bool(ASKS_WHOLE.fullmatch(name) or WHOLE.fullmatch(name))
    if isinstance(node, ast.Subscript):
        return _is_architecture(node.value)
    if isinstance(node, ast.Tuple):
        return bool(node.elts) and all(map(_is_architecture, node.elts))
    if isinstance(node, ast.BinOp):
        return _is_architecture(node.left) or _is_architecture(node.right)
    if isinstance(node, ast.Attribute):
        owner = last_name(node.value.func if isinstance(node.value, ast.Call) else node.value)
        held = owner in ("self", "cls") or bool(HOLDER.search(owner))
        return held and bool(WHOLE.fullmatch(node.attr) or MAJOR.fullmatch(node.attr) or MINOR.fullmatch(node.attr))
    return isinstance(node, ast.Name) and bool(MAJOR.fullmatch(node.id) or MINOR.fullmatch(node.id) or WHOLE.fullmatch(node.id))


SOURCE = re.compile(r"capabilit|is_\w*sm_?\d|sm_version|device_sm|blackwell|hopper|_arch$|^arch$|arch_support", re.IGNORECASE)
_WRAPPERS = frozenset({"tuple", "int", "bool", "str", "max", "min", "any", "all", "map", "join", "lru_cache", "cache"})


def is_architectural(node: ast.expr, known: Container[str] = ()) -> bool:
    """Whether ``node`` is a predicate, or reads a capability, or one of the names ``known``, and hands it on as it is."""
    if isinstance(node, (ast.BoolOp, ast.Compare)):
        return True
    if isinstance(node, ast.UnaryOp):
        return is_architectural(node.operand, known)
    if isinstance(node, ast.BinOp):
        return is_architectural(node.left, known) or is_architectural(node.right, known)
    if isinstance(node, ast.IfExp):
        whole = is_architectural(node.body, known) or is_architectural(node.orelse, known)
        return whole or isinstance(node.test, (ast.BoolOp, ast.Compare))
    if isinstance(node, (ast.Tuple, ast.List)):
        return any(is_architectural(item, known) for item in node.elts)
    if isinstance(node, ast.JoinedStr):
        return is_spelling(node) and any(is_architectural(item, known) for item in node.values)
    if isinstance(node, ast.Subscript):
        return is_architectural(node.value, known) or is_architectural(node.slice, known)
    if isinstance(node, ast.FormattedValue):
        return is_architectural(node.value, known)
    if isinstance(node, (ast.GeneratorExp, ast.ListComp)):
        return is_architectural(node.generators[0].iter, known)
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if SOURCE.search(name) or dotted_name(node.func) in known:
            return True
        return (name in _WRAPPERS or name == "get") and any(is_architectural(argument, known) for argument in node.args)
    if isinstance(node, (ast.Name, ast.Attribute)):
        own = node.attr if isinstance(node, ast.Attribute) else node.id
        return dotted_name(node) in known or bool(SOURCE.search(own)) or own in ("major", "minor")
    return False


def is_spelling(node: ast.JoinedStr) -> bool:
    """Whether a formatted text may be a name of an architecture, such as ``f"sm_{major}{minor}"``; a message is longer."""
    return all(len(str(item.value)) <= len("compute_") for item in node.values if isinstance(item, ast.Constant))
