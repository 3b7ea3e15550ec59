# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How well an audit does on real releases: on lines that people labelled, and on the fusion path."""

from __future__ import annotations

import csv
import shutil
import textwrap
from collections import Counter
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._audit import search
from ansible_collections.blackwell.inference.tests.corpus.test_releases import to_open
from ansible_collections.blackwell.inference.tests.unit.plugins.module_utils import test_audit as plant
from ansible_collections.blackwell.inference.tests.unit.wheels import unpack

HERE = Path(__file__).parent
SOURCES = ("*.py", "*.cu", "*.cuh", "*.h", "*.hpp", "*.inl", "*.cpp", "*.cc")
with (HERE / "audit_sample.tsv").open(encoding="utf-8") as file:
    LABELLED = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Per sample, how many labelled lines are (labelled closed, found), and the lines where that differs."""
    counts, wrong = Counter(), []
    for release in sorted({row["release"] for row in LABELLED}):
        folder = tmp_path_factory.mktemp("release")
        flashinfer, sglang = release.split("+")
        unpack("flashinfer-python", flashinfer, folder, *(f"flashinfer/{pattern}" for pattern in SOURCES))
        unpack("sglang", sglang, folder, *(f"sglang/{pattern}" for pattern in SOURCES))
        closed = search({"flashinfer": str(folder), "sglang": str(folder)}, [(12, 0)]).closed
        found = {(item.file, line) for item in closed for line in range(item.line, item.end_line + 1)}
        for row in LABELLED:
            if row["release"] == release:
                outcome = (row["label"] == "closed", (row["file"], int(row["line"])) in found)
                counts[row["sample"], outcome] += 1
                if outcome[0] is not outcome[1]:
                    wrong.append(f"{release} {row['file']}:{row['line']} {row['label']}: {row['reason']}")
        shutil.rmtree(folder)
    return counts, wrong


def test_the_labelled_lines_are_judged_as_documented(outcomes):
    counts, wrong = outcomes
    documented = (HERE.parents[1] / "docs" / "audit.md").read_text()
    for sample in sorted({row["sample"] for row in LABELLED}):
        hits, missed, false = (counts[sample, outcome] for outcome in ((True, True), (True, False), (False, True)))
        total = sum(number for (name, _outcome), number in counts.items() if name == sample)
        line = f"| {total} | {hits + missed} | {hits / (hits + false):.3f} | {hits / (hits + missed):.3f} |"
        print(f"sample {sample} {line}")
        assert line in documented, (sample, line, wrong)


def test_labels_are_complete():
    assert len(LABELLED) >= 150 and len({row["release"] for row in LABELLED}) >= 3
    assert all(row["label"] in ("closed", "other") and row["reason"] for row in LABELLED)
    assert len({(row["release"], row["file"], row["line"]) for row in LABELLED}) >= 0.95 * len(LABELLED)


@pytest.mark.parametrize("release", ["0.6.12+0.5.14", "0.7.2+0.5.22"])
def test_gates_that_are_planted_in_long_files_are_found(tmp_path, release):
    flashinfer, sglang = release.split("+")
    unpack("flashinfer-python", flashinfer, tmp_path, *(f"flashinfer/{pattern}" for pattern in SOURCES))
    unpack("sglang", sglang, tmp_path, "sglang/*.py")
    planted = []
    for pattern, snippets in (("sglang/srt/**/*.py", plant.PYTHON), ("flashinfer/data/include/**/*.cuh", plant.CUDA)):
        longest = sorted(tmp_path.glob(pattern), key=lambda path: path.stat().st_size, reverse=True)
        for path, (name, (text, *expected)) in zip(longest, snippets.items()):
            before = path.read_text() + "\n"
            path.write_text(before + textwrap.dedent(text))
            line = expected[0][2] if snippets is plant.PYTHON else expected[1]
            if line:  # else it is none
                planted.append((name, str(path.relative_to(tmp_path)), before.count("\n") + line))
    found = {(item.file, item.line) for item in search({"flashinfer": str(tmp_path), "sglang": str(tmp_path)}, [(12, 0)]).closed}
    assert len(planted) > 40 and [(name, file, line) for name, file, line in planted if (file, line) not in found] == []


def test_exactly_the_gates_that_keep_fusion_shut_block_it(pair, host):
    pair = pair.resolved()
    unpack("flashinfer-python", pair.flashinfer, host.site, "flashinfer/data/csrc/*", "flashinfer/data/include/*")
    unpack("sglang", pair.sglang, host.site, "sglang/*.py")

    def blocking() -> list[dict]:
        return [row for row in host.gate("12.0", module="gate_info", scope="all")["findings"] if row["blocks"]]

    before = blocking()
    assert {row["catalogued"] for row in before} == to_open(pair)
    host.gate("12.0")
    assert blocking() == []
    # Derived, not looked up: the catalogue's places are on the path as it was followed through the sources.
    assert [row["file"] for row in before if not row["on_path"]] == []
