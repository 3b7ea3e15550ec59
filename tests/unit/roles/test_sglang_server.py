# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role as an ordinary user runs it, with all folders redirected, and the program that starts the server with secrets."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml
from ansible_collections.blackwell.inference.plugins.module_utils._server_neighbours import MARK
from ansible_collections.blackwell.inference.tests.unit.playbook import ROOT, recap, run_role
from ansible_collections.blackwell.inference.tests.unit.wheels import unpack
from jinja2 import Environment

HOST_FILES = ROOT / "roles/sglang_server/files/host"
KEY = "a-key-to-be-told-to-nobody"
MEMBERS = ["sglang/*.py", "sglang/srt/*.py", "sglang/srt/utils/*.py", "sglang/srt/parser/*.py", "sglang/srt/function_call/*.py"]


# host -> variables of the role; all of them are configured in one run
HOSTS = {
    "plain": {
        "sglang_server_secrets": {"api_key": KEY},
        "sglang_server_secret_environment": {"HF_TOKEN": f'{KEY} " $HOME `id` \\ %'},
        "sglang_server_environment": {"WITH": 'quotes " and 100 % \\ backslash'},
    },
    "off": {
        "sglang_server_allreduce": "nccl",
        "sglang_server_measured": {"strategy": "fusion"},
        "sglang_server_max_jobs": 6,
        "sglang_server_arguments": {"--host": "::", "tp": 4, "max-running-requests": 7},
    },
    "measured": {"sglang_server_measured": {"strategy": "fusion", "reason": "8 % faster at TP8"}},
    "forced": {
        "sglang_server_allreduce": "fusion",
        "sglang_server_gpus": ["4", "5", "6", "7"],
        "sglang_server_arguments": {"tensor_parallel_size": 4, "port": 30001},
    },
    "wrong": {
        "sglang_server_allreduce": "pcie_ipc",
        "sglang_server_gpus": ["3", "4", "5"],
        "sglang_server_arguments": {"max_run_requests": 1, "tensor_parallel_size": 3, "attention_backend": "trtllm_mla"},
    },
    "refused-by-systemd": {"sglang_server_home": "relative"},
    "retired": {"sglang_server_state": "absent"},
    "not-ours": {"sglang_server_state": "absent"},
    # in check mode alone
    "new": {"sglang_server_manage_account": True, "sglang_server_user": "is-yet-to-come", "sglang_server_group": "is-so-too"},
}
BY_HAND = "[Service]\nExecStart=/usr/bin/false\n"
FIRST = f"""{MARK}
Environment="CUDA_VISIBLE_DEVICES=0,1,2,3"
ExecStart="python" -m sglang.launch_server --config "/none"
"""
# what is there before
FILES = {
    FIRST: ["forced/units/first.service", "wrong/units/first.service", "retired/units/first.service", "retired/units/sglang.service"],
    BY_HAND: ["measured/units/sglang.service", "not-ours/units/sglang.service", "new/home/model", "new/etc/sglang.yaml"],
    "": ["retired/etc/sglang.yaml", "retired/etc/sglang.env", "retired/etc/first.yaml", "retired/good/sglang/unit", "retired/home/model"],
}


class Hosts:
    """Hosts in a folder, configured as an ordinary user does it; two of them in check mode before, and once more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=False)
        unpack("sglang", "0.5.8", next((folder / "venv/lib").glob("python*/site-packages")), *MEMBERS)
        common = {
            "sglang_server_python": str(folder / "venv/bin/python"),
            "sglang_server_manage_account": False,
            "sglang_server_manage_service": False,
            "sglang_server_home": str(folder) + "/{{ inventory_hostname }}/home",
            "sglang_server_cache_dir": str(folder) + "/{{ inventory_hostname }}/cache",
            "sglang_server_config_dir": str(folder) + "/{{ inventory_hostname }}/etc",
            "sglang_server_unit_dir": str(folder) + "/{{ inventory_hostname }}/units",
            "sglang_server_good_dir": str(folder) + "/{{ inventory_hostname }}/good",
            "sglang_server_compute_capability": "12.0",
        }
        for text, files in FILES.items():
            for file in files:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_text(text)
        self.variables = {host: {**common, **variables} for host, variables in HOSTS.items()}
        self.predicted = self.run("--check", "--diff", "--limit", "plain,wrong,new")
        self.written_in_check_mode = self.unit("plain").exists() or self.config("plain").exists()
        self.first = self.run("--diff", "-v", "--limit", "all:!new")
        self.again = self.run("--diff", "--limit", "plain,wrong,retired")
        none = {"sglang_server_secrets": {}, "sglang_server_secret_environment": {}}
        self.without_secrets = self.run("--check", "--diff", "-v", "--limit", "plain", "-e", json.dumps(none))

    def run(self, *options: str) -> str:
        """Run the role on all hosts; return what was printed."""
        return run_role("sglang_server", self.variables, self.folder, *options, ANSIBLE_FORKS="5")

    def unit(self, host: str) -> Path:
        return self.folder / host / "units/sglang.service"

    def config(self, host: str) -> Path:
        return self.folder / host / "etc/sglang.yaml"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    return Hosts(tmp_path_factory.mktemp("hosts"))


def test_check_mode_predicts_the_run_and_the_next_run_changes_nothing(hosts):
    assert not hosts.written_in_check_mode
    for host, failed, changed in (("plain", 0, 2), ("wrong", 1, 1)):  # folders are made before the options are checked
        predicted, first, again = (recap(output)[host] for output in (hosts.predicted, hosts.first, hosts.again))
        assert predicted == first
        assert (first["failed"], first["changed"]) == (failed, changed)
        assert (again["failed"], again["changed"]) == (failed, 0)
        assert again["ok"] <= 4  # the validation of the arguments is one of them


def test_check_mode_needs_no_account_where_its_folders_are_there(hosts):
    assert recap(hosts.predicted)["new"]["failed"] == 0, hosts.predicted
    assert "would be replaced, and not written by this collection before" in re.sub(r"\s+", " ", hosts.predicted)
    assert (hosts.folder / "new/etc/sglang.yaml").read_text() == BY_HAND


def test_what_was_written_by_hand_is_kept_beside_what_replaces_it(hosts):
    unit = hosts.unit("measured")
    [kept] = unit.parent.glob("sglang.service.*")
    assert (kept.read_text(), unit.read_text().startswith(MARK)) == (BY_HAND, True)
    told = f"{unit} was replaced, and not written by this collection before. A copy is kept beside it: {kept}."
    assert told in re.sub(r"\s+", " ", hosts.first)
    assert not list(hosts.unit("plain").parent.glob("*~"))


def test_a_server_that_is_retired_leaves_everything_else_alone(hosts):
    first, again = (recap(output)["retired"] for output in (hosts.first, hosts.again))
    assert [(counts["failed"], counts["changed"]) for counts in (first, again)] == [(0, 1), (0, 0)]
    left = {str(path.relative_to(hosts.folder / "retired")) for path in (hosts.folder / "retired").rglob("*") if path.is_file()}
    assert left == {"units/first.service", "etc/first.yaml", "home/model"}


def test_a_unit_that_others_have_written_is_not_removed(hosts):
    assert recap(hosts.first)["not-ours"]["failed"] == 1
    assert "which was not written by this collection; expected a server of its own" in re.sub(r"\s+", " ", hosts.first)
    assert hosts.unit("not-ours").read_text() == BY_HAND


def test_the_configuration_holds_the_secret_and_nothing_else_does(hosts):
    assert yaml.safe_load(hosts.config("plain").read_text())["api-key"] == KEY
    assert hosts.config("plain").stat().st_mode & 0o777 == 0o640
    assert KEY not in hosts.unit("plain").read_text() + hosts.predicted + hosts.first + hosts.again


def test_a_secret_that_is_taken_away_is_not_shown_either(hosts):
    assert recap(hosts.without_secrets)["plain"]["changed"] == 1
    assert KEY not in hosts.without_secrets


def test_secret_variables_are_in_a_file_that_root_alone_reads(hosts):
    path = hosts.folder / "plain/etc/sglang.env"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text().splitlines()[1:] == [rf'HF_TOKEN="{KEY} \" \$HOME \`id\` \\ %"']
    assert f"EnvironmentFile={path}" in hosts.unit("plain").read_text()


def test_own_options_replace_those_of_the_profile_however_they_are_written(hosts):
    config = yaml.safe_load(hosts.config("off").read_text())
    assert config["tensor-parallel-size"] == 4
    assert config["max-running-requests"] == 7
    assert len([name for name in config if name.startswith(("tp", "tensor"))]) == 1


def test_as_many_compilers_as_fit_unless_told_otherwise(hosts):
    plain, off = hosts.unit("plain").read_text(), hosts.unit("off").read_text()
    assert "EnvironmentFile=-/run/blackwell-inference-sglang.env\n" in plain
    assert "MAX_JOBS" not in plain
    assert 'Environment="MAX_JOBS=6"\n' in off
    assert "EnvironmentFile=-" not in off


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        ({}, "http://127.0.0.1:30000"),
        ({"host": "0.0.0.0", "port": 30001}, "http://127.0.0.1:30001"),  # noqa: S104  that is the case to test
        ({"host": "::", "ssl_certfile": "/tls/cert.pem"}, "https://[::1]:30000"),
        ({"host": "10.0.0.5"}, "http://10.0.0.5:30000"),
        ({"host": "fd00::5"}, "http://[fd00::5]:30000"),
        ({"host": None, "port": None}, "http://127.0.0.1:30000"),
    ],
)
def test_the_server_is_asked_where_it_listens(arguments, url):
    templates = yaml.safe_load((ROOT / "roles/sglang_server/vars/main.yml").read_text())
    known = {"sglang_server_all_arguments": arguments}
    for name in ("sglang_server_port", "sglang_server_listens", "sglang_server_own_url"):
        known[name] = Environment().from_string(templates[name]).render(known)  # noqa: S701  no HTML
    assert known["sglang_server_own_url"] == url


def test_the_unit_starts_what_was_configured(hosts):
    lines = hosts.unit("plain").read_text().splitlines()
    assert lines[0] == MARK
    [start] = [line for line in lines if line.startswith("ExecStart=")]
    python, config = hosts.folder / "venv/bin/python", hosts.config("plain")
    assert start == f'ExecStart="{python}" "{config.parent}/launch.py" --config "{config}"'
    assert 'Environment="WITH=quotes \\" and 100 %% \\\\ backslash"' in lines
    assert f'ExecStart="{python}" -m sglang.launch_server --config "{hosts.config("off")}"' in hosts.unit("off").read_text()


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="this machine has no systemd-analyze")
def test_systemd_takes_the_unit_and_its_exposure_is_low(hosts):
    unit = hosts.unit("plain")
    verified = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    rated = subprocess.run(["systemd-analyze", "security", "--offline=true", unit], capture_output=True, text=True, check=False)
    assert float(re.search(r"exposure level for .*: ([\d.]+)", rated.stdout).group(1)) <= 4.0
    assert "WorkingDirectory= path is not absolute" in hosts.first
    assert not hosts.config("refused-by-systemd").exists()


@pytest.mark.parametrize(
    ("host", "fusion"),
    [("plain", False), ("measured", True), ("forced", True), ("off", False)],
)
def test_fusion_is_on_only_where_it_is_forced_or_measured(host, fusion, hosts):
    text = hosts.config(host).read_text()
    assert ("enable-flashinfer-allreduce-fusion: true" in text) is fusion
    # Not the reason, which names figures and processes: another one is no reason to restart.
    assert f"Allreduce: {'fusion' if fusion else 'nccl'}.\n" in text


@pytest.mark.parametrize(
    "line",
    [
        "max_run_requests: this release has no such option; the nearest is max-running-requests",
        "tensor-parallel-size: 3 with PCIe-IPC allreduce; expected 2, 4 or 8",
        "attention-backend: trtllm_mla has no kernels for compute capability 12.0",
        "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE: this release has no PCIe-IPC allreduce",
        "port: 30000 is that of first.service; expected another one. If first.service is to go: "
        "ansible-playbook blackwell.inference.site -l HOST -e sglang_server_state=absent -e sglang_server_name=first",
        "CUDA_VISIBLE_DEVICES: first.service uses GPU 3, too",
    ],
)
def test_refusals_come_before_anything_is_written(line, hosts):
    assert line in hosts.first
    assert not hosts.config("wrong").parent.exists()
    assert not hosts.unit("wrong").exists()


def test_restart_alone_says_that_there_is_nothing_to_start(hosts):
    output = hosts.run("--tags", "restart", "--limit", "off")
    assert "sglang.service is rendered only" in output
    assert recap(output)["off"]["failed"] == 0
    assert "sglang.service is rendered only" not in hosts.first


def test_launch_stars_out_secrets_and_spawns_ranks_as_upstream_does(tmp_path):
    """A server that logs its options in both of upstream's ways, and spawns a rank that imports the same main module."""
    package = tmp_path / "sglang"
    (package / "srt/entrypoints").mkdir(parents=True)
    (package / "launch_server.py").write_text(
        "import logging, multiprocessing, sys\n"
        "def rank():\n"
        "    print('rank of', sys.modules['__mp_main__'].__spec__ and sys.modules['__mp_main__'].__name__, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    logging.basicConfig(level=logging.INFO)\n"
        "    engine = logging.getLogger('sglang.srt.entrypoints.engine')\n"
        "    engine.info(\"server_args=ServerArgs(model='m', api_key='%s', admin_api_key=None, \"\n"
        '                "ssl_keyfile_password=\\"x\'y\\")", sys.argv[2])\n'
        "    engine.info(f\"server_args={{'api_key': '{sys.argv[2]}', 'watermark_key': 'w'}}\")\n"
        "    print(sys.argv[1:], flush=True)\n"
        "    multiprocessing.set_start_method('spawn')\n"
        "    child = multiprocessing.Process(target=rank)\n"
        "    child.start()\n"
        "    child.join()\n"
    )
    command = [sys.executable, HOST_FILES / "launch.py", "--config", KEY]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [f"['--config', '{KEY}']", "rank of __mp_main__"]
    assert KEY not in done.stderr
    assert "model='m', api_key='********', admin_api_key=None, ssl_keyfile_password='********')" in done.stderr
    assert "{'api_key': '********', 'watermark_key': '********'}" in done.stderr
