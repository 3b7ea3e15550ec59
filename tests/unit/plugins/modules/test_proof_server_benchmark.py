# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""server_benchmark with a simulated bench_serving in the serving venv."""

from __future__ import annotations

import json

import pytest
import yaml
from ansible_collections.blackwell.inference.plugins.module_utils._proof_benchmark import samples
from ansible_collections.blackwell.inference.plugins.modules import server_benchmark
from ansible_collections.blackwell.inference.tests.unit.conftest import run_module

SIMULATED = '''\
"""Simulated: in place of sglang.bench_serving. Says what it was asked, and figures that follow from the seed; there is no server."""

import argparse
import json
import os
import sys

parser = argparse.ArgumentParser()
for name in ("backend", "base-url", "dataset-name", "output-file"):
    parser.add_argument(f"--{name}", required=True)
for name in ("random-input-len", "random-output-len", "random-range-ratio", "num-prompts", "max-concurrency", "seed"):
    parser.add_argument(f"--{name}", type=int, required=True)
parser.add_argument("--disable-tqdm", action="store_true")
options = parser.parse_args()
if "9999" in options.base_url:
    sys.exit("Connection refused: http://127.0.0.1:9999")
rate = 1 if options.seed == 0 else 100 * options.max_concurrency + options.seed  # the first run is cold
result = {
    "completed": options.num_prompts - int(os.environ.get("LOST", "0")),
    "output_throughput": rate,
    "accept_length": 3 - options.seed / 10,
}
result |= {"median_ttft_ms": 20, "p99_ttft_ms": 90, "median_tpot_ms": 8.5, "p99_tpot_ms": 12, "asked": vars(options)}
result["key"] = os.environ.get("OPENAI_API_KEY")
with open(options.output_file, "a") as file:
    file.write(json.dumps(result) + "\\n")
with open(os.environ["ASKED"], "a") as file:
    file.write(json.dumps(result) + "\\n")
'''


@pytest.fixture
def bench(tmp_path, venv):
    """Run the module; return its result and what bench_serving was asked."""
    venv.make_interpreter()
    venv.path("sglang/bench_serving.py").write_text(SIMULATED)
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '300.00, 1980, 90'\necho '[N/A], 1960, 80'\nexec sleep 60\n")
    smi.chmod(0o755)

    def run(check=False, lost=0, **options):
        asked = tmp_path / "asked"
        environment = {"ASKED": str(asked), "LOST": str(lost)}
        defaults = {
            "python": str(venv.python),
            "strategy": "nccl",
            "concurrency": [1, 4],
            "executable": str(smi),
            "environment": environment,
        }
        result = run_module("server_benchmark", {**defaults, **options}, check=check)
        return result, [json.loads(line) for line in asked.read_text().splitlines()] if asked.exists() else []

    return run


def test_runs_each_load_three_times_after_a_cold_run(bench):
    result, asked = bench()
    assert result["changed"] is False
    assert result["benchmark"] == [
        {"strategy": "nccl", "concurrency": 1, "tokens_per_s": [101, 102, 103], "acceptance": 2.7},
        {"strategy": "nccl", "concurrency": 4, "tokens_per_s": [401, 402, 403], "acceptance": 2.7},
    ]
    assert [(one["asked"]["max_concurrency"], one["asked"]["seed"]) for one in asked] == [(c, s) for c in (1, 4) for s in range(4)]
    assert {one["asked"]["num_prompts"] for one in asked} == {4, 16}
    assert asked[0]["asked"]["dataset_name"] == "random-ids"
    row = result["runs"][0]
    assert (row["ttft_ms"], row["tpot_ms"]) == ({"median": 20, "p99": 90}, {"median": 8.5, "p99": 12})


def test_samples_are_means_over_what_the_driver_knows():
    assert samples("300.00, 1980, 90\n[N/A], 1960, 80\nnonsense\n") == {"power_w": 300.0, "sm_mhz": 1970.0, "utilization": 85.0}
    assert samples("") == {"power_w": None, "sm_mhz": None, "utilization": None}


def test_works_without_nvidia_smi(bench):
    result, _asked = bench(executable="/nonexistent/nvidia-smi", runs=1)
    assert result["runs"][0]["power_w"] is None


def test_the_key_reaches_the_benchmark_and_nothing_else(bench):
    result, asked = bench(api_key="sesame", runs=1)
    assert asked[0]["key"] == "sesame"
    assert "sesame" not in json.dumps(result)
    assert "sesame" not in json.dumps([one["asked"] for one in asked])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "http://127.0.0.1:9999"}, "sglang.bench_serving: Connection refused: http://127.0.0.1:9999; expected a run against"),
        ({"lost": 1}, "sglang.bench_serving: 3 of 4 requests were answered; expected all of them. Read the server's log."),
        ({"runs": 0}, "runs: 0; expected a positive number."),
        ({"concurrency": [0]}, "concurrency: [0]; expected positive numbers, e.g. [1, 64]."),
        ({"python": "/nonexistent/python"}, "python: /nonexistent/python cannot be run"),
    ],
)
def test_what_goes_wrong_gets_one_line(bench, options, said):
    result, _asked = bench(**options)
    assert said in result.msg


def test_check_mode_puts_no_load_on_the_server(bench):
    result, asked = bench(check=True)
    assert result["skipped"] is True
    assert asked == []


def test_everything_returned_is_documented(bench):
    documented = yaml.safe_load(server_benchmark.RETURN)
    result, _asked = bench(runs=1)
    assert set(documented) == set(result) - {"changed", "invocation"}
    assert set(documented["runs"]["contains"]) == set(result["runs"][0])
    assert set(documented["benchmark"]["contains"]) == set(result["benchmark"][0])
