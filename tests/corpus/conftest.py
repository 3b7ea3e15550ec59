# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The corpus: real releases, with upstream's own code as the judge. A spread of them by default, all with --every-release."""

from __future__ import annotations

import shutil

import pytest
from ansible_collections.blackwell.inference.tests.corpus import compatibility
from ansible_collections.blackwell.inference.tests.corpus.host import Host
from ansible_collections.blackwell.inference.tests.corpus.releases import EVERY, FLASHINFER, FLASHINFER_SPREAD, SPREAD

ROWS: list[compatibility.Row] = []


def pytest_addoption(parser):
    group = parser.getgroup("corpus")
    group.addoption("--every-release", action="store_true", help="test every published release, and record the results")


def pytest_generate_tests(metafunc):
    if "pair" in metafunc.fixturenames:
        pairs = EVERY if metafunc.config.getoption("--every-release") else SPREAD
        metafunc.parametrize("pair", pairs, ids=str)
    if "flashinfer" in metafunc.fixturenames:
        metafunc.parametrize("flashinfer", FLASHINFER if metafunc.config.getoption("--every-release") else FLASHINFER_SPREAD)


@pytest.fixture
def host(pair, tmp_path):
    """A host with this pair of releases; removed at the end, for there are many of them."""
    yield Host(tmp_path, pair.resolved())
    shutil.rmtree(tmp_path)


def pytest_runtest_logreport(report):
    ROWS.extend(value for name, value in report.user_properties if name == "row" and report.when == "call" and report.passed)


def pytest_terminal_summary(terminalreporter):
    if ROWS:
        terminalreporter.section("releases, at compute capability 12.0")
        terminalreporter.write_line(compatibility.as_text(ROWS))


def pytest_sessionfinish(session):
    if session.config.getoption("--every-release") and not hasattr(session.config, "workerinput"):
        compatibility.record(ROWS)
