# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""server_benchmark with a simulated bench_serving in the serving venv."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import yaml
from ansible_collections.blackwell.inference.plugins.module_utils._decision import decide
from ansible_collections.blackwell.inference.plugins.module_utils._proof_benchmark import Load, arguments, samples
from ansible_collections.blackwell.inference.plugins.modules import fusion_proof, server_benchmark
from ansible_collections.blackwell.inference.tests.unit.conftest import run_module
from ansible_collections.blackwell.inference.tests.unit.wheels import unpack

PROOF = Path(__file__).parents[4] / "docs/proof"

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
for name in ("flush-cache", "disable-tqdm"):
    parser.add_argument(f"--{name}", action="store_true")
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
    smi.write_text("#!/bin/sh\necho '300.00, 600.00, 1980, 90'\necho '[N/A], 600.00, 1960, 80'\nexec sleep 60\n")
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
            "state_dir": str(tmp_path / "state"),
        }
        result = run_module("server_benchmark", {**defaults, **options}, check=check)
        return result, [json.loads(line) for line in asked.read_text().splitlines()] if asked.exists() else []

    return run


def test_runs_each_load_three_times_after_a_cold_run(bench):
    result, asked = bench()
    assert result["changed"] is True
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
    found = {"power_w": 300.0, "power_limit_w": 600.0, "sm_mhz": 1970.0, "utilization": 85.0}
    assert samples("300.00, 600.00, 1980, 90\n[N/A], 600.00, 1960, 80\nnonsense\n") == found
    assert samples("") == dict.fromkeys(found)


def test_keeps_the_runs_of_a_configuration_together(bench):
    first, _asked = bench(runs=1, configuration={"tp": 8, "fusion": "off"})
    again, _asked = bench(runs=2, configuration={"fusion": "off", "tp": 8})
    other, _asked = bench(runs=1, configuration={"fusion": "off", "tp": 4})
    third, _asked = bench(runs=1, configuration={"fusion": "off", "tp": 8}, strategy="fusion")
    paths = [Path(result["benchmark_file"]) for result in (first, again, other, third)]
    assert paths[0] == paths[1] and len({*paths}) == 3
    record = json.loads(paths[0].read_text())
    assert [session["runs"] for session in record["sessions"]] == [first["runs"], again["runs"]]
    assert record["sessions"][0]["load"] == {"input_tokens": 1024, "output_tokens": 256, "requests_per_stream": 4}
    assert (record["strategy"], record["configuration"]) == ("nccl", {"tp": 8, "fusion": "off"})
    assert stat.S_IMODE(paths[0].stat().st_mode) == 0o640


def test_no_run_is_answered_from_the_cache_that_an_earlier_one_of_the_same_seed_has_filled(bench):
    for _time in range(2):
        _result, asked = bench(runs=1)
    assert [one["asked"]["seed"] for one in asked] == [0, 1, 0, 1] * 2
    assert all(one["asked"]["flush_cache"] for one in asked)


def test_the_benchmark_has_the_environment_of_the_server_and_no_other(bench, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    _result, asked = bench(runs=1)
    assert asked[0]["key"] is None


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
        ({"python": "/nonexistent/python"}, "cannot run /nonexistent/python (No such file or directory)"),
        ({"user": "nobody-yet"}, "user: nobody-yet does not exist on this host; expected the user that the server runs as."),
    ],
)
def test_what_goes_wrong_gets_one_line(bench, options, said):
    result, _asked = bench(**options)
    assert said in result.msg


@pytest.mark.parametrize("release", ["0.5.8", "0.5.23"])
def test_the_benchmark_of_a_release_knows_the_options_and_has_the_figures(release, tmp_path):
    unpack("sglang", release, tmp_path, "sglang/bench_serving.py", "sglang/benchmark/*.py")
    text = "".join(path.read_text() for path in tmp_path.rglob("*.py") if path.name in ("bench_serving.py", "serving.py"))
    flags = [word for word in arguments("http://127.0.0.1", Load(1, 1, 1), 1, 0, "out") if word.startswith("--")]
    assert [flag for flag in flags if f'"{flag}"' not in text] == []
    for figure in ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "accept_length", "completed"):
        assert f'"{figure}": ' in text
    assert '"OPENAI_API_KEY"' in text


@pytest.mark.parametrize("case", ["A-B-A", "A-A", "B-A-A"])
def test_what_was_measured_on_a_real_server_is_decided_as_recorded(case):
    recorded = PROOF / "2026-12-01-h200"
    decision = json.loads((recorded / "decisions.json").read_text())[case]
    probe = json.loads((PROOF / "2026-11-29-h200-x2/flashinfer-0.6.12.json").read_text())
    measured = {name: json.loads((recorded / f"{name}.json").read_text())["benchmark"] for name, _strategy in decision["given_as"]}
    runs = [{**run, "strategy": strategy} for name, strategy in decision["given_as"] for run in measured[name]]
    assert fusion_proof.described(decide(probe, benchmark=runs)) == decision["measured"]


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
