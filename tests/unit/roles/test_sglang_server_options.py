# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What follows from the options of the role, templated as Ansible does it; no play is run."""

from __future__ import annotations

import json
import subprocess
import sys
from base64 import b64encode
from pathlib import Path

import pytest
import yaml
from ansible_collections.blackwell.inference.tests.unit.playbook import ROOT

NAME = "sglang_server_{}".format


@pytest.fixture(scope="module")
def templated():
    """Return a function from a variable, and from what a user has set, to its value; names go without the prefix of the role."""
    command = [sys.executable, Path(__file__).with_name("templated.py"), ROOT / "roles/sglang_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:

        def value_of(variable, run_tags=("all",), **options):
            question = [NAME(variable), {"ansible_run_tags": run_tags, **{NAME(name): value for name, value in options.items()}}]
            print(json.dumps(question), file=program.stdin, flush=True)
            return json.loads(program.stdout.readline())

        yield value_of
        program.stdin.close()


@pytest.fixture
def refusals(templated):
    return lambda **options: templated("refusals", **options)


def test_the_defaults_are_refused_nowhere(refusals):
    assert refusals() == []


@pytest.mark.parametrize("option", ["arguments", "secrets"])
def test_a_flag_that_sets_fusion_is_refused_wherever_it_comes_from(option, refusals):
    flags = {
        "enable_flashinfer_allreduce_fusion": True,
        "--flashinfer-allreduce-fusion-backend": "trtllm",
        "flashinfer_allreduce_fusion": None,
        "enforce-disable-flashinfer-allreduce-fusion": True,
    }
    for name, line in zip(flags, refusals(**{option: flags}), strict=True):
        spelt = name.lstrip("-").replace("-", "_")
        assert (
            line == f"{spelt}: it was found in sglang_server_{option}; expected none that sets fusion there. Set sglang_server_allreduce."
        )


def test_a_flag_that_sets_fusion_is_refused_in_a_profile(tmp_path, refusals):
    profile = tmp_path / "own.yml"
    profile.write_text(yaml.safe_dump({"arguments": {"model-path": "m", "enable-flashinfer-allreduce-fusion": True}}))
    [line] = refusals(profile=str(profile))
    assert line.startswith("enable_flashinfer_allreduce_fusion: it was found in sglang_server_profile; expected none")
    profile.write_text(yaml.safe_dump({"arguments": {"model-path": "m"}, "environment": {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}}))
    [line] = refusals(profile=str(profile))
    assert line.startswith("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE: it was found in the environment of the server; expected it unset.")


@pytest.mark.parametrize(
    ("config", "unit", "asks"),
    [
        # The comment says what was decided, the options say what is asked for.
        ("# Allreduce: nccl.\nenable-flashinfer-allreduce-fusion: true\n", "", True),
        ("# Allreduce: fusion.\nmodel-path: m\n", "", False),
        ("flashinfer-allreduce-fusion-backend: trtllm\n", "", True),
        ("enforce-disable-flashinfer-allreduce-fusion: true\n", "", False),
        ("served-model-name: x-enable-flashinfer-allreduce-fusion\n", "", False),
        ("", 'Type=exec\nExecStart="python" -m sglang.launch_server "--model-path=m" "--enable-flashinfer-allreduce-fusion"\n', True),
        ("", 'Type=exec\nExecStart="python" -m sglang.launch_server "--model-path=m"\n', False),
        (None, None, False),
    ],
)
def test_a_server_asks_for_fusion_by_its_options(config, unit, asks, templated):
    read = [{"msg": "not found"} if text is None else {"content": b64encode(text.encode()).decode()} for text in (config, unit)]
    assert templated("asks_for_fusion", configured={"results": read}) is asks


def test_options_replace_those_of_the_profile_however_either_is_written(tmp_path, templated):
    profile = tmp_path / "own.yml"
    profile.write_text(yaml.safe_dump({"arguments": {"--model-path": "m", "tp-size": 8, "mem-fraction-static": 0.8}}))
    options = templated("all_arguments", profile=str(profile), arguments={"tp": 2, "mem_fraction_static": None, "--port": 1})
    assert options == {
        "model_path": "m",
        "tensor_parallel_size": 2,
        "mem_fraction_static": None,
        "port": 1,
        "flashinfer_allreduce_fusion": "off",
    }


def test_each_wrong_option_is_one_line(refusals):
    wrong = {
        "arguments": {"mem-fraction-static": 0.7, "mem_fraction_static": 0.9, "tp": 4, "--tensor-parallel-size": 8, "port": 70000},
        "environment": {"MAX_JOBS": "x y"},
    }
    assert refusals(**wrong) == [
        "port: 70000 was found in sglang_server_arguments; expected 1 to 65535.",
        "MAX_JOBS: x y was found in sglang_server_environment; expected a number, 1 or more.",
        "mem_fraction_static: it was found in sglang_server_arguments in more than one spelling; expected one.",
        "tensor_parallel_size: it was found in sglang_server_arguments in more than one spelling; expected one.",
    ]


def test_what_is_no_mapping_is_told_without_its_value(refusals):
    lines = refusals(arguments='{"port": 70000}', environment=["A=1"], secrets="api_key=a-secret", secret_environment=None)
    assert lines[0] == "sglang_server_arguments: no mapping was found; expected one. With -e: -e '{\"sglang_server_arguments\": {...}}'"
    assert [line.partition(":")[0] for line in lines[1:]] == [NAME("environment"), NAME("secrets"), NAME("secret_environment")]
    assert "a-secret" not in "".join(lines)


@pytest.mark.parametrize("name", ["", "../x", "-a"])
def test_a_name_that_leads_elsewhere_is_refused_in_every_state(name, refusals):
    line = f'sglang_server_name: {name} was found; expected letters, digits and any of ":_.@-", the first one a letter or a digit.'
    assert refusals(name=name, state="absent") == refusals(name=name) == [line]


def test_a_server_that_goes_is_asked_for_its_name_alone(refusals):
    assert refusals(name="glm-5.nvfp4_a@1", state="absent", profile="gone", arguments={"port": 70000}) == []


@pytest.mark.parametrize(
    ("host", "secrets", "exposed"),
    [
        ("::", {"admin_api_key": "k"}, True),
        ("127.0.0.1.example.com", {"api_key": ""}, True),
        ("10.1.2.3", {}, True),
        ("10.1.2.3", {"api-key": "k"}, False),
        ("127.1.2.3", {}, False),
        ("localhost", {}, False),
        ("::1", {}, False),
        (None, {}, False),
    ],
)
def test_whether_anybody_who_reaches_the_host_may_use_the_server(host, secrets, exposed, templated):
    assert templated("exposed", arguments={"--host": host}, secrets=secrets) is exposed
