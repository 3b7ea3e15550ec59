# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where a Python file mentions an architecture: looked up in its bytes, since most files mention none."""

from __future__ import annotations

import re

# Every predicate starts from one of these words. The pattern tells the word from others that hold it, and says what
# it is: a question by itself, a value whose line must ask something, or a call whose answer must be asked or kept.
_ASKED = rb"[\])]*\s*(?:[=!<>]=|[<>](?!`)|//|\*|(?:not )?in\b(?!\s+\w+(?:\[\w+\])?\[[\"']))"
_END = rb"[ \t]*(?:#.*)?(?=[\r\n]|\Z)"
_WORDS: tuple[tuple[bytes, re.Pattern[bytes]], ...] = (
    (
        b"apabilit",
        re.compile(
            rb"apabilit(?:y|ies)(?:\w*(?P<call>\()|\w*(?P<value>\[|\.m)|(?P<named>"
            + _END
            + rb")|(?:_\w+)?"
            + _ASKED
            + rb"|(?P<key>[)\],])|(?P<renamed>[ \t]+as\b))"
        ),
    ),
    (b"is_", re.compile(rb"is_(?:sm_?\d|blackwell|(?:nvidia_)?hopper)")),
    (b"sm_version", re.compile(rb"sm_version(?:(?P<call>\()|" + _ASKED + rb")")),
    (b"device_sm", re.compile(rb"device_sm(?:(?P<call>\()|\w*" + _ASKED + rb")")),
    (b"arch", re.compile(rb"(?<![a-z])arch(?:(?P<call>\()|(?P<value>\.m(?:aj|in)or\b)|" + _ASKED + rb"|\s*is\b)")),
    (
        b"major",
        re.compile(
            rb"major(?:_versions\b|\}\w*\{|(?:\(\w*\))?(?:,\s*[\w.]*minor\))?" + _ASKED + rb"|(?P<key>(?:,\s*[\w.]*minor\))?[)\],]))"
        ),
    ),
)
# What stands before "major" where that is the first part of a compute capability: nothing, an owner, or a prefix.
_CAPABILITYS = re.compile(
    rb"(?:(?:\A|[^\w.\-])_*|(?<!VERSION)(?<!version)(?<!version\(\))\.|(?:supported|sm|cc|cap\w*|compute|device|dev|arch|gpu|target|current)_)\Z"
)
_KEY = re.compile(rb"(?:\.get\(|[\w)\]]\[)\(?[\w.]*\Z")  # what stands before what a table is asked for
_BACKENDS = re.compile(rb"@(?:\w+\.)?backend_requirement\(")  # names functions that carry such a word
_LIST = re.compile(rb"supported_\w*$|@\w*$")  # before it, what a call is handed is a list of what is supported
_ANSWER_ASKED = re.compile(rb"[^()]*(?:\([^()]*(?:\([^()]*\)[^()]*)*\)[^()]*)*\)(?:\[\d\])?" + _ASKED)
_RENAMED = re.compile(rb"\w*[ \t]+as\b")
_LINE_ASKS = re.compile(rb"[^\n]*(?:[=!]=|[<>]|\bin\b)")
_KEPT = re.compile(rb"[ \t]*(?:return\b|(?:[\w.]+[ \t]*,[ \t]*)*[\w.]+[ \t]*(?::[^=\n]+)?=(?!=))")
# A name like these means the same without such an assignment.
_CLEAR = re.compile(
    rb"[ \t]*(?:_?(?:\w*capability|(?:\w+_)?(?:major|minor|arch)|(?:\w+_)?sm_version|(?:\w+_)?device_sm|_)[ \t,]*)+"
    rb"=[ \t]*(?:tuple\(|int\()?(?:\w+\.)*(?:_?get_\w*(?:capability|sm_version|device_sm)|\w*arch)\("
)


def mentions(raw: bytes) -> list[int]:
    """The offsets in ``raw`` where a predicate over the architecture may start, in order."""
    found = []
    for word, pattern in _WORDS:
        at = raw.find(word)
        while at >= 0:
            match = pattern.match(raw, at)
            if match and (word != b"major" or _CAPABILITYS.search(raw[max(0, at - 16) : at])):
                line = raw.rfind(b"\n", 0, at) + 1
                before = raw[line:at]
                if before.startswith((b"from ", b"import ")):
                    if _RENAMED.match(raw, at):
                        found.append(at)
                elif _is_code(before) and (not match.lastgroup or _matters(raw, line, at, match)):
                    found.append(at)
            at = raw.find(word, at + len(word))
    if found:
        found += [match.start() for match in _BACKENDS.finditer(raw)]
    return sorted(found)


def _is_code(before: bytes) -> bool:
    """Whether a line that starts like this is more than a comment, or the start of a docstring."""
    return not before.lstrip().startswith((b"#", b'"""')) and b" # " not in before


def _matters(raw: bytes, line: int, at: int, match: re.Match[bytes]) -> bool:
    """Whether the value at ``at`` is compared or looked up, or the answer of the call there is compared, kept or returned."""
    if match.lastgroup == "renamed":
        return True
    if match.lastgroup == "key":
        return _KEY.search(raw, line, at) is not None
    if match.lastgroup == "value":
        return _LINE_ASKS.match(raw, at) is not None
    if match.lastgroup == "call" and _LIST.search(raw, line, at):
        return True
    if match.lastgroup == "call" and _ANSWER_ASKED.match(raw, match.end()):
        return True
    return _KEPT.match(raw, line) is not None and _CLEAR.match(raw, line) is None
