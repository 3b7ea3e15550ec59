# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role in runs of ansible-playbook: it installs the released wheels, without what they need for GPUs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from ansible_collections.blackwell.inference.tests.unit.playbook import recap, run_role
from ansible_collections.blackwell.inference.tests.unit.wheels import WHEELS, wheel

PINS = ["flashinfer-python==0.6.1", "sglang==0.5.8"]


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Run the role on this machine; return (changed, failed) and what was printed."""
    folder = tmp_path_factory.mktemp("serving_venv")
    for distribution, version in (pin.split("==") for pin in (*PINS, "sglang==0.5.9")):
        wheel(distribution, version)

    def play(*options: str, **variables: object) -> tuple[tuple[int, int], str]:
        variables = {
            "serving_venv_path": str(folder / "opt/venv"),
            "serving_venv_base_python": sys.executable,
            "serving_venv_extra_args": ["--no-deps", "--no-index", "--find-links", str(WHEELS)],
            **variables,
        }
        printed = run_role("serving_venv", {"here": variables}, folder, "--diff", *options, UV_CACHE_DIR=str(folder / "uv"))
        counts = recap(printed)["here"]
        return (counts["changed"], counts["failed"]), printed

    play.venv = folder / "opt/venv"
    return play


def test_released_packages_are_installed_once_and_only_where_they_are_asked_for(play):
    assert play()[0] == (0, 0)
    assert not play.venv.exists(), "by default nothing is installed"
    assert play("--tags", "patch", serving_venv_packages=PINS)[0] == (0, 0)
    assert play("--check", serving_venv_packages=PINS)[0] == (1, 0)
    assert not play.venv.exists(), "neither other tags nor check mode install"

    first, printed = play(serving_venv_packages=PINS)
    assert first == (1, 0), printed
    assert "+flashinfer-python==0.6.1\n+sglang==0.5.8\n" in printed
    find = "import importlib.util as u, json; print(json.dumps([bool(u.find_spec(name)) for name in ('flashinfer', 'sglang')]))"
    found = subprocess.run([play.venv / "bin/python", "-I", "-c", find], stdout=subprocess.PIPE, check=True).stdout
    assert json.loads(found) == [True, True]
    assert play("--tags", "install", serving_venv_packages=PINS)[0] == (0, 0), "a second run changes nothing"

    upgrade = [PINS[0], "sglang==0.5.9"]
    predicted, upgraded = play("--check", serving_venv_packages=upgrade), play(serving_venv_packages=upgrade)
    assert predicted[0] == upgraded[0] == (1, 0)
    for printed in (predicted[1], upgraded[1]):
        assert "-sglang==0.5.8\n+sglang==0.5.9\n" in printed
    assert sorted(path.name for path in play.venv.glob("lib/python3*/site-packages/sglang-*")) == ["sglang-0.5.9.dist-info"]


def test_a_bad_pin_is_one_line(play):
    result, printed = play(serving_venv_packages=["sglang"])
    assert result == (0, 1)
    assert "packages: 'sglang'; expected name==version, e.g. sglang==0.5.18." in " ".join(printed.split())
