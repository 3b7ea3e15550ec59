# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""site.yml and restore.yml as an ordinary user runs them, with all folders redirected and simulated GPUs."""

from __future__ import annotations

import json
import re
import subprocess
import time
import venv
from pathlib import Path

import pytest
import yaml
from ansible_collections.blackwell.inference.tests.unit.playbook import ROOT, recap, run_playbook
from ansible_collections.blackwell.inference.tests.unit.wheels import unpack

OPTIONS = {
    name: option
    for path in sorted(ROOT.glob("roles/*/meta/argument_specs.yml"))
    for name, option in yaml.safe_load(path.read_text())["argument_specs"]["main"]["options"].items()
}
WIRED = [name for name in yaml.safe_load((ROOT / "playbooks/vars/wiring.yml").read_text()) if name in OPTIONS]
# What a machine without CUDA and systemd cannot do.
NOT_HERE = ("jit_cache_required", "sglang_server_manage_service")


class Host:
    """A host with the released packages, and what the inventory says of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=False)
        site = next((folder / "venv/lib").glob("python*/site-packages"))
        unpack("flashinfer-python", "0.6.1", site, "flashinfer/*")
        unpack("sglang", "0.5.8", site, "sglang/*")
        self.variables = {
            "gpu_host_nvidia_smi": str(ROOT / "demo/nvidia-smi"),
            "gpu_host_preflight": False,
            "gpu_host_ignore": OPTIONS["gpu_host_ignore"]["choices"],
            "gpu_host_facts_dir": str(folder / "facts.d"),
            "fusion_gates_state_dir": str(folder / "state"),
            "sglang_server_python": str(folder / "venv/bin/python"),
            "sglang_server_allreduce": "fusion",
            "sglang_server_manage_account": False,
            "sglang_server_manage_service": False,
            "sglang_server_home": str(folder / "home"),
            "sglang_server_cache_dir": str(folder / "cache"),
            "sglang_server_config_dir": str(folder / "etc"),
            "sglang_server_unit_dir": str(folder / "units"),
        }

    def run(self, playbook: Path, *options: str, **variables: object) -> str:
        """Run a playbook with further variables in the inventory; return what was printed, on lines that are not broken."""
        unbroken = {"ANSIBLE_CALLBACK_RESULT_FORMAT": "json", "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "1"}
        return run_playbook(playbook, {"host": {**self.variables, **variables}}, self.folder, *options, **unbroken)

    def site(self, *options: str, **variables: object) -> str:
        return self.run(ROOT / "playbooks/site.yml", *options, **variables)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return Host(tmp_path_factory.mktemp("host"))


def counts(output: str) -> dict[str, int]:
    return recap(output)["host"]


@pytest.mark.parametrize("given", [False, True])
def test_numbers_and_booleans_may_be_given_as_text(host, given):
    options = {
        name: option["default"] if option["type"] == "int" else given and name not in NOT_HERE
        for name, option in OPTIONS.items()
        if option["type"] in ("bool", "int")
    }
    text = [f"-e{name}={str(value).lower()}" for name, value in options.items()]
    outputs = [host.site("--check", "--diff", *extra) for extra in (["-e", json.dumps(options)], text)]
    outputs = [re.sub(r"/\S*ansible-tmp-\S*|ansible-local-\S*", "", output) for output in outputs]
    assert outputs[0] == outputs[1]
    assert "MAX_JOBS=0" not in outputs[1]
    assert counts(outputs[1])["failed"] == 0, outputs[1]


def test_what_the_inventory_says_comes_before_what_other_roles_were_told(host, tmp_path):
    told = {**{name: f"told {name}" for name in WIRED}, "sglang_server_restart_required": True, "sglang_server_gpu_count": 3}
    tasks = [
        {"ansible.builtin.copy": {"dest": str(tmp_path / "seen"), "content": "{{ dict(names | zip(query('vars', *names))) | to_json }}"}}
    ]
    play = [
        {
            "hosts": "all",
            "gather_facts": False,
            "vars_files": [str(ROOT / "playbooks/vars/wiring.yml")],
            "vars": {"names": WIRED},
            "tasks": tasks,
        }
    ]
    (tmp_path / "play.json").write_text(json.dumps(play))
    output = host.run(tmp_path / "play.json", **told)
    assert json.loads((tmp_path / "seen").read_text()) == told, output


def test_the_gates_follow_the_inventory_in_each_playbook(host):
    told = {"sglang_server_python": "/none/bin/python", "fusion_gates_python": host.variables["sglang_server_python"]}
    for playbook in ("site", "restore", "audit"):
        output = host.run(ROOT / f"playbooks/{playbook}.yml", "--check", "--tags", "patch,restore,verify", **told)
        assert "/none/bin" not in output
    with subprocess.Popen([host.variables["sglang_server_python"], "-c", "import time; time.sleep(600)", "sglang.launch_server"]) as server:
        time.sleep(0.1)  # processes are dated to a hundredth of a second
        next((host.folder / "venv").rglob("flashinfer/jit/comm.py")).touch()
        nothing_closed = host.site("--check", "--tags", "patch", fusion_gates_compute_capability=["9.0"])
        server.kill()
    assert counts(nothing_closed)["changed"] == 0
    assert "closed" not in nothing_closed
    assert f"restart    pending, pid {server.pid} (" in nothing_closed


def test_wrong_options_are_one_line_each(host):
    wrong = {
        "sglang_server_timeout": "soon",
        "sglang_server_alreduce": "nccl",
        "gpu_host_stric": True,
        "sglang_server_model_dir": "/srv/models",
        "jit_cache_users": {"changed": False, "failed": False},  # as a result that an earlier play has registered
        "sglang_server_measured": {"strategy": "nvls"},
        "sglang_server_arguments": {"port": "70000"},
        "sglang_server_environment": {"MAX_JOBS": "x y"},
    }
    output = host.site("--check", **wrong)
    assert counts(output)["failed"] == 1
    assert "argument_spec_data" not in output
    assert "sglang_server_alreduce: there is no such option; the nearest is sglang_server_allreduce." in output
    assert "gpu_host_stric: there is no such option; the nearest is gpu_host_strict." in output
    assert output.count("there is no such option") == output.count("gpu_host_stric:") * 2
    assert "argument 'sglang_server_timeout' is of type" in output
    assert "value of strategy must be one of: fusion, pcie_ipc, nccl, got: nvls found in sglang_server_measured" in output
    assert "port: 70000 was found in sglang_server_arguments; expected 1 to 65535." in output
    assert "MAX_JOBS: x y was found in sglang_server_environment; expected a number, 1 or more." in output


def test_a_host_without_gpus_gets_no_server(host, tmp_path):
    bare = {
        "gpu_host_nvidia_smi": "no-nvidia-smi",
        "sglang_server_config_dir": str(tmp_path / "etc"),
        "sglang_server_unit_dir": str(tmp_path / "units"),
    }
    output = host.site(**bare)
    assert counts(output)["failed"] == 0, output
    assert "server     none without GPUs: nothing is written or started." in output
    assert list(tmp_path.iterdir()) == []
    assert "server     sglang.service would be written" in host.site("--check", **bare, sglang_server_gpu_count=8)


@pytest.mark.parametrize("profile", ["glm", "/none/glm.yml"])
def test_an_unknown_profile_is_refused_with_those_that_there_are(host, profile):
    output = host.site("--check", sglang_server_profile=profile)
    assert (
        f"sglang_server_profile: {profile} was found; expected one of deepseek_v3_fp8_tp8_h200, glm_5_nvfp4_mtp_tp8_rtx_pro_6000, "
        in output
    )
    assert counts(output)["ok"] == 1


def test_fusion_is_refused_on_closed_gates_and_a_restore_tells_who_asks_for_it(host):
    closed = host.site("--tags", "configure")
    assert "sglang_server_allreduce: fusion on host, where flashinfer.trtllm_comm.majors, sglang.fusion.applies are closed" in closed
    assert not (host.folder / "etc").exists()

    first = host.site("--diff")
    assert counts(first)["failed"] == 0, first
    assert f"{host.folder}/state/gates.sha256" in (host.folder / "units/sglang.service").read_text()
    again = host.site("--diff")
    assert (counts(again)["changed"], counts(again)["failed"]) == (0, 0), again
    assert counts(again)["ok"] <= 10

    edited = next((host.folder / "venv").rglob("flashinfer/jit/comm.py"))
    edited.write_text(f"{edited.read_text()}# by hand\n")
    assert "Run with force=true (fusion_gates_force in a play) to restore it." in host.run(ROOT / "playbooks/restore.yml")
    predicted = host.run(ROOT / "playbooks/restore.yml", "--check", fusion_gates_force=True)
    restored = host.run(ROOT / "playbooks/restore.yml", fusion_gates_force=True)
    assert (counts(predicted), counts(restored)["changed"]) == (counts(restored), 1)
    assert restored.count("restored   ") == 2
    assert "restart    pending" in restored
    assert f"{host.folder}/etc/sglang.yaml still asks for fusion. Set sglang_server_allreduce to nccl" in restored

    nccl = host.site("--tags", "configure", sglang_server_allreduce="nccl")
    assert counts(nccl)["failed"] == 0, nccl
    host.site("--tags", "patch")
    assert "asks for fusion" not in host.site("--tags", "restore")
