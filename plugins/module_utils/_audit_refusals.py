# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tell whether a piece of CUDA or C++ does something for a host, or refuses it."""

from __future__ import annotations

import re
from functools import lru_cache

NOISE = re.compile(r"/\*.*?\*/|//[^\n]*|\\\r?\n", re.DOTALL)

# Statements that stand where the code for a host would be: they refuse, or give a dummy.
_REFUSAL = re.compile(
    r"\s*(?:"
    r"#\s*error\b.*|(?:\w+(?:::|\.|->))*\w*(?:not_supported|only_supported|unsupported|not_implemented|invalid_control_path|unreachable"
    r"|assert|trap|abort|printf|throw)\w*\s*\(.*|\w*check\w*\s*\(\s*(?:false|0)\b.*"
    r"|\w+_error\s*\(.*|log\s*\(\s*fatal\s*\).*|(?:\w+::)*panic\s*\(.*"
    r"|asm\s*(?:volatile)?\s*\(\s*\"\s*trap\s*;?\s*\".*|throw\b.*|\(void\)\s*\(?\w+\)?|return\s*(?:\{\s*\}|-?[\w.:]*(?:\(\s*0?\s*\))?)"
    r"|using\b.*|exit\s*\(.*|(?:if\s*\(.*\)\s*)?continue"
    r")\s*",
    re.IGNORECASE | re.DOTALL,
)
# What makes the message of a refusal, and is none by itself.
_MESSAGE = re.compile(r"\s*(?:(?:std::)?o?stringstream\s+\w+|[\w:]+\s*<<.*)\s*", re.DOTALL)
_DIRECTIVE_LINE = re.compile(r"^[ \t]*#[ \t]*(?!error\b)(?:[^\\\n]+|\\\r?\n|\\)*", re.MULTILINE)
# One of these words is in every refusal but an empty one.
_REFUSING = (
    "supported",
    "not_",
    "invalid",
    "unreachable",
    "assert",
    "trap",
    "abort",
    "print",
    "throw",
    "error",
    "return",
    "exit",
    "continue",
    "check",
    "fatal",
    "panic",
)
# How code starts that does something; told at once, because most does.
_WORKS = re.compile(
    r"(?:#[ \t]*pragma[^\n]*\s*)*(?:\{\s*)?(?:"
    r"asm\b(?![^;]{0,60}trap)|for\b|(?:const(?:expr)? |auto )?[A-Za-z_][\w:<>, ]*[ &*]\w+(?:\[\w*\])* ?=[^=]"
    rf"|(?!(?:asm|if|while|do|else|switch)\b|[\w:]*(?i:{'|'.join(_REFUSING)}))[A-Za-z_][\w:]*\s*\("
    r")"
)
_EMPTY_BLOCK = re.compile(r"\{\s*\}")
_FRAME = re.compile(
    r"[{}]|\bif\s*\([\w:.= ]*\bthread(?:0|Idx)\b[\w:.= ]*(?:\(\))?[\w= ]*\)|\belse\b|\bdo\b|\bwhile\s*\(\s*(?:0|false|true|1)\s*\)"
)
LONGEST_REFUSAL = 1500


@lru_cache(maxsize=1 << 14)
def refuses(text: str) -> bool:
    """Whether a piece of code does nothing for a host: it is empty, reports an error or returns a dummy."""
    if len(text) > LONGEST_REFUSAL or _WORKS.match(text.lstrip()):
        return False
    if "=" in text and "#" not in text:
        lower = text.lower()
        if not any(word in lower for word in _REFUSING):
            return False
    text = _DIRECTIVE_LINE.sub("", NOISE.sub(" ", text))
    text = _FRAME.sub(";", _EMPTY_BLOCK.sub("()", text))
    statements = [statement for statement in _statements(text) if statement.strip("() \t\r\n")]
    telling = [statement for statement in statements if not _MESSAGE.fullmatch(statement)]
    return len(telling) >= min(1, len(statements)) and all(map(_REFUSAL.fullmatch, telling))


def only_directs(text: str) -> bool:
    """Whether a piece of code holds directives, and nothing but those; ``#error`` is more than that."""
    text = NOISE.sub(" ", text)
    return bool(text.strip()) and not _DIRECTIVE_LINE.sub("", text).strip()


def _statements(text: str) -> list[str]:
    """``text`` cut at semicolons, but not at those in a string such as "trap;"."""
    statements: list[str] = []
    for part in text.split(";"):
        if statements and statements[-1].count('"') % 2:
            statements[-1] += f";{part}"
        else:
            statements.append(part)
    return statements
