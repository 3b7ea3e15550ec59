# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Gates of each kind, planted in small packages, and what only looks like one."""

from __future__ import annotations

import textwrap

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._audit import Closed, Found, search
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError

SM90, SM103, SM120 = (9, 0), (10, 3), (12, 0)
FILLER = "".join(f"def f{number}(x):\n    for item in x:\n        yield item * {number}\n\n\n" for number in range(200))


def audited(folder, files: dict[str, str], *hosts) -> Found:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return search({"kernels": str(folder)}, hosts or [SM120])


def closed(folder, text: str, *hosts, name: str = "kernels/a.py") -> list[Closed]:
    return audited(folder, {name: text}, *hosts).closed


PYTHON = {
    "list of major versions": ("flags = get(supported_major_versions=[9, 10])", ["list", "supported_major_versions=[9, 10]", 1, 1]),
    "list that a name holds": (
        """\
        MAJORS = [9, 10]

        def gen():
            return flags(supported_major_versions=MAJORS)
        """,
        ["list", "supported_major_versions=MAJORS", 4, 4],
    ),
    "list on several lines": (
        """\
        def gen():
            flags = context.get_nvcc_flags_list(
                supported_major_versions=[
                    9,  # Hopper
                    10,
                ]
            )
        """,
        ["list", "supported_major_versions=[9, 10]", 3, 6],
    ),
    "decorator": (
        """\
        @supported_compute_capability([90, 100, 103])
        def check(x):
            return True
        """,
        ["decorator", "@supported_compute_capability([90, 100, 103])", 1, 1],
    ),
    "decorator under another name": (
        """\
        from utils import supported_compute_capability as supported

        SERVED = [90, 100]

        @supported(SERVED)
        def check(x):
            return True
        """,
        ["decorator", "@supported(SERVED)", 5, 5],
    ),
    "flag of a class": (
        """\
        class Runner:
            fast = get_platform().is_sm100

            def run(self, x):
                if self.fast:
                    x.run()
        """,
        ["condition", "self.fast", 5, 5],
    ),
    "getattr()": (
        """\
        def use(x):
            if getattr(get_platform(), "is_sm100"):
                x.run()
        """,
        ["condition", "getattr(get_platform(), 'is_sm100')", 2, 2],
    ),
    "decorator of backends": (
        """\
        @supported_compute_capability([100, 103])
        def check(x):
            return True

        @backend_requirement({"trtllm": check})
        def run(x):
            return x
        """,
        ["decorator", "@backend_requirement({'trtllm': check})", 5, 5],
    ),
    "condition on several lines": (
        """\
        def use(x):
            if (
                is_sm90_supported()
                or is_sm100_supported()  # both
            ) and x:
                return fast(x)
            return slow(x)
        """,
        ["condition", "(is_sm90_supported() or is_sm100_supported()) and x", 2, 5],
    ),
    "alias at module level": (
        """\
        from utils import is_cuda, is_sm90_supported

        _hopper = is_cuda() and is_sm90_supported()

        def use(x):
            if _hopper:
                x.fast()
        """,
        ["condition", "_hopper, where _hopper = is_cuda() and is_sm90_supported()", 6, 6],
    ),
    "alias of an import": (
        """\
        from utils import is_sm90_supported as is_sm90_supported_here

        def use(x):
            return is_sm90_supported_here() and x.fast()
        """,
        ["return", "is_sm90_supported_here() and x.fast()", 4, 4],
    ),
    "alias in a function": (
        """\
        def use(x):
            capability = torch.cuda.get_device_capability()
            major = capability[0]
            if major == 9:
                x.fast()
        """,
        ["condition", "major == 9", 4, 4],
    ),
    "alias in an object": (
        """\
        class Runner:
            def __init__(self, x):
                self.sm = get_device_sm()
                self.fast = self.sm in (90, 100)

            def run(self, x):
                assert self.fast
        """,
        ["assert", "self.fast, where self.fast = self.sm in (90, 100)", 7, 7],
    ),
    "flag that something else decides too": (
        """\
        def use(x):
            fast = get_device_sm() == 90 and x.even
            if fast or x.forced:
                x.run()
        """,
        ["assignment", "get_device_sm() == 90 and x.even", 2, 2],
    ),
    "answer of a helper": (
        """\
        def helper(device):
            major, _ = get_compute_capability(device)
            return major == 10
        """,
        ["return", "major == 10", 3, 3],
    ),
    "call of a helper": (
        """\
        def can(device):
            return (props.major, props.minor) == (10, 0)

        def use(x):
            assert can(x.device), "no"
        """,
        ["assert", "can(x.device)", 5, 5],
    ),
    "helper that asks for more": (
        """\
        def can(x):
            if not x.ready:
                return False
            return get_compute_capability(x.device)[0] in (9, 10)

        def use(x):
            if not can(x):
                raise ValueError(x)
        """,
        ["raise", "not can(x)", 7, 7],
    ),
    "helper that answers yes or no": (
        """\
        def can(device):
            if get_compute_capability(device)[0] == 9:
                return True
            return False

        def use(x):
            assert can(x.device)
        """,
        ["assert", "can(x.device)", 7, 7],
    ),
    "helper that may fail": (
        """\
        def can(device):
            try:
                return get_compute_capability(device)[0] == 9
            except RuntimeError:
                return False

        def use(x):
            assert can(x.device)
        """,
        ["assert", "can(x.device)", 8, 8],
    ),
    "helper whose answer has a name": (
        """\
        def can(device):
            return get_compute_capability(device)[0] == 9

        def use(x):
            fast = can(x.device)
            if fast:
                x.run()
        """,
        ["condition", "fast", 6, 6],
    ),
    "helper in a function": (
        """\
        def use(x):
            def can():
                return get_compute_capability(x.device)[0] == 9

            assert can()
        """,
        ["assert", "can()", 5, 5],
    ),
    "method": (
        """\
        class Runner:
            def can(self):
                return get_compute_capability(self.device)[0] == 9

            def run(self):
                if not self.can():
                    raise RuntimeError
        """,
        ["raise", "not self.can()", 6, 6],
    ),
    "property": (
        """\
        class Runner:
            @functools.cached_property
            def fast(self):
                return get_compute_capability(self.device)[0] == 9

            def run(self, x):
                if self.fast:
                    x.run()
        """,
        ["condition", "self.fast", 7, 7],
    ),
    "helper that is handed a list": (
        """\
        def match(device, sm_version):
            major, minor = get_compute_capability(device)
            device_arch = f"{major * 10 + minor}"
            return device_arch in sm_version

        def use(x):
            assert match(x.device, ["120", "121"]) or not match(x.device, ["100"])
            if not match(x.device, ["90", "90a"]):
                raise ValueError(x)
        """,
        ["raise", "not match(x.device, ['90', '90a'])", 8, 8],
    ),
    "helper that names what it is handed": (
        """\
        def match(device, wanted):
            found = get_device_sm(device) in wanted
            return found

        def use(x):
            assert match(x.device, wanted=(120,))
            assert match(x.device, wanted=(100,))
        """,
        ["assert", "match(x.device, wanted=(100,))", 7, 7],
    ),
    "table": (
        """\
        ARCHES = {(9, 0): "sm_90a", (10, 0): "sm_100a"}

        def use(capability):
            arch = ARCHES.get(capability)
            if arch is None:
                raise ValueError(capability)
        """,
        ["raise", "arch is None", 5, 5],
    ),
    "table that gives a function": (
        """\
        KERNELS = {9: wgmma, 10: tcgen05}

        def use(device):
            major, minor = get_compute_capability(device)
            kernel = KERNELS.get(major)
            if not kernel:
                raise ValueError(device)
        """,
        ["raise", "not kernel", 6, 6],
    ),
    "table whose entry is returned": (
        """\
        ARCHES = {(9, 0): "sm_90a", (10, 0): "sm_100a"}

        def arch_for(capability):
            return ARCHES.get(capability)
        """,
        ["return", "ARCHES.get(capability)", 4, 4],
    ),
    "table that fails": (
        """\
        ARCHES = {(9, 0): "sm_90a", (10, 0): "sm_100a"}

        def use(capability):
            try:
                arch = ARCHES[capability]
            except KeyError:
                raise ValueError(capability) from None
            return arch
        """,
        ["lookup", "ARCHES[capability]", 5, 5],
    ),
    "table by parts": (
        """\
        SIZES = {(9, 0): 1, (10, 3): 2}

        def use(device):
            major, minor = get_compute_capability(device)
            return SIZES[(major, minor)]
        """,
        ["lookup", "SIZES[major, minor]", 5, 5],
    ),
    "keys of a table": (
        """\
        SIZES = {9: 1, 10: 2}

        def use(device):
            assert get_compute_capability(device)[0] in SIZES.keys()
        """,
        ["assert", "get_compute_capability(device)[0] in SIZES.keys()", 4, 4],
    ),
    "attribute of a class": (
        """\
        class Kernel(Base):
            supported_capabilities = ((9, 0), (10, 0))

            def check(self, capability_tuple):
                if capability_tuple not in self.supported_capabilities:
                    raise ValueError
        """,
        ["raise", "capability_tuple not in self.supported_capabilities", 5, 5],
    ),
    "refusal": (
        """\
        def use(device):
            major, minor = torch.cuda.get_device_capability(device)
            if major not in (9, 10):
                raise ValueError("no")
            return 1
        """,
        ["raise", "major not in (9, 10)", 3, 3],
    ),
    "refusal of what is on a GPU": (
        """\
        def use(x):
            if x.is_cuda and get_compute_capability(x.device)[0] not in (9, 10):
                raise ValueError("no")
            return 1
        """,
        ["raise", "x.is_cuda and get_compute_capability(x.device)[0] not in (9, 10)", 2, 2],
    ),
    "early return": (
        """\
        def use(x):
            if not get_platform().is_sm100:
                return None
            return fast(x)
        """,
        ["early return", "not get_platform().is_sm100", 2, 2],
    ),
    "range": ("assert 90 <= get_device_sm() < 120\n", ["assert", "90 <= get_device_sm() < 120", 1, 1]),
    "tens": (
        """\
        def use(sm_version):
            assert sm_version // 10 == 10
        """,
        ["assert", "sm_version // 10 == 10", 2, 2],
    ),
    "spelled": (
        """\
        def use(arch):
            if arch != "sm_90a":
                raise ValueError(arch)
        """,
        ["raise", "arch != 'sm_90a'", 2, 2],
    ),
    "choice in an expression": (
        """\
        def use(x):
            return fast(x) if is_sm100_supported() else slow(x)
        """,
        ["condition", "is_sm100_supported()", 2, 2],
    ),
    "else": (
        """\
        def use(x):
            if torch.cuda.get_device_capability() >= (12, 0):
                return None
            else:
                return fast(x)
        """,
        ["early return", "torch.cuda.get_device_capability() >= (12, 0)", 2, 2],
    ),
    "argument": (
        "build(rubin=get_compute_capability(device) == (10, 7))\n",
        ["argument", "get_compute_capability(device) == (10, 7)", 1, 1],
    ),
    "list that a local name holds": (
        """\
        def gen():
            wanted = [9, 10]
            return flags(supported_major_versions=wanted)
        """,
        ["list", "supported_major_versions=wanted", 3, 3],
    ),
    "set in lower case": (
        """\
        served = {90, 100}

        def use(device):
            major, minor = get_compute_capability(device)
            if major * 10 + minor not in served:
                raise ValueError
        """,
        ["raise", "major * 10 + minor not in served", 5, 5],
    ),
    "name of a name of a name": (
        """\
        def use(x):
            whole = torch.cuda.get_device_capability()
            copy = whole
            first = copy[0]
            if first == 10:
                return fast(x)
            return slow(x)
        """,
        ["condition", "first == 10", 5, 5],
    ),
    "names of the module": (
        """\
        _CC = torch.cuda.get_device_capability()
        _FIRST = _CC[0]

        def use(x):
            assert _FIRST == 9
        """,
        ["assert", "_FIRST == 9", 5, 5],
    ),
    "function under another name": (
        """\
        ask = torch.cuda.get_device_capability

        def use(x):
            assert ask()[0] == 9
        """,
        ["assert", "ask()[0] == 9", 4, 4],
    ),
    "attribute that another one follows from": (
        """\
        class Backend:
            def __init__(self):
                self.cap = (0, 0)
                self.cap = torch.cuda.get_device_capability()
                self.major = self.cap[0]
                self.fast = self.major in (9, 10)

            def run(self, x):
                assert self.fast
        """,
        ["assert", "self.fast, where self.fast = self.major in (9, 10)", 9, 9],
    ),
    "message that is one of several": (  # the other one is not in an excerpt
        """\
        def use(x):
            why = check(x)
            cc = torch.cuda.get_device_capability()
            if x.wide:
                why = f"the kernels for this are for {cc[0]}"
            if why is None:
                assert cc == (9, 0)
        """,
        ["assert", "cc == (9, 0)", 7, 7],
    ),
    "what may be None": (
        """\
        def use(device):
            capability = None if device is None else device.identity.compute_capability
            assert capability == (9, 0)
        """,
        ["assert", "capability == (9, 0)", 3, 3],
    ),
    "range()": (
        """\
        def use(device):
            assert torch.cuda.get_device_capability(device)[0] in range(9, 11)
        """,
        ["assert", "torch.cuda.get_device_capability(device)[0] in range(9, 11)", 2, 2],
    ),
    "targets of a build": (
        """\
        def gen(context):
            if any(major == 9 for major, _ in context.TARGET_CUDA_ARCHS):
                context.add()
        """,
        ["condition", "any((major == 9 for major, _ in context.TARGET_CUDA_ARCHS))", 2, 2],
    ),
    "architectures of CuTe": (
        """\
        def use(self):
            if const_expr(self.arch >= Arch.sm_100 and self.arch <= Arch.sm_100f):
                self.fast()
        """,
        ["condition", "const_expr(self.arch >= Arch.sm_100 and self.arch <= Arch.sm_100f)", 2, 2],
    ),
    "any()": (
        "assert any([is_sm90_supported(), is_sm100_supported()])\n",
        ["assert", "any([is_sm90_supported(), is_sm100_supported()])", 1, 1],
    ),
    "text of numbers": (
        """\
        def use(device):
            major, minor = torch.cuda.get_device_capability(device)
            name = f"sm_{major}{minor}"
            assert name in ("sm_90", "sm_100")
        """,
        ["assert", "name in ('sm_90', 'sm_100')", 4, 4],
    ),
    "number of a text": (
        """\
        def use(device):
            name = "".join(str(x) for x in torch.cuda.get_device_capability(device))
            assert int(name) == 90
        """,
        ["assert", "int(name) == 90", 3, 3],
    ),
}


@pytest.mark.parametrize("text, expected", PYTHON.values(), ids=PYTHON)
def test_a_gate_in_python(tmp_path, text, expected):
    found = [[item.kind, item.expression, item.line, item.end_line] for item in closed(tmp_path, text)]
    assert expected in found
    # What it is made of may be listed as well, but nothing else is.
    assert {kind for kind, *_rest in found} <= {"decorator", "assignment", "return", "condition", expected[0]}


@pytest.mark.parametrize("text, expected", PYTHON.values(), ids=PYTHON)
def test_it_is_found_in_a_long_file_as_well(tmp_path, text, expected):
    """There an excerpt is all that is parsed."""
    found = closed(tmp_path, f"{FILLER}{textwrap.dedent(text)}\n\n{FILLER}")
    kind, expression, line, end = expected
    assert [kind, expression, line + 1000, end + 1000] in [[item.kind, item.expression, item.line, item.end_line] for item in found]


@pytest.mark.parametrize(
    "home, imported",
    [
        ({"kernels/tables.py": "ARCHES = {(9, 0): 'sm_90a', (10, 0): 'sm_100a'}\n"}, "from .tables import ARCHES"),
        ({"kernels/tables.py": "ARCHES: Final = (\n    (9, 0),\n    (10, 0),\n)\nx = 1\n"}, "from kernels.tables import (\n    ARCHES,\n)"),
        (
            {"kernels/tables/__init__.py": "from .all import ARCHES\n", "kernels/tables/all.py": "ARCHES = [(9, 0)]\n"},
            "from .tables import ARCHES",
        ),
        ({"kernels/tables.py": "ARCHES = ((9, 0),)\n"}, "from .tables import ARCHES as KNOWN"),
    ],
)
def test_a_constant_of_another_file(tmp_path, home, imported):
    name = imported.split()[-1] if " as " in imported else "ARCHES"
    text = f"{imported}\n\n\ndef use(capability):\n    if capability not in {name}:\n        raise ValueError(capability)\n"
    for filled in (text, f"{text}\n\n{FILLER}"):
        found = audited(tmp_path, {**home, "kernels/a.py": filled})
        assert [(item.file, item.kind) for item in found.closed] == [("kernels/a.py", "raise")]
        assert found.undecided == []


@pytest.mark.parametrize("home", ["ARCHES = find()\n", "", "from .a import ARCHES\n", "ARCHES = (\n"])
def test_a_constant_that_cannot_be_found_is_undecidable(tmp_path, home):
    text = "from .tables import ARCHES\n\n\ndef use(capability):\n    if capability not in ARCHES:\n        raise ValueError(capability)\n"
    found = audited(tmp_path, {"kernels/tables.py": home, "kernels/a.py": text})
    assert (found.closed, [item.line for item in found.undecided]) == ([], [5])


NO_PYTHON_GATE = {
    "comment": "x = 1  # if major == 9 or is_sm90_supported()\n# supported_major_versions=[9, 10]\n",
    "docstring": '"""Use is_sm90_supported().\n\n>>> assert get_device_sm() == 90\n"""\n',
    "string": "x = 'if not is_sm90_supported(): raise'\nlog(\"major == 9\")\n",
    "message": "def f(x):\n    if x:\n        raise ValueError(f'needs SM90, is_sm90_supported() is {is_sm90_supported()}')\n",
    "never": "if False:\n    assert is_sm90_supported()\n",
    "types only": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    assert is_sm90_supported()\n",
    "other vendor": "if is_hip():\n    assert get_device_capability() == (9, 4)\n",
    "behind a return": "def f():\n    return 1\n    assert is_sm90_supported()\n",
    "not reached here": "def f(x):\n    if is_sm120_supported():\n        return 1\n    assert is_sm90_supported()\n",
    "else that is not reached": "def f(x):\n    if is_sm120_supported():\n        x.a()\n    else:\n        assert is_sm90_supported()\n",
    "open": "assert get_device_sm() >= 90\nflags(supported_major_versions=[9, 10, 12])\n",
    "open to everything": "flags(supported_major_versions=None)\n",
    "older hardware": "def f(x):\n    if torch.cuda.get_device_capability() < (8, 0):\n        return slow(x)\n    return fast(x)\n",
    "helper that lets this host through": (
        "def can(x):\n    if not x.ready:\n        return False\n    return get_device_sm() >= 90\ndef use(x):\n    assert can(x)\n"
    ),
    "method that another class has as well": (
        "class A:\n    def can(self):\n        return get_device_sm() >= 90\n    def run(self):\n        assert self.can()\n"
        "class B(A):\n    def can(self):\n        return True\n"
    ),
    "table with this host": "SIZES = {9: 1, 12: 2}\ndef use(major):\n    return SIZES[major], SIZES.get(major)\n",
    "table with something else for the rest": "SIZES = {9: 1}\ndef use(major):\n    return SIZES.get(major, 2)\n",
    "table that is filled": "seen = {}\ndef use(capability):\n    seen[capability] = 1\n    return seen[capability]\n",
    "of a model": 'def f(model_arch, x):\n    if model_arch == "DeepseekV3ForCausalLM":\n        x.fast()\n',
    "toolkit": "if torch.version.cuda and cuda_major == 11:\n    raise ValueError\n",
    "a word more in a log": "def f(x):\n    if get_device_sm() >= 90:\n        log.info('new')\n    return x\n",
    "open range": "assert torch.cuda.get_device_capability()[0] in range(9, 13)\n",
    "open text": "def f():\n    major, minor = get_device_capability()\n    name = f'{major}{minor}'\n    assert name in ('90', '120')\n",
    "version of a library": (
        "def f():\n    major, minor = map(int, cudnn.__version__.split('.')[:2])\n    assert major == 9 and minor < 3\n"
    ),
    "version in a function of its own": "def f():\n    major, minor = get_cuda_version()\n    assert major == 9\n",
    "number of a version": "def f():\n    v = torch.backends.cudnn.version()\n    major = v // 10000\n    assert major == 9\n",
    "shape": "def f(x):\n    major, minor = x.shape\n    assert major == 9\n",
    "version of the toolkit": "def f():\n    major = int(torch.version.cuda.split('.')[0])\n    assert major == 11\n",
    "layout": 'def f(major):\n    return 1 if major == "k" else 2\n',
}


@pytest.mark.parametrize("text", NO_PYTHON_GATE.values(), ids=NO_PYTHON_GATE)
def test_no_gate_in_python(tmp_path, text):
    assert closed(tmp_path, text) == []
    assert closed(tmp_path, f"{FILLER}{text}\n\n{FILLER}") == []


CUDA = {
    "if": ("#if __CUDA_ARCH__ == 900\nwork();\n#endif\n", "#if __CUDA_ARCH__ == 900", 1, False),
    "range": (
        "#if (__CUDA_ARCH__ >= 900) && (__CUDA_ARCH__ < 1200)\nwork();\n#endif\n",
        "#if (__CUDA_ARCH__ >= 900) && (__CUDA_ARCH__ < 1200)",
        1,
        False,
    ),
    "feature": ("#ifdef __CUDA_ARCH_FEAT_SM90_ALL\nwork();\n#endif\n", "#ifdef __CUDA_ARCH_FEAT_SM90_ALL", 1, False),
    "continued": (
        "#if defined(__CUDA_ARCH__) && \\\n    !(__CUDA_ARCH__ != 1000 && \\\n      __CUDA_ARCH__ != 1030)\nwork();\n#endif\n",
        "#if defined(__CUDA_ARCH__) && !(__CUDA_ARCH__ != 1000 && __CUDA_ARCH__ != 1030)",
        1,
        False,
    ),
    "elif": (
        "#if __CUDA_ARCH__ < 700\nold();\n#elif __CUDA_ARCH__ < 1200\nwork();\n#else\n__trap();\n#endif\n",
        "#elif __CUDA_ARCH__ < 1200",
        3,
        False,
    ),
    "else of a refusal": (
        "#if __CUDA_ARCH__ >= 1200\nasm volatile(\"trap;\");\n#else\nwork();\n#endif\n",
        "#else of #if __CUDA_ARCH__ >= 1200",
        3,
        False,
    ),
    "else of nothing": ("#if __CUDA_ARCH__ >= 1200\n// not here\n#else\nwork();\n#endif\n", "#else of #if __CUDA_ARCH__ >= 1200", 3, False),
    "else": ("#if __CUDA_ARCH__ >= 1200 || __CUDA_ARCH__ < 800\nother();\n#else\nwork();\n#endif\n", None, 0, False),
    "with other code": ("#if __CUDA_ARCH__ == 1000\nwork();\n#else\nother();\n#endif\n", "#if __CUDA_ARCH__ == 1000", 1, True),
    "nested": (
        "#ifdef __CUDA_ARCH__\n#  if __CUDA_ARCH__ >= 900\n#    if __CUDA_ARCH__ == 1000\nwork();\n#    endif\n#  endif\n#endif\n",
        "# if __CUDA_ARCH__ == 1000",
        3,
        False,
    ),
    "macro": ("#if __CUDA_ARCH__ == 1000\n#define HAS_TMEM 1\n#endif\n#ifdef HAS_TMEM\nwork();\n#endif\n", "#ifdef HAS_TMEM", 4, False),
    "macro with a value": (
        "#if __CUDA_ARCH__ == 900\n#define FAST_ARCH 1\n#else\n#define FAST_ARCH 0\n#endif\n#if FAST_ARCH\nwork();\n#endif\n",
        "#if FAST_ARCH",
        6,
        False,
    ),
    "earlier one inside a later one": (
        "#if __CUDA_ARCH__ >= 900\n#if __CUDA_ARCH__ < 1000\nwork();\n#endif\n#endif\n", "#if __CUDA_ARCH__ < 1000", 2, False,
    ),
    "error": ("#if __CUDA_ARCH__ != 900\n#error only for Hopper\n#endif\n", "#if __CUDA_ARCH__ != 900", 1, False),
    "macro of a condition": ("#define IS_ARCH_90 (__CUDA_ARCH__ == 900)\n#if IS_ARCH_90\nwork();\n#endif\n", "#if IS_ARCH_90", 2, False),
}  # fmt: skip


@pytest.mark.parametrize("text, expression, line, replaced", CUDA.values(), ids=CUDA)
def test_a_gate_of_the_preprocessor(tmp_path, text, expression, line, replaced):
    kernel = f"__global__ void kernel(int* x) {{\n{text}}}\n"
    found = [(item.expression, item.line, item.replaced) for item in closed(tmp_path, kernel, name="kernels/a.cuh")]
    assert found == ([(expression, line + 1, replaced)] if expression else [])


def test_a_gate_behind_a_macro_of_another_header(tmp_path):
    headers = {
        "kernels/include/config.h": "#if __CUDA_ARCH__ == 900\n#define KERNELS_ARCH_MMA_ENABLED 1\n#endif\n",
        "kernels/include/more.h": "#if defined(KERNELS_ARCH_MMA_ENABLED)\n#define KERNELS_WGMMA_ENABLED\n#endif\n",
        "kernels/csrc/a.cu": '#include "more.h"\n__global__ void kernel() {\n#if defined(KERNELS_WGMMA_ENABLED)\n  work();\n#endif\n}\n',
    }
    found = audited(tmp_path, headers).closed
    assert [(item.expression, item.line, item.guards) for item in found if item.file == "kernels/csrc/a.cu"] == [
        ("#if defined(KERNELS_WGMMA_ENABLED)", 3, "kernel")
    ]


RUN_TIME = {
    "check": ("FLASHINFER_CHECK(mSM == kSM_100 || mSM == kSM_103, \"no\");", "mSM == kSM_100 || mSM == kSM_103"),
    "check on several lines": (
        "TLLM_CHECK_WITH_INFO(getSMVersion() == 90 ||\n      getSMVersion() == 100,\n      \"no\");",
        "getSMVersion() == 90 || getSMVersion() == 100",
    ),
    "condition": ("if (getSMVersion() == 100) { fast(x); }", "getSMVersion() == 100"),
    "refusal": ("int sm = getSMVersion();\n  if (sm >= 120) {\n    throw std::runtime_error(\"no\");\n  }", "sm >= 120"),
    "device": ("cudaDeviceProp prop;\n  cudaGetDeviceProperties(&prop, 0);\n  if (prop.major == 9) fast(x);", "prop.major == 9"),
    "attribute": ("int cc;\n  cudaDeviceGetAttribute(&cc, cudaDevAttrComputeCapabilityMajor, 0);\n  TORCH_CHECK(cc == 9);", "cc == 9"),
    "flag": ("bool const fast = getSMVersion() == 100;", "getSMVersion() == 100"),
    "flag of two": ("int sm = getSMVersion();\n  int stages = (sm >= 90 && sm < 120) ? 4 : 2;", "(sm >= 90 && sm < 120)"),
    "nothing in return": ("int sm = getSMVersion();\n  if (sm != 90) return false;\n  fast(x);\n  return true;", "sm != 90"),
    "refusal by a macro": ("int sm = getSMVersion();\n  if (sm != 90) {\n    TLLM_THROW(\"only %d\", 90);\n  }", "sm != 90"),
    "refusal by a check": ("int sm = getSMVersion();\n  if (sm / 10 == 12) {\n    TORCH_CHECK(false, \"no\");\n  }", "sm / 10 == 12"),
    "refusal with a message": (
        "int sm = getSMVersion();\n  if (sm != 90) {\n    std::ostringstream s;\n    s << \"no\";\n    FLASHINFER_ERROR(s.str());\n  }",
        "sm != 90",
    ),
    "number first": ("int sm = getSMVersion();\n  if (90 == sm) { fast(x); }", "90 == sm"),
    "name in the condition": ("if (int sm = getSMVersion(); sm == 90) { fast(x); }", "sm == 90"),
    "put together": ("cudaDeviceProp p;\n  int const cc = p.major * 10 + p.minor;\n  if (cc == 90) { fast(x); }", "cc == 90"),
    "of the device, beside another version": (
        "cudaDeviceProp p;\n  int major = cudnnGetVersion() / 10000;\n  if (p.major == 9 && major > 8) { fast(x); }",
        "p.major == 9 && major > 8",
    ),
    "as the macro": ("cudaDeviceProp p;\n  int cc = p.major * 100 + p.minor * 10;\n  TORCH_CHECK(cc == 900, \"no\");", "cc == 900"),
    "fallback": ("int sm = getSMVersion();\n  if (sm != 90) { return Route::kFallback; }", "sm != 90"),
    "with something unknown": ("int sm = getSMVersion();\n  if (sm == 103 && fp4) { fast(x); }", "sm == 103 && fp4"),
}  # fmt: skip


@pytest.mark.parametrize("code, expression", RUN_TIME.values(), ids=RUN_TIME)
def test_a_gate_at_run_time(tmp_path, code, expression):
    text = f'#include "tvm_ffi_utils.h"\n\nvoid launch(Tensor x) {{\n  {code}\n  run(x);\n}}\n'
    assert [(item.expression, item.kind, item.guards) for item in closed(tmp_path, text, name="kernels/launch.cu")] == [
        (expression, "run-time check", "launch")
    ]


@pytest.mark.parametrize(
    "code, found",
    [
        ("if constexpr (flashinfer::arch::is_major_v<10> || flashinfer::arch::is_major_v<11>) {\n  work();\n}", [False]),
        (
            'if constexpr (arch::is_match_v<103>) {\n  work();\n} else {\n  if (thread0()) {\n    printf("no");\n    __trap();\n  }\n}',
            [False],
        ),
        ("if constexpr (arch::is_major_v<9>) {\n  work();\n} else {\n  slow();\n}", [True]),
        ("if constexpr (arch::is_major_v<12>) {\n  work();\n}", []),
    ],
)
@pytest.mark.parametrize("ending", ["\n", " \\\n"], ids=["plain", "in a macro"])
def test_a_gate_at_compile_time(tmp_path, code, found, ending):
    function = f"__device__ void run() {{\n{code}\n}}".replace("\n", ending)
    text = f'#include "flashinfer/arch_condition.h"\n{"#define RUN() " if ending != chr(10) else ""}{function}\n'
    assert [(item.kind, item.replaced) for item in closed(tmp_path, text, name="kernels/a.cuh")] == [
        ("compile-time check", replaced) for replaced in found
    ]


NO_CUDA_GATE = {
    "comment": "// #if __CUDA_ARCH__ == 900\n// work();\n// #endif\n",
    "block comment": "/*\n#if __CUDA_ARCH__ == 900\nwork();\n#endif\n*/\n",
    "string": 'const char* text = "#if __CUDA_ARCH__ == 900";\n',
    "text of several lines": 'auto text = R"cu(\n#if __CUDA_ARCH__ == 900\nwork();\n#endif\n)cu";\n',
    "error for what is older": "#if __CUDA_ARCH__ < 800\n#error too old\n#endif\n",
    "run time, open flag": "int f() {\n  bool const pdl = getSMVersion() >= 90;\n  return getSMVersion() >= 90 ? 1 : 0;\n}\n",
    "never": "#if 0\n#if __CUDA_ARCH__ == 900\nwork();\n#endif\n#endif\n",
    "run time, never": "void f() {\n  int sm = getSMVersion();\n#if 0\n  if (sm == 90) { run(); }\n#endif\n}\n",
    "run time, other version": "void f() {\n  cudaDeviceProp p;\n  int major = cudnnGetVersion() / 10000;\n  if (major == 9) run();\n}\n",
    "run time, other pair": "void f() {\n  cudaDeviceProp p;\n  for (auto& kv : table) { if (kv.first == 9) { run(); } }\n}\n",
    "run time, a text": 'void f() {\n  int sm = getSMVersion();\n  if (sm == 120) { text << "new"; }\n  else { text << "old"; }\n}\n',
    "run time, an answer": "int f() {\n  if (getSMVersion() == 120) return 4;\n  return 2;\n}\n",
    "host code": "#ifndef __CUDA_ARCH__\nwork();\n#endif\n",
    "open": "#if __CUDA_ARCH__ >= 900\nwork();\n#endif\n",
    "open to a family": "#if defined(__CUDA_ARCH_FEAT_SM120_ALL) || __CUDA_ARCH__ == 1000\nwork();\n#endif\n",
    "older hardware": "#if __CUDA_ARCH__ < 800\nslow();\n#else\nwork();\n#endif\n",
    "refusal of what is older": "#if __CUDA_ARCH__ >= 900\nwork();\n#else\n__trap();\n#endif\n",
    "another vendor": "#ifdef __HIP_PLATFORM_AMD__\n#if __CUDA_ARCH__ == 900\nwork();\n#endif\n#endif\n",
    "a flag": "#ifdef ENABLE_BF16\nwork();\n#endif\n",
    "run time, comment": "void f() {\n  // if (getSMVersion() == 90) {\n  run();\n}\n",
    "run time, string": 'void f() {\n  log("getSMVersion() == 90");\n}\n',
    "run time, open": "void f() {\n  if (getSMVersion() >= 90) { run(); }\n}\n",
    "run time, not reached": "int f() {\n  if (getSMVersion() >= 120) return 1;\n  if (getSMVersion() == 90) return 2;\n  return 0;\n}\n",
    "run time, another branch": "void f() {\n  if (getSMVersion() == 120) { a(); }\n  else if (getSMVersion() == 90) { b(); }\n}\n",
}


@pytest.mark.parametrize("text", NO_CUDA_GATE.values(), ids=NO_CUDA_GATE)
def test_no_gate_in_cuda(tmp_path, text):
    assert closed(tmp_path, f"#include <vector>\n{text}", name="kernels/a.cpp") == []


@pytest.mark.parametrize("name", ["tests/a.py", "test/a.py", "jit/test_a.py", "benchmarks/a.py", "a.pyi", "readme.md", "a.txt"])
def test_tests_and_texts_are_left_out(tmp_path, name):
    assert closed(tmp_path, "assert is_sm90_supported()\n", name=f"kernels/{name}") == []
    assert closed(tmp_path, "assert is_sm90_supported()\n", name="kernels/latest.py") != []


@pytest.mark.parametrize(
    "text",
    [
        "def f(device, table):\n    if get_compute_capability(device) in table.arches:\n        run()\n",
        "def f(device, least):\n    assert get_device_sm() >= least()\n",
        "flags(supported_major_versions=find())\n",
        "class A:\n    ok = (9,)\n    def f(self, major):\n        assert major in self.ok\nclass B(A):\n    ok = (12,)\n",
    ],
)
def test_what_cannot_be_told_is_undecidable(tmp_path, text):
    found = audited(tmp_path, {"kernels/a.py": text})
    assert found.closed == [] and len(found.undecided) == 1


def test_a_file_that_is_no_python_is_undecidable(tmp_path):
    (item,) = audited(tmp_path, {"kernels/a.py": "print 'major', major == 9\n"}).undecided
    assert (item.file, item.line, item.expression.partition(":")[0]) == ("kernels/a.py", 1, "not read")


@pytest.mark.parametrize(
    "text",
    [
        "if a:\n    b()\n" + "elif get_device_sm() == 90 and c:\n    d()\n" * 2000,
        f"assert get_device_sm() == {' + '.join(['x'] * 5000)}\n",
    ],
    ids=["elif", "sum"],
)
def test_a_file_that_is_nested_too_deeply_is_undecidable(tmp_path, text):
    found = audited(tmp_path, {"kernels/a.py": text, "kernels/b.py": "assert get_device_sm() == 90\n"})
    assert [item.file for item in found.closed] == ["kernels/b.py"]
    assert [(item.file, item.line, item.expression) for item in found.undecided] == [("kernels/a.py", 1, "not read: nested too deeply")]


def test_a_gate_is_closed_on_one_host_and_open_on_another(tmp_path):
    text = "assert get_device_sm() in (90, 100)\n#\n"
    assert [bool(closed(tmp_path, text, host)) for host in (SM90, (10, 0), SM103, SM120)] == [False, False, True, True]
    assert len(closed(tmp_path, text, SM90, SM120)) == 1


def test_where_it_stands(tmp_path):
    text = """\
    class Layer:
        def forward(self, x):
            def inner():
                assert is_sm90_supported()
            return inner
    """
    (item,) = closed(tmp_path, text)
    assert (item.file, item.line, item.guards, item.replaced) == ("kernels/a.py", 4, "Layer.forward.inner", False)


def test_whether_other_code_serves_the_host(tmp_path):
    text = """\
    def use(x):
        if is_sm100_supported():
            return fast(x)
        return slow(x)

    def other(x):
        if is_sm100_supported():
            return fast(x)
        raise ValueError("no")
    """
    assert [(item.guards, item.replaced) for item in closed(tmp_path, text)] == [("use", True), ("other", False)]


def test_every_core_finds_the_same(tmp_path):
    macro = "#if __CUDA_ARCH__ == 900\n#define KERNELS_ARCH_WGMMA 1\n#endif\n"
    kernel = "__global__ void kernel() {\n#ifdef KERNELS_ARCH_WGMMA\nwork();\n#endif\n}\n"
    files = {f"kernels/{number}.cuh": kernel for number in range(200)}
    found = audited(tmp_path, {**files, "kernels/z.h": macro}).closed
    assert {item.file for item in found} == {*files, "kernels/z.h"} - {"kernels/z.h"}


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InferenceError, match="absent"):
        search({"absent": str(tmp_path)}, [SM120])


def test_a_broken_link_in_another_process_is_named(tmp_path):
    for number in range(200):
        (tmp_path / "kernels").mkdir(exist_ok=True)
        (tmp_path / "kernels" / f"{number}.py").symlink_to(tmp_path / "gone")
    with pytest.raises(InferenceError, match=r"cannot be read \(No such file"):
        search({"kernels": str(tmp_path)}, [SM120])
