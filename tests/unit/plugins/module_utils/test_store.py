# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._packages import locate
from ansible_collections.blackwell.inference.plugins.module_utils._store import Entry, Store, checksum, recorded_checksums

ROOT = "/opt/sglang/venv/lib/python3.12/site-packages"
BEFORE, AFTER = b"before", b"after"


def entry(**changed) -> Entry:
    given = (
        "flashinfer",
        "0.6.1",
        ("flashinfer.trtllm_comm.majors",),
        ("12.0",),
        checksum(BEFORE),
        checksum(AFTER),
        "2026-01-01T00:00:00Z",
        "0",
    )
    return Entry(*given)._replace(**changed)


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(str(tmp_path / "state"))


def ledger_file(store: Store) -> Path:
    return next(Path(store.folder, "ledgers").iterdir())


def test_a_ledger_comes_back_as_it_was_written(store):
    assert store.ledger(ROOT) == {} and not Path(store.folder).exists()
    store.write_ledger(ROOT, {"flashinfer/jit/comm.py": entry()})
    assert store.ledger(ROOT) == {"flashinfer/jit/comm.py": entry()}
    assert Path(store.folder).stat().st_mode & 0o777 == 0o750


def test_people_can_read_a_ledger(store):
    store.write_ledger(ROOT, {"flashinfer/jit/comm.py": entry()})
    content = json.loads(ledger_file(store).read_text())
    assert (content["schema_version"], content["site_packages"]) == (1, ROOT)
    assert content["files"]["flashinfer/jit/comm.py"]["gates"] == ["flashinfer.trtllm_comm.majors"]


def test_no_two_folders_share_a_ledger(store):
    for number, root in enumerate(["/a/b-c", "/a-b/c", "/a/b/c", "/a-b-c", "/" + "x" * 300, "/y" + "x" * 300]):
        assert store.ledger(root) == {}
        store.write_ledger(root, {"file": entry(version=str(number))})
    assert store.ledger("/a/b-c")["file"].version == "0"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "it is not a ledger"),
        ('{"schema_version": 1, "fil', "it is not a ledger"),
        ("[]", "it is not a ledger"),
        ("\udcff", "it is not a ledger"),
        ('{"schema_version": 2, "files": {}}', "its schema_version is 2"),
        ('{"schema_version": 1}', "it is damaged"),
        ('{"schema_version": 1, "site_packages": "/", "files": {"x": {}}}', "it is damaged"),
        ('{"schema_version": 1, "site_packages": "/", "files": {"x": {"gates": [], "capabilities": [], "extra": 1}}}', "it is damaged"),
        ('{"schema_version": 1, "site_packages": 3, "files": {}}', "it is damaged"),
    ],
)
def test_a_ledger_that_cannot_be_used_is_named_with_what_to_do(store, content, found):
    store.write_ledger(ROOT, {"file": entry()})
    path = ledger_file(store)
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(InferenceError, match=rf"{path.name}: {found}; expected schema_version 1\. .*move it away"):
        store.ledger(ROOT)


def test_pristine_bytes_are_kept_by_checksum_and_never_given_out_damaged(store):
    store.keep_pristine(BEFORE)
    assert store.pristine(checksum(BEFORE)) == BEFORE and store.pristine(checksum(AFTER)) is None
    path = Path(store.folder, "pristine", checksum(BEFORE))
    path.write_bytes(b"rotten")
    assert store.pristine(checksum(BEFORE)) is None
    store.keep_pristine(BEFORE)
    assert path.read_bytes() == BEFORE


def test_the_checksum_list_is_what_sha256sum_checks(store, tmp_path):
    root = tmp_path / "site packages"
    root.mkdir()
    (root / "file.py").write_bytes(AFTER)
    store.settle({str(root): {"file.py": entry()}}, {})
    check = ["sha256sum", "--check", "--quiet", "--strict", f"{store.folder}/gates.sha256"]
    assert subprocess.run(check, check=False).returncode == 0 and store.is_settled()
    (root / "file.py").write_bytes(BEFORE)
    assert subprocess.run(check, check=False, capture_output=True).returncode == 1
    store.settle({str(root): {}}, {})
    assert not Path(store.folder, "gates.sha256").exists() and store.is_settled()


def test_settling_drops_the_pristine_bytes_that_only_the_dropped_entries_named(store):
    for content in (BEFORE, AFTER, b"lost"):
        store.keep_pristine(content)
    store.settle({"/usr": {"file": entry()}, "/etc": {"file": entry(), "other": entry(sha256_before=checksum(AFTER))}}, {})
    store.settle({"/etc": {}}, {"/etc": store.ledger("/etc")})
    assert [store.pristine(checksum(content)) for content in (BEFORE, AFTER, b"lost")] == [BEFORE, None, b"lost"]


@pytest.mark.parametrize("harm", ["stale list", "no list", "unfinished"])
def test_what_a_kill_left_in_the_folder_is_noticed_and_put_right(store, harm):
    store.settle({"/usr": {"file": entry()}}, {})
    checksums = Path(store.folder, "gates.sha256")
    kept = checksums.read_bytes()
    if harm == "stale list":
        checksums.write_bytes(b"")
    elif harm == "no list":
        checksums.unlink()
    else:
        Path(store.folder, "ledgers", "x.json.new").touch()
    assert not store.is_settled()
    store.settle({"/usr": {"file": entry()}}, {})
    assert store.is_settled() and checksums.read_bytes() == kept and not list(Path(store.folder).rglob("*.new"))


def test_a_damaged_ledger_of_another_folder_does_not_stop_this_one(store):
    store.settle({"/etc": {"file": entry()}}, {})
    ledger_file(store).write_text("{")
    store.settle({"/usr": {"file": entry()}}, {})
    assert store.is_settled() and "/usr/file" in Path(store.folder, "gates.sha256").read_text()


@pytest.mark.parametrize("gone", ["/usr/gone", "/etc/hostname/gone"])
def test_the_ledger_of_a_folder_that_is_gone_is_dropped(store, gone):
    store.settle({"/usr": {"file": entry()}, gone: {"file": entry()}}, {})
    assert not store.is_settled() and store.ledger(gone)
    store.settle({}, {})
    assert store.is_settled() and not store.ledger(gone) and store.ledger("/usr")


def test_a_folder_that_cannot_be_looked_at_is_not_gone(store, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    store.settle({str(tmp_path / "loop/x"): {"file": entry()}}, {})
    assert store.is_settled()


def test_one_run_at_a_time(store):
    with store.lock(0):
        with pytest.raises(InferenceError, match=r"state_dir: another run has held .*lock for 0\.2 s"), Store(store.folder).lock(0.2):
            pytest.fail("two runs at once")
        with pytest.raises(InferenceError), Store(store.folder).lock(-1):
            pytest.fail("two runs at once")
    with store.lock(0):
        pass


def test_an_error_under_the_lock_is_not_taken_for_one_of_the_folder(store):
    with pytest.raises(FileNotFoundError), store.lock(0):
        Path("/does/not/exist").read_bytes()


@pytest.mark.parametrize("way", ["file", "no-access"])
def test_a_folder_that_cannot_be_written_is_named_before_anything_is(tmp_path, monkeypatch, way):
    if way == "file":
        (tmp_path / "taken").touch()
    else:
        monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    store = Store(str(tmp_path / "taken" / "state"))
    with pytest.raises(InferenceError, match=r"state_dir .*taken/state: cannot be written \((Not a directory|Permission denied)\)"):
        store.refuse_unwritable()
    Store(str(tmp_path / "new" / "state")).refuse_unwritable() if way == "file" else None
    assert not (tmp_path / "new").exists()


def test_a_full_disk_leaves_the_ledger_as_it_was(store, monkeypatch):
    store.write_ledger(ROOT, {"file": entry()})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(InferenceError, match=r"cannot be written \(No space left on device\)"):
        patched.setattr(os, "fsync", full)
        store.write_ledger(ROOT, {"file": entry(version="2")})
    assert store.ledger(ROOT) == {"file": entry()} and len(list(Path(store.folder, "ledgers").iterdir())) == 1


def test_record_says_what_is_pristine(venv):
    package = locate(site_packages=str(venv.site)).packages["flashinfer"]
    names = {"flashinfer/jit/comm.py", "flashinfer/jit/mla.py", "flashinfer/none.py"}
    found = recorded_checksums(package, names)
    assert found == {name: checksum(venv.path(name).read_bytes()) for name in names - {"flashinfer/none.py"}}
    assert recorded_checksums(package._replace(dist_info=None), names) == {}


@pytest.mark.parametrize("content", [b"flashinfer/jit/comm.py,sha256=x,1\n", b"\xff\xfe", b'"flashinfer/jit/comm.py' + b"x" * 200000])
def test_a_damaged_record_is_named(venv, content):
    package = locate(site_packages=str(venv.site)).packages["flashinfer"]
    Path(package.dist_info, "RECORD").write_bytes(content)
    with pytest.raises(InferenceError, match=r"RECORD: cannot be read .*pip install --force-reinstall"):
        recorded_checksums(package, {"flashinfer/jit/comm.py"})


def test_stale_modules_are_noted_for_each_folder_until_they_are_cleared(store):
    store.mark_stale(ROOT, ["trtllm_comm", "mla"])
    Path(next(Path(store.folder, "stale").iterdir()), "half.new").touch()
    assert store.stale_modules(ROOT) == ["mla", "trtllm_comm"] and store.stale_modules("/other") == []
    store.forget_stale(ROOT, ["mla", "never"])
    assert store.stale_modules(ROOT) == ["trtllm_comm"]
