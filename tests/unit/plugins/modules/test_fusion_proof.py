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
from types import SimpleNamespace

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args
from ansible_collections.blackwell.inference.plugins.module_utils import _proof
from ansible_collections.blackwell.inference.plugins.module_utils._decision import differences
from ansible_collections.blackwell.inference.plugins.module_utils._gpu import CSV_QUERY
from ansible_collections.blackwell.inference.plugins.module_utils._packages import locate
from ansible_collections.blackwell.inference.plugins.module_utils._proof import Server, fingerprint
from ansible_collections.blackwell.inference.plugins.modules import fusion_proof
from ansible_collections.blackwell.inference.tests.unit.conftest import Venv, run_module

FIXTURES = Path(__file__).parents[2] / "fixtures"
RECORDED = Path(__file__).parents[4] / "docs/proof/2026-11-29-h200-x2/flashinfer-0.6.1.json"


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

    def options(self, **given: object) -> dict[str, object]:
        """Options of the module for this host."""
        defaults = {
            "python": str(self.venv.python),
            "world_size": 2,
            "executable": str(self.smi),
            "environment": {"HOME": str(self.root), "SIMULATED_PROOF": str(self.recorded), "NCCL_P2P_LEVEL": "SYS"},
            "state_dir": str(self.root / "state"),
            "facts_dir": str(self.root / "facts"),
            "phase_timeout": 1,
        }
        return {**defaults, **given}

    def prove(self, check: bool = False, **given: object):
        """Run the module."""
        return run_module("fusion_proof", self.options(**given), check=check)

    @property
    def proof(self) -> Path:
        return self.root / "state" / "proofs" / "sglang.json"

    @property
    def facts(self) -> dict:
        return json.loads((self.root / "facts" / "blackwell_inference_proof_sglang.fact").read_text())


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
    assert stat.S_IMODE(host.proof.parents[1].stat().st_mode) == 0o750
    assert record["fingerprint"]["driver"] == "580.159.04"
    assert record["fingerprint"]["links"] == {"0-1": "NV18"}
    assert record["fingerprint"]["gates"] == {}  # all are open on an H200, as released
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
    assert not host.proof.parents[1].exists()
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
    predicted = host.prove(check=True)
    assert (predicted["status"], predicted["measured"]["strategy"]) == ("measured", "fusion")  # as far as anybody knows
    again = host.prove()
    assert (again["status"], again["measured"]["strategy"]) == ("measured", "fusion")


OURS = "GPU-00000000-0000-0000-0000-000000000002, 4711, sglang::scheduler"
THEIRS = "GPU-00000000-0000-0000-0000-000000000001, 4712, python"


class TestOfAServerThatRuns:
    """It is stopped by whoever measures; while nobody does, it goes on with what was measured for it."""

    @pytest.fixture
    def prove(self, host, monkeypatch, capsys):
        """Run the module beside a server of which process 4711 is one, with what was measured with another driver."""
        config = host.root / "sglang.yaml"
        config.write_text("# Managed\n# Profile glm. Allreduce: fusion.\nport: 30000\n")
        host.prove()

        def prove(processes: str, driver: str = "590.44.01", check: bool = False, **given: object) -> dict:
            host.runs(processes, driver)
            monkeypatch.setattr(fusion_proof, "of_unit", {"sglang.service": {4711, 4799} if "4711" in processes else set()}.get)
            options = host.options(unit="sglang.service", config_file=str(config), **given)
            with patch_module_args({**options, "_ansible_check_mode": check}), pytest.raises(SystemExit):
                fusion_proof.main()
            return json.loads(capsys.readouterr().out)

        prove.config = config
        return prove

    def test_it_keeps_what_was_measured_until_it_can_be_measured_again(self, prove):
        looked = prove(OURS, measure=False, stops=True)
        assert (looked["status"], looked["measured"]["strategy"]) == ("stale", "fusion")
        both = f"{OURS}\n{THEIRS}"
        refused = [prove(OURS), prove(OURS, measure=False), prove(both), prove(both, measure=False, stops=True)]
        for result, process in zip(
            refused, ("GPU 1 by process 4711", "GPU 1 by process 4711", "GPU 1 by process 4711", "GPU 0 by process 4712")
        ):
            assert (result["changed"], result["status"], result["measured"]["strategy"]) == (False, "refused", "fusion")
            for words in (
                f"it cannot be measured now: the GPUs are in use: {process}",
                "driver was 580.159.04 and is 590.44.01",
                "site -l HOST",
            ):
                assert words in result["measured"]["reason"]

    def test_what_says_of_itself_that_it_does_not_fuse_does_not_begin_to(self, prove):
        prove.config.write_text("# Profile glm. Allreduce: nccl.\n")
        assert prove(OURS)["measured"]["strategy"] == "nccl"
        prove.config.unlink()
        assert prove(OURS)["measured"]["strategy"] == "nccl"

    def test_other_packages_are_not_what_was_measured(self, prove, host):
        host.version("torch", "2.9.2")
        refused = prove(OURS)
        assert refused["measured"]["strategy"] == "nccl"
        assert "packages torch was 2.9.1 and is 2.9.2" in refused["measured"]["reason"]

    def test_check_mode_knows_that_it_would_be_stopped(self, prove):
        assert (prove(OURS, check=True)["status"], prove(OURS, check=True)["changed"]) == ("refused", False)
        predicted = prove(OURS, check=True, stops=True)
        assert (predicted["status"], predicted["changed"], predicted["measured"]["strategy"]) == ("measured", True, "fusion")
        assert "process 4712" in prove(f"{OURS}\n{THEIRS}", check=True, stops=True)["msg"]
        assert prove("", stops=True)["status"] == "measured"

    def test_what_is_asked_for_and_cannot_be_fails_with_what_works(self, prove):
        assert "Stop the server first" in prove(OURS, required=True)["msg"]
        assert "ansible-playbook blackwell.inference.site -l HOST." in prove(OURS, required=True)["msg"]
        assert "process 4711" in prove(OURS, stops=True)["msg"]  # it was stopped, and is there again


def test_memory_goes_with_the_processes_that_are_stopped():
    gpus = [{"uuid": uuid, "index": str(index), "memory.used": "81234"} for index, uuid in enumerate(("GPU-1", "GPU-2"))]
    left, processes = _proof.without({4711}, gpus, "GPU-1, 4711, rank\nGPU-1, 47, other\nGPU-2, 14711, rank\n")
    assert [gpu["memory.used"] for gpu in left] == ["0", "81234"]
    assert processes == "GPU-1, 47, other\nGPU-2, 14711, rank\n"


def test_an_opened_gate_changes_what_was_measured(venv):
    server = Server(str(venv.make_interpreter().python), None, {}, 8, 6144)
    inventory = SimpleNamespace(compute_capabilities=["12.0"], driver_version="580.95.05", gpus=[], links=[])

    def now() -> dict:
        return fingerprint(server, inventory, locate(server.python), str(venv.state))

    before = now()
    venv.gate("open")
    assert "gates sglang.fusion.applies was closed and is opened" in differences(before, now())
    venv.gate("restored")
    assert differences(before, now()) == []


def test_changed_options_are_measured_again_and_force_always(host):
    host.prove()
    assert host.prove(hidden_size=7168, measure=False)["changed_since"] == ["server hidden_size was 6144 and is 7168"]
    assert host.prove(force=True)["status"] == "measured"


def test_servers_of_one_host_are_kept_apart(host):
    host.prove()
    assert host.prove(name="second", measure=False)["status"] == "missing"
    host.prove(name="second", hidden_size=7168)
    assert host.prove(measure=False)["status"] == host.prove(name="second", hidden_size=7168, measure=False)["status"] == "kept"
    assert "name: '../second'; expected letters" in host.prove(name="../second").msg


@pytest.mark.parametrize(
    ("config", "model", "measured"),
    [
        ('{"hidden_size": 4096}', {"hidden_size": 7168}, 4096),
        ('{"text_config": {"hidden_size": 5120}}', {}, 5120),
        (None, {"hidden_size": 7168}, 7168),
        (None, {}, 6144),
    ],
)
def test_the_hidden_size_is_that_of_the_model(host, config, model, measured):
    folder = host.root / "model"
    folder.mkdir()
    if config:
        (folder / "config.json").write_text(config)
    result = host.prove(model={"path": str(folder), **model})
    assert json.loads(host.proof.read_text())["fingerprint"]["server"]["hidden_size"] == measured
    assert result["probe"]["parameters"]["hidden_size"] == measured
    assert host.prove(model={"path": str(folder), **model}, hidden_size=8192, measure=False)["status"] == "stale"


def test_a_model_without_a_hidden_size_gets_one_line(host):
    (host.root / "config.json").write_text("[]")
    assert f"{host.root}/config.json: it says no hidden_size" in host.prove(model={"path": str(host.root)}).msg


def test_another_compiler_is_measured_again(host):
    nvcc = host.root / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    environment = {"HOME": str(host.root), "SIMULATED_PROOF": str(host.recorded), "CUDA_HOME": str(host.root / "cuda")}
    host.prove(environment=environment)
    nvcc.write_text("")
    nvcc.chmod(0o755)
    assert host.prove(environment=environment, measure=False)["changed_since"] == [f"nvcc was unknown and is {nvcc}"]


def test_the_folder_of_the_caches_is_made_as_systemd_makes_it(host):
    cache = host.root / "var" / "cache"
    host.prove(environment={"HOME": str(host.root), "SIMULATED_PROOF": str(host.recorded), "FLASHINFER_WORKSPACE_BASE": str(cache)})
    assert stat.S_IMODE(cache.stat().st_mode) == 0o750


def test_nobody_else_measures_for_a_server_without_an_account(host):
    assert "user: nobody-yet does not exist on this host; expected the user that the server runs as." in host.prove(user="nobody-yet").msg
    assert host.prove(user="nobody-yet", check=True)["changed"] is True  # an earlier task of a run creates it


def test_without_a_result_it_says_how_to_get_one(host):
    result = host.prove(measure=False)
    assert (result["changed"], result["status"], result["probe"]) == (False, "missing", None)
    assert "ansible-playbook blackwell.inference.site -l HOST" in result["measured"]["reason"]


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
    assert host.prove()["candidate"] == "fusion"  # so that it can be benchmarked again
    assert host.prove(force=True)["measured"]["strategy"] == "fusion"


def test_a_server_that_does_not_serve_with_fusion_is_a_benchmark(host):
    host.prove()
    runs = [{"strategy": "nccl", "concurrency": 1, "tokens_per_s": [100, 101, 99]}, {"strategy": "fusion", "error": "it is hung"}]
    result = host.prove(benchmark=runs)
    assert (result["measured"]["strategy"], result["candidate"]) == ("nccl", "fusion")
    assert result["measured"]["reason"].startswith("fusion does not serve on this host: it is hung")


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
    assert f"{host.proof}: it is no record of a measurement; expected schema_version 1. Remove it, and measure again." in host.prove().msg


def test_a_probe_that_does_not_run_gets_one_line(host):
    (host.venv.site / "torch/distributed/run.py").unlink()
    result = host.prove()
    assert "fusion failed: the launcher ended; ranks 0, 1 never started; the last it said:" in result["measured"]["reason"]


def test_everything_returned_is_documented(host):
    documented = yaml.safe_load(fusion_proof.RETURN)
    result = host.prove()
    assert set(documented) == set(result) - {"changed", "diff", "invocation"}
    assert set(documented["measured"]["contains"]) == set(result["measured"])
