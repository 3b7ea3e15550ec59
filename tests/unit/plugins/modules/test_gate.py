# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module as a program of its own, as Ansible runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._packages import locate
from ansible_collections.blackwell.inference.plugins.module_utils._store import checksum, recorded_checksums
from ansible_collections.blackwell.inference.tests.unit.conftest import COLLECTIONS, EDITED, MODULES, OPENED, SOURCES, program, run_module
from ansible_collections.blackwell.inference.tests.unit.wheels import unpack

COMM = "flashinfer/jit/comm.py"


@pytest.fixture
def host(venv):
    """The venv with an interpreter to ask."""
    return venv.make_interpreter()


def options(host, **changed) -> dict[str, object]:
    return {"python": str(host.python), "compute_capability": ["12.0"], "state_dir": str(host.state), **changed}


def test_check_mode_predicts_the_run_and_writes_nothing(host):
    before = host.files()
    predicted = run_module("gate", options(host), check=True)
    assert host.files() == before and not host.state.exists()
    done = run_module("gate", options(host))
    assert predicted == done and done["changed"]
    assert predicted["diff"] == done["diff"] and len(done["diff"]) == len(EDITED)


def test_the_diff_is_what_changed(host):
    diff = run_module("gate", options(host))["diff"]
    assert [item["before_header"] for item in diff][1] == f"{COMM} (flashinfer 0.6.9)"
    for item, name in zip(diff, EDITED):
        assert (item["before"], item["after"]) == (SOURCES[name], host.path(name).read_text())


def test_a_second_run_changes_nothing_and_restoring_undoes_it(host):
    assert run_module("gate", options(host))["changed"]
    before = host.files()
    again = run_module("gate", options(host))
    assert not again["changed"] and again["files"] == [] and host.files() == before
    predicted = run_module("gate", options(host, state="restored"), check=True)
    restored = run_module("gate", options(host, state="restored"))
    assert predicted == restored and restored["changed"] and host.is_pristine()
    assert not run_module("gate", options(host, state="restored"))["changed"]


def test_it_returns_what_it_says(host):
    result = run_module("gate", options(host))
    assert [gate["id"] for gate in result["gates"] if (gate["before"], gate["after"]) == ("closed", "opened")] == OPENED
    assert all(gate["verdict"] == gate["after"] for gate in result["gates"])
    assert result["files"][0].keys() == {"path", "sha256_before", "sha256_after"}
    assert result["restart_required"] and result["complete"] and result["stale_jit_modules"] == ["trtllm_comm"]
    assert result["packages"]["sglang"]["version"] == "0.5.14" and result["compute_capabilities"] == ["12.0"]


def test_the_interpreter_of_the_venv_may_run_the_module_itself(host):
    module = str(MODULES / "gate.py")
    arguments = json.dumps({"ANSIBLE_MODULE_ARGS": options(host)})
    paths = os.pathsep.join([str(COLLECTIONS), *(path for path in sys.path if path.endswith("site-packages"))])
    done = subprocess.run(
        [host.python, module], input=arguments, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths}
    )
    assert json.loads(done.stdout)["changed"], done.stderr


def test_on_real_wheels_the_two_gates_are_opened_and_record_holds_again_afterwards(tmp_path):
    site = unpack("flashinfer-python", "0.6.1", tmp_path / "site", "flashinfer/jit/*.py", "flashinfer/comm/*.py")
    unpack("sglang", "0.5.8", site, "sglang/srt/layers/*.py", "sglang/srt/server_args.py")
    given = {"site_packages": str(site), "compute_capability": ["12.0"], "state_dir": str(tmp_path / "state")}
    files = {path: path.read_bytes() for path in site.rglob("*.py")}
    result = run_module("gate", given)
    assert [gate["id"] for gate in result["gates"] if gate["after"] == "opened"] == [OPENED[0], "sglang.fusion.applies"]
    changed = {str(path.relative_to(site)) for path, content in files.items() if path.read_bytes() != content}
    assert changed == {COMM, "sglang/srt/layers/communicator.py"}
    assert (site / COMM).read_text().count("[9, 10, 12]") == 1
    assert run_module("gate", {**given, "state": "restored"})["changed"]
    assert {path: path.read_bytes() for path in site.rglob("*.py")} == files
    for package in locate(site_packages=str(site)).packages.values():
        names = {str(path.relative_to(site)) for path in files}
        for name, sha256 in recorded_checksums(package, names).items():
            assert checksum((site / name).read_bytes()) == sha256


# Bad input: one line, and nothing is written


def remove_sglang(host) -> None:
    for path in (host.path("sglang"), host.site / "sglang-0.5.14.dist-info"):
        subprocess.run(["rm", "-r", str(path)], check=True)


def truncate(host) -> None:
    path = host.path(COMM)
    path.write_text(path.read_text()[:-20])


def edit_by_hand(host) -> None:
    path = host.path(COMM)
    path.write_text(path.read_text().replace("[9, 10]", "[10]"))


def empty(host) -> None:
    host.path(COMM).write_bytes(b"")


def damage_record(host) -> None:
    (host.site / "sglang-0.5.14.dist-info" / "RECORD").write_bytes(b"\xff")


def nothing(host) -> None:
    pass


BAD = {
    "no python": (
        nothing,
        {"python": "/does/not/exist"},
        "python: /does/not/exist does not exist; expected the path of the serving venv's",
    ),
    "python that is none": (nothing, {"python": "/bin/true"}, "python: /bin/true did not answer as Python 3 does"),
    "no sglang": (remove_sglang, {}, "sglang is not installed there; expected the venv that serves sglang"),
    "no folder": (nothing, {"python": None, "site_packages": "/none"}, "site_packages: /none is not a folder"),
    "both": (nothing, {"site_packages": "/none"}, "mutually exclusive: python|site_packages"),
    "neither": (nothing, {"python": None}, "one of the following is required: python, site_packages"),
    "banana": (
        nothing,
        {"compute_capability": ["banana"]},
        "compute_capability: 'banana' is not a compute capability; expected MAJOR.MINOR",
    ),
    "13.0": (nothing, {"compute_capability": ["12.0", "13.0"]}, "compute_capability: no GPU of 13.0 is known; expected one of 5.0"),
    "unknown gate": (
        nothing,
        {"gates": ["sglang.fusion.aplies"]},
        "'sglang.fusion.aplies' is no gate; expected sglang.fusion.applies, perhaps",
    ),
    "what it needs": (
        nothing,
        {"gates": ["sglang.fusion.applies"]},
        "which it needs, closed; expected both or neither. Nothing was changed.",
    ),
    "truncated": (truncate, {}, "gate flashinfer.trtllm_comm.majors is not recognised (no Python source"),
    "empty": (empty, {}, f"{COMM}:1: gate flashinfer.trtllm_comm.majors is not recognised (no such construct in"),
    "by hand": (edit_by_hand, {}, f"{COMM}:11: gate flashinfer.trtllm_comm.majors is in conflict (supported_major_versions=[10];"),
    "damaged RECORD": (damage_record, {}, "RECORD: cannot be read (it is damaged); expected the RECORD that pip wrote. Reinstall it:"),
    "state_dir is a file": (lambda host: host.state.write_text(""), {}, "state: cannot be written (Not a directory)"),
    "read-only": (lambda host: host.path(COMM).chmod(0o444), {}, f"{COMM}: it is read-only (mode 0444); expected a file that this run may"),
}


@pytest.mark.parametrize("check", [True, False], ids=["check", "run"])
@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_line_and_nothing_is_written(host, case, check):
    prepare, changed, message = BAD[case]
    prepare(host)
    before = host.files()
    given = {name: value for name, value in options(host, **changed).items() if value is not None}
    result = run_module("gate", given, check=check)
    assert message in result.msg
    assert host.files() == before and not (host.state / "lock").exists()


def test_9_0_is_no_bad_input_and_opens_nothing(host):
    before = host.files()
    result = run_module("gate", options(host, compute_capability=["9.0"]))
    assert not result["changed"] and result["complete"] and host.files() == before and not host.state.exists()


def test_a_truncated_or_foreign_file_in_the_way_of_restoring_is_named(host):
    run_module("gate", options(host))
    host.path(COMM).write_text(host.path(COMM).read_text() + "\n# mine\n")
    before = host.files()
    assert f"{COMM}: it is not as released, and not as this collection left it" in run_module("gate", options(host, state="restored")).msg
    assert host.files() == before


@contextmanager
def mounted(path: Path, kib: int):
    """A file system of this size."""
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(path)], check=True, capture_output=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def can_mount(path: Path) -> bool:
    try:
        with mounted(path, 64):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def fill(folder: Path) -> None:
    with open(folder / "full", "wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass


@pytest.mark.parametrize("where", ["packages", "state"])
def test_on_a_full_disk_nothing_is_changed(host, where):
    """On a full file system where one can be mounted; elsewhere with a limit on the size of files, which fails in the same places."""
    if not can_mount(host.folder.parent / "try"):
        return full_without_mount(host, where)
    folder = host.path("sglang/srt/layers") if where == "packages" else host.state
    kept = {path.name: path.read_bytes() for path in folder.glob("*.py")}
    with mounted(folder, 64 if where == "packages" else 16) as full:
        for name, content in kept.items():
            (full / name).write_bytes(content)
        fill(full)
        before = host.sources()
        result = run_module("gate", options(host))
        assert "(No space left on device)" in result.msg and "full" not in result.msg
        assert host.sources() == before and host.remembered() == (["full"] if where == "state" else []) and host.stale() == []
    return None


def full_without_mount(host, where: str) -> None:
    before = host.sources()
    limit = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\n"
    (host.folder / "limit").mkdir()
    (host.folder / "limit" / "sitecustomize.py").write_text(limit)
    result = run_module("gate", options(host), environment={"PYTHONPATH": os.pathsep.join([str(host.folder / "limit"), str(COLLECTIONS)])})
    assert "(File too large)" in result.msg and host.sources() == before and host.remembered() == host.stale() == []


def test_an_immutable_file_is_named_and_nothing_is_changed(host, tmp_path):
    probe = tmp_path / "probe"
    probe.touch()
    if subprocess.run(["chattr", "+i", str(probe)], check=False, capture_output=True).returncode:
        pytest.skip("no file can be made immutable here: not root, or a file system without the attribute")
    subprocess.run(["chattr", "-i", str(probe)], check=True)
    moved = type(host)(tmp_path / "venv").install()
    path = moved.path(COMM)
    subprocess.run(["chattr", "+i", str(path)], check=True)
    try:
        before = moved.files()
        result = run_module("gate", moved.parameters())
        assert f"{COMM}: it cannot be written (Operation not permitted)" in result.msg and moved.files() == before
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=True)


def test_two_runs_at_once_both_succeed_and_one_of_them_changes(host):
    command, arguments = [sys.executable, str(MODULES / "gate.py")], json.dumps({"ANSIBLE_MODULE_ARGS": options(host)})
    runs = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(COLLECTIONS)}
        )
        for _run in range(4)
    ]
    for run in runs:
        run.stdin.write(arguments)
        run.stdin.close()
    results = [json.loads(run.stdout.read()) for run in runs]
    for run in runs:
        run.wait()
        run.stdout.close()
    assert [result.get("msg") for result in results] == [None] * 4 and sum(result["changed"] for result in results) == 1
    assert all(result["summary"]["opened"] == 6 for result in results)


def test_a_run_that_does_not_get_the_lock_says_who_is_in_the_way(host):
    host.state.mkdir()
    code = "import fcntl, sys, time; lock = open(sys.argv[1], 'w'); fcntl.flock(lock, 2); print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(host.state / "lock")], stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()
        before = host.files()
        result = run_module("gate", options(host, lock_timeout=0))
        assert f"state_dir: another run has held {host.state}/lock for 0 s; expected one run at a time" in result.msg
        assert host.files() == before
        assert run_module("gate", options(host, lock_timeout=0), check=True)["changed"]  # looking needs no lock
    finally:
        holder.kill()
        holder.communicate()


def test_nothing_is_edited_while_a_server_starts(host):
    server = subprocess.Popen([str(host.python), "-c", "import time; time.sleep(60)", "-m", "sglang.launch_server"])
    try:
        before = host.files()
        for check in (True, False):
            assert "s ago; expected no server younger than 120 s. Nothing was changed" in run_module("gate", options(host), check=check).msg
        assert host.files() == before
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("answer", ["exit 9", "sleep 60"])
def test_restoring_does_not_need_the_driver(host, tmp_path, answer):
    run_module("gate", options(host))
    program(tmp_path / "nvidia-smi", answer)
    given = options(host, state="restored")
    del given["compute_capability"]
    result = run_module("gate", given, environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert result["changed"] and result["compute_capabilities"] == ["12.0"] and host.is_pristine()
