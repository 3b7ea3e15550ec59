# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Verdicts on servers that a script plays: time passes only when the watcher sleeps or waits for an answer."""

from __future__ import annotations

import json

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._health import Answer, Log, Unit, describe, watch

RUNNING = Unit("active", "running", 0, "success", "", 0)
DIED = Unit("activating", "auto-restart", 0, "exit-code", "exited", 1)
KILLED = Unit("failed", "failed", 0, "signal", "killed", 9)
OK = Answer(200, b"{}", "")
BUSY = Answer(503, b"", "")
REFUSED = Answer(None, b"", "[Errno 111] Connection refused")
TIMEOUT = Answer(None, b"", "timeout")
TEXT = Answer(200, json.dumps({"text": "12", "meta_info": {"completion_tokens": 8}}).encode(), "")
NAN = Answer(200, json.dumps({"text": "!!!!!!!!", "meta_info": {"completion_tokens": 8}}).encode(), "")
INFO = {"version": "0.5.8", "model_path": "m", "tp_size": 2, "enable_flashinfer_allreduce_fusion": True, "api_key": "sekret"}
START = "server_args=ServerArgs(model_path='m', tp_size=2)"
RANKS = [
    "[TP0] FlashInfer workspace initialized for rank 0, world_size 2",
    "[TP1] FlashInfer workspace initialized for rank 1, world_size 2",
]


class Script:
    """A host that follows a script: each entry holds from its second on."""

    def __init__(self, unit=((0, RUNNING),), log=(), health=((0, REFUSED),), generate=((0, TEXT),), compiling=(), stuck=()):
        self.time = 0.0
        self.script = {"unit": unit, "health": health, "generate": generate}
        self.log = list(log)
        self.compile_times = compiling
        self.stuck = list(stuck)
        self.requests = []

    def _at(self, name):
        return [value for second, value in self.script[name] if second <= self.time][-1]

    def unit(self):
        return self._at("unit")

    def lines(self):
        told = [line for second, line in self.log if second <= self.time]
        self.log = self.log[len(told) :]
        return told

    def compiling(self):
        return any(begin <= self.time < end for begin, end in self.compile_times)

    def stuck_gpus(self):
        return self.stuck

    def request(self, path, body, timeout):
        self.requests.append((self.time, path, body))
        if path == "/server_info":
            return Answer(404, b"", "")
        if path == "/get_server_info":
            return Answer(200, json.dumps(INFO).encode(), "")
        answer = self._at("health" if path == "/health" else "generate")
        self.time += timeout if answer is TIMEOUT else 0
        return answer

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += max(seconds, 0.5)


def verdict(script, timeout=1800, interval=10, canaries=1):
    return watch(script, timeout, interval, canaries)


def test_ready_is_a_request_of_ours_that_was_answered():
    script = Script(
        log=[(1, RANKS[0]), (1, RANKS[1]), (100, "Load weight end. elapsed=98 s")], health=[(0, REFUSED), (200, BUSY), (400, OK)]
    )
    report = verdict(script, canaries=3)
    assert (report.state, report.diagnosis) == ("ready", None)
    assert report.server == {"version": "0.5.8", "model_path": "m", "tp_size": 2, "fusion": "active"}
    assert 400 <= report.seconds < 415
    assert [entry["line"] for entry in report.timeline] == ["", "Load weight end. elapsed=98 s", "Load weight end. elapsed=98 s"]
    prompts = [body["text"] for _time, path, body in script.requests if path == "/generate"]
    assert len(set(prompts)) == 3
    assert "sekret" not in repr(report)


def test_a_dead_server_is_told_at_once_with_the_first_reason():
    log = [
        (60, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        (61, "Received sigquit from a child process. It usually means the child failed."),
        (62, "RuntimeError: Address already in use"),
    ]
    report = verdict(Script(unit=[(0, RUNNING), (62, DIED)], log=log))
    assert report.state == "failed"
    assert report.diagnosis["signature"] == "gpu-memory"
    assert report.diagnosis["line"].startswith("torch.OutOfMemoryError")
    assert report.seconds < 70


def test_a_consequence_is_a_reason_only_where_nothing_else_is():
    log = [(1, "Received sigquit from a child process")]
    assert verdict(Script(unit=[(0, RUNNING), (5, DIED)], log=log)).diagnosis["signature"] == "child-died"


def test_a_restart_between_two_looks_is_a_death():
    assert verdict(Script(unit=[(0, RUNNING), (30, RUNNING._replace(restarts=1))])).state == "failed"
    assert verdict(Script(unit=[(0, RUNNING._replace(restarts=1))], health=[(0, OK)])).state == "ready"


def test_without_a_signature_the_exit_and_the_exception_are_told():
    report = verdict(Script(unit=[(0, RUNNING), (9, DIED)], log=[(1, "ValueError: no such thing"), (2, "bye")]))
    assert report.diagnosis == {
        "signature": None,
        "meaning": "The server ended with status 1 (exit-code).",
        "remedy": "Read the journal of the unit.",
        "line": "ValueError: no such thing",
    }
    assert "killed by signal 9" in verdict(Script(unit=[(0, KILLED)])).diagnosis["meaning"]


def test_what_reaches_the_log_after_the_death_is_still_read():
    report = verdict(Script(unit=[(0, KILLED)], log=[(0.5, "CUDA out of memory")]))
    assert report.diagnosis["signature"] == "gpu-memory"


def test_a_fatal_line_is_no_verdict_while_the_server_lives_on():
    report = verdict(Script(log=[(1, "RuntimeError: GEMM initialization failed")], health=[(0, REFUSED), (60, OK)]))
    assert report.state == "ready"


def test_healthy_and_mute_is_hung():
    report = verdict(Script(health=[(0, OK)], generate=[(0, TIMEOUT)]))
    assert report.state == "hung"
    assert report.seconds < 120
    assert "does not answer them" in report.diagnosis["meaning"]


def test_sglangs_own_health_request_that_hangs_is_hung_too():
    """It generates by itself, and waits for the ranks for as long as SGLANG_HEALTH_CHECK_TIMEOUT says: 120 s in our units."""
    script = Script(health=[(0, REFUSED), (60, BUSY), (70, TIMEOUT)], log=[(69, "The server is fired up and ready to roll!")])
    report = verdict(script)
    assert report.state == "hung"
    assert report.seconds < 200
    assert len([second for second, _path, _body in script.requests if second >= 70]) == 3  # what piles up in the server


def test_the_reason_of_a_hang_is_told_where_the_log_has_it():
    script = Script(log=[(5, "FileBaton: waiting for baton release")])
    report = verdict(script, timeout=900)
    assert (report.state, report.diagnosis["signature"]) == ("hung", "stale-build-lock")


@pytest.mark.parametrize("health", [TIMEOUT, OK])
def test_a_server_that_takes_long_and_then_lives_is_ready(health):
    report = verdict(Script(health=[(0, REFUSED), (600, BUSY), (700, health), (750, OK)], generate=[(0, TIMEOUT), (750, TEXT)]))
    assert report.state == "ready"


@pytest.mark.parametrize(
    "busy",
    [
        {"log": [(t, "Decode batch, #running-req: 3") for t in range(0, 300, 5)]},
        {"log": [(t, "Prefill batch, #new-seq: 1, #new-token: 16384, #cached-token: 0") for t in range(0, 300, 20)]},
        {"log": [(t, "Capturing batches (bs=8 avail_mem=12.01 GB):  50%") for t in range(0, 300, 20)]},
        {"compiling": [(0, 300)]},
    ],
)
def test_slow_to_answer_is_not_hung_while_it_works(busy):
    report = verdict(Script(health=[(0, OK)], generate=[(0, TIMEOUT), (300, TEXT)], **busy))
    assert report.state == "ready"


@pytest.mark.parametrize("answer", [NAN, Answer(200, b"not json", ""), Answer(500, b"", ""), REFUSED, Answer(200, b'{"text": "x"}', "")])
def test_an_answer_without_tokens_of_sense_is_none(answer):
    report = verdict(Script(health=[(0, OK)], generate=[(0, answer), (50, TEXT)]))
    assert report.state == "ready"
    assert report.seconds >= 50


def test_our_own_request_is_no_sign_of_work():
    prefill = [(t, "Prefill batch, #new-seq: 1, #new-token: 14, #cached-token: 0") for t in range(0, 300, 10)]
    assert verdict(Script(health=[(0, OK)], generate=[(0, TIMEOUT)], log=prefill)).state == "hung"


def test_time_runs_out_while_starting_compiling_or_silent():
    chatty = [(t, f"Loading safetensors checkpoint shards:  {t}% Completed") for t in range(100)]
    report = verdict(Script(log=chatty), timeout=99)
    assert (report.state, report.diagnosis["line"]) == ("starting", "Loading safetensors checkpoint shards:  99% Completed")
    assert len(report.timeline) > 10
    assert verdict(Script(compiling=[(0, 10**6)]), timeout=3000).state == "compiling"
    report = verdict(Script(log=[(1, "Loading JIT ops")]), timeout=900)
    assert (report.state, report.diagnosis["line"]) == ("hung", "Loading JIT ops")


def test_a_look_without_waiting():
    script = Script(health=[(0, BUSY)])
    assert verdict(script, timeout=0).state == "starting"
    assert script.time == 0


def test_a_lost_gpu_is_wedged_unless_the_server_still_answers():
    xid = [(5, "NVRM: Xid (PCI:0000:41:00): 79, pid=1, GPU has fallen off the bus.")]
    report = verdict(Script(log=xid))
    assert (report.state, report.diagnosis["signature"]) == ("wedged", "xid")
    assert report.seconds < 10
    assert verdict(Script(unit=[(0, RUNNING), (4, KILLED)], log=xid)).state == "wedged"
    assert verdict(Script(log=xid, health=[(0, REFUSED), (6, OK)])).state == "ready"


def test_gpus_that_stay_busy_after_the_death_are_wedged():
    report = verdict(Script(unit=[(0, KILLED)], stuck=[3]))
    assert (report.state, report.diagnosis["signature"]) == ("wedged", "gpu-busy-without-process")


def test_a_wrong_key_is_told_at_once():
    with pytest.raises(InferenceError, match=r"api_key: the server answers 401; expected the key"):
        verdict(Script(health=[(0, OK)], generate=[(0, Answer(401, b"", ""))]))


def test_without_a_unit_the_answers_alone_count():
    report = verdict(Script(unit=[(0, None)], health=[(0, REFUSED), (30, OK)]))
    assert (report.state, report.server["fusion"]) == ("ready", "unknown")


@pytest.mark.parametrize(
    ("info", "lines", "fusion"),
    [
        (INFO, RANKS, "active"),
        (INFO, [START, *RANKS[:1]], "requested_but_inactive"),
        (INFO, [START], "requested_but_inactive"),
        (INFO, ["Decode batch, #running-req: 3"], "unknown"),  # of a server that has run for so long that its start is forgotten
        (INFO, [*RANKS, "Failed to initialize FlashInfer workspace: x"], "requested_but_inactive"),
        ({**INFO, "enable_flashinfer_allreduce_fusion": False}, [], "off"),
        ({**INFO, "enforce_disable_flashinfer_allreduce_fusion": True}, RANKS, "off"),
        (
            {"tp_size": 1, "flashinfer_allreduce_fusion_backend": "trtllm"},
            ["FlashInfer AllReduce Fusion enabled and workspace initialized: backend=trtllm, rank=0, world_size=1"],
            "active",
        ),
        ({}, RANKS, "unknown"),
    ],
)
def test_fusion_is_active_where_every_rank_says_so(info, lines, fusion):
    log = Log()
    log.add(lines)
    assert describe(info, log)["fusion"] == fusion
