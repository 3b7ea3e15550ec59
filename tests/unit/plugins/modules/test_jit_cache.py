# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.plugins.modules import jit_cache
from ansible_collections.blackwell.inference.tests.unit.wheels import unpack

FILES = {"trtllm_comm.so": 4000, "trtllm_allreduce.cuda.o": 900, "build.ninja": 80, ".ninja_log": 20}
BYTES = sum(FILES.values())


@pytest.fixture(scope="module")
def site_packages(tmp_path_factory) -> str:
    root = tmp_path_factory.mktemp("site-packages")
    unpack("flashinfer-python", "0.6.1", root, "flashinfer/_build_meta.py")
    return str(unpack("sglang", "0.5.8", root, "sglang/srt/environ.py"))


@pytest.fixture
def home(tmp_path) -> Path:
    return tmp_path


def build(home: Path, archs: str = "120a", module: str = "trtllm_comm", version: str = "0.6.1") -> Path:
    """Lay out one built module as flashinfer does; return its folder."""
    folder = home / ".cache/flashinfer" / version / archs / "cached_ops" / module
    folder.mkdir(parents=True)
    for name, size in FILES.items():
        (folder / name).write_bytes(bytes(size))
    locks = folder.parent / "tmp"
    locks.mkdir(exist_ok=True)
    (locks / f"{module}.lock").touch()
    return folder


@pytest.fixture
def run(site_packages, home, run_here):
    """Run the module, return its result."""

    def run(check: bool = False, **options) -> dict:
        arguments = {"site_packages": site_packages, "environment": {"HOME": str(home)}, **options}
        return run_here(jit_cache, arguments, check=check)

    return run


@contextlib.contextmanager
def process(code: str, *arguments: str):
    """Run a Python process that says when it is ready, until the block ends; yield its pid."""
    command = [sys.executable, "-c", code + "\nprint('ready', flush=True); input()", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        try:
            yield child.pid
        finally:
            child.communicate("\n")


MAP = "import mmap, sys; file = open(sys.argv[1], 'rb'); held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)"
LOCK = "import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.flock(file, fcntl.LOCK_EX)"


def test_a_cache_that_does_not_exist_is_nothing_to_do(run, home):
    result = run()
    assert (result["changed"], result["removed"], result["freed_bytes"], result["cache_dirs"]) == (False, [], 0, [])
    assert result["cache_root"] == str(home / ".cache/flashinfer/0.6.1")
    assert list(home.iterdir()) == []


def test_the_named_module_goes_in_every_folder_of_this_version_and_nothing_else_does(run, home):
    gone = [build(home), build(home, "90a_120a")]
    stays = [build(home, module="norm"), build(home, version="0.6.0")]
    predicted, result = run(check=True), run()
    assert predicted == result
    assert result["changed"]
    assert result["removed"] == [{"path": str(path), "bytes": BYTES} for path in gone]
    assert result["freed_bytes"] == 2 * BYTES
    assert result["diff"]["before"].splitlines() == [f"{path} ({BYTES} bytes)" for path in gone]
    assert not any(path.exists() for path in gone)
    assert all(path.is_dir() for path in stays)
    assert (gone[0].parent / "tmp/trtllm_comm.lock").exists()
    assert not run()["changed"]


def test_check_mode_removes_nothing(run, home):
    folder = build(home)
    assert run(check=True)["changed"]
    assert {path.name for path in folder.iterdir()} == set(FILES)


def test_all_modules(run, home):
    build(home)
    folder = build(home, module="norm").parent
    assert len(run(modules=["all"])["removed"]) == 2
    assert [path.name for path in folder.iterdir()] == ["tmp"]


def test_only_folders_of_this_capability(run, home):
    other, ours = build(home, "90a"), build(home, "120a")
    result = run(compute_capability=["12.0"])
    assert [item["path"] for item in result["removed"]] == [str(ours)]
    assert result["skipped"] == [{"path": str(other.parents[1]), "reason": "built for other GPUs than 12.0"}]
    assert other.exists()


def test_a_root_that_is_a_symlink_is_followed(run, home):
    folder = build(home)
    (home / ".cache/flashinfer").rename(home / "disk")
    (home / ".cache/flashinfer").symlink_to(home / "disk")
    assert [item["path"] for item in run()["removed"]] == [str(folder)]
    assert (home / "disk/0.6.1/120a/cached_ops").is_dir()
    assert not folder.exists()


@pytest.mark.parametrize("planted", ["0.6.1", "0.6.1/120a", "0.6.1/120a/cached_ops"])
def test_a_symlink_in_the_cache_is_reported_and_not_followed(run, home, planted):
    folder = build(home)
    link = home / ".cache/flashinfer" / planted
    link.rename(home / "elsewhere")
    link.symlink_to(home / "elsewhere")
    result = run()
    assert not result["changed"]
    assert result["skipped"] == [{"path": str(link), "reason": f"is a symlink to {home}/elsewhere, which may lead out of the cache"}]
    assert str(link) in str(result["warnings"])
    assert folder.exists()


def test_a_module_that_is_a_symlink_is_unlinked(run, home):
    folder = build(home)
    precious = home / "precious"
    folder.rename(precious)
    folder.symlink_to(precious)
    assert run()["changed"]
    assert not folder.is_symlink()
    assert {path.name for path in precious.iterdir()} == set(FILES)


def test_symlinks_within_a_module_are_unlinked(run, home):
    folder, precious = build(home), home / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (folder / "out").symlink_to(precious)
    assert run()["changed"]
    assert not folder.exists()
    assert (precious / "file").exists()


@pytest.mark.parametrize("check", [False, True])
def test_a_loaded_module_stays(run, home, check):
    folder, other = build(home), build(home, "90a")
    library = str(folder / "trtllm_comm.so")
    with process(MAP, library) as pid:
        result = run(check=check)
    assert result["failed"]
    assert result["msg"].startswith(f"{folder}: pid {pid} ({sys.executable}) has loaded it; expected")
    assert "\n" not in result["msg"]
    assert {path.name for path in folder.iterdir()} == set(FILES)
    assert other.exists()
    assert run()["changed"]


def test_a_loaded_module_is_found_under_another_name(run, home):
    folder = build(home)
    os.link(folder / "trtllm_comm.so", home / "seen-from-a-container")
    with process(MAP, str(home / "seen-from-a-container")) as pid:
        assert f"pid {pid} (" in run()["msg"]


def test_a_module_loaded_through_a_symlink_stays(run, home):
    folder = build(home)
    folder.rename(home / "disk")
    folder.symlink_to(home / "disk")
    with process(MAP, str(folder / "trtllm_comm.so")) as pid:
        assert f"pid {pid} (" in run()["msg"]


@pytest.mark.parametrize("lock", ["trtllm_comm.lock", "flashinfer_jit.lock"])
def test_a_module_that_is_being_built_stays(run, home, lock):
    folder = build(home)
    path = folder.parent / "tmp" / lock
    path.touch()
    with process(LOCK, str(path)) as pid:
        result = run()
    assert result["msg"].startswith(f"{path}: pid {pid} ({sys.executable}) holds this lock, so a build is running; expected")
    assert folder.exists()
    assert run()["changed"]


def test_the_build_of_another_module_does_not_matter(run, home):
    build(home)
    other = build(home, module="norm")
    with process(LOCK, str(other.parent / "tmp/norm.lock")):
        assert run()["changed"]
    assert other.exists()


def test_a_cache_that_may_not_be_changed_is_one_line(run, home, monkeypatch):
    folder = build(home)

    def unlink(name, dir_fd):
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(os, "unlink", unlink)  # root may do everything, so the system's answer is played
    result = run()
    assert result["msg"].startswith(f"{folder}: the cache cannot be read or changed (Permission denied at .ninja_log); expected")
    assert folder.exists()


def lay_out(root: Path, *names: str) -> list[Path]:
    paths = [root / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    return paths


@pytest.mark.parametrize(
    ("name", "variable", "gone", "stays"),
    [
        ("p2p_access", "SGLANG_CACHE_DIR", ["gpu_p2p_access_cache_for_0,1.json", "gpu_p2p_access_cache_for_2.json"], ["triton/x"]),
        ("autotune", "SGLANG_CACHE_DIR", ["flashinfer/autotune/0.6.12/sm120/ab/rank_tp0_pp0_dp0.json"], ["flashinfer/other"]),
        ("torch_extension_locks", "TORCH_EXTENSIONS_DIR", ["some_ext/lock"], ["some_ext/some_ext.so", "other/build.ninja"]),
    ],
)
def test_another_cache_goes_only_when_it_is_named(run, home, name, variable, gone, stays):
    gone, stays = lay_out(home / "other", *gone), lay_out(home / "other", *stays)
    environment = {"HOME": str(home), variable: str(home / "other")}
    assert not run(environment=environment)["changed"]
    predicted, result = (run(check=check, environment=environment, other_caches=[name]) for check in (True, False))
    assert predicted == result
    assert result["freed_bytes"] == 2 * len(gone)
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in stays)
    assert not run(environment=environment, other_caches=[name])["changed"]


def test_the_default_places_of_the_other_caches(run, home):
    lay_out(home / ".cache", "sglang/gpu_p2p_access_cache_for_0.json", "torch_extensions/py312_cu130/some_ext/lock")
    assert len(run(other_caches=["p2p_access", "torch_extension_locks"])["removed"]) == 2


def test_a_torch_lock_that_is_held_stays_and_so_does_everything_else(run, home):
    folder = build(home)
    (lock,) = lay_out(home / ".cache", "torch_extensions/py312_cu130/some_ext/lock")
    with process("import sys; file = open(sys.argv[1])", str(lock)) as pid:
        result = run(other_caches=["torch_extension_locks"])
    assert result["msg"].startswith(f"{lock}: pid {pid} ({sys.executable}) has it open; expected a lock that no process holds.")
    assert folder.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": ["../../precious"]}, "modules: '../../precious'; expected the name of a FlashInfer module"),
        ({"modules": ["tmp"]}, "modules: 'tmp'; expected the name of a FlashInfer module"),
        ({"compute_capability": ["12.0", "banana"]}, "compute_capability: 'banana'; expected major.minor, e.g. 12.0."),
        ({"environment": {"FLASHINFER_WORKSPACE_BASE": "here"}}, "environment FLASHINFER_WORKSPACE_BASE: 'here' is relative"),
        ({"environment": {}, "user": "nobody-of-this-name"}, "user: nobody-of-this-name does not exist on this host; expected"),
        ({"site_packages": "/nowhere"}, "site_packages: /nowhere is not a folder; expected"),
    ],
)
def test_bad_input_is_one_line(run, options, message):
    result = run(**options)
    assert result["failed"]
    assert result["msg"].startswith(message)
    assert "\n" not in result["msg"]


def test_a_venv_without_sglang_is_refused(run, tmp_path):
    unpack("flashinfer-python", "0.6.1", tmp_path, "flashinfer/_build_meta.py")
    assert f"site_packages {tmp_path}: sglang is not installed there" in run(site_packages=str(tmp_path))["msg"]
