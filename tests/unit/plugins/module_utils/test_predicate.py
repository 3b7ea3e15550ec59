# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import ast

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._predicate import (
    UNKNOWN,
    Host,
    Scope,
    Unknown,
    depends_on_host,
    dotted_name,
    every_host,
    steps,
    unresolved_architecture,
)
from ansible_collections.blackwell.inference.plugins.module_utils._source import Source

SM120 = (12, 0)


def scope(capability=SM120, module: str = "", **assumed) -> Scope:
    return Scope(Host(capability), Source(f"from helpers import *\n{module}".encode()).module, assumed)


def expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


@pytest.mark.parametrize(
    ("text", "on_120"),
    [
        ("is_sm90_supported()", False),
        ("is_sm120_supported()", True),
        ("utils.is_sm120_supported(device)", True),
        ("get_platform().is_sm120", True),
        ("get_platform().is_sm100 or get_platform().is_sm90", False),
        ("get_platform().device_sm == 120", True),
        ("torch.cuda.get_device_capability()[0] >= 9", True),
        ("torch.cuda.get_device_capability(0) == (12, 0)", True),
        ("get_device_capability() in [(9, 0), (10, 0)]", False),
        ("9 <= get_device_capability()[0] < 12", False),
        ("get_device_sm() // 10 % 10 == 2", True),
        ("not is_cuda()", False),
        ("bool(is_sm90_supported())", False),
        ("any([is_sm90_supported(), is_sm120_supported()])", True),
        ("all((is_cuda(), is_sm120_supported()))", True),
        ("is_sm90_supported() | is_sm120_supported()", True),
        ("True if is_sm90_supported() else False", False),
        ("-1 < 0", True),
        ("check(cuDeviceGetAttribute(a.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, 0)) == 0", True),
        ("False and batch_size > 0", False),
        ("batch_size > 0 and False", False),
        ("True or batch_size > 0", True),
        ("1 < batch_size < 5 < 3", False),
    ],
)
def test_what_follows_from_the_host_is_known(text, on_120):
    assert scope().truth(expression(text)) is on_120


@pytest.mark.parametrize(
    ("text", "architecture"),
    [
        ("batch_size > 0", None),
        ("True and batch_size", None),
        ("[batch_size][0]", None),
        ("f()", None),
        ("f(1)", None),
        ("None < 1", None),
        ("'%s' * 999999999", None),
        ("{1: 2}[1]", None),
        ("f'{x}'", None),
        ("is_sm130_supported()", "is_sm130_supported"),
        ("batch_size > 0 and probe_sm90()", "probe_sm90"),
        ("properties.major >= 9", "major"),
        ("supports_hopper", "supports_hopper"),
        ("get_platform().is_sm999", "is_sm999"),
        ("any(probe() for probe in (is_sm90_supported, is_sm100_supported))", "is_sm90_supported"),
        ("(lambda: is_sm90_supported())()", "is_sm90_supported"),
        ("f(is_cuda())", "is_cuda()"),
        ("check(cuDeviceGetAttribute(a.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, 0))[1]", "CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED"),
        ("probe_sm90().ok", "probe_sm90"),
    ],
)
def test_what_does_not_is_unknown_and_says_whether_an_architecture_is_behind_it(text, architecture):
    node = expression(text)
    assert isinstance(scope().value(node), Unknown) and scope().truth(node) is None
    assert unresolved_architecture(node, scope()) == architecture


def test_an_unknown_value_is_never_taken_for_true_or_false():
    with pytest.raises(TypeError):
        bool(UNKNOWN)


@pytest.mark.parametrize(
    ("module", "text", "value"),
    [
        ("A = is_sm120_supported()", "A", True),
        ("A = B\nB = A", "A", UNKNOWN),
        ("from u import is_sm120_supported as probe", "probe()", True),
        ("from u import is_sm90_supported as is_sm120_supported", "is_sm120_supported()", False),
        ("probe = is_sm120_supported", "probe()", True),
        ("def probe():\n    return is_sm120_supported()", "probe()", True),
        ("@lru_cache(maxsize=1)\ndef probe():\n    return is_sm120_supported()", "probe()", True),
        ("def probe():\n    if is_sm90_supported():\n        return False\n    return True", "probe()", True),
        ("def probe(flag):\n    if flag:\n        return 1\n    return 1", "probe(x)", 1),
        ("def probe(): ...", "probe()", None),
        ("def one():\n    return two()\ndef two():\n    return one()", "one()", UNKNOWN),
        ("def probe(flag):\n    if flag:\n        return 1\n    return 2", "probe(x)", UNKNOWN),
        ("@wrapped\ndef probe():\n    return True", "probe()", UNKNOWN),
        ("def probe():\n    yield True", "probe()", UNKNOWN),
        ("A = [9]\nA.append(12)", "12 in A", UNKNOWN),
    ],
)
def test_names_of_the_module_mean_what_it_binds_them_to(module, text, value):
    found = scope(module=module).value(expression(text))
    assert isinstance(found, Unknown) if value is UNKNOWN else found == value


@pytest.mark.parametrize(
    "module",
    [
        "def is_sm120_supported(): return probe_sm120()",
        "is_sm120_supported = decide()",
        "if x:\n    is_sm120_supported = f",
        "class is_sm120_supported: ...",
    ],
)
def test_a_helper_that_the_module_defines_itself_is_not_the_known_one(module):
    assert unresolved_architecture(expression("is_sm120_supported()"), scope(module=module))


def test_a_helper_that_nobody_imported_has_no_value():
    node = expression("is_sm120_supported()")
    assert unresolved_architecture(node, Scope(Host(SM120), {})) == "is_sm120_supported"


def reached(body: str, capability=SM120, **assumed) -> list[str]:
    """The returns, raises and asserts of a function, each with ``?`` for every condition on the way that is not decided."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    source = Source(f"from helpers import *\ndef function(size, flag):\n{lines}".encode())
    found = steps(source.functions("function")[0], Scope(Host(capability), source.module, assumed))
    return [
        ast.unparse(step.node) + "?" * len(step.undecided) for step in found if isinstance(step.node, (ast.Return, ast.Raise, ast.Assert))
    ]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("if is_sm90_supported(): raise A\nreturn 1", ["return 1"]),
        ("if is_sm120_supported(): raise A\nreturn 1", ["raise A"]),
        ("if flag: raise A\nreturn 1", ["raise A?", "return 1?"]),
        ("if flag: x = 1\nelse: x = 1\nif x == 1: raise A", ["raise A"]),
        ("if flag: x = 1\nelse: x = 2\nif x == 1: raise A", ["raise A?"]),
        ("if flag: return 1\nelse: x = 2\nif x == 2: raise A", ["return 1?", "raise A?"]),
        ("ok = is_sm90_supported()\nok |= is_sm100_supported()\nif not ok: raise A", ["raise A"]),
        ("a, b = f()\nif a: raise A", ["raise A?"]),
        ("if (ok := is_sm120_supported()): pass\nif ok: raise A", ["raise A"]),
        ("for x in size:\n  raise A", ["raise A"]),
        ("for x in size:\n  if x: return 1\nraise A", ["return 1?", "raise A??"]),
        ("for x in size:\n  if is_sm120_supported(): continue\n  raise A\nreturn 1", ["return 1??"]),
        ("while flag:\n  break\n  raise A\nelse:\n  raise B", ["raise B?"]),
        ("for x in size: ok = False\nif not ok: raise A", ["raise A?"]),
        ("try:\n  x = 1\nexcept E:\n  raise A\nelse:\n  raise B\nfinally:\n  y = 1", ["raise B"]),
        ("try:\n  return 1\nexcept E:\n  pass\nraise A", ["return 1", "raise A"]),
        ("try:\n  x = 1\nfinally:\n  raise A", ["raise A"]),
        ("with f() as x:\n  if is_sm120_supported(): raise A\nreturn 1", ["raise A"]),
        ("assert is_sm90_supported()\nreturn 1", ["assert is_sm90_supported()"]),
        ("assert is_sm120_supported() and flag\nreturn 1", ["assert is_sm120_supported() and flag?", "return 1"]),
        ("assert is_sm120_supported()\nreturn 1", ["return 1"]),
        ("def inner():\n  raise A\nreturn 1", ["return 1"]),
        ("return 1\nraise A", ["return 1"]),
    ],
)
def test_a_function_is_followed_as_it_runs_on_the_host(body, expected):
    assert reached(body) == expected


def test_match_statements_are_not_decided():
    assert reached("match flag:\n  case 1:\n    raise A\n  case _:\n    return 1\nreturn 2") == ["raise A?", "return 1?", "return 2?"]


def test_a_parameter_hides_the_module_and_an_assumption_fills_it():
    source = Source(b"flag = True\ndef function(flag):\n    if flag: raise A\n    return 1\n")
    function = source.functions("function")[0]

    def certain(**assumed) -> list[str]:
        found = steps(function, Scope(Host(SM120), source.module, assumed))
        return [ast.unparse(step.node) for step in found if not step.undecided and isinstance(step.node, (ast.Raise, ast.Return))]

    assert (certain(), certain(flag=True), certain(flag=False)) == ([], ["raise A"], ["return 1"])


def test_dependence_is_a_difference_between_hosts():
    hosts = every_host(scope().module)
    assert depends_on_host(expression("is_sm90_supported() or batch_size"), hosts)
    assert not depends_on_host(expression("is_cuda() and batch_size"), hosts)


def test_only_chains_of_names_have_a_dotted_name():
    assert [dotted_name(expression(text)) for text in ("a", "a.b.c", "a().b", "a[0].b")] == ["a", "a.b.c", "", ""]
