# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real serving venvs and a real nvcc, on a machine that needs no GPU (`make kernels`).

Needs a CUDA toolkit (CUDA_HOME, default /usr/local/cuda) and a C++ compiler. The venvs stay in BLACKWELL_KERNELS
(default: .cache/kernels in the checkout).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args
from ansible_collections.blackwell.inference.plugins.modules import gate
from ansible_collections.blackwell.inference.tests.unit.wheels import unpack

HERE = Path(__file__).parent
VENVS = Path(os.environ.get("BLACKWELL_KERNELS") or HERE.parents[1] / ".cache" / "kernels")
# The release beside each flashinfer: one before and one after sglang moves flashinfer's cache into its own.
SGLANG = {"0.6.1": "0.5.8", "0.7.4": "0.5.23"}


def _make_venv(folder: Path, fill: Callable[[Path, Path], None]) -> Path:
    """Make a venv once, and fill it, given its interpreter and site-packages; return the interpreter."""
    python, done = folder / "bin/python", folder / "done"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        (packages,) = (folder / "lib").glob("python*/site-packages")
        fill(python, packages)
        done.touch()
    return python


@pytest.fixture(scope="session")
def base_venv() -> Path:
    def fill(python: Path, _packages: Path) -> None:
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", HERE / "requirements.txt"]
        subprocess.run(install, check=True)

    _make_venv(VENVS / "base", fill)
    return VENVS / "base"


@pytest.fixture(scope="session")
def serving_python(base_venv) -> Callable[[str], Path]:
    """Give the interpreter of a venv that holds the released wheels of a flashinfer version and of sglang."""
    (shared,) = (base_venv / "lib").glob("python*/site-packages")

    def serving_python(flashinfer: str) -> Path:
        def fill(_python: Path, packages: Path) -> None:
            unpack("flashinfer-python", flashinfer, packages, "*")
            unpack("sglang", SGLANG[flashinfer], packages, "*")
            (packages / "beside.pth").write_text(f"{shared}\n")

        return _make_venv(VENVS / f"{flashinfer}-{SGLANG[flashinfer]}", fill)

    return serving_python


@pytest.fixture(scope="session")
def cuda_home() -> Path:
    folder = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    assert (folder / "bin/nvcc").is_file(), f"no nvcc in {folder}: name a CUDA toolkit in CUDA_HOME"
    return folder


@pytest.fixture
def environment(cuda_home, tmp_path) -> dict[str, str]:
    """The environment of a service, on a machine without a driver: an empty libcuda stands in for the linker."""
    stub = tmp_path / "stub"
    stub.mkdir()
    subprocess.run(["c++", "-shared", "-x", "c++", os.devnull, "-o", stub / "libcuda.so"], check=True)
    return {
        "HOME": str(tmp_path / "home"),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "CUDA_HOME": str(cuda_home),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{stub}",
        "LD_LIBRARY_PATH": f"{stub}:{cuda_home}/lib64",
    }


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a module of this collection; show what it logs, as builds take long."""

    def log(module, message, *arguments, **options):
        if not message.startswith("Invoked"):
            with capsys.disabled():
                sys.stdout.write(f"\n{message}")

    monkeypatch.setattr(AnsibleModule, "log", log)

    def run(module, check: bool = False, **options) -> dict:
        with patch_module_args({**options, "_ansible_check_mode": check}), pytest.raises(SystemExit):
            module.main()
        result = json.loads(capsys.readouterr().out)
        assert not result.get("failed"), result["msg"]
        return result

    return run


@pytest.fixture
def open_gates(run, tmp_path):
    """Open the gates of a venv for 12.0; restore them after the test."""
    opened = []

    def open_gates(python: Path, **more: object) -> dict:
        options = {"python": str(python), "state_dir": str(tmp_path / "state"), "compute_capability": ["12.0"]}
        opened.append(options)
        return run(gate, state="open", **options, **more)

    yield open_gates
    for options in opened:
        run(gate, state="restored", **options)
