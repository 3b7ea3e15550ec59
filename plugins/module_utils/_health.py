# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tell whether a server serves, by its own answers, its unit and its log, and why where it does not.

``/health`` alone lies both ways: it may answer while generation hangs, and does not while a long prompt is computed. So a
server is ready when it has answered a request of ours. It hangs when it takes requests and answers none while its log tells
of no work: sglang's own ``/health`` waits for the ranks, too, for as long as SGLANG_HEALTH_CHECK_TIMEOUT says.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any, NamedTuple, Optional, Protocol

from ansible_collections.blackwell.inference.plugins.module_utils import _signatures
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._signatures import Signature, explain

READY, STARTING, COMPILING, FAILED, HUNG, WEDGED = "ready", "starting", "compiling", "failed", "hung", "wedged"

TICK = 2.0  # seconds between two looks at the unit and its log
ASK_TIMEOUT = 5.0  # seconds that a server that is ready may take to say what it is
HANG = 3  # requests in a row that a server took and did not answer, while it did nothing else
SILENCE = 600.0  # seconds without a log line and without a compiler after which a start no longer makes progress
CANARY_TOKENS = 8
TIMELINE_LENGTH = 100

# Lines that follow from an earlier one: the reason is never theirs while another line gives one.
_CONSEQUENCES = ("child-died", "rank-killed", "compile-error", "engine-core", "restart-limit", "start-timeout", "preflight-refused")
_FUSION_RANK = re.compile(r"(?:AllReduce Fusion enabled.*rank=|FlashInfer workspace initialized for rank )(\d+)")
_FUSION_FAILURES = ("workspace-failed", "fusion-off-everywhere", "preflight-failed", "preflight-needs-multicast")
# Tokens made for others, or a prompt of thousands of tokens: ours have fewer, and a rank that hangs has said so before.
_WORK = re.compile(r"Decode batch|Prefill batch.*#new-token: \d{4}")
_START = "server_args="  # which every release logs first
_TRACEBACK = "Traceback (most recent call last)"
_EXCEPTION = re.compile(r"(?:^|\s)[\w.]*(?:Error|Exception|Interrupt): |^[\w.]*(?:Error|Exception|Interrupt)$")


class Unit(NamedTuple):
    """What systemd says about the unit."""

    active: str  # ActiveState
    sub: str  # SubState
    restarts: int  # NRestarts
    result: str  # Result
    exit_code: str  # ExecMainCode in words: exited, killed, dumped, or "" while it runs
    exit_status: int  # ExecMainStatus: exit status or signal

    @property
    def dead(self) -> bool:
        """Whether the server is gone, be it for the seconds until systemd starts it again."""
        return self.active in ("failed", "inactive", "deactivating") or self.sub == "auto-restart"


class Answer(NamedTuple):
    """What came back for a request."""

    status: Optional[int]  # HTTP status, None where nothing came back
    body: bytes
    reason: str  # why nothing came back: "timeout", or what the system says; "" otherwise

    def data(self) -> dict[str, Any]:
        """Return the JSON object in the body, {} where it is none."""
        try:
            found = json.loads(self.body)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


class Host(Protocol):
    """How the host and the server are asked; the tests bring their own."""

    def unit(self) -> Optional[Unit]:
        """Return the state of the unit, None where no unit is watched."""

    def lines(self) -> list[str]:
        """Return the log lines of the unit and the kernel since the last call; the first call returns those since the start."""

    def compiling(self) -> bool:
        """Return whether a compiler runs for the server."""

    def stuck_gpus(self) -> list[int]:
        """Return the indices of GPUs that are busy without a process."""

    def request(self, path: str, body: Optional[dict[str, Any]], timeout: float) -> Answer:
        """Ask the server: GET without a body, POST with one."""

    def now(self) -> float:
        """Return a steady clock's seconds."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class Report(NamedTuple):
    """The verdict."""

    state: str
    diagnosis: Optional[dict[str, Any]]  # signature, meaning, remedy, line; None for a server that is ready
    timeline: list[dict[str, Any]]  # seconds, state, line
    server: dict[str, Any]  # version, model_path, tp_size, fusion; {} while it does not answer
    seconds: float


class Log:
    """What the log lines have told so far."""

    def __init__(self) -> None:
        self.reason: Optional[tuple[Signature, str]] = None  # the first line that explains a death
        self.hardware: Optional[tuple[Signature, str]] = None
        self.warning: Optional[tuple[Signature, str]] = None
        self.exception = ""  # the first one, of a traceback where there is one
        self.last = ""
        self.progress = ""
        self.fusion_ranks: set[int] = set()
        self.fusion_failed = False
        self.of_start = False  # whether it reaches back to the start, at a level that ranks tell of fusion on
        self.work = 0  # lines that tell of work
        self._traceback = False  # whether the exception is that of a traceback
        self._in_traceback = False

    def add(self, lines: Iterable[str]) -> bool:
        """Take in new lines, oldest first; return whether there were any."""
        empty = True
        for line in lines:
            text = line.strip()
            if not text:
                continue
            empty = False
            self.last = text
            self.work += bool(_WORK.search(text))
            self.of_start = self.of_start or _START in text
            self._add_exception(text)
            signature = explain(text)
            if signature:
                self._add_signature(signature, text)
        return not empty

    def _add_exception(self, text: str) -> None:
        self._in_traceback = self._in_traceback or _TRACEBACK in text
        if _EXCEPTION.search(text):
            if not self._traceback and (self._in_traceback or not self.exception):
                self.exception, self._traceback = text, self._in_traceback
            self._in_traceback = False

    def _add_signature(self, signature: Signature, text: str) -> None:
        if signature.severity == _signatures.HARDWARE:
            self.hardware = self.hardware or (signature, text)
        elif signature.severity == _signatures.FATAL:
            if self.reason is None or (self.reason[0].name in _CONSEQUENCES and signature.name not in _CONSEQUENCES):
                self.reason = (signature, text)
        elif signature.severity == _signatures.WARNING:
            self.warning = self.warning or (signature, text)
        elif signature.severity == _signatures.PROGRESS:
            self.progress = text
            self.work += 1
        rank = _FUSION_RANK.search(text)
        if rank:
            self.fusion_ranks.add(int(rank.group(1)))
        self.fusion_failed = self.fusion_failed or signature.name in _FUSION_FAILURES


def watch(host: Host, timeout: float, interval: float, canaries: int) -> Report:
    """Look at a server until it is ready, is known not to become so, or ``timeout`` seconds are over.

    Args:
        host: How to ask.
        timeout: Seconds; 0 looks once.
        interval: Seconds between two requests to the server.
        canaries: Requests that the server has to answer in a row; 0 is content with ``/health``.

    Raises:
        InferenceError: The server answers, and not to us.
    """
    return _Watch(host, timeout, interval, canaries).run()


class _Watch:
    def __init__(self, host: Host, timeout: float, interval: float, canaries: int) -> None:
        self.host = host
        self.timeout = timeout
        self.interval = interval
        self.canaries = canaries
        self.log = Log()
        self.timeline: list[dict[str, Any]] = []
        self.began = host.now()
        self.heard = self.began  # when something last showed that the server makes progress
        self.patience = max(ASK_TIMEOUT, interval * 3)  # seconds that a request of ours may take
        self.unanswered = 0  # requests in a row that the server took and did not answer

    def run(self) -> Report:
        first = self.host.unit()
        unit = first
        state = STARTING
        asked: Optional[float] = None
        while True:
            self._listen()
            if unit and first and (unit.dead or unit.restarts > first.restarts):
                return self._dead(unit)
            compiling = self.host.compiling()
            state = COMPILING if compiling else STARTING
            if compiling:
                self.heard = self.host.now()
            if asked is None or self.log.hardware or self.host.now() - asked >= self.interval:
                asked = self.host.now()
                if self._answers():
                    return self._report(READY, None)
                if self.log.hardware:
                    return self._report(WEDGED, self._explained(*self.log.hardware))
                if self.unanswered >= HANG:
                    return self._report(HUNG, self._hung("The server takes requests and does not answer them."))
            self._note(state, self.log.progress)
            if self.host.now() - self.began >= self.timeout:
                return self._out_of_time(state)
            self.host.sleep(min(TICK, max(0.0, self.timeout - (self.host.now() - self.began))))
            unit = self.host.unit()

    def _listen(self) -> None:
        if self.log.add(self.host.lines()):
            self.heard = self.host.now()

    def _answers(self) -> bool:
        """Return whether the server is ready; count the requests that it leaves without an answer."""
        for ask in (self._healthy, *[self._canary] * self.canaries):
            before = self.log.work
            answered = ask()
            if answered:
                continue
            self._listen()
            if answered is False:
                self.unanswered = 0
            elif self.log.work == before and not self.host.compiling():
                self.unanswered += 1
            return False
        self.unanswered = 0
        return True

    # Both ask once: True for a good answer, None for none in time, False for another one, or where nobody listens.

    def _healthy(self) -> Optional[bool]:
        answer = self.host.request("/health", None, self.patience)
        return _in_time(answer) and answer.status is not None and 200 <= answer.status < 300

    def _canary(self) -> Optional[bool]:
        prompt = f"Repeat this number: {secrets.randbelow(10**9):09d}. "
        body: dict[str, Any] = {"text": prompt, "sampling_params": {"max_new_tokens": CANARY_TOKENS, "temperature": 0}}
        answer = self.host.request("/generate", body, self.patience)
        if answer.status in (401, 403):
            raise InferenceError("api_key", f"the server answers {answer.status}", "the key that the server was started with")
        return _in_time(answer) and answer.status == 200 and _is_text(answer.data())

    def _dead(self, unit: Unit) -> Report:
        self.host.sleep(1)  # what the server said last may still be on its way to the journal
        self._listen()
        if self.log.hardware:
            return self._report(WEDGED, self._explained(*self.log.hardware))
        stuck = self.host.stuck_gpus()
        if stuck:
            return self._report(WEDGED, _stuck(stuck))
        if self.log.reason:
            return self._report(FAILED, self._explained(*self.log.reason))
        how = {"killed": "was killed by signal", "dumped": "crashed with signal"}.get(unit.exit_code, "ended with status")
        remedy = "Look for the out-of-memory killer in the kernel log." if unit.exit_status == 9 else "Read the journal of the unit."
        line = self.log.exception or (self.log.warning[1] if self.log.warning else self.log.last)
        return self._report(FAILED, _diagnosis(None, f"The server {how} {unit.exit_status} ({unit.result}).", remedy, line))

    def _out_of_time(self, state: str) -> Report:
        seconds = int(self.host.now() - self.heard)
        if self.unanswered:
            return self._report(HUNG, self._hung("The server takes requests and does not answer them."))
        if state == STARTING and seconds >= SILENCE:
            return self._report(HUNG, self._hung(f"The server has said nothing for {seconds} s, and no compiler runs."))
        meaning = "The server was not ready in time and was still at it."
        return self._report(
            state, _diagnosis(None, meaning, "Give it more time, or prebuild the kernels.", self.log.progress or self.log.last)
        )

    def _hung(self, meaning: str) -> dict[str, Any]:
        if self.log.reason:
            return self._explained(*self.log.reason)
        remedy = "Look at a rank with py-spy dump, and for a stale lock; then restart the server."
        return _diagnosis(None, meaning, remedy, self.log.last)

    def _explained(self, signature: Signature, line: str) -> dict[str, Any]:
        return _diagnosis(signature.name, signature.meaning, signature.remedy, line)

    def _note(self, state: str, line: str) -> None:
        entry = {"seconds": round(self.host.now() - self.began), "state": state, "line": line}
        last = self.timeline[-1] if self.timeline else {}
        if (last.get("state"), last.get("line")) != (state, line) and len(self.timeline) < TIMELINE_LENGTH:
            self.timeline.append(entry)

    def _report(self, state: str, diagnosis: Optional[dict[str, Any]]) -> Report:
        self._note(state, diagnosis["line"] if diagnosis else self.log.progress)
        server = self._server() if state == READY else {}
        return Report(state, diagnosis, self.timeline, server, round(self.host.now() - self.began, 1))

    def _server(self) -> dict[str, Any]:
        answer = self.host.request("/server_info", None, ASK_TIMEOUT)
        if answer.status == 404:
            answer = self.host.request("/get_server_info", None, ASK_TIMEOUT)  # up to sglang 0.5.7
        return describe(answer.data(), self.log)


def describe(info: dict[str, Any], log: Log) -> dict[str, Any]:
    """Return version, model_path, tp_size and fusion from what the server and its log say.

    ``fusion`` is active (every rank said so), requested_but_inactive, off, or unknown where there is no log of the start to prove it.
    """
    size = info.get("tp_size")
    wanted = bool(info.get("enable_flashinfer_allreduce_fusion") or info.get("flashinfer_allreduce_fusion_backend"))
    if not info:
        fusion = "unknown"
    elif not wanted or info.get("enforce_disable_flashinfer_allreduce_fusion"):
        fusion = "off"
    elif log.fusion_failed:
        fusion = "requested_but_inactive"
    elif isinstance(size, int) and len(log.fusion_ranks) >= size:
        fusion = "active"
    else:
        fusion = "requested_but_inactive" if log.of_start else "unknown"
    return {"version": info.get("version"), "model_path": info.get("model_path"), "tp_size": size, "fusion": fusion}


def _in_time(answer: Answer) -> Optional[bool]:
    """Return None where the server took the request and did not answer it in time, True otherwise."""
    return None if answer.status is None and answer.reason == "timeout" else True


def _is_text(answer: dict[str, Any]) -> bool:
    """Return whether a generated answer is one: tokens were made, and not all of them the "!" that NaN turns into."""
    text = answer.get("text")
    tokens = (answer.get("meta_info") or {}).get("completion_tokens")
    return isinstance(text, str) and isinstance(tokens, int) and 0 < tokens <= CANARY_TOKENS and set(text.strip()) != {"!"}


def _stuck(gpus: list[int]) -> dict[str, Any]:
    meaning = f"GPU {', '.join(map(str, gpus))} is fully busy without a process."
    return _diagnosis("gpu-busy-without-process", meaning, "Do not start the server again; reset the GPU or reboot.", "")


def _diagnosis(signature: Optional[str], meaning: str, remedy: str, line: str) -> dict[str, Any]:
    return {"signature": signature, "meaning": meaning, "remedy": remedy, "line": line}
