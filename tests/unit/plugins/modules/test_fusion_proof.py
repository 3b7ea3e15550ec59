# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""fusion_proof with simulated packages, nvidia-smi and torch, which replay what was recorded on two H200s."""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from pathlib import Path

import pytest
import yaml
from ansible_collections.blackwell.inference.plugins.module_utils._gpu import CSV_QUERY
from ansible_collections.blackwell.inference.plugins.modules import fusion_proof
from ansible_collections.blackwell.inference.tests.unit.conftest import Venv, run_module

FIXTURES = Path(__file__).parents[2] / "fixtures"
RECORDED = Path(__file__).parents[4] / "docs/proof/2026-11-29-h200-x2/flashinfer-0.6.1.json"


# In place of torch, in the simulated venv.
SIMULATED_TORCH = {
    "__init__.py": '''\
"""Simulated: in place of torch. A rank of the probe that imports it replays what $SIMULATED_PROOF recorded; there is no GPU.

A stage that was measured is written down as measured. One that hung stays where it hung, one that failed fails again.
"""

import json
import os
import sys
import time
from pathlib import Path


def _replay(probe):
    request = json.loads(sys.argv[sys.argv.index("--rank-request") + 1])
    rank = int(os.environ.get("RANK", "0"))
    stage = json.loads(Path(os.environ["SIMULATED_PROOF"]).read_text())["stages"][request["stage"]]
    report = {name: value for name, value in stage.items() if name not in ("status", "phase", "message", "log", "seconds", "ranks")}
    error = stage["message"].partition(": ")[2] if stage["status"] == "failed" and rank == 0 else None
    progress = probe.Progress(stage["phase"] or "done", request["phase_timeout"], stage["status"] == "measured", error, time.time())
    path = Path(request["folder"], f"rank{rank}.json")
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps({**progress._asdict(), "pid": os.getpid(), "report": report if rank == 0 else {}}))
    draft.replace(path)
    if stage["status"] == "hung":
        time.sleep(600)
    os._exit(1 if error else 0)


if hasattr(sys.modules["__main__"], "Progress"):
    _replay(sys.modules["__main__"])
''',
    "distributed/__init__.py": "",
    "distributed/run.py": '''\
"""Simulated: starts the ranks as the real launcher does, each in a session of its own."""

import os
import subprocess
import sys

if __name__ == "__main__":
    count = int(sys.argv[sys.argv.index("--nproc-per-node") + 1])
    script = next(index for index, word in enumerate(sys.argv) if index and word.endswith(".py"))
    command = [sys.executable, "-u", *sys.argv[script:]]
    ranks = [subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}, start_new_session=True) for rank in range(count)]
    sys.exit(max(rank.wait() for rank in ranks))
''',
}


class Host:
    """A simulated host with two H200s."""

    def __init__(self, root: Path, venv: Venv) -> None:
        self.root, self.venv = root, venv.make_interpreter()
        shutil.copytree(Path(__file__).parents[3] / "simulated/torch", venv.site / "torch")
        self.version("torch", "2.9.1")
        self.recorded, self.smi = root / "recorded.json", root / "bin" / "nvidia-smi"
        self.replays()
        self.smi.parent.mkdir()
        self.runs("")

    def version(self, distribution: str, version: str) -> None:
        """Install the metadata of a package."""
        for found in self.venv.site.glob(f"{distribution}-*.dist-info"):
            shutil.rmtree(found)
        folder = self.venv.site / f"{distribution}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")

    def replays(self, **stages: dict) -> None:
        """Say what the simulated ranks do."""
        result = json.loads(RECORDED.read_text())
        result["stages"].update(stages)
        self.recorded.write_text(json.dumps(result))

    def runs(self, processes: str, driver: str = "580.159.04") -> None:
        """Say what the simulated nvidia-smi lists as processes."""
        replies = FIXTURES / "nvidia-smi"
        gpus = "\n".join(f"{i}, GPU-00000000-0000-0000-0000-00000000000{i + 1}, NVIDIA H200, {driver}, 9.0, 0, 700.00" for i in (0, 1))
        self.smi.write_text(f"""#!/bin/sh
case "$1" in
  {CSV_QUERY[0]}) sed 's/580.159.04/{driver}/' {replies}/h200-x2.query.csv;;
  --query-gpu=*) echo '{gpus}';;
  --query-compute-apps=*) printf '%s' '{processes}';;
  -q) sed 's/580.159.04/{driver}/' {replies}/h200-x2.smi.xml;;
  topo) cat {replies}/h200-x2.topo-raw.txt;;
esac
""")
        self.smi.chmod(0o755)

    def prove(self, check: bool = False, **options):
        """Run the module."""
        defaults = {
            "python": str(self.venv.python),
            "world_size": 2,
            "executable": str(self.smi),
            "environment": {"HOME": str(self.root), "SIMULATED_PROOF": str(self.recorded), "NCCL_P2P_LEVEL": "SYS"},
            "state_dir": str(self.root / "state"),
            "facts_dir": str(self.root / "facts"),
            "phase_timeout": 1,
        }
        return run_module("fusion_proof", {**defaults, **options}, check=check)

    @property
    def proof(self) -> Path:
        return self.root / "state" / "proof.json"

    @property
    def facts(self) -> dict:
        return json.loads((self.root / "facts" / "blackwell_inference_proof.fact").read_text())


@pytest.fixture
def host(tmp_path, venv) -> Host:
    return Host(tmp_path, venv)


def test_measures_keeps_and_does_not_measure_again(host):
    result = host.prove()
    assert (result["changed"], result["status"], result["measured"]["strategy"]) == (True, "measured", "fusion"), result
    assert result["diff"]["before"].startswith("nccl: nothing has been measured")
    assert result["diff"]["after"].startswith("fusion: fusion is correct and 1.8")
    assert result["probe"]["stages"]["fusion"]["times"] == json.loads(RECORDED.read_text())["stages"]["fusion"]["times"]
    record = json.loads(host.proof.read_text())
    assert stat.S_IMODE(host.proof.stat().st_mode) == 0o640
    assert record["fingerprint"]["driver"] == "580.159.04"
    assert record["fingerprint"]["links"] == {"0-1": "NV18"}
    assert record["fingerprint"]["packages"]["torch"] == "2.9.1"
    assert record["fingerprint"]["server"]["environment"] == {"NCCL_P2P_LEVEL": "SYS"}
    assert host.facts["strategy"] == "fusion"
    assert host.facts["world_size"] == 2

    again = host.prove()
    assert (again["changed"], again["status"], again["measured"]) == (False, "kept", result["measured"])
    assert "diff" not in again


def test_check_mode_says_that_it_would_measure_and_writes_nothing(host):
    result = host.prove(check=True)
    assert (result["changed"], result["status"], result["measured"]["strategy"]) == (True, "measured", "nccl")
    assert result["diff"]["after"] == "nccl: it would be measured, and the result is not known yet\n"
    assert not host.proof.parent.exists()
    host.prove()
    assert host.prove(check=True)["changed"] is False


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda host: host.runs("", driver="590.44.01"), "driver was 580.159.04 and is 590.44.01"),
        (lambda host: host.version("torch", "2.9.2"), "packages torch was 2.9.1 and is 2.9.2"),
    ],
)
def test_a_changed_host_is_measured_again(host, change, said):
    host.prove()
    change(host)
    stale = host.prove(measure=False)
    assert (stale["changed"], stale["status"], stale["measured"]["strategy"], stale["changed_since"]) == (False, "stale", "nccl", [said])
    assert said in stale["measured"]["reason"]
    again = host.prove()
    assert (again["status"], again["measured"]["strategy"]) == ("measured", "fusion")


def test_changed_options_are_measured_again_and_force_always(host):
    host.prove()
    assert host.prove(hidden_size=7168, measure=False)["changed_since"] == ["server hidden_size was 6144 and is 7168"]
    assert host.prove(force=True)["status"] == "measured"


def test_without_a_result_it_says_how_to_get_one(host):
    result = host.prove(measure=False)
    assert (result["changed"], result["status"], result["probe"]) == (False, "missing", None)
    assert "--tags prove" in result["measured"]["reason"]


def test_busy_gpus_are_not_measured(host):
    host.runs("GPU-00000000-0000-0000-0000-000000000002, 4711, sglang::scheduler")
    for check in (False, True):
        result = host.prove(check=check)
        assert (result["changed"], result["status"], result["measured"]["strategy"]) == (False, "refused", "nccl")
        assert "the GPUs are in use: GPU 1 by process 4711 (sglang::scheduler)" in result["measured"]["reason"]
    assert not host.proof.exists()
    assert "GPU 1 by process 4711" in host.prove(required=True).msg


def test_a_result_is_kept_while_gpus_are_busy(host):
    host.prove()
    host.runs("GPU-00000000-0000-0000-0000-000000000002, 4711, sglang::scheduler")
    assert host.prove(required=True)["status"] == "kept"


def test_a_hang_is_a_result(host):
    host.replays(fusion={"status": "hung", "phase": "checking fusion at 1 tokens", "message": ""})
    started = time.monotonic()
    result = host.prove()
    assert time.monotonic() - started < 30
    assert (result["status"], result["measured"]["strategy"]) == ("measured", "nccl")
    assert result["measured"]["reason"].startswith("fusion hung: ranks 0, 1 hung in checking fusion at 1 tokens")
    assert host.prove()["status"] == "kept"  # and is not tried again
    assert not [
        name for name in os.listdir("/proc") if name.isdigit() and str(host.root) in command(name) and "--rank-request" in command(name)
    ]


def command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def test_a_closed_gate_is_a_result(host):
    host.replays(fusion={"status": "failed", "phase": "compiling", "message": "rank 0: No supported CUDA architectures found"})
    result = host.prove()
    assert "fusion failed: rank 0 failed in compiling: No supported CUDA architectures found" in result["measured"]["reason"]


def test_a_benchmark_is_kept_and_has_the_last_word(host):
    runs = [
        {"strategy": strategy, "concurrency": 64, "tokens_per_s": rates, "acceptance": None}
        for strategy, rates in (("nccl", [3740, 3731, 3745]), ("fusion", [78.6, 78.1, 79.0]), ("nccl", [3738, 3741, 3729]))
    ]
    assert "nothing has been measured" in host.prove(benchmark=runs).msg
    host.prove()
    expected = host.prove(benchmark=runs, check=True)
    assert expected["changed"] is True
    assert host.facts["strategy"] == "fusion"
    result = host.prove(benchmark=runs)
    assert (result["changed"], result["measured"]["strategy"]) == (True, "nccl")
    assert "on the server, fusion is correct, and takes 47.5" in result["measured"]["reason"]
    assert (result["measured"], result["diff"]) == (expected["measured"], expected["diff"])
    assert host.facts["strategy"] == "nccl"
    assert host.prove(benchmark=runs)["changed"] is False
    assert host.prove()["measured"] == result["measured"]
    assert host.prove(force=True)["measured"]["strategy"] == "fusion"


def test_hosts_with_nothing_to_measure_are_a_success(host):
    assert host.prove(world_size=1)["measured"]["reason"] == "one rank has nothing to reduce"
    result = host.prove(executable="/nonexistent/nvidia-smi", required=True)
    assert (result["changed"], result["status"], result["measured"]["reason"]) == (False, "pointless", "there is no GPU on this host")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"world_size": 8}, "8 ranks on 2 GPUs"),
        ({"world_size": 3}, "3 ranks: FlashInfer's fused allreduce knows 2, 4 and 8"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "1"}}, "2 ranks on 1 GPU:"),
    ],
)
def test_a_world_size_that_cannot_be(host, options, said):
    assert said in host.prove(**options)["measured"]["reason"]
    assert said in host.prove(required=True, **options).msg


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"world_size": 0}, "world_size: 0; expected a positive number."),
        ({"timeout": 0}, "timeout: 0; expected a positive number."),
        ({"python": "/nonexistent/python"}, "python: /nonexistent/python does not exist; expected the path of the serving venv's"),
    ],
)
def test_bad_options_get_one_line(host, options, said):
    assert said in host.prove(**options).msg


def test_a_damaged_record_gets_one_line(host):
    host.prove()
    host.proof.write_text("{}")
    assert f"{host.proof}: it is no record of a proof; expected schema_version 1. Remove it, and measure again." in host.prove().msg


def test_a_probe_that_does_not_run_gets_one_line(host):
    (host.venv.site / "torch/distributed/run.py").unlink()
    result = host.prove()
    assert "fusion failed: the launcher ended; ranks 0, 1 never started; the last it said:" in result["measured"]["reason"]


def test_everything_returned_is_documented(host):
    documented = yaml.safe_load(fusion_proof.RETURN)
    result = host.prove()
    assert set(documented) == set(result) - {"changed", "diff", "invocation"}
    assert set(documented["measured"]["contains"]) == set(result["measured"])
