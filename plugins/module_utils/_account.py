# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The account that a server runs as, and what a program needs to run as that server does."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # what systemd gives a unit that sets none


def find(user: Optional[str]) -> Optional[pwd.struct_passwd]:
    """Return an account, that of this process where no user is named; None where the user does not exist (yet).

    Raises:
        InferenceError: This process cannot start programs as that user.
    """
    try:
        account = pwd.getpwnam(user) if user else pwd.getpwuid(os.geteuid())
    except KeyError:
        return None
    if os.geteuid() not in (0, account.pw_uid):
        raise InferenceError("user", f"{account.pw_name}, but the module runs as uid {os.geteuid()}", "root or that user", "Use become.")
    return account


def identity(account: pwd.struct_passwd) -> dict[str, Any]:
    """Return the options of subprocess.Popen that start a program as an account; none where this process runs as it."""
    if os.geteuid() == account.pw_uid:
        return {}
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": os.getgrouplist(account.pw_name, account.pw_gid)}


def environment(account: pwd.struct_passwd, given: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of a unit that runs as an account and sets what is given."""
    return {"PATH": PATH, "HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name, **given}


def make_folder(account: pwd.struct_passwd, path: str) -> None:
    """Make a folder that belongs to an account, as systemd makes those of a unit. One that is there stays as it is.

    Below a folder of the account, it is the account that makes it: what lies between is then its own, too, and root does not follow
    a link that the account could plant there.

    Raises:
        InferenceError: It cannot be made.
    """
    if os.path.isdir(path):
        return
    try:
        if any(os.lstat(folder).st_uid == account.pw_uid for folder in map(str, Path(path).parents) if os.path.lexists(folder)):
            subprocess.run(["mkdir", "-p", "-m", "0750", "--", path], check=True, stderr=subprocess.PIPE, text=True, **identity(account))
        else:
            os.makedirs(path, mode=0o750)
            os.chown(path, account.pw_uid, account.pw_gid)
    except OSError as error:
        raise InferenceError(path, f"it cannot be made ({error.strerror})", "a folder that can be made, or is there") from None
    except subprocess.CalledProcessError as error:
        found = f"{account.pw_name} cannot make it ({error.stderr.strip()})"
        raise InferenceError(path, found, "a folder that can be made, or is there") from None
