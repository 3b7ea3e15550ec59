# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json

import pytest
from ansible_collections.blackwell.inference.tests.corpus import compatibility
from ansible_collections.blackwell.inference.tests.corpus.releases import EVERY, FLASHINFER, SGLANG


@pytest.fixture
def results():
    return json.loads(compatibility.RESULTS.read_text(encoding="utf-8"))


def test_the_page_is_what_the_catalogue_and_the_results_give(results):
    assert compatibility.stale(results, compatibility.TABLE.read_text(encoding="utf-8")) == ""


@pytest.mark.parametrize(
    ("changed", "page", "message"),
    [({"catalogue": "0"}, None, "run `make corpus`"), ({}, "# Compatibility\n", "run `make compatibility`")],
)
def test_a_stale_one_is_noticed(results, changed, page, message):
    changed = {**results, **changed}
    assert message in compatibility.stale(changed, page or compatibility.as_markdown(changed))


def test_every_release_is_in_the_results(results):
    pairs = [(row["sglang"], row["flashinfer"]) for row in results["pairs"]]
    assert len(pairs) == len(set(pairs)) == len(EVERY)
    assert {sglang for sglang, _flashinfer in pairs} == set(SGLANG)
    assert {flashinfer for _sglang, flashinfer in pairs} == set(FLASHINFER)
