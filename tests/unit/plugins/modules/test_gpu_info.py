# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import platform
import venv
from pathlib import Path

import pytest
import yaml
from ansible_collections.blackwell.inference.plugins.module_utils import _gpu_host as gpu_host
from ansible_collections.blackwell.inference.plugins.modules import gpu_info
from ansible_collections.blackwell.inference.tests.unit.conftest import program

SIMULATED = str(Path(__file__).resolve().parents[4] / "demo/nvidia-smi")


@pytest.fixture
def run(run_here):
    """Run the module, return its result."""
    return lambda check=False, **options: run_here(gpu_info, options, check=check)


@pytest.fixture
def script(tmp_path):
    """Write an nvidia-smi, return its path."""
    return lambda body: program(tmp_path / "nvidia-smi", body)


@pytest.mark.parametrize("check", [False, True])
def test_gpus(run, check):
    result = run(check, executable=SIMULATED)
    assert result["changed"] is False
    assert "diff" not in result
    assert result["count"] == len(result["gpus"]) == 8
    assert result["gpus"][7]["name"] == "NVIDIA RTX PRO 6000 Blackwell Server Edition (simulated)"
    assert result["gpus"][7]["memory_mib"] == 97887
    assert (result["compute_capability"], result["compute_capabilities"], result["architecture"]) == ("12.0", ["12.0"], "Blackwell")
    assert (result["driver_version"], result["cuda_version"]) == ("580.95.05", "13.0")
    assert {"gpus": [0, 1], "link": "PHB", "peer_access": "OK"} in result["links"]


def test_everything_returned_is_documented(run):
    documented = yaml.safe_load(gpu_info.RETURN)
    result = run(executable=SIMULATED, environment={"MAX_JOBS": 10**6})
    assert set(documented) == set(result) - {"changed", "invocation", "warnings"}
    for name in ("gpus", "links", "problems"):
        assert set(documented[name]["contains"]) == set(result[name][0])
    for name in ("host", "toolkit", "venv"):
        assert set(documented[name]["contains"]) == set(result[name])
    assert yaml.safe_load(gpu_info.DOCUMENTATION)["options"]["ignore"]["choices"] == list(gpu_host.IDS)


def test_only_with_an_environment_is_more_than_the_gpus_looked_at(run):
    assert not {"host", "toolkit", "venv", "problems", "warnings"} & set(run(executable=SIMULATED))


@pytest.mark.parametrize("check", [False, True])
def test_a_problem_is_a_warning_that_names_the_host(run, check):
    result = run(check, executable=SIMULATED, environment={"MAX_JOBS": 10**6, "UNSET": None})
    (message,) = (problem["message"] for problem in result["problems"] if problem["id"] == "max_jobs")
    assert message.startswith("environment MAX_JOBS: 1000000 compilers")
    assert f"{platform.node()}: {message}" in str(result["warnings"])
    assert not result["changed"]


def test_a_problem_that_is_ignored_is_neither_returned_nor_warned_of(run):
    result = run(executable=SIMULATED, environment={"MAX_JOBS": 10**6}, ignore=["max_jobs"])
    assert "MAX_JOBS" not in str(result["problems"]) + str(result.get("warnings"))


def test_what_is_fatal_is_left_to_those_who_asked(run, tmp_path):
    venv.create(tmp_path, symlinks=True)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    (packages / "torch").mkdir()
    (packages / "torch/__init__.py").touch()
    (packages / "torch/version.py").write_text("cuda: Optional[str] = None\n")
    result = run(executable=SIMULATED, environment={}, python=str(tmp_path / "bin/python"))
    assert {problem["id"]: problem["fatal"] for problem in result["problems"]}["torch"]
    assert "torch" not in str(result.get("warnings"))
    assert "failed" not in result


def test_a_python_that_is_none_is_one_line(run, tmp_path):
    (tmp_path / "python").write_text("")
    assert "cannot be run" in run(executable=SIMULATED, environment={}, python=str(tmp_path / "python"))["msg"]


NONE = {"gpus": [], "count": 0, "compute_capability": None, "compute_capabilities": [], "driver_version": None, "links": []}


def test_no_gpu_is_a_success(run, script):
    result = run(executable=script("echo No devices were found; exit 6"))
    assert result.items() >= NONE.items()
    assert "failed" not in result


def test_missing_is_a_success_only_where_allowed(run, tmp_path):
    assert run(executable="no-nvidia-smi", allow_missing=True).items() >= NONE.items()
    missing = str(tmp_path / "nvidia-smi")
    for options in ({"executable": "no-nvidia-smi"}, {"executable": missing}, {"executable": missing, "allow_missing": True}):
        result = run(**options)
        assert result["failed"]
        assert result["msg"] == f"executable: {options['executable']} does not exist on this host; expected the name or path of nvidia-smi."


@pytest.mark.parametrize("allow_missing", [False, True])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo Failed to initialize NVML: Driver/library version mismatch; exit 18", "Driver/library version mismatch"),
        ("exec sleep 60", "hangs; expected an answer within 1 s."),
        ("exit 1", "exit status 1, no answer"),
    ],
)
def test_trouble_is_a_failure(run, script, body, message, allow_missing):
    result = run(executable=script(body), timeout=1, allow_missing=allow_missing)
    assert result["failed"]
    assert message in result["msg"]
    assert "\n" not in result["msg"]


def test_timeout_must_be_positive(run):
    assert run(executable=SIMULATED, timeout=0)["msg"] == "timeout: 0; expected seconds, more than 0."
