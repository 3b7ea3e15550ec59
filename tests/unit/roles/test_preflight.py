# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is asked on the host before each start of a server."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._jit_build import max_jobs
from ansible_collections.blackwell.inference.tests.unit.conftest import Venv, program
from ansible_collections.blackwell.inference.tests.unit.playbook import ROOT

SCRIPT = (ROOT / "roles/sglang_server/files/host/preflight.sh").read_text()
REMEDY = "Run: ansible-playbook blackwell.inference.site -l HOST\n"
COMM = "flashinfer/jit/comm.py"
COMMUNICATOR = "sglang/srt/layers/communicator.py"


class Host:
    """A host with tools of its own, asked as an ordinary user."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.meminfo = folder, Path("/proc/meminfo")
        self.tool("setpriv", 'echo "$1 $2 $3 $4 $5" > "$0.arguments"\nshift 5\nexec "$@"')

    def tool(self, name: str, script: str) -> None:
        """Put a program of this name before those of the machine."""
        (self.folder / "tools").mkdir(exist_ok=True)
        program(self.folder / "tools" / name, script)

    def preflight(self, checksums: object = "/none", port: int = 1, gpus: str = "", found: object = "", python: object = "") -> str:
        """Run the check before the start; return what it says, "" where the server may start."""
        script = SCRIPT.replace("PATH=/usr/local/sbin", f"PATH={self.folder}/tools:/usr/local/sbin", 1).replace(
            "/proc/meminfo", str(self.meminfo)
        )
        server = map(str, (checksums, port, gpus, 2048, found, python, "sglang", "gpu"))
        done = subprocess.run(["sh", "-c", script, "preflight", *server], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.count("\n"), done.stdout) in [(0, 0, ""), (1, 1, "")], done
        return done.stderr


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


@pytest.fixture
def venvs(venv, tmp_path) -> tuple[Venv, Venv]:
    """Two venvs of a host with all gates opened."""
    other = Venv(tmp_path / "other").install().make_interpreter()
    other.state = venv.state
    venv.make_interpreter()
    for each in (venv, other):
        each.gate()
    return venv, other


def test_without_opened_gates_nothing_is_refused(host, tmp_path):
    assert host.preflight(tmp_path / "gates.sha256", python="/none/bin/python") == ""


@pytest.mark.parametrize("of_other", ["upgraded", "gone"])
def test_what_becomes_of_another_venv_stops_no_server(host, venvs, of_other):
    venv, other = venvs
    checksums = venv.state / "gates.sha256"
    if of_other == "gone":
        shutil.rmtree(other.folder)
    else:
        other.install()
    assert host.preflight(checksums, python=venv.python) == ""
    assert (host.folder / "tools/setpriv.arguments").read_text() == "--reuid sglang --regid gpu --init-groups\n"
    venv.path(COMM).write_text("closed by a reinstall")
    told = host.preflight(checksums, python=venv.python)
    assert told.startswith(f"blackwell.inference: opened gates have changed on disk ({venv.path(COMM)}), as after a reinstall")
    assert told.endswith(REMEDY)


def test_a_unit_that_names_no_interpreter_counts_every_venv(host, venvs):
    venv, other = venvs
    assert host.preflight(venv.state / "gates.sha256") == ""
    other.path(COMM).unlink()
    assert f"({other.path(COMM)})" in host.preflight(venv.state / "gates.sha256")


def test_packages_outside_the_venv_count_where_the_server_imports_them(host, venvs, tmp_path):
    venv, other = venvs
    server = Venv(tmp_path / "server").make_interpreter()
    server.site.mkdir(parents=True)
    (server.site / "editable.pth").write_text(f"{tmp_path}/link\n")
    (tmp_path / "link").symlink_to(other.site)
    shutil.rmtree(venv.folder)
    assert host.preflight(venv.state / "gates.sha256", python=server.python) == ""
    other.path(COMMUNICATOR).write_text("closed by a pull")
    assert f"({other.path(COMMUNICATOR)})" in host.preflight(venv.state / "gates.sha256", python=server.python)


def test_the_gates_of_an_older_python_in_the_venv_count(host, venvs):
    venv, _other = venvs
    checksums = venv.state / "gates.sha256"
    checksums.write_text(checksums.read_text().replace(venv.site.parent.name, "python3.8"))
    assert "/lib/python3.8/site-packages/flashinfer/" in host.preflight(checksums, python=venv.python)


def test_a_list_or_an_interpreter_that_tells_nothing_is_no_permission(host, venvs):
    venv, _other = venvs
    checksums = venv.state / "gates.sha256"
    assert "/none/python does not tell sglang where flashinfer and sglang are (" in host.preflight(checksums, python="/none/python")
    (venv.site / "broken.pth").write_text("import sys; sys.exit('no libpython')\n")
    assert "no libpython). Try: sudo -u sglang" in host.preflight(checksums, python=venv.python)
    (venv.site / "broken.pth").unlink()
    checksums.write_text(f"no checksum\n{checksums.read_text()}")
    assert f"({checksums})" in host.preflight(checksums, python=venv.python)


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_port_in_use_is_refused(host, family, address):
    with socket.socket(family) as listening:
        listening.bind((address, 0))
        port = listening.getsockname()[1]
        assert host.preflight(port=port) == ""
        listening.listen()
        assert host.preflight(port=port) == f"blackwell.inference: port {port} is in use. Find the process: ss -ltnp sport = :{port}\n"


def test_gpus_that_others_hold_are_refused(host):
    host.tool("nvidia-smi", 'echo "$*" > "$0.arguments"\nprintf "0, 512\\n3, 81234\\n4, [N/A]\\n5, 4000\\n"; echo WARNING: infoROM >&2')
    assert "other processes hold memory on GPU 3 (81234 MiB), GPU 5 (4000 MiB)." in host.preflight()
    host.tool("nvidia-smi", 'echo "$*" > "$0.arguments"; echo 0, 2048')
    assert host.preflight(gpus="0,3") == ""
    assert "--id=0,3" in (host.folder / "tools/nvidia-smi.arguments").read_text()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "echo Failed to initialize NVML: Driver/library version mismatch; echo NVML library version: 580.95; exit 18",
            "Failed to initialize NVML: Driver/library version mismatch",
        ),
        (
            "echo Unable to determine the device handle for GPU0000:01:00.0 >&2; exit 15",
            "Unable to determine the device handle for GPU0000",
        ),
        ("printf '0, 3\\n1, [GPU is lost]\\n2, 3\\n'", "1, [GPU is lost]."),
        ("exec sleep 60", "nothing within 0.2 s."),
        ("exit 3", "nothing, and failed."),
    ],
)
def test_an_nvidia_smi_that_does_not_answer_is_refused(host, monkeypatch, script, said):
    monkeypatch.setitem(globals(), "SCRIPT", SCRIPT.replace("timeout 30", "timeout 0.2").replace("within 30 s", "within 0.2 s"))
    host.tool("nvidia-smi", script)
    assert f"nvidia-smi said: {said}" in host.preflight()


@pytest.mark.parametrize("gib", [4, 23.9, 24, 40.1, 63, 1024])
def test_as_many_compilers_are_let_in_as_the_builds_of_the_collection_take(host, tmp_path, gib):
    host.meminfo = tmp_path / "meminfo"
    host.meminfo.write_text(f"MemTotal: 1 kB\nMemAvailable:   {int(gib * 2**20)} kB\nBuffers: 3 kB\n")
    host.tool("nproc", "echo 6")
    assert host.preflight(found=tmp_path / "found.env") == ""
    assert (tmp_path / "found.env").read_text() == f"MAX_JOBS={max_jobs(host.meminfo.read_text(), 6)}\n"
