# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real installs by real uv and pip, of packages that are small: two that need nothing, and one that needs one of them."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils import _serving_venv as serving_venv
from ansible_collections.blackwell.inference.plugins.modules import serving_venv as module

RELEASES = {("tiny-server", "1.0"): ["tiny_kernels"], ("tiny-server", "2.0"): ["tiny_kernels>=2"]}
RELEASES |= {("tiny-kernels", version): [] for version in ("1.0", "2.0", "2.1+cu130")}


def make_wheel(folder: Path, name: str, version: str, needs: list[str]) -> None:
    package = name.replace("-", "_")
    info = f"{package}-{version}.dist-info"
    files = {
        f"{package}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {need}\n" for need in needs),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {file: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=") for file, text in files.items()}
    files[f"{info}/RECORD"] = "".join(f"{file},sha256={digest},\n" for file, digest in digests.items()) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{package}-{version}-py3-none-any.whl", "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    for (name, version), needs in RELEASES.items():
        make_wheel(folder, name, version, needs)
    return folder


@pytest.fixture(params=["uv", "pip"])
def installer(request, monkeypatch, tmp_path) -> str:
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return request.param


class Host:
    """A host with one venv."""

    def __init__(self, folder: Path, index: Path, installer: str, run_here) -> None:
        self.venv, self.lock, self.index, self.run_here = folder / "opt/venv", folder / "opt/venv.lock", index, run_here
        self.options = {
            "path": str(self.venv),
            "installer": installer,
            "base_python": sys.executable,
            "extra_args": ["--no-index", "--find-links", str(index)],
        }

    def run(self, *packages: str, check: bool = False, **options) -> dict:
        return self.run_here(module, {**self.options, "packages": list(packages), **options}, check=check)

    def imported(self, name: str) -> str:
        """Return the version of a package as the venv's interpreter imports it."""
        command = [self.venv / "bin/python", "-c", f"import {name}; print({name}.VERSION)"]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    def locked(self) -> list[str]:
        return [line for line in self.lock.read_text().splitlines() if line.startswith("tiny")]

    def site(self) -> Path:
        (site,) = self.venv.glob("lib/python3*/site-packages")
        return site


@pytest.fixture
def host(tmp_path, index, installer, run_here) -> Host:
    return Host(tmp_path, index, installer, run_here)


@pytest.fixture
def anywhere(tmp_path, index, run_here) -> Host:
    """A host on which it does not matter what installs."""
    return Host(tmp_path, index, "auto", run_here)


def test_a_venv_is_installed_once(host, installer):
    predicted = host.run("tiny-server==1.0", check=True)
    assert not host.venv.parent.exists()
    first = host.run("tiny-server==1.0")
    assert (first["changed"], first["installer"], first["python"]) == (True, installer, str(host.venv / "bin/python"))
    assert predicted["diff"] == first["diff"]
    assert first["diff"]["after"] == "tiny-server==1.0\n"
    assert (host.imported("tiny_server"), host.imported("tiny_kernels")) == ("1.0", "2.1+cu130")
    assert host.locked() == ["tiny-kernels==2.1+cu130", "tiny-server==1.0"]
    assert host.lock.stat().st_mode & 0o777 == 0o644
    stamp = host.lock.stat().st_mtime_ns
    second = host.run("tiny-server==1.0")
    assert (second["changed"], second["installer"], host.lock.stat().st_mtime_ns) == (False, None, stamp)
    assert second["packages"] == first["packages"]


def test_other_pins_are_resolved_anew(host):
    host.run("tiny-server==1.0", "tiny-kernels==1.0")
    assert host.locked() == ["tiny-kernels==1.0", "tiny-server==1.0"]
    predicted = host.run("tiny-server==2.0", check=True)
    assert host.imported("tiny_server") == "1.0"
    upgraded = host.run("tiny-server==2.0")
    assert predicted["diff"] == upgraded["diff"]
    assert (upgraded["diff"]["before"], upgraded["diff"]["after"]) == ("tiny-server==1.0\n", "tiny-server==2.0\n")
    assert host.locked() == ["tiny-kernels==2.1+cu130", "tiny-server==2.0"]
    assert not host.run("tiny-server==2.0")["changed"]


def test_the_pins_before_bring_back_what_they_were_resolved_to(host, index):
    host.run("tiny-server==1.0", "tiny-kernels==1.0")
    first, previous = host.locked(), host.lock.with_name("venv.lock.previous")
    assert not previous.exists()
    host.run("tiny-server==1.0")
    host.run("tiny-server==2.0")
    resolved = host.locked()
    assert (resolved, "# asked for: tiny-server==1.0\n" in previous.read_text()) == (["tiny-kernels==2.1+cu130", "tiny-server==2.0"], True)
    make_wheel(index, "tiny-kernels", "3.0", [])
    try:
        predicted = host.run("tiny-server==1.0", check=True)
        back = host.run("tiny-server==1.0")
    finally:
        (index / "tiny_kernels-3.0-py3-none-any.whl").unlink()
    assert predicted["diff"] == back["diff"]
    assert host.imported("tiny_server") == "1.0"
    assert host.locked() == ["tiny-kernels==1.0", "tiny-server==1.0"] == first
    assert "# asked for: tiny-server==2.0\n" in previous.read_text()
    assert not host.run("tiny-server==1.0")["changed"]


def test_what_was_changed_by_hand_comes_back_from_the_lock_and_nothing_else_changes(host, index):
    host.run("tiny-server==1.0", "tiny-kernels==2.0")
    shutil.rmtree(host.site() / "tiny_server-1.0.dist-info")
    make_wheel(index, "tiny-kernels", "3.0", [])
    try:
        predicted = host.run("tiny-server==1.0", "tiny-kernels==2.0", check=True)
        repaired = host.run("tiny-server==1.0", "tiny-kernels==2.0")
    finally:
        (index / "tiny_kernels-3.0-py3-none-any.whl").unlink()
    assert predicted["diff"] == repaired["diff"]
    assert repaired["diff"]["after"].splitlines()[-2:] == ["tiny-kernels==2.0", "tiny-server==1.0"]
    assert host.locked() == ["tiny-kernels==2.0", "tiny-server==1.0"]
    assert not host.run("tiny-server==1.0", "tiny-kernels==2.0")["changed"]


@pytest.mark.parametrize("extra", [[], ["--no-deps"]], ids=["", "no-deps"])
def test_a_lock_of_another_host_makes_the_same_venv(host, extra):
    host.options["extra_args"] += extra
    host.lock.parent.mkdir()
    host.lock.write_text("# asked for: tiny-server==1.0\ntiny-kernels==1.0\ntiny-server==1.0\n")
    text = host.lock.read_text()
    assert host.run("tiny-server==1.0")["changed"]
    assert host.imported("tiny_kernels") == "1.0"
    assert host.lock.read_text() == text
    assert not host.run("tiny-server==1.0")["changed"]


def test_what_cannot_be_installed_is_one_line_and_no_lock(host):
    result = host.run("tiny-server==9.9")
    assert result["msg"].startswith(f"installing into {host.venv} with ")
    assert "tiny-server==9.9" in result["msg"]
    assert "\n" not in result["msg"]
    assert not host.lock.exists()
    assert host.run("tiny-server==1.0")["changed"]


def test_a_venv_that_cannot_be_made_leaves_nothing(host):
    result = host.run("tiny-server==1.0", base_python="/bin/false")
    assert result["msg"].startswith(f"making {host.venv} with ")
    assert not host.venv.exists()
    assert host.run("tiny-server==1.0")["changed"]


def test_a_venv_that_is_there_is_adopted(host, installer):
    command = {"uv": ["uv", "venv", "--quiet"], "pip": [sys.executable, "-m", "venv"]}[installer]
    subprocess.run([*command, host.venv], check=True)
    marker = host.venv / "marker"
    marker.touch()
    assert host.run("tiny-kernels==2.0")["changed"]
    assert marker.exists()


def test_uv_installs_where_there_is_one_and_pip_elsewhere(anywhere, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert anywhere.run("tiny-kernels==1.0", check=True)["installer"] == "pip"
    (tmp_path / "bin/uv").symlink_to(Path(sys.executable).parent / "uv")
    assert anywhere.run("tiny-kernels==1.0", check=True)["installer"] == "uv"
    (tmp_path / "bin/uv").unlink()
    assert anywhere.run("tiny-kernels==1.0", installer="uv")["msg"].startswith(
        "installer: there is no uv on this host; expected one in PATH."
    )


def test_nothing_is_installed_while_a_server_of_this_venv_runs(host, monkeypatch):
    host.run("tiny-kernels==1.0")
    (host.site() / "sglang.py").write_text("print('ready', flush=True); input()")
    command = [host.venv / "bin/python", host.site() / "sglang.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        monkeypatch.setattr(module, "of_unit", {"its.service": {server.pid}, "other.service": {1}}.get)
        server.stdout.readline()
        refused = [
            host.run("tiny-kernels==2.0", check=check, unit=unit) for check in (False, True) for unit in ("its.service", "other.service")
        ]
        unchanged = host.run("tiny-kernels==1.0")
        server.communicate("\n")
    for run in (refused[0], refused[1], refused[3]):
        assert f"pid {server.pid} (" in run["msg"]
    assert (refused[2]["changed"], refused[2]["in_use"]) == (True, True)  # it would be stopped before
    assert (unchanged["changed"], host.imported("tiny_kernels")) == (False, "1.0")
    assert host.run("tiny-kernels==2.0")["changed"]


def test_check_mode_fails_where_the_pins_cannot_be_resolved(host):
    host.run("tiny-kernels==1.0")
    predicted = host.run("tiny-kernels==9.9", check=True)
    assert predicted["msg"].startswith(f"resolving for {host.venv} with ")
    assert "tiny-kernels==9.9" in predicted["msg"]


def test_an_old_pip_is_not_asked():
    pip, uv = (serving_venv.Installer(name, [], []) for name in ("pip", "uv"))
    assert [serving_venv.can_resolve(pip, {"pip": version}) for version in ("22.0.2", "22.2", "26.0")] == [False, True, True]
    assert (serving_venv.can_resolve(pip, {}), serving_venv.can_resolve(uv, {})) == (False, True)


def test_two_runs_at_once_do_not_mix(anywhere):
    anywhere.venv.parent.mkdir()
    fd = os.open(anywhere.venv.parent, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        assert anywhere.run("tiny-kernels==1.0")["msg"].startswith("path: another run installs into")
    finally:
        os.close(fd)
    assert not anywhere.venv.exists()


def test_an_installer_that_does_not_end_is_ended(tmp_path):
    started = time.monotonic()
    with pytest.raises(serving_venv.InferenceError, match=r"timeout: waiting: not done after 0.3 s"):
        serving_venv.run(["sh", "-c", "sleep 60; true"], "waiting", 0.3)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("packages", "options", "message"),
    [
        (["sglang"], {}, "packages: 'sglang'; expected name==version, e.g. sglang==0.5.18."),
        (["sglang>=0.5"], {}, "packages: 'sglang>=0.5'; expected name==version"),
        (["--index-url=x"], {}, "packages: '--index-url=x'; expected name==version"),
        (["a_b==1", "A-B==2"], {}, "packages: a-b stands there twice; expected one version of it."),
        (
            ["a==1"],
            {"extra_args": ["--index-url", "https://me:secret@host/simple"]},
            "extra_args: https://***@host/simple holds credentials",
        ),
        (["a==1"], {"path": "/usr"}, "path: /usr holds no bin/python; expected a venv, or a path that is free."),
        (["a==1"], {"path": "/proc/nothing/venv"}, "/proc/nothing: No such file or directory; expected a path that this task may write."),
        (
            ["a==1"],
            {"installer": "pip", "base_python": "/no/python"},
            "base_python: /no/python is not on this host; expected an interpreter",
        ),
    ],
)
def test_bad_input_is_one_line(anywhere, packages, options, message):
    result = anywhere.run(*packages, **options)
    assert result["failed"]
    assert result["msg"].startswith(message)
    assert "\n" not in result["msg"]
    assert "secret" not in result["msg"]


def test_a_version_that_is_not_written_as_installed_is_refused_rather_than_installed_each_time(anywhere):
    assert "tiny-kernels 2.0 after installing tiny-kernels==2; expected that version" in anywhere.run("tiny-kernels==2")["msg"]


def test_a_local_version_is_the_pinned_one_unless_another_is_named():
    found = {"torch": "2.11.0+cu130"}
    assert serving_venv.missing({"torch": "2.11.0"}, found) == serving_venv.missing({"torch": "2.11.0+cu130"}, found) == {}
    assert serving_venv.missing({"torch": "2.11.0+cu128"}, found) == {"torch": "2.11.0+cu128"}
    assert serving_venv.missing({"sglang": "0.5.8"}, found) == {"sglang": "0.5.8"}


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("Looking\nERROR: No matching distribution found for x==9\n", "ERROR: No matching distribution found for x==9"),
        ("  \u00d7 No solution found:\n  ╰─▶ there is no x==9.\n", "\u00d7 No solution found: ╰─▶ there is no x==9"),
        ("error: https://me:secret@host/ is down\n", "error: https://***@host/ is down"),
        ("Killed\n", "Killed"),
        ("", "it said nothing"),
    ],
)
def test_why_an_installer_failed(output, line):
    assert serving_venv.reason(output) == line
