# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json

import pytest
from ansible_collections.blackwell.inference.tests.unit.conftest import run_module
from ansible_collections.blackwell.inference.tests.unit.wheels import unpack

OPTIONS = {"model_path": "some/model", "tensor_parallel_size": 8, "flashinfer_allreduce_fusion": "trtllm"}


@pytest.fixture(scope="module")
def site_packages(tmp_path_factory):
    return str(unpack("sglang", "0.5.8", tmp_path_factory.mktemp("site"), "sglang/srt/*.py", "sglang/srt/utils/*.py"))


def run(check=False, **options):
    return run_module("server_args_info", options, check=check)


@pytest.mark.parametrize("check", [False, True])
def test_options_as_this_release_takes_them(site_packages, check):
    result = run(site_packages=site_packages, arguments=OPTIONS, check=check)
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
    assert run(site_packages=site_packages, arguments=OPTIONS, config_file=str(config))["secret_written"] is False
    config.write_text("model-path: m\nport: 1\n")
    assert run(site_packages=site_packages, arguments=OPTIONS, config_file=str(config))["secret_written"] is False
    config.write_text("model-path: m\napi-key: to-be-told-to-nobody\n")
    result = run(site_packages=site_packages, arguments=OPTIONS, config_file=str(config))
    assert result["secret_written"] is True
    assert "to-be-told-to-nobody" not in json.dumps(result)


def test_files_that_others_have_written_are_told(site_packages, tmp_path):
    ours, theirs, empty, missing, folder = (tmp_path / name for name in ("ours", "theirs", "empty", "missing", "folder"))
    ours.write_text("# Managed by blackwell.inference\n[Unit]\n")
    theirs.write_text("[Unit]\n")
    empty.touch()
    folder.mkdir()
    result = run(site_packages=site_packages, arguments=OPTIONS, replaces=[str(path) for path in (ours, theirs, empty, missing, folder)])
    assert result["written_by_hand"] == [str(theirs)]


def test_a_folder_without_sglang_is_told_in_one_line(tmp_path):
    assert "sglang is not installed there" in run(site_packages=str(tmp_path)).msg
