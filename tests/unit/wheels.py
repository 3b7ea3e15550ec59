# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The real wheels that tests read, downloaded once into BLACKWELL_WHEELS (default: .cache/wheels in the checkout)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

WHEELS = Path(os.environ.get("BLACKWELL_WHEELS") or Path(__file__).parents[2] / ".cache" / "wheels")
# Some wheels are for one Python and platform: the same ones everywhere, whatever runs the tests.
_TARGET = ["--python-version=3.11", "--platform=manylinux_2_34_x86_64", "--only-binary=:all:"]


def wheel(distribution: str, version: str) -> Path:
    """Return the path of a wheel, e.g. ``wheel("flashinfer-python", "0.6.1")``."""
    pattern = f"{distribution.replace('-', '_')}-{version}-*.whl"
    if not any(WHEELS.glob(pattern)):
        WHEELS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=WHEELS) as folder:
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", *_TARGET]
            subprocess.run([*download, "--dest", folder, f"{distribution}=={version}"], check=True)
            for path in Path(folder).glob("*.whl"):
                path.replace(WHEELS / path.name)
    return next(WHEELS.glob(pattern))


def unpack(distribution: str, version: str, target: Path, *members: str) -> Path:
    """Unpack the members of a wheel that match a pattern such as ``flashinfer/jit/*.py``, with its metadata; return ``target``."""
    with zipfile.ZipFile(wheel(distribution, version)) as archive:
        for name in archive.namelist():
            if ".dist-info/" in name or any(fnmatch(name, member) for member in members):
                archive.extract(name, target)
    return target
