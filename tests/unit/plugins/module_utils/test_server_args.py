# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The flags that are read from a release are those of its own parser, which runs here with stand-ins for torch."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._server_args import RENAMED, SECRETS, check, read_flags
from ansible_collections.blackwell.inference.tests.unit.wheels import unpack

RELEASES = ["0.5.2", "0.5.3", "0.5.5.post3", "0.5.8", "0.5.10", "0.5.12.post1", "0.5.13.post1", "0.5.14", "0.5.18", "0.5.20", "0.5.23"]
PARSER = Path(__file__).parents[2] / "fixtures" / "sglang_parser.py"
MEMBERS = [
    f"sglang/srt/{pattern}"
    for pattern in ("server_args*.py", "environ.py", "arg_groups/*", "utils/*.py", "utils.py", "parser/*.py", "function_call/*.py")
] + ["sglang/srt/model_executor/cuda_graph_config.py", "sglang/*/kv_canary/consts.py"]


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """Return a function from a version to the folder that holds what declares its arguments."""
    return functools.cache(lambda version: unpack("sglang", version, tmp_path_factory.mktemp("release"), *MEMBERS))


@pytest.fixture(scope="module")
def flags_of(release):
    return functools.cache(lambda version: read_flags(str(release(version) / "sglang")))


@pytest.fixture
def upstream(release):
    """Return a function that asks a release's own parser."""

    def ask(version, argv=(), config=None):
        return ask_for(version, {"argv": list(argv), "config": config and str(config)})

    def ask_for(version, request):
        command = [sys.executable, PARSER, release(version)]
        answer = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)

    ask.all = ask_for
    return ask


@pytest.fixture
def parsed(upstream, tmp_path):
    """Return a function that starts upstream's parser as the unit does, with the configuration file and the rest as arguments."""

    def parse(version, checked):
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(checked.config))
        answer = upstream(version, checked.argv, config if checked.config else None)
        assert answer["error"] is None, answer["error"]
        return answer["parsed"]

    return parse


@pytest.mark.parametrize("version", RELEASES)
def test_flags_are_those_of_upstreams_parser(version, flags_of, upstream):
    theirs = upstream(version)["flags"]
    ours = {
        name: {
            "dest": flag.dest,
            "kind": flag.kind,
            "type": flag.type if flag.type in ("int", "float") and flag.kind not in ("switch", "toggle") else "other",
            "choices": None if flag.choices is None else sorted(map(str, flag.choices)),
            "required": flag.required,
        }
        for flag in flags_of(version)
        for name in flag.names
    }
    assert ours == theirs


@pytest.mark.parametrize("version", RELEASES)
def test_upstream_parses_what_check_returns(version, flags_of, parsed):
    options = {
        "model_path": "some/model",
        "tensor_parallel_size": "8",
        "mem-fraction-static": 0.85,
        "--max-running-requests": 1024,
        "attention_backend": "flashinfer",
        "disable_custom_all_reduce": True,
        "enable_metrics": False,
        "cuda_graph_max_bs": 32,
        "cuda_graph_bs": [1, 2, 4],
        "json_model_override_args": {"a": 1},
        "lora_paths": ["one=/a", "two=/b"],
        "watchdog_timeout": None,
        "served_model_name": "-dashed",
    }
    checked = check(flags_of(version), options)
    assert (checked.unknown, checked.invalid) == ([], [])
    values = parsed(version, checked)
    assert values.get("tp_size", values.get("tensor_parallel_size")) == 8
    assert values["mem_fraction_static"] == 0.85
    assert values["max_running_requests"] == 1024
    assert values["disable_custom_all_reduce"] is True
    assert values["enable_metrics"] is False
    assert values.get("cuda_graph_max_bs_decode", values.get("cuda_graph_max_bs")) == 32
    assert values.get("cuda_graph_bs_decode", values.get("cuda_graph_bs")) == [1, 2, 4]
    assert json.loads(values["json_model_override_args"]) == {"a": 1}
    assert values["lora_paths"] == ["one=/a", "two=/b"]
    assert values["served_model_name"] == "-dashed"


@pytest.mark.parametrize("version", RELEASES)
def test_every_flag_survives_the_way_through_the_configuration_file(version, flags_of, parsed):
    """One value for each flag: what check puts into the file, upstream's own merger accepts."""
    samples = {"int": 3, "float": 0.5, "json": [1], "suffixed": 4096}
    options = {}
    for flag in flags_of(version):
        if flag.plain and flag.names[0] not in (*SECRETS, "config", "dllm-algorithm-config"):
            value = flag.choices[0] if flag.choices else samples.get(flag.type, "text")
            options[flag.names[0]] = True if flag.kind == "switch" else [value, value] if flag.kind == "list" else value
    options["json-model-override-args"] = {}
    if any("cuda-graph-config" in flag.names for flag in flags_of(version)):
        options["cuda-graph-config"] = {}
    checked = check(flags_of(version), options)
    assert (checked.unknown, checked.invalid) == ([], [])
    values = parsed(version, checked)
    for flag in flags_of(version):
        if flag.names[0] in options and flag.type != "json" and options[flag.names[0]] != {}:
            assert values[flag.dest] == options[flag.names[0]], flag


@pytest.mark.parametrize("version", ["0.5.3", "0.5.8", "0.5.23"])
def test_upstream_takes_every_value_that_check_takes(version, flags_of, upstream, tmp_path):
    """Each flag with each kind of value; what is refused here is not asked there."""
    flags = flags_of(version)
    asked, requests = [], []
    for flag in flags:
        for value in ("text", "-dash", "4k", 3, -3, 1.5, True, False, [1, 2], ["a", "b"], {}, "", *(flag.choices or ())[:2]):
            name = flag.names[0]
            if name in (*SECRETS, "config"):
                continue
            checked = check(flags, {"model-path": "m", name: value})
            if not (checked.unknown or checked.invalid):
                config = tmp_path / f"{len(requests)}.yaml"
                config.write_text(json.dumps(checked.config))
                asked.append((name, value))
                requests.append({"argv": checked.argv, "config": str(config)})
    assert len(asked) > 2 * len(flags)
    refused = [(item, error) for item, error in zip(asked, upstream.all(version, requests)) if error]
    # Upstream looks into the JSON that a list of adapters may hold.
    assert [item for item in refused if item[0] != ("lora-paths", {})] == []


@pytest.mark.parametrize(
    ("version", "value", "expected"),
    [
        ("0.5.8", "trtllm", {"enable-flashinfer-allreduce-fusion": True}),
        ("0.5.8", "auto", {"enable-flashinfer-allreduce-fusion": True}),
        ("0.5.8", "off", {}),
        ("0.5.8", False, {}),  # what YAML makes of a bare off
        ("0.5.10", "trtllm", {"enable-flashinfer-allreduce-fusion": True}),
        ("0.5.10", "off", {"enforce-disable-flashinfer-allreduce-fusion": True}),
        ("0.5.14", "trtllm", {"flashinfer-allreduce-fusion-backend": "trtllm"}),
        ("0.5.23", "trtllm", {"flashinfer-allreduce-fusion-backend": "trtllm"}),
        ("0.5.23", "off", {"enforce-disable-flashinfer-allreduce-fusion": True}),
    ],
)
def test_fusion_is_called_what_the_release_calls_it(version, value, expected, flags_of):
    checked = check(flags_of(version), {"model_path": "x", "flashinfer_allreduce_fusion": value})
    assert checked.config == {"model-path": "x", **expected}
    assert checked.translated == {"flashinfer_allreduce_fusion": " ".join(f"--{name}" for name in expected)}
    assert (checked.unknown, checked.invalid) == ([], [])


def test_flags_of_other_releases_are_translated_for_fusion(flags_of):
    old, new = flags_of("0.5.8"), flags_of("0.5.23")
    assert check(old, {"model_path": "x", "flashinfer-allreduce-fusion-backend": "trtllm"}).config["enable-flashinfer-allreduce-fusion"]
    assert check(old, {"model_path": "x", "enforce-disable-flashinfer-allreduce-fusion": True}).config == {"model-path": "x"}
    assert check(new, {"model_path": "x", "flashinfer_allreduce_fusion": "mnnvl"}).config["flashinfer-allreduce-fusion-backend"] == "mnnvl"


@pytest.mark.parametrize("pair", RENAMED)
def test_renamed_options_are_taken_from_upstream(pair, flags_of):
    announced = {(name, flag.replacement.lstrip("-")) for version in RELEASES for flag in flags_of(version) for name in flag.names}
    assert pair in announced


def test_an_option_is_known_by_its_older_and_its_newer_name(flags_of):
    assert check(flags_of("0.5.23"), {"model_path": "x", "cuda_graph_max_bs": 8}).translated == {
        "cuda_graph_max_bs": "--cuda-graph-max-bs-decode"
    }
    assert check(flags_of("0.5.8"), {"model_path": "x", "cuda_graph_max_bs_decode": 8}).config["cuda-graph-max-bs"] == 8


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"max_runing_requests": 3}, "max_runing_requests: this release has no such option; the nearest is max-running-requests"),
        ({"zzzz": 3}, "zzzz: this release has no such option"),
        ({"attention_backend": "flashinferr"}, "the nearest is flashinfer)"),
        ({"tensor_parallel_size": "eight"}, "tensor_parallel_size: found 'eight'; expected a whole number"),
        ({"tensor_parallel_size": 1.5}, "tensor_parallel_size: found 1.5; expected a whole number"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size: found True; expected a whole number"),
        ({"mem_fraction_static": "most"}, "mem_fraction_static: found 'most'; expected a number"),
        ({"enable_metrics": "yes"}, "enable_metrics: found 'yes'; expected true or false"),
        ({"tokenizer_path": ["a"]}, "tokenizer_path: found a list; expected text"),
        ({"tp_size": 4, "tensor_parallel_size": 8}, "tensor_parallel_size: sets the same option as tp_size"),
        ({"api_key": "x"}, "api_key: it is a secret"),
        ({"flashinfer_allreduce_fusion": "mnnvl"}, "flashinfer_allreduce_fusion: found 'mnnvl'; expected one of auto, trtllm, off"),
        ({"model_path": None}, "model-path: missing"),
        ({"lora_paths": ["-a"]}, "lora_paths: found ['-a']; expected no item that starts with a dash"),
    ],
)
def test_what_the_release_does_not_take_is_told_in_one_line(options, line, flags_of):
    checked = check(flags_of("0.5.8"), {"model_path": "x", **options})
    [told] = [*checked.unknown, *checked.invalid]
    assert line in told
    assert "\n" not in told


def test_a_retired_flag_that_stops_the_server_is_refused(flags_of):
    [line] = check(flags_of("0.5.3"), {"model_path": "x", "enable_ep_moe": True}).invalid
    assert line.startswith("enable_ep_moe: this release has retired it (NOTE: --enable-ep-moe is deprecated. Please set `--ep-size`")


@pytest.mark.parametrize("value", [3, [1], "[1]", "null", "text"])
def test_a_json_object_is_expected_where_upstream_takes_no_other_json(value, flags_of):
    [line] = check(flags_of("0.5.23"), {"model_path": "x", "cuda_graph_config": value}).invalid
    assert line == f"cuda_graph_config: found {value!r}; expected a JSON object"


def test_secrets_are_placed_by_key_alone(flags_of):
    assert check(flags_of("0.5.8"), {"model_path": "x"}, ("api_key",)).hidden_keys == {"api_key": "api-key"}
    [line] = check(flags_of("0.5.8"), {"model_path": "x"}, ("watermark_key",)).unknown
    assert line.startswith("watermark_key: ")
    [line] = check(flags_of("0.5.2"), {"model_path": "x"}, ("api_key",)).invalid
    assert "on the command line alone" in line


def test_a_release_without_configuration_file_gets_arguments(flags_of):
    checked = check(flags_of("0.5.2"), {"model_path": "x", "tp_size": 2, "cuda_graph_bs": [1, 2], "enable_metrics": True})
    assert checked.config == {}
    assert checked.argv == ["--model-path=x", "--tp-size=2", "--cuda-graph-bs", "1", "2", "--enable-metrics"]


def test_source_of_another_shape_is_refused(tmp_path):
    with pytest.raises(InferenceError, match=r"server_args\.py is missing or is not Python"):
        read_flags(str(tmp_path / "sglang"))
    source = tmp_path / "sglang" / "srt" / "server_args.py"
    source.parent.mkdir(parents=True)
    source.write_text("class ServerArgs: pass\n")
    with pytest.raises(InferenceError, match=r"no ServerArgs\.add_cli_args"):
        read_flags(str(tmp_path / "sglang"))
    source.write_text("class ServerArgs:\n    def add_cli_args(parser):\n        parser.add_argument('--x')\n")
    with pytest.raises(InferenceError, match="1 flags"):
        read_flags(str(tmp_path / "sglang"))
