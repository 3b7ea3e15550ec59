# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Derive the fusion path from the installed sources: from sglang's option to the kernels that it starts.

In Python the path leads from the functions of sglang that read the option, and those that call FlashInfer's fused
allreduce, through every function that these call, to the JIT module's sources. From there it follows the ``#include``s,
and, from the operations that sglang uses, the functions and kernels that those name. Names decide: a call goes to the
function of that name in the same file, else to the only ones of that name on the way.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ansible_collections.blackwell.inference.plugins.module_utils._audit_files import text_of

OPTION = b"allreduce_fusion"  # what sglang's option, and everything on the way, has in its name
_SETS_OPTION = re.compile(r"(?:enable_flashinfer_allreduce_fusion|flashinfer_allreduce_fusion_backend)\"?\s*(?::|=(?!=))")
_OPTIONS = frozenset({"enable_flashinfer_allreduce_fusion", "flashinfer_allreduce_fusion_backend"})
_USES_FLASHINFER = re.compile(r"\bflashinfer\.comm\b|\b_?flashinfer_comm\b|\bfrom flashinfer import comm\b")
# A workstation card uses the backend trtllm; what is named after another one is not on its path.
_OTHER_BACKEND = re.compile(r"mnnvl|cute_?dsl|cake|nvshmem|mixed_comm|\bdcp", re.IGNORECASE)
_CHOOSES_ANOTHER = re.compile(r"==\s*[\"'](?:mnnvl|cute_?dsl|cake|nvshmem)")
_FLASHINFER = ("flashinfer/comm", "flashinfer/jit/comm.py", "flashinfer/jit/core.py", "flashinfer/compilation_context.py")
_FUSED = re.compile(r"all_?reduce\w*fusion|AllReduceFusion")  # what FlashInfer's entry points have in their names
_FACTORY = re.compile(r"get_\w+_module")
_ONE_MODEL = "sglang/srt/models/"  # what a single model does on its own is not the path of every model
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+[\w.]+[ \t]+)?import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE)

_DOCSTRING = re.compile(r"\"{3}[\s\S]*?\"{3}|'{3}[\s\S]*?'{3}")
_DEFINITION = re.compile(r"^([ \t]*)(?:async[ \t]+def|def|class)[ \t]+(\w+)", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w{3,}")
_SOURCE_NAME = re.compile(r"[\"']([\w/]+\.cu)[\"']")
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*\"([^\"\n]+)\"", re.MULTILINE)
_EXPORTED = re.compile(r"(?:EXPORT\w*\(\s*(\w+)|\.def\(\s*\"(\w+)\")\s*,\s*&?(?:\w+::)*(\w+)")
_NO_FUNCTION = frozenset(
    {"if", "for", "while", "switch", "catch", "constexpr", "defined", "sizeof", "__launch_bounds__", "alignas", "decltype"}
)
_CUDA_DEFINITION = re.compile(
    r"^[^\n#/;]*?\b(?:(?:struct|class)\s+(?P<type>\w+)[^;{}()]*\{|(?P<function>\w+)\s*\([^;{}]*\)\s*(?:const\s*)?(?:noexcept\s*)?\{)",
    re.MULTILINE,
)


class _Function(NamedTuple):
    """A function or method of a Python file; what is defined in it is a function of its own."""

    file: str
    owner: str  # class; empty elsewhere
    name: str
    start: int  # its first line, from 1
    end: int  # its last line
    names: frozenset[str]  # every name in it
    imported: frozenset[str]  # every name that its file imports


class FusionPath:
    """What lies on the fusion path.

    Args:
        functions: The Python functions on it.
        callers: Functions that lead to it, and to other places as well.
        kernels: For each CUDA file on it, the names of functions and kernels that are reached.
        root_of: For each package, by import name, the folder that it is in.
    """

    def __init__(
        self,
        functions: Iterable[_Function],
        callers: Iterable[_Function],
        kernels: Mapping[str, frozenset[str]],
        root_of: Mapping[str, str],
    ) -> None:
        self._functions = _by_file(functions)
        self._callers = _by_file(callers)
        self._kernels, self._root_of = kernels, root_of
        self._words = frozenset(function.name for found in self._functions.values() for function in found if _FUSED.search(function.name))

    @property
    def files(self) -> list[str]:
        """The files on it, in order."""
        return sorted({*self._functions, *self._kernels})

    def holds(self, file: str, line: int, guards: str) -> bool:
        """Whether a condition at ``line`` of ``file``, in the function or kernel ``guards``, is on it."""
        if file in self._kernels:
            return not guards or guards in self._kernels[file]
        if not _around(self._functions, file, line):
            return self._leads_on(file, line)
        return not any(_CHOOSES_ANOTHER.search(head) for head in _heads(text_of(self._root_of, file), line))

    def depends_on(self, file: str, line: int) -> bool:
        """Whether the fused allreduce depends on what the condition at ``line`` of a Python file lets through.

        It does in a function that reads sglang's option, and where the condition guards something further on the path.
        """
        return any(_OPTIONS & function.names for function in _around(self._functions, file, line)) or self._leads_on(file, line)

    def _leads_on(self, file: str, line: int) -> bool:
        around = [*_around(self._functions, file, line), *_around(self._callers, file, line)]
        return bool(around) and not self._words.isdisjoint(_NAME.findall(_block(text_of(self._root_of, file), line)))


def _around(functions: Mapping[str, list[_Function]], file: str, line: int) -> list[_Function]:
    return [function for function in functions.get(file, ()) if function.start <= line <= function.end]


def derive(root_of: Mapping[str, str], option_files: Iterable[str]) -> FusionPath:
    """Derive the path.

    Args:
        root_of: For each package, by import name, the folder that it is in.
        option_files: Python files of sglang in which OPTION occurs.
    """
    texts = {file: text_of(root_of, file) for file in option_files}
    ours = [function for file, text in texts.items() if not _SETS_OPTION.search(text) for function in _functions(file, text)]
    theirs = [function for file in _flashinfer_files(root_of) for function in _functions(file, text_of(root_of, file))]
    entries = {function.name for function in theirs if function.file.startswith("flashinfer/comm/") and _FUSED.search(function.name)}
    begins = [
        function
        for function in ours
        if not function.file.startswith(_ONE_MODEL)
        and not _OTHER_BACKEND.search(f"{function.file} {function.owner} {function.name}")
        and (_OPTIONS & function.names or (_plain(function.names) & entries and _USES_FLASHINFER.search(texts[function.file])))
    ]
    within_sglang = _reached(begins, ours)
    used = {name for function in within_sglang for name in _plain(function.names) & entries}
    within_flashinfer = _reached([function for function in theirs if function.name in used and not function.owner], theirs)
    on_it = [*within_sglang, *within_flashinfer]
    return FusionPath(on_it, _leading(on_it, ours), _kernels(root_of, within_flashinfer), root_of)


def _plain(names: Iterable[str]) -> set[str]:
    """``names`` as they were before a module gave them private aliases."""
    return {name.lstrip("_") for name in names}


def _flashinfer_files(root_of: Mapping[str, str]) -> Iterator[str]:
    for name in _FLASHINFER:
        folder = os.path.join(root_of.get("flashinfer", ""), name)
        yield from (f"{name}/{file}" for file in sorted(os.listdir(folder)) if file.endswith(".py")) if os.path.isdir(folder) else (name,)


def _by_file(functions: Iterable[_Function]) -> dict[str, list[_Function]]:
    found: dict[str, list[_Function]] = {}
    for function in functions:
        found.setdefault(function.file, []).append(function)
    return found


def _functions(file: str, text: str) -> list[_Function]:
    """The functions of a file, found by indentation."""
    lines = _DOCSTRING.sub(lambda match: "\n" * match[0].count("\n"), text).splitlines()
    imported = frozenset(name for names in _IMPORT.findall(text) for name in _NAME.findall(names))
    found: list[_Function] = []
    open_ones: list[tuple[int, str, str, int, list[str]]] = []  # indentation, keyword, name, first line, its own lines

    def end(before: int, indent: int) -> None:
        while open_ones and open_ones[-1][0] >= indent:
            _indent, keyword, name, start, own = open_ones.pop()
            if keyword != "class":
                owner = open_ones[-1][2] if open_ones and open_ones[-1][1] == "class" else ""
                found.append(_Function(file, owner, name, start, before, frozenset(_NAME.findall("\n".join(own))), imported))

    for number, line in enumerate(lines, 1):
        stripped = line.lstrip()
        if not stripped or stripped.startswith(("#", ")", "]", "}")):
            continue
        indent = len(line) - len(stripped)
        end(number - 1, indent)
        match = _DEFINITION.match(line)
        if match:
            open_ones.append((indent, line.split(None, 1)[0], match[2], number, []))
        elif open_ones:
            open_ones[-1][4].append(line.partition("#")[0])
    end(len(lines), 0)
    return found


def _reached(begins: Iterable[_Function], among: list[_Function]) -> list[_Function]:
    """``begins`` and every function that they call, directly or not; a class stands for the method that makes it."""
    homes: dict[str, list[_Function]] = {}
    for function in among:
        homes.setdefault(function.owner if function.name == "__init__" else function.name, []).append(function)
    within, pending, found, made = _by_file(among), list(begins), {}, set()
    while pending:
        function = pending.pop()
        if (function.file, function.start) in found:
            continue
        found[function.file, function.start] = function
        made.add(function.owner)
        names = function.names
        if _FACTORY.fullmatch(function.name):  # it hands out what is defined in it, and calls nothing of that
            names -= {other.name for other in within.get(function.file, ()) if function.start < other.start <= function.end}
        for name in names:
            candidates = [other for other in homes.get(name, ()) if not _OTHER_BACKEND.search(f"{other.owner} {other.name}")]
            methods = [other for other in candidates if other.owner and other.owner == function.owner]
            near = [
                other for other in candidates if other.file == function.file and (other.owner in ("", *made) or other.name == "__init__")
            ]
            far = candidates if name in function.imported or (len(candidates) == 1 and name.count("_") > 1) else []
            pending.extend(
                methods or near or [other for other in far if not other.owner or other.name == "__init__" or other.owner in made]
            )
    return list(found.values())


def _leading(path: Iterable[_Function], among: Iterable[_Function]) -> list[_Function]:
    """The functions among ``among`` that lead to ``path``, directly or not."""
    words = {function.name for function in path if _FUSED.search(function.name)}
    found: dict[tuple[str, int], _Function] = {}
    grown = True
    while grown:
        new = [function for function in among if (function.file, function.start) not in found and function.names & words]
        found.update({(function.file, function.start): function for function in new})
        words |= {function.name for function in new if _FUSED.search(function.name)}
        grown = bool(new)
    return list(found.values())


def _heads(text: str, line: int) -> Iterator[str]:
    """The head of the statement at ``line``, and the first line of each that it stands in, up to its function."""
    lines = text.splitlines()
    for own in lines[line - 1 :]:
        yield own
        if own.rstrip().endswith(":") or not own.strip():
            break
    indent = len(lines[line - 1]) - len(lines[line - 1].lstrip())
    for above in reversed(lines[: line - 1]):
        stripped = above.lstrip()
        if stripped and len(above) - len(stripped) < indent:
            if _DEFINITION.match(above):
                return
            indent = len(above) - len(stripped)
            yield above


def _block(text: str, line: int) -> str:
    """The statement that starts at ``line``, with everything in it."""
    lines = text.splitlines()
    indent = len(lines[line - 1]) - len(lines[line - 1].lstrip())
    block = [lines[line - 1]]
    for following in lines[line:]:
        stripped = following.lstrip()
        if stripped and len(following) - len(stripped) <= indent and not stripped.startswith((")", "]", "}", "and ", "or ")):
            break
        block.append(following)
    return "\n".join(block)


def _kernels(root_of: Mapping[str, str], functions: Iterable[_Function]) -> dict[str, frozenset[str]]:
    """For each CUDA file that the JIT modules of ``functions`` are built from, what is reached in it."""
    functions = list(functions)
    sources = [
        f"flashinfer/data/csrc/{name}"
        for function in functions
        if function.name.startswith("gen_")
        for name in _SOURCE_NAME.findall("\n".join(text_of(root_of, function.file).splitlines()[function.start - 1 : function.end]))
    ]
    texts: dict[str, str] = {}
    for source in sources:
        _include(root_of, source, texts)
    used = {name for function in functions if not _FACTORY.fullmatch(function.name) for name in function.names}
    exported = {match[3] for text in texts.values() for match in _EXPORTED.finditer(text) if (match[1] or match[2]) in used}
    defined = [item for text in texts.values() for item in _cuda_definitions(text)]
    named: dict[str, set[str]] = {}
    for name, names in defined:
        named.setdefault(name, set()).update(names)
    pending, reached = set(exported), set()
    while pending:
        reached |= pending
        pending = {name for word in pending for name in named.get(word, ()) if name in named} - reached
    return {file: frozenset(reached) for file in texts}


def _include(root_of: Mapping[str, str], file: str, texts: dict[str, str]) -> None:
    """Add ``file``, and every file that it includes, to ``texts``."""
    if file in texts or not os.path.isfile(os.path.join(root_of["flashinfer"], file)):
        return
    texts[file] = text = text_of(root_of, file)
    for name in _INCLUDE.findall(text):
        for folder in (os.path.dirname(file), "flashinfer/data/include", "flashinfer/data/csrc"):
            _include(root_of, os.path.normpath(f"{folder}/{name}"), texts)


def _cuda_definitions(text: str) -> Iterator[tuple[str, frozenset[str]]]:
    """The functions, kernels and types that ``text`` defines, each with the names in it."""
    matches = [match for match in _CUDA_DEFINITION.finditer(text) if match["function"] not in _NO_FUNCTION]
    for match, following in zip(matches, [*matches[1:], None]):
        body = text[match.start() : following.start() if following else len(text)]
        yield match["type"] or match["function"], frozenset(re.findall(r"[A-Za-z_]\w*", body))
