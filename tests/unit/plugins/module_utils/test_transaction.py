# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import errno
import os
import py_compile
import stat
import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._transaction import (
    Replacement,
    leftovers,
    refuse_irreplaceable,
    replace_all,
)
from ansible_collections.blackwell.inference.plugins.modules import gate


@pytest.fixture
def package(tmp_path) -> Path:
    folder = tmp_path / "package"
    folder.mkdir()
    for name in ("one.py", "two.py"):
        (folder / name).write_text(f"{name[:3]} = 'before'\n")
    return folder


def replacement(path: Path, package: Path) -> Replacement:
    return Replacement(str(path), str(package), path.read_bytes(), path.read_bytes().replace(b"before", b"after, and longer"))


def replace(package: Path, *paths: Path, **options) -> None:
    replace_all([replacement(path, package) for path in paths or sorted(package.glob("*.py"))], **options)


def is_changed(path: Path) -> bool:
    return "after" in path.read_text()


def test_all_files_are_replaced_and_nothing_else_is_left(package):
    os.utime(package / "one.py", (1, 1))
    replace(package)
    assert [path.name for path in sorted(package.iterdir()) if is_changed(path)] == ["one.py", "two.py"]
    assert (package / "one.py").stat().st_mtime > 1e9  # ninja and Python decide by it


def test_owner_mode_and_extended_attributes_are_kept(package):
    path = package / "one.py"
    path.chmod(0o751)
    if os.geteuid() == 0:
        os.chown(path, 1234, 4321)
    attributes = {}
    with suppress(OSError):  # a file system without them
        os.setxattr(path, "user.origin", b"wheel")
        attributes = {"user.origin": b"wheel"}
    before = path.stat()
    replace(package, path)
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert {name: os.getxattr(path, name) for name in attributes} == attributes


def test_the_other_hard_link_keeps_its_bytes(package, tmp_path):
    os.link(package / "one.py", tmp_path / "cache.py")
    replace(package)
    assert is_changed(package / "one.py") and not is_changed(tmp_path / "cache.py")


def test_a_symlink_inside_the_package_is_followed(package):
    (package / "alias.py").symlink_to("one.py")
    replace(package, package / "alias.py")
    assert (package / "alias.py").is_symlink() and is_changed(package / "one.py")


def test_a_symlink_that_leads_out_is_replaced_itself(package, tmp_path):
    outside = tmp_path / "cache.py"
    (package / "one.py").rename(outside)
    (package / "one.py").symlink_to(outside)
    replace(package)
    assert not (package / "one.py").is_symlink() and is_changed(package / "one.py") and not is_changed(outside)


def test_a_folder_that_leads_out_is_refused(package, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "three.py").write_text("three = 'before'\n")
    (package / "inner").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InferenceError, match="leads out of the package"):
        replace(package, package / "one.py", package / "inner" / "three.py")
    assert not is_changed(package / "one.py") and not is_changed(tmp_path / "elsewhere" / "three.py")


@pytest.mark.parametrize("mode", py_compile.PycInvalidationMode, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("prefix", [False, True], ids=["beside", "prefix"])
def test_compiled_files_cannot_hide_the_change(package, tmp_path, monkeypatch, mode, prefix):
    if prefix:
        monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "cache"))
    compiled = [Path(py_compile.compile(str(package / "one.py"), invalidation_mode=mode, optimize=level)) for level in (0, 1)]
    kept = Path(py_compile.compile(str(package / "two.py"), invalidation_mode=mode))
    assert (tmp_path / "cache" in kept.parents) is prefix
    replace(package, package / "one.py", pycache_prefix=str(tmp_path / "cache") if prefix else "")
    assert kept.exists() and not any(path.exists() for path in compiled)


def test_a_compiled_file_below_the_prefix_is_found_by_the_path_that_the_server_imports_by(package, tmp_path, monkeypatch):
    (tmp_path / "current").symlink_to(tmp_path)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "cache"))
    compiled = Path(py_compile.compile(str(tmp_path / "current" / "package" / "one.py")))
    replace(package, pycache_prefix=str(tmp_path / "cache"))
    assert not compiled.exists()


@pytest.mark.parametrize("mode", [0o444, 0o555], ids=oct)
def test_a_read_only_file_is_refused_to_root_too(package, mode):
    (package / "two.py").chmod(mode)
    for attempt in (lambda: replace(package), lambda: refuse_irreplaceable([replacement(package / "two.py", package)])):
        with pytest.raises(InferenceError, match=r"two\.py: it is read-only \(mode 0[45]{3}\).*Nothing was changed"):
            attempt()
    assert not is_changed(package / "one.py") and sorted(package.iterdir()) == [package / "one.py", package / "two.py"]


def test_a_file_that_changed_in_the_meantime_stops_it(package):
    planned = [replacement(path, package) for path in sorted(package.glob("*.py"))]
    (package / "two.py").write_text("two = 'somebody else'\n")
    with pytest.raises(InferenceError, match="changed during this run"):
        replace_all(planned)
    assert not is_changed(package / "one.py") and "somebody else" in (package / "two.py").read_text() and not leftovers(planned[0].path)


@pytest.mark.parametrize("call", range(1, 3))
def test_a_full_disk_is_noticed_before_anything_has_changed(package, monkeypatch, call):
    monkeypatch.setattr(os, "fsync", failing(os.fsync, call, errno.ENOSPC))
    with pytest.raises(InferenceError, match=r"No space left on device.*Nothing was changed\.$"):
        replace(package)
    assert sorted(path.name for path in package.iterdir() if not is_changed(path)) == ["one.py", "two.py"]


@pytest.mark.parametrize("call", range(1, 3))
def test_a_failing_rename_puts_back_what_was_replaced(package, monkeypatch, call):
    (package / "one.py").chmod(0o640)
    monkeypatch.setattr(os, "replace", failing(os.replace, call, errno.EIO))
    with pytest.raises(InferenceError, match=r"Input/output error.*Nothing was changed\.$"):
        replace(package)
    assert sorted(path.name for path in package.iterdir() if not is_changed(path)) == ["one.py", "two.py"]
    assert stat.S_IMODE((package / "one.py").stat().st_mode) == 0o640


def test_a_rename_that_cannot_be_undone_says_so(package, monkeypatch):
    monkeypatch.setattr(os, "replace", failing(os.replace, 2, errno.EROFS, forever=True))
    with pytest.raises(InferenceError, match=r"one\.py: it was replaced, .* cannot be put back .*state=restored"):
        replace(package)


def failing(function, call: int, code: int, forever: bool = False):
    """``function``, which fails at its n-th call, or from then on."""
    count = 0

    def wrapper(*arguments, **options):
        nonlocal count
        count += 1
        if count == call or (forever and count > call):
            raise OSError(code, os.strerror(code))
        return function(*arguments, **options)

    return wrapper


# What a kill leaves behind. Every event that Python audits and that touches a file is a point to die at.

_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.chmod", "os.chown", "os.setxattr", "os.link", "os.truncate", "fcntl.flock"}


def killed(action, point: int) -> bool:
    """Run ``action`` in a process that is killed right before its n-th event; whether it came that far."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = point

    def die(event: str, arguments: tuple) -> None:
        nonlocal left
        if event in _EVENTS and not (event == "open" and arguments[2] & os.O_ACCMODE == os.O_RDONLY):
            left -= 1
            if left <= 0:
                os._exit(9)

    sys.addaudithook(die)
    try:
        action()
    except BaseException:
        os._exit(1)
    os._exit(0)


SOME = ["flashinfer.trtllm_comm.majors", "sglang.fusion.applies"]
FIRST = [SOME[0], "flashinfer.workspace.multicast_device", "flashinfer.workspace.multicast_granularity"]
RUNS = {  # what was done before, and the run that is killed
    "open": ([], {}),
    "open-more": ([{"gates": FIRST}], {}),
    "restore": ([{}], {"state": "restored"}),
    "restore-some": ([{}], {"state": "restored", "gates": ["sglang.fusion.workspace_preflight"]}),
}


@pytest.mark.parametrize("with_record", [True, False], ids=["record", "no-record"])
@pytest.mark.parametrize("run", RUNS)
def test_after_a_kill_at_any_point_files_are_whole_and_the_next_run_finishes_or_undoes(venv, monkeypatch, run, with_record):
    monkeypatch.setattr(gate, "refuse_starting_server", lambda root: None)  # reading all of /proc some thousand times takes long
    for path in venv.site.glob("*.dist-info/RECORD") if not with_record else ():
        path.unlink()
    pristine, (done, last) = venv.sources(), RUNS[run]
    for options in done:
        venv.gate(**options)
    start, before = venv.snapshot(), venv.sources()
    venv.gate(**last)
    after = venv.sources()
    venv.put_back(start)
    point = 0
    while killed(lambda: venv.gate(**last), point := point + 1):
        found = {name: content for name, content in venv.sources().items() if not name.endswith(".blackwell-inference")}
        assert found.keys() == pristine.keys()
        assert all(found[name] in (before[name], after[name]) for name in pristine), f"a torn file at point {point}"
        assert found["flashinfer/jit/comm.py"] == before["flashinfer/jit/comm.py"] or venv.stale() == ["trtllm_comm"]
        crashed = venv.snapshot()
        venv.gate()
        assert venv.gate()["summary"]["opened"] == 6, f"not finished after point {point}"
        assert venv.gate()["changed"] is False and checksums_hold(venv)
        for where in ("finished", "crashed"):
            venv.gate("restored")
            assert venv.sources() == pristine, f"not undone after point {point}, {where}"
            assert venv.remembered() == [], f"something is left in the state folder after point {point}, {where}"
            if where == "finished":
                venv.put_back(crashed)
        venv.put_back(start)
    assert point > 15 and venv.sources() == after


def checksums_hold(venv) -> bool:
    lines = [line.split("  ", 1) for line in (venv.state / "gates.sha256").read_text().splitlines()]
    return len(lines) == 4 and all(sha256(Path(path).read_bytes()).hexdigest() == digest for digest, path in lines)
