# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The profiles of sglang_server start with releases old and new, and say where they come from."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import yaml
from ansible_collections.blackwell.inference.plugins.module_utils._server_args import check, read_flags
from ansible_collections.blackwell.inference.plugins.module_utils._server_args_rules import contradictions, read_environment
from ansible_collections.blackwell.inference.tests.unit.wheels import unpack

PROFILES = sorted((Path(__file__).parents[4] / "roles" / "sglang_server" / "files" / "profiles").glob("*.yml"))
MEMBERS = ["sglang/srt/*.py", "sglang/srt/arg_groups/*", "sglang/srt/function_call/*.py", "sglang/srt/parser/*.py", "sglang/srt/utils/*.py"]


@pytest.fixture(scope="module")
def sglang(tmp_path_factory):
    return functools.cache(lambda version: str(unpack("sglang", version, tmp_path_factory.mktemp("release"), *MEMBERS) / "sglang"))


@pytest.mark.parametrize("version", ["0.5.8", "0.5.9", "0.5.14", "0.5.23"])
@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("fusion", ["off", "trtllm"])
def test_a_profile_starts_with_every_release(path, version, fusion, sglang):
    profile = yaml.safe_load(path.read_text())
    alone = profile["arguments"]["tensor_parallel_size"] == 1
    options = {**profile["arguments"], "flashinfer_allreduce_fusion": "off" if alone else fusion}
    checked = check(read_flags(sglang(version)), options, ("api_key",))
    assert (checked.unknown, checked.invalid) == ([], [])
    capability = "9.0" if "h200" in path.stem else "12.0"
    environment = profile.get("environment", {})
    assert all(isinstance(value, str) for value in environment.values())
    assert contradictions(checked.values, environment, read_environment(sglang(version)), capability) == []


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_a_profile_has_a_source_and_a_date(path):
    profile = yaml.safe_load(path.read_text())
    assert set(profile) <= {"source", "date", "hidden_size", "min_memory_mib", "arguments", "environment"}
    assert "trust_remote_code" not in profile["arguments"]  # nothing from the hub is run unasked
    assert profile["source"].startswith("https://")
    assert re.fullmatch(r"20\d\d-\d\d", profile["date"])
