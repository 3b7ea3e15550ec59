# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The parts of the probe that need no GPU; the others are in tests/gpu."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils import _proof_probe as probe
from ansible_collections.blackwell.inference.plugins.module_utils._proof_probe import EntryPoint, Options, Progress
from ansible_collections.blackwell.inference.tests.unit.wheels import unpack

GPUS = probe.parse_gpus(
    "0, GPU-aa, NVIDIA H200, 580.1, 9.0, 0, 700.00\nsome warning\n"
    "1, GPU-bb, NVIDIA H200, 580.1, 9.0, 0, 700.00\n2, GPU-bc, NVIDIA H200, 580.1, 9.0, 0, 700.00\n"
)
OPTIONS = Options(2, 6144, (1, 2), 60, 1800, None)


def at(phase: str, limit: float = 60, done: bool = False, error: str | None = None, written: float = 0) -> Progress:
    return Progress(phase, limit, done, error, written)


@pytest.mark.parametrize(
    ("sglang", "api", "fp32_acc"),
    [("0.5.8", "ipc", False), ("0.5.23", "unified", True)],
)
def test_it_calls_what_the_released_sglang_calls(tmp_path, sglang, api, fp32_acc):
    text = (
        unpack("sglang", sglang, tmp_path, "sglang/srt/layers/flashinfer_comm_fusion.py") / "sglang/srt/layers/flashinfer_comm_fusion.py"
    ).read_text()
    expected = EntryPoint(api, fp32_acc, f"sglang {sglang}, layers/flashinfer_comm_fusion.py")
    assert probe.entry_point(text, sglang, True) == expected


def test_without_sglang_it_calls_the_newest_api():
    assert probe.entry_point(None, "", True).api == "unified"
    assert probe.entry_point(None, "", False).api == "ipc"


@pytest.mark.parametrize(
    ("variable", "indices"),
    [(None, "012"), ("", ""), ("1,0", "10"), ("GPU-bb", "1"), ("2,7,0", "2"), ("GPU-b", ""), ("-1", "")],
)
def test_visible_devices_are_understood_as_cuda_does(variable, indices):
    assert "".join(gpu["index"] for gpu in probe.visible(GPUS, variable)) == indices


@pytest.mark.parametrize(
    ("options", "gpus", "processes", "said"),
    [
        (OPTIONS._replace(world_size=3), GPUS, "", "3 ranks: FlashInfer's fused allreduce knows 2, 4 and 8"),
        (OPTIONS._replace(world_size=4), GPUS, "", "4 ranks on 3 GPUs"),
        (OPTIONS, GPUS[:1], "", "2 ranks on 1 GPU:"),
        (OPTIONS, GPUS, "GPU-bb, 4711, sglang::scheduler_TP1\n", "GPU 1 by process 4711 (sglang::scheduler_TP1)"),
        (OPTIONS, GPUS, "GPU-aa, 1, a\nGPU-bb, 2, b\n", "GPU 0 by process 1 (a) and 1 more"),
        (OPTIONS, [{**GPUS[0], "memory.used": "80000"}, GPUS[1]], "", "GPU 0 holds 80000 MiB of somebody's"),
    ],
)
def test_refusals(options, gpus, processes, said):
    with pytest.raises(probe.Refusal) as refused:
        probe.refuse(options, gpus, processes)
    assert said in str(refused.value)


def test_gpus_that_are_not_used_may_be_busy():
    probe.refuse(OPTIONS, GPUS, "GPU-bc, 4711, python\n")


def test_overdue_ranks():
    progress = {0: at("a", 10), 1: at("a", 30), 2: None, 3: at("a", 10, done=True), 4: at("a", 10, error="x")}
    assert probe.overdue(progress, dict.fromkeys(progress, 5)) == []
    assert probe.overdue(progress, dict.fromkeys(progress, 20)) == [0]
    assert probe.overdue(progress, dict.fromkeys(progress, 1000)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("progress", "hung", "status", "message"),
    [
        ({0: at("x", done=True), 1: at("x", done=True)}, [], "measured", None),
        ({0: at("x", done=True), 1: at("checking")}, [1], "hung", "rank 1 hung in checking for more than 60 s"),
        ({0: at("joining"), 1: None}, [0], "hung", "rank 0 hung in joining for more than 60 s; rank 1 never started"),
        ({0: at("joining"), 1: at("checking")}, [0], "hung", "rank 0 hung in joining for more than 60 s, rank 1 hung in checking"),
        ({0: None, 1: None}, [0, 1], "hung", "the launcher hung; ranks 0, 1 never started"),
        # The first error is the cause; what the others then say is not.
        (
            {0: at("checking", error="peer reset", written=2), 1: at("compiling", error="no gate", written=1)},
            [],
            "failed",
            "rank 1 failed in compiling: no gate",
        ),
        ({0: at("checking"), 1: at("x", done=True)}, [], "failed", "rank 0 ended in checking; the last it said: Segmentation fault"),
    ],
)
def test_outcomes(progress, hung, status, message):
    result = probe.outcome(progress, hung, "warning\nSegmentation fault\n")
    assert (result["status"], result["message"]) == (status, message)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("", "nothing"),
        (
            "a\n\nsymbol lookup error: cuDeviceGet\nE1129 torch/distributed/elastic/api.py:1] failed\n=====\n",
            "symbol lookup error: cuDeviceGet",
        ),
        ("W1129 torch/distributed/elastic/api.py:1] x\nNo module named torch\n", "No module named torch"),
    ],
)
def test_a_rank_has_the_last_word(log, said):
    assert probe.last_words(log) == said


def test_a_number_that_is_none_is_the_worst_of_all():
    check = {"sum_error_ulp": 0.5, "norm_error_ulp": 0.5, "relative_error": 0.001, "finite": True}
    found = probe.worst([check, {**check, "norm_error_ulp": float("nan"), "finite": False}, {**check, "sum_error_ulp": 1.0}])
    assert (found["sum_error_ulp"], found["finite"]) == (1.0, False)
    assert json.loads(json.dumps(found))["norm_error_ulp"] > 1e29


def test_the_table_shows_what_was_measured():
    recorded = json.loads((Path(__file__).parents[4] / "docs/proof/2026-11-29-h200-x2/flashinfer-0.6.1.json").read_text())
    lines = probe.table(recorded).splitlines()
    assert lines[0].startswith("2 x NVIDIA H200, driver 580.159.04, flashinfer-python 0.6.1, sglang 0.5.8, torch 2.11.0, hidden size 6144")
    assert any(line.split()[0] == "2048" and "one" in line for line in lines)
    assert lines[-1] == "pcie_ipc: absent; flashinfer 0.6.1 has no PCIe-IPC allreduce"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", "1,x"], "--tokens: '1,x' found; expected numbers such as 1,8,128"),
        (["--tokens", "4096"], "--tokens: 4096 found; expected 1 to 2048"),
        (["--hidden-size", "100"], "--hidden-size: 100 found; expected a multiple of 8"),
    ],
)
def test_wrong_options_get_one_line(arguments, said):
    done = subprocess.run([sys.executable, probe.__file__, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]


def test_a_host_without_a_driver_is_refused(tmp_path):
    output = tmp_path / "probe.json"
    command = [sys.executable, probe.__file__, "--output", str(output)]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    result = json.loads(output.read_text())
    assert (result["status"], result["schema_version"]) == ("refused", probe.SCHEMA_VERSION)
    assert "nvidia-smi does not answer" in result["message"]


def test_the_ranks_of_a_killed_probe_end_with_it(tmp_path):
    marker = tmp_path / "alive"
    code = f"import sys, time; sys.path.insert(0, {str(Path(probe.__file__).parent)!r}); import _proof_probe, subprocess\n"
    child = f"import time\nfor n in range(100): open({str(marker)!r}, 'w').write(str(n)); time.sleep(0.05)"
    code += f"subprocess.Popen([sys.executable, '-c', {child!r}], preexec_fn=_proof_probe._die_with_parent); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 20
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    time.sleep(0.2)
    seen = marker.read_text()
    time.sleep(0.3)
    assert marker.read_text() == seen
