# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Find the gates in C++ that ask for the architecture at run time: checks, conditions, and flags that follow from them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ansible_collections.blackwell.inference.plugins.module_utils._audit_cuda import (
    Buffer,
    Closed,
    guarded,
    is_code,
    one_line,
)
from ansible_collections.blackwell.inference.plugins.module_utils._audit_hosts import REFERENCE, is_gate
from ansible_collections.blackwell.inference.plugins.module_utils._audit_refusals import refuses
from ansible_collections.blackwell.inference.plugins.module_utils._c_expression import cpp_meaning, evaluate, parse
from ansible_collections.blackwell.inference.plugins.module_utils._predicate import Capability

# What a file must hold to ask for the architecture at run time, or to be handed it: ``Version`` is for getSMVersion and the
# like, behind the license at the start, which has a version of its own.
_RUN_TIME = (b"ComputeCapability", b"DeviceProp", b"sm_version", b"sm ==", b"kSM_", b"arch::is_")
_LICENSE = 1500
_HOST_HEADER = re.compile(
    rb"#[ \t]*include(?![ \t]*(?:<(?:cuda(?:_\w+)?|math_constants|mma|cooperative_groups|stdint|float|math)\.h>"
    rb"|<c(?:stdint|stddef|float|math|limits)>|\"[^\"\n]*(?:device|prelude)[^\"\n]*\"))"
)

_VERSIONS = ("getSMVersion", "smVersion", "sm_version", "mSM", "gpuSM", "sm", "sm_")
_ASKED = ("getSMVersion()", "cudaDevAttrComputeCapabilityM", "GetCudaComputeCapability")
_PUT_TOGETHER = re.compile(r"major\s*\*\s*10(0?)\s*\+\s*[\w.>-]*\bminor\b")
_IS_GIVEN = re.compile(r"\b(\w+)\s*=\s*[\w.>-]*\Z")
# What `major` may be given besides.
_GIVEN = re.compile(r"\b(major|minor)\s*=\s*([^;,]+)")
_OF_OTHER = re.compile(r"(?<!SM)Version\s*\(|\bver\b|cudnn|_VERSION\b")
_HANDED_ON = (  # what stands before one of those, and what the name means that gets its answer
    (re.compile(r"\b(\w+)\s*[={(]\s*[\w:]*$"), "version"),
    (re.compile(r"&\s*(\w+)\s*,\s*$"), ""),
    (re.compile(r"\[\s*(\w+)\s*,\s*(\w+)\s*\]\s*=\s*[\w:]*$"), "pair"),
)
_COMPILE_TIME = re.compile(r"arch::is_(?:major|match)_v\s*<")
_COMPARED = re.compile(r"(?:\(\))?\s*(?:/\s*10\s*)?(?:[=!<>]=|[<>])\s*(?:\d|kSM_)")
_REVERSED = re.compile(r"(?<![\w.])\d{1,4}\s*(?:[=!<>]=|[<>])\s*\Z")
_CHECK = re.compile(r"\w*(?:CHECK|ASSERT|REQUIRE|assert)\w*")
_LEAVES = re.compile(r"(?:\breturn\b|\bthrow\b|\bcontinue\b|\bbreak\b)[^;{}]*;\s*\}?\Z")
# What is returned to somebody who can use it.
_ANSWER = re.compile(
    r"\breturn\b(?!\s*;|\s*(?:0|-1|false|nullptr|NULL|\{\s*\}|[\w:]*(?:error|invalid|unsupported|success|fallback)\w*)\s*;)", re.IGNORECASE
)
_NEVER = re.compile(rb"#[ \t]*if[ \t]+0\b")
_GROUP = re.compile(rb"#[ \t]*(if|el|endif)")
_INITIALISED = re.compile(r"\bif\s*(?:constexpr\s*)?\((?:[^(){};]|\([^()]*\))*;\Z")  # if (int sm = ...;
_OTHERWISE = re.compile(r"[\s\\]*else\b\s*(\{)?")
_ELSE = re.compile(r"\s*else\b[^;{]*\{")
_BRANCHES = ("if", "constexpr", "while")
_KEPT = re.compile(r"\breturn\b|(?<![=!<>+*/&|^-])=(?!=)")  # what stands before a value that is returned or kept
_VALUE_ENDS = re.compile(r"[;?]")
_FARTHEST = 4000  # characters that one condition or branch may take


def holds_host_code(raw: Buffer, end: int) -> bool:
    """Whether a file includes more than device headers. One that does not has no way to ask for the architecture."""
    return _HOST_HEADER.search(raw, 0, end) is not None


def may_check(raw: Buffer, end: int) -> bool:
    """Whether a file may ask for the architecture at run time."""
    if raw.find(b"Version", _LICENSE, end) >= 0 or raw.find(b"MVersion", 0, min(end, 2 * _LICENSE)) >= 0:
        return True
    return any(raw.find(word, 0, end) >= 0 for word in _RUN_TIME)


def closed_checks(raw: Buffer, end: int, host: Capability) -> Iterator[Closed]:
    """The checks at run time in ``raw[:end]`` that refuse ``host`` or leave something out for it."""
    text = raw[:end].decode("latin-1")  # one character a byte: offsets stay
    roles = _roles(text)
    compared = [
        at for name in roles for at in _everywhere(text, name) if _is_compared(text, at, at + len(name)) and not _of_other(text, at)
    ]
    dead = list(_dead(raw, end))
    constant = [match.start() for match in _COMPILE_TIME.finditer(text)]
    seen: set[int] = set()
    unreached: list[tuple[int, int]] = []
    for offset in sorted((*compared, *constant)):
        check = _whole(text, offset)
        start, stop = check.start, check.stop
        line = text[text.rfind("\n", 0, offset) + 1 : offset]
        if not check.decides or start in seen or "//" in line or line.count('"') % 2 or not is_code(raw, start):
            continue
        seen.add(start)
        node = parse(text[start:stop])
        answer = evaluate(node, cpp_meaning(roles, host))
        if answer is None or any(first <= start < last for first, last in (*dead, *unreached)):
            continue
        unreached.append(_unreached(text, check, bool(answer)))
        if bool(answer) is not (check.decides == "refusal"):
            continue
        if is_gate(host, [other for other in REFERENCE if evaluate(node, cpp_meaning(roles, other)) != answer]):
            owner = guarded(raw, start, start)
            kind = "compile-time check" if _COMPILE_TIME.search(text, start, stop) else "run-time check"
            yield Closed(start, stop, one_line(text[start:stop]), kind, owner, check.decides == "choice")


def _is_compared(text: str, start: int, stop: int) -> bool:
    return _COMPARED.match(text, stop) is not None or _REVERSED.search(text, max(0, start - 16), start) is not None


def _of_other(text: str, offset: int) -> bool:
    """Whether the ``major`` or ``minor`` at ``offset`` was given the version of something else in its function."""
    given = list(_GIVEN.finditer(text, max(text.rfind("\n}", 0, offset), 0), offset))
    own = [value for value in given if text.startswith(value[1], offset)]
    return bool(own) and text[offset - 1] not in ".>" and _OF_OTHER.search(own[-1][2]) is not None


def _dead(raw: Buffer, end: int) -> Iterator[tuple[int, int]]:
    """From where to where ``#if 0`` leaves code out."""
    for never in _NEVER.finditer(raw, 0, end):
        depth = 0
        for directive in _GROUP.finditer(raw, never.end(), end):
            if directive[1] == b"if":
                depth += 1
            elif not depth:
                yield never.end(), directive.start()
                break
            elif directive[1] == b"endif":
                depth -= 1


def _roles(text: str) -> dict[str, str]:
    """The names in ``text`` that hold an architecture or a part of one, and what each means."""
    roles = {**dict.fromkeys(_VERSIONS, "version"), "major": "major", "minor": "minor"}
    if "GetCudaComputeCapability" in text:  # a pair
        roles["first"] = "major"
    for whole in _PUT_TOGETHER.finditer(text):
        given = _IS_GIVEN.search(text, max(0, whole.start() - 80), whole.start())
        if given:
            roles[given[1]] = "macro" if whole[1] else "version"
    roles.update(_answers(text))
    return roles


def _answers(text: str) -> dict[str, str]:
    """The names that ``text`` gives the answer to a question for the architecture, and what each means."""
    roles: dict[str, str] = {}
    for question in _ASKED:
        for at in _everywhere(text, question):
            before = text[max(0, at - 120) : at]
            for pattern, role in _HANDED_ON:
                match = pattern.search(before)
                if match and role == "pair":
                    roles.update({match[1]: "major", match[2]: "minor"})
                elif match and role:
                    roles[match[1]] = "major" if re.match(r"\s*/\s*10\b", text[at + len(question) :][:8]) else role
                elif match:
                    roles[match[1]] = "major" if text.startswith("ajor", at + len(question)) else "minor"
    return roles


def _everywhere(text: str, word: str) -> Iterator[int]:
    at = text.find(word)
    while at >= 0:
        if not (text[at - 1].isalnum() or text[at - 1] == "_"):
            yield at
        at = text.find(word, at + len(word))


class _Check(NamedTuple):
    """A condition at run time: where it starts and stops, what it decides, and where the code starts and stops that it lets run.

    It decides ``use`` where code is left out unless it holds, ``choice`` where other code takes over then, ``refusal``
    where it refuses, and nothing where nothing can be said.
    """

    start: int
    stop: int
    decides: str
    body: tuple[int, int] = (0, 0)


def _whole(text: str, offset: int) -> _Check:
    """The condition around ``offset``."""
    start, depth = offset, 0
    while start > max(0, offset - _FARTHEST):
        character = text[start - 1]
        if character in ")]":
            depth += 1
        elif character in "([":
            word = re.search(r"(\w+)\s*$", text[max(0, start - 60) : start - 1])
            if not depth and word and word[1] != "return":
                return _argument(text, start, word[1])
            depth = max(0, depth - 1)
        elif character in ";{}" and not depth:
            opened = _INITIALISED.search(text, max(0, start - 200), start)
            if opened:
                return _argument(text, start, "if")
            break
        start -= 1
    kept = list(_KEPT.finditer(text, start, offset))
    stop = _VALUE_ENDS.search(text, offset)
    return _Check(kept[-1].end(), stop.start(), "choice" if stop[0] == "?" else "use") if kept and stop else _Check(start, offset, "")


def _argument(text: str, start: int, word: str) -> _Check:
    """The condition that starts behind the parenthesis of ``word``."""
    stop = _closing(text, start, "," if word not in _BRANCHES else "")
    if word not in _BRANCHES:
        return _Check(start, stop, "use" if _CHECK.fullmatch(word) else "")
    opened = re.compile(r"\)\s*(?:\[\[\w+\]\]\s*)?(\{?)").match(text, stop)
    if not opened:
        return _Check(start, stop, "")
    first = opened.end()
    last = _closing(text, first, "") if opened[1] else text.find(";", first) + 1
    body = first, last + len(opened[1])
    rest = text[body[1] : body[1] + _FARTHEST]
    if refuses(text[first:last]) and not _ANSWER.search(text, first, last):
        return _Check(start, stop, "refusal", body)
    otherwise = _OTHERWISE.match(rest)
    if otherwise:
        served = not otherwise[1] or not refuses(rest[otherwise.end() : _closing(rest, otherwise.end(), "")])
        return _Check(start, stop, "choice" if served else "use", body)
    after = rest[: _closing(rest, 0, "")].strip()
    returned = re.search(r"\breturn\b[^;{}]*;\s*$", text[first:last])
    return _Check(start, stop, "choice" if returned and not (after and refuses(after)) else "use", body)


def _unreached(text: str, check: _Check, answer: bool) -> tuple[int, int]:
    """From where to where code is not reached on a host on which ``check`` has this answer."""
    first, last = check.body
    if not answer:
        return first, last
    if first and _LEAVES.search(text, first, last):
        return last, _closing(text, last, "")
    otherwise = last
    while first and _ELSE.match(text, otherwise):
        opened = text.find("{", otherwise)
        otherwise = _closing(text, opened + 1, "") + 1 if opened >= 0 else otherwise + 1
    return last, otherwise


def _closing(text: str, start: int, separator: str) -> int:
    """Where the bracket closes that is open at ``start``, or the next ``separator`` stands in it."""
    depth = 0
    for offset in range(start, min(len(text), start + _FARTHEST)):
        character = text[offset]
        if character in "([{":
            depth += 1
        elif character in ")]}":
            if not depth:
                return offset
            depth -= 1
        elif character == separator and not depth:
            return offset
    return min(len(text), start + _FARTHEST)
