# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import ast
import warnings

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._source import Edit, Source
from hypothesis import given
from hypothesis import strategies as st

TEXT = "name = 'é'  # comment\nif name:\n\tvalue = [1, 'ü', 2]\n"
FORMS = {
    "utf-8": TEXT.encode(),
    "bom": b"\xef\xbb\xbf" + TEXT.encode(),
    "latin-1": b"# -*- coding: latin-1 -*-\n" + TEXT.encode("latin-1"),
    "cp1252-second-line": b"#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\n" + TEXT.encode("cp1252"),
    "crlf": TEXT.replace("\n", "\r\n").encode(),
    "cr": TEXT.replace("\n", "\r").encode(),
    "mixed": b"a = 1\r\nb = 2\nc = 3\r" + TEXT.encode(),
    "form-feed": b"a = 1\n\x0c\n" + TEXT.encode(),
    "no-newline": TEXT.rstrip("\n").encode(),
}


def last_number(source: Source) -> ast.expr:
    return next(node for node in ast.walk(source.tree) if isinstance(node, ast.List)).elts[-1]


@pytest.mark.parametrize("raw", FORMS.values(), ids=FORMS)
def test_an_edit_leaves_every_other_byte_as_it_was(raw):
    source = Source(raw)
    start, end = source.span(last_number(source))
    assert source.text[start:end] == "2" and source.edited([]) == raw
    edited = source.edited([Edit(end, end, ", 3")])
    assert edited == raw.replace(b", 2]", b", 2, 3]")
    assert Source(edited).segment(last_number(Source(edited))) == "3"


def test_edits_are_applied_together_and_must_not_overlap():
    source = Source(b"abcdef")
    assert source.edited([Edit(4, 5, ""), Edit(1, 1, "-"), Edit(2, 3, "C")]) == b"a-bCdf"
    assert source.edited([Edit(1, 1, "2"), Edit(1, 1, "1")]) == b"a21bcdef"
    with pytest.raises(ValueError, match="overlap at offset 1"):
        source.edited([Edit(1, 3, ""), Edit(2, 4, "")])


@pytest.mark.parametrize(
    "raw",
    [
        b"x = (",
        b"x = '\xff'",
        b"# coding: ascii\nx = '\xc3\xa9'",
        b"# coding: no-such-codec\n",
        b"# coding: rot13\nk = 1",
        b"# coding: utf-7\nx = '+AGEAYg-'",  # it decodes, and is written in another way again
        b"\xef\xbb\xbf# coding: latin-1\n",
        b"x = 1\0",
        b"(" * 2000 + b")" * 2000,
        b"-" * 100000 + b"1",
        b"\x80\x02",
    ],
)
def test_what_is_no_source_is_a_syntax_error(raw):
    with pytest.raises(SyntaxError):
        Source(raw)


@given(st.binary(max_size=60))
def test_any_bytes_are_source_or_a_syntax_error(raw):
    try:
        source = Source(raw)
    except SyntaxError:
        return
    assert source.edited([]) == raw


def test_upstreams_warnings_are_not_ours():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Source(b"pattern = '\\d'\n")


@pytest.mark.parametrize(
    ("line", "fills"),
    [
        ("call()", True),
        ("call()  # comment", True),
        ("call(); other()", False),
        ("if x: call()", False),
        ("x; call()", False),
    ],
)
def test_whether_a_statement_has_its_lines_for_itself(line, fills):
    source = Source(f"{line}\n".encode())
    statements = [node for node in ast.walk(source.tree) if isinstance(node, ast.Expr) and ast.unparse(node) == "call()"]
    assert source.fills_its_lines(statements[0]) is fills


def test_functions_are_found_by_name_and_by_class():
    source = Source(b"def f(): ...\nclass A:\n    def f(self): ...\nclass B:\n    async def f(self):\n        def g(): ...\n")
    assert [function.lineno for function in source.functions("f")] == [1, 3, 5]
    assert [function.lineno for function in source.functions("B.f")] == [5] and source.functions("A.g") == []


@pytest.mark.parametrize(
    ("code", "bound"),
    [
        ("X = f()", "f()"),
        ("X: bool = f()", "f()"),
        ("X = Y = f()", "f()"),
        ("def X(): ...", "def X():\n    ..."),
        ("from m import a as X", "a as X"),
        ("try:\n    from m import X\nexcept ImportError:\n    from n import X", "X"),
        ("X = f()\nX = g()", None),
        ("X = f()\nif X:\n    X = g()", None),
        ("if y:\n    X = f()", None),
        ("try:\n    X = f()\nexcept ImportError:\n    X = None", None),
        ("X, y = f()", None),
        ("X = f()\nX += 1", None),
        ("X = [9]\nX.append(10)", None),
        ("X = [9]\nX[0] = 10", None),
        ("X = f()\ndel X", None),
        ("for X in f(): ...", None),
        ("with f() as X: ...", None),
        ("y = (X := f())", None),
        ("class X: ...", None),
        ("X = f()\ndef g():\n    global X", None),
        ("from m import X\nX = 1", None),
        ("def X(): ...\ndef X(): ...", None),
        ("X: bool", None),
    ],
)
def test_what_a_module_binds_a_name_to_is_known_where_it_is_certain(code, bound):
    binding = Source(code.encode()).module.get("X")
    assert (binding and ast.unparse(binding)) == bound
