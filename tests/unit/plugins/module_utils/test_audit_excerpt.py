# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An excerpt of a file tells what the whole file tells."""

from __future__ import annotations

import ast
import textwrap

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._audit_excerpt import excerpt
from ansible_collections.blackwell.inference.plugins.module_utils._audit_lines import logical_lines
from ansible_collections.blackwell.inference.plugins.module_utils._audit_mentions import mentions
from ansible_collections.blackwell.inference.plugins.module_utils._audit_python import judged
from hypothesis import given
from hypothesis import strategies as st

SM120 = (12, 0)
COMMENT = "# is_sm90_supported()\n"
ASKS = (
    "if is_sm100_supported():\n    x.a()\nelse:\n    x.b()\n",
    "if not is_sm90_supported():\n    raise ValueError(f'no {x}')\n",
    "if x.even and (\n    get_device_sm() == 90  # here\n    or x.odd\n):\n    return x.a()\n",
    "assert torch.cuda.get_device_capability() in ((9, 0), (10, 0)), 'no'\n",
    "major, minor = get_compute_capability(x)\nif major == 9:\n    x.a()\n",
    "sm = get_device_sm()\nif sm // 10 == 10:\n    x.a()\n",
    "self.sm = get_device_sm()\nif self.sm == 100:\n    x.a()\n",
    "fast = is_sm90_supported() and x.even\nif fast:\n    x.a()\n",
    "return x.a() if is_sm100_supported() else x.b()\n",
    "flags = get(\n    supported_major_versions=[9, 10],\n)\n",
    "while arch == 'sm_90a':\n    x.a()\n",
)
OTHER = (
    "x = 1\n",
    "for item in x:\n    item.run()\n",
    "if x.even:\n    return\n",
    "try:\n    x.a()\nexcept (OSError, ValueError):\n    pass\nfinally:\n    x.b()\n",
    '"""text (with [brackets"""\n',
    "x.a('''\nif major == 9:\n''')\n",
    "with x as y:\n    y.run(\n        1,\n    )\n",
    COMMENT,
    "x = {'(': 1, \"[\": [2, (3)]}\n",
    "@staticmethod\ndef inner(a: int = 1, *, b: str) -> None:\n    return a\n",
    "x = 1 + \\\n    2\n",
)
statements = st.lists(st.sampled_from(ASKS + OTHER * 2), min_size=1, max_size=6).filter(lambda body: set(body) != {COMMENT}).map("".join)


@st.composite
def modules(draw) -> str:
    """A file with functions and classes."""
    parts = []
    for index, body in enumerate(draw(st.lists(statements, min_size=1, max_size=5))):
        in_class, decorated = draw(st.booleans()), draw(st.sampled_from(["", "@supported_compute_capability([90])\n", "@cache\n"]))
        function = f"{decorated}def f{index}(self, x):\n{textwrap.indent(body, '    ')}"
        parts.append(f"class C{index}(Base):\n    y = 1\n\n{textwrap.indent(function, '    ')}" if in_class else function)
        parts.append(draw(st.sampled_from(["", "\n\n", "x = 1\n", '"""major == 9\n\nmajor in (9,)\n"""\n'])))
    return "".join(parts)


@given(modules())
def test_it_tells_what_the_whole_file_tells(text):
    part = excerpt(text.encode())
    whole = judged(ast.parse(text), "package/a.py", SM120)
    assert (judged(part, "package/a.py", SM120) if part else ([], [])) == whole


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("if major == 9:", True),
        ("if (major, minor) not in SUPPORTED:", True),
        ("if (props.major, props.minor) == (9, 0):", True),
        ("assert cc_major >= 9", True),
        ("if device_major() == 9:", True),
        ("x = get_platform().is_sm90", True),
        ("if is_blackwell():", True),
        ("if get_compute_capability(device)[0] == 9:", True),
        ("ok = torch.cuda.get_device_capability(device) >= (9, 0)", True),
        ("return get_device_sm() == 90", True),
        ("flags(supported_major_versions=[9])", True),
        ("@supported_compute_capability([90])", True),
        ("from utils import is_sm90_supported as hopper", True),
        ("if arch in ('sm_90a', 'sm_100a'):", True),
        ("    # if major == 9:", False),
        ("x = 1  # if major == 9:", False),
        ("from utils import is_sm90_supported", False),
        ("major, minor = torch.cuda.get_device_capability()", False),
        ("if scale_major_mode == 'K':", False),
        ("for item in search == 1:", False),
        ("if CUDA_VERSION.major == 13:", False),
        ("print(get_device_capability())", False),
    ],
)
def test_what_counts_as_a_mention(line, counts):
    assert bool(mentions(f"x = 1\n{line}\n".encode())) is counts


def test_a_file_without_a_mention_is_not_parsed():
    assert excerpt(b"def broken(:\n") is None


def test_a_file_whose_strings_cannot_be_told_is_read_as_a_whole():
    text = 'x = \'"""\'\nassert is_sm90_supported()\ny = 1\n'
    assert [item.line for item in judged(excerpt(text.encode()), "a.py", SM120)[0]] == [2]
    assert len(excerpt(text.encode()).body) == 3


def test_logical_lines():
    text = "@a\ndef f(x,\n      y):\n\n    # none\n    x = [1,\n         2]; y = '('\n    if x: \\\n       return 1\n"
    assert [(line.word, line.indent, text[line.start : line.end].count("\n")) for line in logical_lines(text, 0, len(text))] == [
        ("@", 0, 1),
        ("def", 0, 2),
        ("x", 4, 2),
        ("if", 4, 2),
    ]
