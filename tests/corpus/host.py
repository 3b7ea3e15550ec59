# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A site-packages folder with two real releases in it, and what is done to it."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from ansible_collections.blackwell.inference.plugins.module_utils._catalogue import GATES
from ansible_collections.blackwell.inference.tests.corpus.releases import Pair
from ansible_collections.blackwell.inference.tests.unit.wheels import wheel

CHECKOUT = Path(__file__).parents[2]
ORACLE_PYTHON = CHECKOUT / ".cache" / "oracle-venv" / "bin" / "python"
# What the gates and the oracle need of each package; all of it where that is little.
NEEDED = {
    "flashinfer-python": (
        "flashinfer/*.py",
        "flashinfer/gemm/*.json",
        "flashinfer/data/csrc/*.jinja",
        *{place.file for gate in GATES for place in gate.places},
    ),
    "sglang": (
        "sglang/version.py",
        "sglang/_version.py",
        "sglang/srt/environ.py",
        "sglang/srt/runtime_context.py",
        "sglang/srt/utils.py",
        "sglang/srt/utils/*.py",
        "sglang/srt/layers/layer_boundary/*.py",
        *{file for gate in GATES for file in (*(place.file for place in gate.places), *(use.file for use in gate.path))},
    ),
}
LEFT_OUT = ("flashinfer/data/*.py",)  # vendored libraries


class Host:
    """Two real releases in a folder, as pip would have put them there.

    Args:
        folder: Where the folder is made.
        pair: The releases.
    """

    def __init__(self, folder: Path, pair: Pair) -> None:
        self.site, self.state = folder / "site-packages", folder / "state"
        for distribution, version in (("flashinfer-python", pair.flashinfer), ("sglang", pair.sglang)):
            with zipfile.ZipFile(wheel(distribution, version)) as archive:
                archive.extractall(self.site, filter(_wanted(distribution), archive.namelist()))
        self.pristine = self.files()

    def gate(self, *capabilities: str, module: str = "gate", **options: object) -> dict:
        """What the real module ``gate``, run as a program, returns on a host with GPUs of ``capabilities``."""
        given = {"site_packages": str(self.site), "state_dir": str(self.state), "compute_capability": list(capabilities), **options}
        done = subprocess.run(
            [sys.executable, CHECKOUT / "plugins" / "modules" / f"{module}.py"],
            input=json.dumps({"ANSIBLE_MODULE_ARGS": given}),
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT / ".venv" / "collections")},
        )
        assert done.stdout, done.stderr
        result = json.loads(done.stdout)
        assert not result.get("failed"), result["msg"]
        return result

    def oracle(self) -> dict:
        """What upstream's code answers, executed: see oracle.py."""
        assert ORACLE_PYTHON.exists(), f"{ORACLE_PYTHON} is missing; run `make oracle`"
        done = subprocess.run(
            [ORACLE_PYTHON, Path(__file__).with_name("oracle.py"), self.site], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def files(self) -> dict[str, bytes]:
        """Every file by its name."""
        return {str(path.relative_to(self.site)): path.read_bytes() for path in sorted(self.site.rglob("*")) if path.is_file()}

    def not_as_recorded(self) -> list[str]:
        """The files that are not what RECORD of their package says, or that it does not know."""
        recorded = {}
        for record in self.site.glob("*.dist-info/RECORD"):
            with record.open(encoding="utf-8", newline="") as file:
                recorded.update({row[0]: row[1] for row in csv.reader(file)})
        return [name for name, content in self.files().items() if recorded.get(name) not in ("", _recorded(content))]


def _wanted(distribution: str):
    def wanted(name: str) -> bool:
        needed = ".dist-info/" in name or any(fnmatch(name, pattern) for pattern in NEEDED[distribution])
        return needed and not any(fnmatch(name, pattern) for pattern in LEFT_OUT)

    return wanted


def _recorded(content: bytes) -> str:
    return f"sha256={base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip('=')}"
