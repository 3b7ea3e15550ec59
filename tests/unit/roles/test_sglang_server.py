# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role as an ordinary user runs it, with all folders redirected, and the two programs that its unit runs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
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

pytestmark = pytest.mark.xdist_group("sglang_server")  # one worker, or the runs below are made again in each
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
}
# another server on the hosts "forced" and "wrong"
FIRST = f"""{MARK}
Environment="CUDA_VISIBLE_DEVICES=0,1,2,3"
ExecStart="python" -m sglang.launch_server --config "/none"
"""


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
            "sglang_server_compute_capability": "12.0",
        }
        for host in ("forced", "wrong"):
            (folder / host / "units").mkdir(parents=True)
            (folder / host / "units/first.service").write_text(FIRST)
        self.variables = {host: {**common, **variables} for host, variables in HOSTS.items()}
        self.predicted = self.run("--check", "--diff", "--limit", "plain,wrong")
        self.written_in_check_mode = self.unit("plain").exists() or self.config("plain").exists()
        self.first = self.run("--diff", "-v")
        self.again = self.run("--diff", "--limit", "plain,wrong")
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
        "port: 30000 is that of first.service; expected another one",
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


def preflight(*arguments: object, path: str = "/usr/bin:/bin") -> str:
    """Run the check before the start; return what it says, "" where the server may start."""
    script = (HOST_FILES / "preflight.sh").read_text().replace("PATH=/usr/local/sbin", f"PATH={path}:/usr/local/sbin", 1)
    done = subprocess.run(["sh", "-c", script, "preflight", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is (done.stderr == "")
    return done.stderr


def test_preflight_refuses_opened_gates_that_changed(tmp_path):
    gate = tmp_path / "comm.py"
    gate.write_text("opened")
    checksums = tmp_path / "gates.sha256"
    assert preflight(checksums, 1, "", 2048) == ""
    checksums.write_text(f"{hashlib.sha256(b'opened').hexdigest()}  {gate}\n")
    assert preflight(checksums, 1, "", 2048) == ""
    gate.write_text("closed by a reinstall")
    told = preflight(checksums, 1, "", 2048)
    assert told.startswith(f"blackwell.inference: opened gates have changed on disk ({gate}), as after a reinstall")
    assert told.count("\n") == 1
    gate.unlink()
    assert "--tags patch,cache,restart" in preflight(checksums, 1, "", 2048)
    checksums.write_text("no checksum\n")
    assert f"({checksums})" in preflight(checksums, 1, "", 2048)


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_preflight_refuses_a_port_in_use(family, address):
    with socket.socket(family) as listening:
        listening.bind((address, 0))
        port = listening.getsockname()[1]
        assert preflight("/none", port, "", 2048) == ""
        listening.listen()
        assert (
            preflight("/none", port, "", 2048)
            == f"blackwell.inference: port {port} is in use. Find the process: ss -ltnp sport = :{port}\n"
        )


def test_preflight_refuses_gpus_that_others_hold(tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$*" > "$0.arguments"\nprintf "0, 512\\n3, 81234\\n4, [N/A]\\n5, 4000\\n"\n')
    tool.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    assert "other processes hold memory on GPU 3 (81234 MiB), GPU 5 (4000 MiB)." in preflight("/none", 1, "", 2048, path=path)
    assert preflight("/none", 1, "0,3", 90000, path=path) == ""
    assert "--id=0,3" in (tmp_path / "nvidia-smi.arguments").read_text()


def test_preflight_counts_the_compilers_that_fit(tmp_path):
    found = tmp_path / "found.env"
    assert preflight("/none", 1, "", 2048, found) == ""
    available = int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) / 2**20
    most = max(1, min(len(os.sched_getaffinity(0)), int((available - 16) / 8) + 1))
    assert 1 <= int(re.fullmatch(r"MAX_JOBS=(\d+)\n", found.read_text())[1]) <= most


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
