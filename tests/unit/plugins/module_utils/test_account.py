# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os
import pwd
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils import _account as account
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError

OTHER = pwd.getpwnam("nobody")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes folders for others")


@pytest.fixture
def home():
    """A home folder of another account, in a place that everybody can reach."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        home = Path(folder, "home")
        home.mkdir()
        if os.geteuid() == 0:
            os.chown(home, OTHER.pw_uid, OTHER.pw_gid)
        yield home


@as_root
def test_all_that_is_made_below_a_folder_of_the_account_is_its_own(home):
    account.make_folder(OTHER, str(home / ".cache/sglang"))
    for folder in (home / ".cache", home / ".cache/sglang"):
        assert folder.stat().st_uid == OTHER.pw_uid
    assert (home / ".cache/sglang").stat().st_mode & 0o777 == 0o750


@as_root
def test_elsewhere_only_the_folder_itself_is(home):
    account.make_folder(OTHER, str(home.parent / "var/cache"))
    assert ((home.parent / "var").stat().st_uid, (home.parent / "var/cache").stat().st_uid) == (0, OTHER.pw_uid)


@as_root
def test_no_folder_is_made_or_given_away_through_a_link_of_the_account(home):
    precious = home.parent / "precious"
    precious.mkdir(mode=0o755)
    (home / ".cache").symlink_to(precious)
    os.chown(home / ".cache", OTHER.pw_uid, OTHER.pw_gid, follow_symlinks=False)
    path = home / ".cache/sglang"
    with pytest.raises(
        InferenceError, match=re.escape(f"{path}: nobody cannot make it (mkdir: ") + ".*; expected a folder that can be made"
    ):
        account.make_folder(OTHER, str(path))
    assert list(precious.iterdir()) == []


def test_a_folder_of_ones_own(home):
    own = pwd.getpwuid(os.geteuid())
    account.make_folder(own, str(home / "a/b"))
    (home / "a/b").chmod(0o700)
    account.make_folder(own, str(home / "a/b"))
    assert (home / "a/b").stat().st_mode & 0o777 == 0o700, "one that is there stays as it is"


def test_a_folder_that_cannot_be_made_is_one_line(home):
    (home / "file").write_text("")
    with pytest.raises(InferenceError, match=r"file/folder: .*; expected a folder that can be made, or is there\.$"):
        account.make_folder(pwd.getpwuid(os.geteuid()), str(home / "file/folder"))
