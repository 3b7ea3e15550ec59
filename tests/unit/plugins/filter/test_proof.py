# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plots of results from real cards, and of benchmarks that are made up."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from ansible_collections.blackwell.inference.plugins.filter import proof
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.plugin_utils import _plots

ROOT = Path(__file__).parents[4]
RECORDED = ROOT / "docs/proof/2026-11-29-h200-x2"
FILTERS = proof.FilterModule().filters()
TIMED = sorted(path for path in RECORDED.glob("*.json") if '"times"' in path.read_text())


def texts(svg: str) -> list[str]:
    """What is written in a plot."""
    return [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]  # noqa: S314  our own


def markers(svg: str, colour: str) -> int:
    """How many points of a colour there are, without the one in the legend."""
    return len(re.findall(rf'<use [^>]*style="fill: {colour}', svg)) - 1


def benchmark(strategy: str, rate: float, when: str = "2026-12-01T00:00:00Z", input_tokens: int = 1024) -> dict:
    """Made up: what is kept of two runs at each of three loads."""
    runs = [
        {
            "concurrency": level,
            "tokens_per_s": rate * level + run,
            "ttft_ms": {"median": 20 + run, "p99": 90},
            "tpot_ms": {"median": 8, "p99": 12},
        }
        for level in (1, 16, 64)
        for run in range(2)
    ]
    load = {"input_tokens": input_tokens, "output_tokens": 256, "requests_per_stream": 4}
    return {"strategy": strategy, "sessions": [{"measured_at": when, "load": load, "runs": runs}]}


@pytest.mark.parametrize("path", TIMED, ids=lambda path: path.stem)
def test_a_result_is_drawn_at_every_size(path):
    probe = json.loads(path.read_text())
    svg = FILTERS["probe_plot"](probe)
    sizes = len(probe["stages"]["fusion"]["times"])
    assert markers(svg, "#777777") == sizes
    assert markers(svg, "#0072b2") == 2 * sizes  # time and gain
    assert f"flashinfer {probe['versions']['flashinfer-python']}" in " ".join(texts(svg))
    assert svg == FILTERS["probe_plot"](probe)


def test_the_plots_in_the_docs_are_those_of_the_results_beside_them():
    plots = sorted(RECORDED.glob("*.svg"))
    assert plots
    for plot in plots:
        assert texts(plot.read_text()) == texts(FILTERS["probe_plot"](json.loads(plot.with_suffix(".json").read_text())))


def test_a_benchmark_is_drawn_by_strategy():
    svg = FILTERS["benchmark_plot"]([benchmark("nccl", 100), benchmark("fusion", 120)])
    assert {"Throughput", "Time to the first token", "Time per further token", "nccl", "fusion", "64"} <= {*texts(svg)}
    assert "1024 tokens in, 256 out" in " ".join(texts(svg))


def test_runs_under_another_load_are_no_part_of_it():
    old = benchmark("nccl", 9000, when="2026-11-01T00:00:00Z", input_tokens=8)
    rows = _plots.comparable([benchmark("fusion", 120), old, benchmark("nccl", 100)])
    assert sorted(rows) == ["fusion", "nccl"]
    assert max(row["tokens_per_s"] for row in rows["nccl"]) == 6401


def test_the_decision_is_that_of_the_record():
    record = {"probe": json.loads((RECORDED / "flashinfer-0.6.1.json").read_text())}
    assert FILTERS["proof_decision"](record)["strategy"] == "fusion"
    slow = [{"strategy": name, "concurrency": 1, "tokens_per_s": rates} for name, rates in (("nccl", [3740]), ("fusion", [78.6]))]
    assert FILTERS["proof_decision"]({**record, "benchmark": slow})["strategy"] == "nccl"


@pytest.mark.parametrize(
    ("name", "measured"),
    [("probe_plot", {}), ("probe_plot", None), ("probe_plot", {"stages": {}}), ("benchmark_plot", []), ("proof_decision", {})],
)
def test_what_cannot_be_drawn_gets_one_line(name, measured):
    with pytest.raises(InferenceError) as error:
        FILTERS[name](measured)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InferenceError) as error:
        FILTERS["probe_plot"](json.loads(TIMED[0].read_text()))
    assert str(error.value).endswith(f"Install it: {sys.executable} -m pip install matplotlib")


def test_each_filter_is_described():
    for name in FILTERS:
        described = yaml.safe_load((ROOT / f"plugins/filter/{name}.yml").read_text())
        assert described["DOCUMENTATION"]["name"] == name
