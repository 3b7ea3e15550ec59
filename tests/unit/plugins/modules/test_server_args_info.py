# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module as Ansible runs it: a program that reads its options from standard input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.tests.unit.wheels import unpack

MODULE = Path(__file__).parents[4] / "plugins" / "modules" / "server_args_info.py"
OPTIONS = {"model_path": "some/model", "tensor_parallel_size": 8, "flashinfer_allreduce_fusion": "trtllm"}


@pytest.fixture(scope="module")
def site_packages(tmp_path_factory):
    return unpack("sglang", "0.5.8", tmp_path_factory.mktemp("site"), "sglang/srt/*.py", "sglang/srt/utils/*.py")


def run(**options):
    arguments = json.dumps(
        {"ANSIBLE_MODULE_ARGS": {key: value if isinstance(value, (bool, dict)) else str(value) for key, value in options.items()}}
    )
    answer = subprocess.run(
        [sys.executable, MODULE], input=arguments, capture_output=True, text=True, check=False, cwd=MODULE.parents[2], env=environment()
    )
    assert "Traceback" not in answer.stderr + answer.stdout, answer.stderr
    return json.loads(answer.stdout)


def environment():
    return {"PYTHONPATH": str(MODULE.parents[2] / ".venv" / "collections"), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}


@pytest.mark.parametrize("check", [False, True])
def test_options_as_this_release_takes_them(site_packages, check):
    result = run(site_packages=site_packages, arguments=OPTIONS, _ansible_check_mode=check)
    assert result["changed"] is False
    assert result["version"] == "0.5.8"
    assert result["config"] == {"model-path": "some/model", "tensor-parallel-size": 8, "enable-flashinfer-allreduce-fusion": True}
    assert result["translated"] == {"flashinfer_allreduce_fusion": "--enable-flashinfer-allreduce-fusion"}
    assert [result[key] for key in ("argv", "unknown", "invalid", "contradictions")] == [[], [], [], []]


def test_problems_are_returned_or_fail_the_run(site_packages):
    wrong = {**OPTIONS, "tensor_parallel_size": 6, "tp": 1, "attention_backend": "x"}
    result = run(site_packages=site_packages, arguments=wrong)
    assert [len(result[key]) for key in ("unknown", "invalid", "contradictions")] == [1, 1, 1]
    strict = run(site_packages=site_packages, arguments=wrong, strict=True)
    assert strict["failed"] is True
    assert strict["msg"].startswith("sglang 0.5.8 cannot be started with these options:\n")
    assert len(strict["msg"].splitlines()) == 4


def test_a_secret_in_the_present_file_is_told(site_packages, tmp_path):
    config = tmp_path / "sglang.yaml"
    assert run(site_packages=site_packages, arguments=OPTIONS, config_file=config)["secret_written"] is False
    config.write_text("model-path: m\nport: 1\n")
    assert run(site_packages=site_packages, arguments=OPTIONS, config_file=config)["secret_written"] is False
    config.write_text("model-path: m\napi-key: to-be-told-to-nobody\n")
    result = run(site_packages=site_packages, arguments=OPTIONS, config_file=config)
    assert result["secret_written"] is True
    assert "to-be-told-to-nobody" not in json.dumps(result)


def test_a_folder_without_sglang_is_told_in_one_line(tmp_path):
    result = run(site_packages=tmp_path)
    assert result["failed"] is True
    assert "sglang is not installed there" in result["msg"]
    assert "\n" not in result["msg"]
