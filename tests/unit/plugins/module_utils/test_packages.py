# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._packages import Package, locate
from ansible_collections.blackwell.inference.tests.unit.conftest import program


@pytest.fixture
def asked(venv):
    """The venv with an interpreter to ask."""
    return venv.make_interpreter()


def test_the_interpreter_and_the_folder_give_the_same_packages(asked):
    by_python, by_folder = locate(python=str(asked.python)), locate(site_packages=str(asked.site))
    assert {name: by_python.packages[name] for name in ("flashinfer", "sglang")} == by_folder.packages
    assert by_folder.packages["flashinfer"] == Package(
        name="flashinfer",
        distribution="flashinfer-python",
        version="0.6.9",
        location=str(asked.path("flashinfer")),
        root=str(asked.site),
        dist_info=str(asked.site / "flashinfer_python-0.6.9.dist-info"),
    )


def test_symlinks_on_the_way_do_not_make_another_place_of_it(asked, tmp_path):
    link = tmp_path / "current"
    link.symlink_to(asked.folder)
    relative = asked.site.relative_to(asked.folder)
    assert locate(site_packages=str(link / relative)).packages == locate(site_packages=str(asked.site)).packages
    assert locate(python=str(link / "bin" / "python")).packages == locate(python=str(asked.python)).packages


def test_a_package_folder_that_is_a_symlink_keeps_its_place_and_its_record(asked):
    checkout = asked.folder.parent / "sglang-main"
    asked.path("sglang").rename(checkout)
    asked.path("sglang").symlink_to(checkout)
    for site in (locate(python=str(asked.python)), locate(site_packages=str(asked.site))):
        package = site.packages["sglang"]
        assert (package.location, package.root) == (str(checkout), str(asked.site)) and package.dist_info
        assert Path(package.path("sglang/srt/server_args.py")).is_file()


def test_an_editable_install_is_where_it_is_imported_from_and_has_no_record(asked):
    checkout = asked.folder.parent / "checkout" / "python"
    checkout.mkdir(parents=True)
    asked.path("sglang").rename(checkout / "sglang")
    (asked.site / "sglang.pth").write_text(f"{checkout}\n")
    package = locate(python=str(asked.python)).packages["sglang"]
    assert (package.location, package.root) == (str(checkout / "sglang"), str(checkout))
    assert (package.version, package.dist_info) == ("0.5.14", None)


def test_of_two_copies_the_one_that_is_imported_counts(asked, tmp_path):
    other = type(asked)(tmp_path / "other").install(releases=("flashinfer_python-0.6.1", "sglang-0.5.8"))
    (asked.site / "first.pth").write_text(f"import sys; sys.path.insert(0, {str(other.site)!r})\n")
    package = locate(python=str(asked.python)).packages["flashinfer"]
    assert (package.root, package.version) == (str(other.site), "0.6.1")


def test_a_package_without_metadata_has_an_unknown_version(asked):
    for path in asked.site.glob("sglang-*.dist-info/*"):
        path.unlink()
        path.parent.rmdir() if not any(path.parent.iterdir()) else None
    for site in (locate(python=str(asked.python)), locate(site_packages=str(asked.site))):
        assert (site.packages["sglang"].version, site.packages["sglang"].dist_info) == ("unknown", None)


def test_two_versions_in_one_folder_are_refused(asked):
    asked.install(releases=("sglang-0.5.8",))
    for options in ({"python": str(asked.python)}, {"site_packages": str(asked.site)}):
        with pytest.raises(InferenceError, match=r"holds sglang-0\.5\.14\.dist-info and sglang-0\.5\.8\.dist-info"):
            locate(**options)


def test_what_a_pth_file_prints_is_not_the_answer(asked):
    (asked.site / "loud.pth").write_text("import sys; print('hello')\n")
    assert locate(python=str(asked.python)).packages["sglang"].version == "0.5.14"


def test_a_venv_without_the_package_is_named(asked):
    with pytest.raises(InferenceError, match=r"^python .*bin/python: flashinfer-jit-cache is not installed there; expected"):
        locate(python=str(asked.python)).require("sglang", "flashinfer_jit_cache")


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("none", "does not exist"),
        (".", "is not a file"),
        ("data", "cannot be run (Permission denied)"),
        ("silent", "did not answer as Python 3 does (exit status 3)"),
        ("loud", "did not answer as Python 3 does (no such module)"),
        ("wrong", "did not answer as Python 3 does ([1, 2])"),
        ("empty", "did not answer as Python 3 does"),
        ("binary", "did not answer as Python 3 does"),
    ],
)
def test_something_else_than_an_interpreter_is_named(tmp_path, path, found):
    (tmp_path / "data").touch()
    program(tmp_path / "silent", "exit 3")
    program(tmp_path / "loud", "echo trace >&2; echo 'no such module' >&2; exit 1")
    program(tmp_path / "wrong", "echo '[1, 2]'")
    program(tmp_path / "empty", "echo")
    program(tmp_path / "binary", r"printf '\377\376\000'")
    with pytest.raises(InferenceError) as raised:
        locate(python=str(tmp_path / path))
    assert str(raised.value).startswith(f"python: {tmp_path / path}".rstrip(".")) and found in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_interpreter_that_hangs_is_given_up_with_its_children(tmp_path):
    python, started = program(tmp_path / "python", f"sleep 60 & echo $! > {tmp_path}/child; wait"), time.monotonic()
    with pytest.raises(InferenceError, match=r"did not answer within 0\.5 s"):
        locate(python=python, timeout=0.5)
    assert time.monotonic() - started < 10
    stat = Path(f"/proc/{int((tmp_path / 'child').read_text())}/stat")
    while stat.exists() and " Z " not in stat.read_text():  # a signal is delivered when its process is next scheduled
        assert time.monotonic() - started < 10
        time.sleep(0.01)


def test_a_site_packages_folder_that_is_none_is_named(tmp_path):
    with pytest.raises(InferenceError, match=r"site_packages: .*/none is not a folder"):
        locate(site_packages=str(tmp_path / "none"))


def test_neither_the_working_folder_nor_the_environment_answers(asked, tmp_path, monkeypatch):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path))
    assert locate(python=str(asked.python)).packages["sglang"].root == str(asked.site)
