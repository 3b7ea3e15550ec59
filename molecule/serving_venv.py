# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make the serving venv of a test host: the real wheels, for the Python 3.11 of Debian 12.

    python serving_venv.py FOLDER DISTRIBUTION==VERSION ...

The venv is relocatable, since it has no pip and no scripts. An interrupted run leaves no FOLDER behind.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit"))
from wheels import unpack


def main(folder: Path, requirements: list[str]) -> None:
    """Make ``folder`` unless it exists."""
    if folder.exists():
        return
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for requirement in requirements:
        distribution, _equals, version = requirement.partition("==")
        unpack(distribution, version, unfinished / "lib" / "python3.11" / "site-packages", "*")
    (unfinished / "bin").mkdir()
    (unfinished / "bin" / "python").symlink_to("/usr/bin/python3")
    (unfinished / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.11\n")
    unfinished.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
