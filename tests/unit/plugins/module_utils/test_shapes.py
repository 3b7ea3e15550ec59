# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the shapes answer and how they edit, against the code itself: every source here is also executed, with stand-ins for the GPU."""

from __future__ import annotations

import builtins
import contextlib
import io
import tokenize
from types import SimpleNamespace

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._catalogue import BY_ID
from ansible_collections.blackwell.inference.plugins.module_utils._opening import compose
from ansible_collections.blackwell.inference.plugins.module_utils._predicate import Host
from ansible_collections.blackwell.inference.plugins.module_utils._shapes import ShapeError
from ansible_collections.blackwell.inference.plugins.module_utils._source import Source
from ansible_collections.blackwell.inference.plugins.module_utils._survey import InstalledFile
from ansible_collections.blackwell.inference.tests.unit.conftest import OPENED, SOURCES
from hypothesis import given
from hypothesis import strategies as st

SM120 = (12, 0)
MAJORS, DEVICE, GRANULARITY, APPLIES, BACKEND, PREFLIGHT = OPENED


CAPABILITIES = [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), SM120, (12, 1)]  # the code only runs on these: that takes long


class Closed(Exception):
    """A gate that is shut."""


class Broken(Exception):
    """Code that does not run."""


class Anything:
    """Whatever the code takes from elsewhere."""

    def __getattr__(self, name: str) -> Anything:
        return self

    def __call__(self, *arguments: object, **named: object) -> Anything:
        return self


def executed(gate: str, text: str, capability: tuple[int, int]) -> bool:
    """Whether ``gate`` is open when the code in ``text`` runs on this GPU."""
    major, multicast = capability[0], int(capability[0] in (9, 10))

    def query(*_arguments):
        if not multicast:
            raise Closed
        return (0, 1) if gate == PREFLIGHT else 1

    helpers = {f"is_sm{number}_supported": lambda *_arguments, wanted=number // 10: major == wanted for number in (80, 90, 100, 120)}
    platform = SimpleNamespace(**{name.removesuffix("_supported"): probe() for name, probe in helpers.items()})
    platform.device_capability, platform.device_sm = capability, major * 10 + capability[1]
    utils = SimpleNamespace(is_cuda=lambda: True, get_platform=lambda: platform, **helpers)
    torch = SimpleNamespace(cuda=SimpleNamespace(get_device_capability=lambda *_: capability))

    def flags(supported_major_versions=None):
        if supported_major_versions and major not in supported_major_versions:
            raise Closed
        return []

    modules = {"torch": torch, "": SimpleNamespace(context=SimpleNamespace(get_nvcc_flags_list=flags), gen_jit_spec=Anything())}
    driver = Anything()
    driver.cuDeviceGetAttribute = lambda attribute, device: multicast
    driver.cuMulticastGetGranularity, driver.CUDA_SUCCESS = query, 0
    driver.cuMemGetAllocationGranularity = lambda *_: (0, 1) if gate == PREFLIGHT else 1
    scope = {
        "__name__": "simulated",
        **helpers,
        "__builtins__": {**vars(builtins), "__import__": lambda name, *_: modules.get(name, utils)},
        "get_server_args": Anything(),
        "comm": Anything(),
        "cuda": driver,
        "check": lambda result: result,
        "ceil_align": lambda size, step: size,
    }
    try:
        exec(compile(text, "simulated", "exec", dont_inherit=True), scope)
        if gate == APPLIES:
            return bool(scope["apply_flashinfer_allreduce_fusion"](8))
        if gate == MAJORS:
            scope["gen_trtllm_comm_module"]()
        elif gate == BACKEND:
            scope["_resolve_backend"]("trtllm")
        elif gate == PREFLIGHT:
            scope["_flashinfer_trtllm_workspace_allocation_sizes"](driver, Anything(), [1, 2])
        else:
            memory = scope["SymmDeviceMemory"]
            memory._allocate = lambda self, enable_multicast: None
            made = memory(1, 0, enable_multicast=False) if gate == DEVICE else memory.__new__(memory)
            made._enable_multicast = False
            if gate == GRANULARITY:
                made._get_allocation_prop(1)
    except (Closed, ValueError, RuntimeError, AssertionError):
        return False
    except (TypeError, NameError, AttributeError) as error:
        raise Broken from error
    return True


def place(gate: str):
    return next(place for place in BY_ID[gate].places if place.file in SOURCES)


def file_of(gate: str, content: bytes) -> InstalledFile:
    return InstalledFile("/simulated", place(gate).file, content, None, None)


def answers(gate: str, content: bytes) -> dict:
    reading = place(gate).shape.read(Source(content))
    return {capability: reading.answer(Host(capability)) for capability in CAPABILITIES} if reading else {}


def run_everywhere(gate: str, text: str) -> dict[tuple[int, int], bool]:
    return {capability: executed(gate, text, capability) for capability in CAPABILITIES}


def check(gate: str, content: bytes, must_open: bool = False) -> None:
    """What the shape says of ``content`` is what happens when it runs, and so it is after opening, which adds tokens and takes none."""
    before, edited = {}, None
    try:
        before = answers(gate, content)
        edited = compose(file_of(gate, content), [gate], (SM120,))
    except ShapeError:
        assert not must_open
    assert not must_open or before.get(SM120) is False
    if not before:
        return
    text = Source(content).text
    run = run_everywhere(gate, text)
    assert all(answer in (None, run[capability]) for capability, answer in before.items()), (before, run)
    if edited is None or before[SM120] is not False:
        assert edited in (None, content)
        return
    after, changed = run_everywhere(gate, Source(edited).text), {SM120, *place(gate).shape.spreads(SM120)}
    assert after[SM120] and [after[known] for known in after if known not in changed] == [
        run[known] for known in run if known not in changed
    ]
    assert is_subsequence(tokens(text), tokens(Source(edited).text))
    assert edited[:3] == content[:3] and line_endings(edited) == line_endings(content)


def tokens(text: str) -> list[str]:
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return [token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in layout]


def is_subsequence(part: list[str], whole: list[str]) -> bool:
    rest = iter(whole)
    return all(token in rest for token in part)


def line_endings(content: bytes) -> set[bytes]:
    crlf = content.count(b"\r\n")
    return {name for name, count in ((b"\r\n", crlf), (b"\n", content.count(b"\n") - crlf), (b"\r", content.count(b"\r") - crlf)) if count}


@pytest.mark.parametrize("gate", OPENED)
def test_a_gate_is_read_and_opened_as_it_runs(gate):
    content = SOURCES[place(gate).file].encode()
    assert answers(gate, content)[SM120] is False and answers(gate, content)[(9, 0)] is True
    check(gate, content, must_open=True)
    assert executed(gate, compose(file_of(gate, content), [gate], (SM120,)).decode(), SM120)


# Other layouts of the same code

_GAP = st.sampled_from(
    ["", " ", "  ", "\t", "\n", "\n\n    ", "  # see above: [9, 10] or is_sm90_supported()\n", "\n# ünïcode, 12\n        "]
)
_LINE = st.sampled_from(["", "", "", "\n", "# a comment: supported_major_versions=[9, 10]\n", "    # indented\n\n"])


@st.composite
def layouts(draw, text: str) -> str:
    """``text`` with other white space, comments, line breaks and trailing commas where they mean nothing."""
    written, depth, end = [], 0, (1, 0)
    lines = text.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            continue
        gap = text_between(lines, end, token.start)
        if token.string in ")]}":
            depth -= 1
        keeps_apart = bool(gap.strip("\n")) or not gap
        written.append(gap if not depth or not keeps_apart else gap + draw(_GAP))
        if token.string in "([{" and token.type == tokenize.OP:
            depth += 1
        written.append(token.string)
        if token.type in (tokenize.NEWLINE, tokenize.NL) and not depth:
            written.append(draw(_LINE))
        end = token.end
    return "".join(written)


def text_between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    return "".join([lines[start[0] - 1][start[1] :], *lines[start[0] : end[0] - 1], lines[end[0] - 1][: end[1]]])


_FORMS = st.sampled_from(
    [
        lambda text: text.encode(),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.replace("\n", "\r").encode(),
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: b"# -*- coding: latin-1 -*-\n" + text.encode("latin-1"),
        lambda text: b"#!/usr/bin/python\n# vim: fileencoding=utf-8\n" + text.encode(),
        lambda text: text.rstrip("\n").encode(),
    ]
)


@pytest.mark.parametrize("gate", OPENED)
@given(data=st.data())
def test_layout_does_not_matter(gate, data):
    content = data.draw(_FORMS)(data.draw(layouts(SOURCES[place(gate).file])))
    check(gate, content, must_open=True)


# Other code: it is understood as it runs, or refused

_LIST = "[9, 10])\n    return"
_BOTH = "(_is_sm90_supported or _is_sm100_supported)\n        and"
_SM90, _SM100 = "_is_sm90_supported = _is_cuda and is_sm90_supported()", "_is_sm100_supported = _is_cuda and is_sm100_supported()"
_RETURN = "return (\n        # both"
_TEST = "not (is_sm90_supported() or is_sm100_supported())"
_IF = f"    if {_TEST}:\n        raise"
_IMPORT = "import is_sm90_supported, is_sm100_supported"
_SIZE = "        mc_prop.size = allocation_size\n"
_QUERY = "error, mc_granularity = driver.cuMulticastGetGranularity(mc_prop)"
_UNSUPPORTED = "        if supported == 0:\n            raise"

# By gate: a piece of its code, and what may stand there instead.
VARIANTS = {
    MAJORS: {
        _LIST: [
            *(f"{majors})\n    return" for majors in ("(9, 10)", "{10, 9}", "[9, (10)]", "[9] + [10]", "[12, 9]", "[8 + 1, 10, *[]]")),
            *(f"{majors})\n    return" for majors in ("None", "[]", "[9, 10.0]", "list(range(9, 11))", "[9, 'ten']", "[*[9, 10]]")),
            "(lambda: [9, 10])())\n    return",
            "[9, 10] if gen_mixed_comm_module else [9])\n    return",
        ],
        "context.get_nvcc_flags_list(supported_major_versions=[9, 10])\n    return": [
            "context.get_nvcc_flags_list([9, 10])\n    return",
            "context.get_nvcc_flags_list()\n    return",
            "context.get_nvcc_flags_list(**{'supported_major_versions': [9, 10]})\n    return",
            "(context.get_nvcc_flags_list([9, 10]) or context.get_nvcc_flags_list([9, 12]))\n    return",
            "(lambda: context.get_nvcc_flags_list([9, 10]))()\n    return",
        ],
        "    flags = context.get_nvcc_flags_list(supported_major_versions=[9, 10])": [
            "    majors = [9, 10]\n    flags = context.get_nvcc_flags_list(majors)",
            "    majors = [9]\n    majors += [10]\n    flags = context.get_nvcc_flags_list(majors)",
            "    majors = [9]\n    majors.append(12)\n    flags = context.get_nvcc_flags_list(majors)",
            "    if gen_mixed_comm_module:\n        flags = context.get_nvcc_flags_list(supported_major_versions=[9, 10])",
        ],
        "def gen_trtllm_comm_module": [
            "@(lambda function: function)\ndef gen_trtllm_comm_module",
            "class Other:\n    pass\n\n\ndef gen_trtllm_comm_module",
        ],
    },
    APPLIES: {
        _BOTH: [
            f"{condition}\n        and"
            for condition in (
                "(_is_sm90_supported or _is_sm100_supported or False)",
                "any([_is_sm90_supported, _is_sm100_supported])",
                "any(probe for probe in (_is_sm90_supported, _is_sm100_supported))",
                "(_is_sm90_supported | _is_sm100_supported)",
                "(not (not _is_sm90_supported and not _is_sm100_supported))",
                "(True if _is_sm90_supported else _is_sm100_supported)",
                "(torch.cuda.get_device_capability()[0] in (9, 10))",
                "(9 <= torch.cuda.get_device_capability()[0] < 12)",
                "((8, 9) < torch.cuda.get_device_capability() < (11, 5))",
                "decoy()",
                "(lambda: _is_sm90_supported or _is_sm100_supported)()",
                "max(_is_sm90_supported, _is_sm100_supported)",
                "True",
                "_is_sm90_supported",
                "{True: True}.get(_is_sm90_supported)",
                "(is_sm90_supported() and _is_cuda or _is_sm100_supported)",
            )
        ],
        _SM90: [
            "_is_sm90_supported = is_sm90_supported()",
            "_is_sm90_supported: bool = (\n    _is_cuda and is_sm90_supported()\n)",
            "_is_sm90_supported = False\nif _is_cuda:\n    _is_sm90_supported = is_sm90_supported()",
            "try:\n    _is_sm90_supported = is_sm90_supported()\nexcept ImportError:\n    _is_sm90_supported = False",
            "_is_sm90_supported = is_sm90_supported() if _is_cuda else False",
        ],
        _SM100: [
            "_is_sm100_supported = (\n    _is_cuda  # first\n    and is_sm100_supported()\n)",
            "_is_sm100_supported = is_sm100_supported()  # a comment",
            "_is_sm100_supported = is_sm100_supported(); other = 1",
            "other = _is_sm100_supported = is_sm100_supported()",
            "_is_sm120_supported = None\n_is_sm100_supported = is_sm100_supported()",
            "_is_sm100_supported, other = is_sm100_supported(), 1",
            "_is_sm100_supported = is_sm100_supported() or is_sm120_supported() and False",
            "from sglang.srt.utils import get_platform\n_is_sm100_supported = _is_cuda and get_platform().is_sm100",
        ],
        "import is_cuda, is_sm90_supported, is_sm100_supported": [
            "import is_cuda, is_sm100_supported, is_sm80_supported as is_sm90_supported, is_sm120_supported",
            "import is_cuda, is_sm120_supported as is_sm90_supported, is_sm100_supported",
            "import *",
        ],
        "import torch\n": [
            "import torch\nimport torch\n",
            "",
            "import torch as t\n",
            "try:\n    import torch\nexcept ImportError:\n    torch = None\n",
        ],
        f"    {_RETURN}": [
            "    arch = _is_sm90_supported or _is_sm100_supported\n    return arch and (\n        # both",
            *(
                f"    {early}\n    {_RETURN}"
                for early in (
                    "if not _is_cuda: return False",
                    "if batch_size > 9: return False",
                    "if batch_size > 9: return True",
                    "if not (_is_sm90_supported or _is_sm100_supported): return False",
                    "if is_sm80_supported(): return True",
                    "_is_sm100_supported = is_sm90_supported()",
                    "while batch_size > 9: return False",
                )
            ),
        ],
        "batch_size: int": ["batch_size, _is_cuda=True", "batch_size, *, is_sm90_supported=None"],
        "def decoy():\n": [
            "def apply_flashinfer_allreduce_fusion(batch_size):\n    return 1\n\n\ndef decoy():\n",
            "_is_sm90_supported = _is_cuda\n\n\ndef decoy():\n",
            "def decoy():\n    global _is_sm90_supported\n",
            "@print\ndef decoy():\n",
        ],
    },
    BACKEND: {
        _TEST: [
            "not is_sm90_supported() and not is_sm100_supported()",
            "torch.cuda.get_device_capability()[0] not in (9, 10)",
            "not (is_sm90_supported() or is_sm100_supported() or backend == 'none')",
            "backend and not (is_sm90_supported() or is_sm100_supported())",
            "not _mnnvl_supported(is_multi_node)",
            "not (is_sm90_supported() or is_sm100_supported()) or is_sm80_supported()",
            "is_multi_node or not (is_sm90_supported() or is_sm100_supported())",
            "len([probe for probe in (is_sm90_supported, is_sm100_supported) if probe()]) == 0",
            "(ok := is_sm90_supported() or is_sm100_supported()) is False",
        ],
        _IF: [
            f"    if not ({_TEST}):\n        pass\n    else:\n        raise",
            f"    if is_sm80_supported():\n        raise ValueError('old')\n    elif {_TEST}:\n        raise",
            f"    assert not ({_TEST}), 'no'\n    if False:\n        raise",
            f"    for _turn in (1,):\n        if {_TEST}: raise ValueError\n    if False:\n        raise",
            f"    try:\n        major = 1\n    finally:\n        if {_TEST}: raise ValueError\n    if False:\n        raise",
            f"    with open('/dev/null'):\n        if {_TEST}: raise ValueError\n    if False:\n        raise",
            f"    if {_TEST}: raise ValueError\n    if False:\n        raise",
            f"    if {_TEST}:\n        backend = None\n    if backend is None:\n        raise",
            "    ok = is_sm90_supported()\n    ok |= is_sm100_supported()\n    if not ok:\n        raise",
            "    from sglang.srt.utils import is_sm90_supported as a, is_sm100_supported as b\n    if not (a() or b()):\n        raise",
            "    def supported():\n        return is_sm90_supported() or is_sm100_supported()\n    if not supported():\n        raise",
        ],
        "    return backend\n": [
            "    if is_sm80_supported():\n        raise ValueError('old')\n    return backend\n",
            "    if torch.cuda.get_device_capability() == (12, 0):\n        raise ValueError('new')\n    return backend\n",
            "    raise ValueError(backend)\n",
        ],
        _IMPORT: [
            "import is_sm90_supported, is_sm90_supported as is_sm100_supported",
            "import is_sm120_supported as is_sm90_supported, is_sm100_supported",
        ],
        "backend, is_multi_node=False": ["backend, is_multi_node=False, is_sm90_supported=lambda: False"],
        "import torch\n": ["", "import torch.cuda\n"],
    },
    PREFLIGHT: {
        _SIZE: [
            _SIZE.replace("\n", "; other = 1\n"),
            _SIZE.replace("allocation_size", "'''\n'''"),
            _SIZE.replace("allocation_size", "1 + \\\n            allocation_size"),
            _SIZE + "        other = mc_prop\n",
            _SIZE + "        print(mc_prop, end='')\n",
        ],
        "        allocation_size = ceil_align(allocation_size, mc_granularity)\n": [
            "",
            "        rounded = ceil_align(allocation_size, mc_granularity)\n        allocation_size = rounded\n",
        ],
        "append(allocation_size)": ["append(mc_granularity)", "append((allocation_size, mc_prop))"],
        "        mc_prop = driver": [
            "        if is_sm90_supported():\n            allocation_size += 0\n        mc_prop = driver",
            "        if is_sm120_supported():\n            continue\n        mc_prop = driver",
        ],
        "    allocation_sizes = []\n": [
            "    allocation_sizes = []\n    if is_sm120_supported():\n        return sizes\n",
            "    allocation_sizes = []\n    if torch.cuda.get_device_capability() in [(12, 0)]: return sizes\n",
        ],
        "import torch\n": [""],
        f"        {_QUERY}": [
            f"        with open('/dev/null'):\n            {_QUERY}",
            f"        with open('/dev/null'): {_QUERY}",
            f"        x = 1; {_QUERY}",
            "        error = (mc_granularity := driver.cuMulticastGetGranularity(mc_prop)[1]) and 0",
            f"        if is_sm90_supported() or is_sm100_supported() or True:\n            {_QUERY}",
        ],
        "    return allocation_sizes": ["    driver.cuMulticastGetGranularity(mc_prop)\n    return allocation_sizes"],
    },
    DEVICE: {
        "supported == 0": [
            "not supported",
            "supported != 1",
            "supported == 0 and enable_multicast",
            "enable_multicast and supported == 0",
            "supported == 0 or size < 0",
            "not bool(supported)",
            "not is_ok(supported)",
        ],
        _UNSUPPORTED: [
            f"        x = 1\n{_UNSUPPORTED}",
            "        if size < 0: pass\n        elif supported == 0:\n            raise",
            "        if supported: pass\n        else:\n            raise",
        ],
        "class SymmDeviceMemory:": ["def is_ok(value):\n    return value\n\n\nclass SymmDeviceMemory:"],
        "enable_multicast=True": ["enable_multicast=None", "*, enable_multicast=True"],
    },
    GRANULARITY: {
        "        mc_prop.size = size\n": ["        mc_prop.size = size\n        if self._enable_multicast: pass\n"],
        "        mc_prop = cuda": ["        if not self._enable_multicast:\n            return prop, None, 1\n        mc_prop = cuda"],
        "return prop, mc_prop, alloc_granularity": ["return prop, mc_prop, self._mc_granularity"],
        "self._mc_granularity = check(": ["granularity = check(", "self._other = self._mc_granularity = check("],
        "alloc_granularity = check(": ["alloc_granularity = granularity = check(", "alloc_granularity: int = check("],
        "cuda.cuMulticastGetGranularity(mc_prop)": [
            "\n            cuda.cuMulticastGetGranularity(\n                mc_prop  # of it\n            )\n        "
        ],
    },
}
# Places that a gate may move to and where it is not followed, all of them closed at 12.0.
_PLATFORM = "    from sglang.srt.utils import get_platform\n"
_MATCH = f"{_PLATFORM}    match get_platform().device_sm:\n        case 90 | 100 | 103:\n            pass\n        case _:\n            "
_LOOP = (
    f"{_PLATFORM}    for number in (90, 100, 103):\n        if get_platform().device_sm == number:\n            break\n    else:\n        "
)
_ONLY = "(lambda function: lambda *given: (is_sm90_supported() or is_sm100_supported()) and function(*given))"
_DEFINITION, _DECOY = "def apply_flashinfer_allreduce_fusion(batch_size: int):\n", "def decoy():\n"
_GENERATE, _SIGNATURE = "def gen_trtllm_comm_module():\n", "def _resolve_backend(backend, is_multi_node=False):\n"
_RESOLVE = f"{_SIGNATURE}{_IF}"
_REQUIRE = f"def _require():\n    if {_TEST}:\n        raise ValueError\n\n\n"
MOVED = {
    MAJORS: {
        '(supported_major_versions=[9, 10])\n    return gen_jit_spec("trtllm': [
            '(supported_major_versions=[9, 10], excluded_major_versions=[12])\n    return gen_jit_spec("trtllm',
            '(supported_major_versions=[9, 10])\n    flags = context.without(flags, [12])\n    return gen_jit_spec("trtllm',
        ],
        _GENERATE: [f"{_GENERATE}    if not any(major in (9, 10) for major in context.TARGET_CUDA_ARCHS):\n        raise RuntimeError\n"],
    },
    APPLIES: {
        _DEFINITION: [
            f"@{_ONLY}\n{_DEFINITION}",
            f"{_DEFINITION}{_MATCH}return False\n",
            f"{_DEFINITION}{_LOOP}return False\n",
            f"{_DEFINITION}{_PLATFORM}    if not getattr(get_platform(), 'is_sm90'):\n        return False\n",
        ],
        _DECOY: [f"apply_flashinfer_allreduce_fusion = {_ONLY}(apply_flashinfer_allreduce_fusion)\n\n\n{_DECOY}"],
        _BOTH: ["({}.get('fuse') or _is_sm90_supported or _is_sm100_supported)\n        and"],
    },
    BACKEND: {
        _IF: [f"{_MATCH}raise", f"{_LOOP}raise", f"{_PLATFORM}    if not getattr(get_platform(), 'is_sm90'):\n        raise"],
        _RESOLVE: [
            f"{_REQUIRE}{_SIGNATURE}    _require()\n    if False:\n        raise",
            f"{_REQUIRE}{_SIGNATURE}    is_sm90_supported() or _require()\n    if False:\n        raise",
            f"@{_ONLY}\n{_RESOLVE}",
        ],
    },
    DEVICE: {
        _UNSUPPORTED: ["        _require(supported)\n        if False:\n            raise"],
    },
}
for _gate, _variants in MOVED.items():
    for _old, _news in _variants.items():
        VARIANTS[_gate].setdefault(_old, []).extend(_news)
_NOT_FOLLOWED = [(gate, old, new) for gate, variants in MOVED.items() for old, news in variants.items() for new in news]
_ALL = [(gate, old, new) for gate, variants in VARIANTS.items() for old, news in variants.items() for new in news]


@pytest.mark.parametrize(("gate", "old", "new"), _ALL)
def test_other_code_is_understood_as_it_runs_or_refused(gate, old, new):
    text = SOURCES[place(gate).file]
    assert text.count(old) == 1
    check_variant(gate, text.replace(old, new))


@pytest.mark.parametrize(
    ("gate", "old", "new"),
    [
        *_NOT_FOLLOWED,
        (APPLIES, _BOTH, "get_platform().supports_fusion\n        and"),
        (BACKEND, _TEST, "not get_platform().supports_fusion"),
        (PREFLIGHT, _QUERY, "error, mc_granularity = _ask(driver, mc_prop)"),
    ],
)
def test_a_gate_that_moved_out_of_sight_is_never_called_open(gate, old, new):
    helper = "def _ask(driver, mc_prop):\n    return driver.cuMulticastGetGranularity(mc_prop)\n\n\n"
    helper += "def _require(supported=None):\n    if not supported:\n        raise RuntimeError\n\n\n" if gate == DEVICE else ""
    text = SOURCES[place(gate).file]
    assert text.count(old) == 1
    content = (helper + text.replace(old, new)).encode()
    with contextlib.suppress(ShapeError):
        edited = compose(file_of(gate, content), [gate], (SM120,))
        assert edited != content or answers(gate, edited)[SM120] is not True


@pytest.mark.parametrize("gate", OPENED)
@given(data=st.data())
def test_so_is_any_mixture_of_it(gate, data):
    text = SOURCES[place(gate).file]
    pairs = st.sampled_from([pair for own, *pair in _ALL if own == gate])
    for old, new in data.draw(st.lists(pairs, min_size=2, max_size=4, unique_by=lambda pair: pair[0])):
        text = text.replace(old, new, 1)
    check_variant(gate, text)


def check_variant(gate: str, text: str) -> None:
    try:
        compile(text, "simulated", "exec")
        run_everywhere(gate, text)
    except (SyntaxError, Broken):  # variants that do not go together
        with contextlib.suppress(ShapeError):
            compose(file_of(gate, text.encode()), [gate], (SM120,))
    else:
        check(gate, text.encode())
