# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The real host that a server is watched on: systemd, the journal, processes, GPUs and HTTP."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._health import Answer, Unit

COMPILERS = frozenset({"cc1plus", "cicc", "cudafe++", "ninja", "nvcc", "ptxas"})
MAX_BODY = 4 * 1024 * 1024  # bytes of an answer that are read
MAX_LINES = 50_000  # log lines that are read at once
LAST_LINES = 5_000  # and the last ones of a log that is longer
MAX_LINE = 4_000  # characters of a line that are kept
PREFLIGHT = 90  # seconds that systemd gives to what the unit runs before the server
TOOL_TIMEOUT = 20.0  # seconds that systemctl, journalctl or nvidia-smi may take

_EXIT_CODES = {"0": "", "1": "exited", "2": "killed", "3": "dumped"}  # CLD_ codes, as systemctl shows them
_SECRET = re.compile(r"((?:api_key|password)['\"]?[=:]\s?)(['\"])[^'\"]*\2")


class Target(NamedTuple):
    """What to watch."""

    url: str  # base URL of the server, e.g. http://127.0.0.1:30000
    unit: Optional[str]  # name of its systemd unit, None to watch the URL alone
    since: Optional[str]  # where its log begins, as journalctl --since takes it; None for the last start of the unit
    api_key: Optional[str]
    ca_path: Optional[str]  # file of certificates to trust beside the system's
    validate_certs: bool


class LocalHost:
    """A _health.Host over the machine that this runs on."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._cursor: Optional[str] = None
        self._properties: dict[str, str] = {}
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_context(target)), _NoRedirect()
        )
        if target.unit and not shutil.which("systemctl"):
            raise InferenceError("unit", "systemctl is not on this host", "a host with systemd", "Name the url alone.")

    def unit(self) -> Optional[Unit]:
        """Return the state of the unit.

        Raises:
            InferenceError: systemd does not know the unit, or does not answer.
        """
        if not self._target.unit:
            return None
        output = _run(["systemctl", "show", "--no-pager", self._target.unit])
        found = dict(line.partition("=")[::2] for line in (output or "").splitlines())
        if found.get("LoadState") != "loaded":
            raise InferenceError(
                "unit",
                f"systemd says {found.get('LoadState', 'nothing')} for {self._target.unit}",
                "a unit that is loaded",
                "Configure the server first, or correct the name.",
            )
        self._properties = found
        return Unit(
            active=found.get("ActiveState", ""),
            sub=found.get("SubState", ""),
            restarts=_integer(found.get("NRestarts")),
            result=found.get("Result", ""),
            exit_code=_EXIT_CODES.get(found.get("ExecMainCode", ""), ""),
            exit_status=_integer(found.get("ExecMainStatus")),
        )

    def lines(self) -> list[str]:
        """Return the log lines since the last call: the unit's, systemd's about it, and the kernel's."""
        unit = self._properties.get("Id") or self._target.unit  # the journal knows neither aliases nor names without a suffix
        if not unit or not shutil.which("journalctl"):
            return []
        of_unit = (f"_SYSTEMD_UNIT={unit}", f"UNIT={unit}")
        if self._cursor:
            return self._read(of_unit, f"--after-cursor={self._cursor}")
        # While systemd waits to start the server again, the times of the unit are those of the waiting; the invocation is still the last.
        invocation = "" if self._target.since else self._properties.get("InvocationID")
        of_start = (f"_SYSTEMD_INVOCATION_ID={invocation}", f"INVOCATION_ID={invocation}") if invocation else of_unit
        since = f"--since={self._target.since or self._before_start()}"
        found = self._read(of_start, since)
        if len(found) >= MAX_LINES:  # a server that runs for weeks: its start, and what it said last
            found += self._read(of_start, since, f"--lines={LAST_LINES}")
        return found

    def _read(self, matches: tuple[str, str], *which: str) -> list[str]:
        command = ["journalctl", "--no-pager", "--quiet", "--all", "--output=json", "--output-fields=MESSAGE", *which]
        found: list[str] = []
        for text in _first_lines([*command, matches[0], "+", matches[1], "+", "_TRANSPORT=kernel"], MAX_LINES):
            entry = _json_object(text)
            self._cursor = entry.get("__CURSOR") or self._cursor
            found.extend(line[:MAX_LINE] for line in self._without_secrets(_message(entry)).splitlines())
        return found

    def compiling(self) -> bool:
        """Return whether a compiler runs in the unit."""
        return any(_name(process) in COMPILERS for process in self._processes())

    def stuck_gpus(self) -> list[int]:
        """Return the indices of GPUs that are at 100 % and 100 to 160 W while no process uses any GPU."""
        if not shutil.which("nvidia-smi"):
            return []
        form = "--format=csv,noheader,nounits"
        if (_run(["nvidia-smi", "--query-compute-apps=pid", form]) or "").strip():
            return []
        found = []
        for line in (_run(["nvidia-smi", "--query-gpu=index,utilization.gpu,power.draw", form]) or "").splitlines():
            fields = [_number(field) for field in line.split(",")]
            if len(fields) == 3 and None not in fields and fields[1] >= 99 and 100 <= fields[2] <= 160:
                found.append(int(fields[0]))
        return found

    def request(self, path: str, body: Optional[dict[str, Any]], timeout: float) -> Answer:
        """Send one request and read its answer; both together take ``timeout`` seconds at most."""
        headers = {"Content-Type": "application/json"}
        if self._target.api_key:
            headers["Authorization"] = f"Bearer {self._target.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._target.url.rstrip("/") + path, data=data, headers=headers)  # noqa: S310  the module checks the scheme
        end = time.monotonic() + timeout
        try:
            with self._opener.open(request, timeout=timeout) as response:
                return Answer(response.status, _read(response, end), "")
        except urllib.error.HTTPError as error:
            return Answer(error.code, b"", "")
        except (OSError, http.client.HTTPException) as error:
            # A timeout that urllib has wrapped is one of the connection: nobody took the request.
            taken = isinstance(error, (TimeoutError, socket.timeout))
            return Answer(None, b"", "timeout" if taken else str(getattr(error, "reason", error)))

    def now(self) -> float:
        """Return a steady clock's seconds."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def enabled(self) -> Optional[bool]:
        """Return whether the unit starts with the host, None where no unit is watched."""
        return self._properties.get("UnitFileState") == "enabled" if self._target.unit else None

    def started(self) -> float:
        """Return when the unit was last started, as seconds since the epoch; 0 where it does not run."""
        microseconds = _integer(self._properties.get("InactiveExitTimestampMonotonic"))
        if not microseconds or self._properties.get("ActiveState") not in ("active", "activating", "reloading"):
            return 0
        return time.time() - (time.clock_gettime(time.CLOCK_MONOTONIC) - microseconds / 1e6)

    def _before_start(self) -> str:
        now = time.clock_gettime(time.CLOCK_MONOTONIC)
        begun = _integer(self._properties.get("ExecMainStartTimestampMonotonic")) / 1e6
        waiting = _integer(self._properties.get("InactiveExitTimestampMonotonic")) / 1e6
        if not begun:  # it was never started, or was refused by what runs before and waits now
            begun = waiting - PREFLIGHT if waiting else now
        return f"@{int(time.time() - now + begun)}"

    def _processes(self) -> list[str]:
        group = self._properties.get("ControlGroup")
        if not group:
            return []
        found: list[str] = []
        for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified"):
            for path in Path(root + group).rglob("cgroup.procs"):
                found.extend(_text(path).split())
        return found

    def _without_secrets(self, text: str) -> str:
        if self._target.api_key:
            text = text.replace(self._target.api_key, "********")
        return _SECRET.sub(r"\1'********'", text)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key goes to the given URL and to no other."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        """Follow nothing."""


def changed_since(paths: list[str], moment: float, python: Optional[str] = None) -> list[str]:
    """Return the files that changed after ``moment`` (seconds since the epoch), none of them where that is 0.

    A list of checksums (``*.sha256``) stands for the files that it names; with ``python``, for those in the venv of this
    interpreter. Files that do not exist did not change.
    """
    venv = os.path.join(os.path.realpath(os.path.dirname(os.path.dirname(python))), "") if python else ""
    named: list[str] = []
    for path in paths:
        lines = _text(Path(path)).splitlines() if path.endswith(".sha256") else []
        listed = [line.partition(" ")[2].lstrip(" *") for line in lines]
        named.extend([name for name in listed if os.path.realpath(name).startswith(venv)] if listed else [path])
    return [path for path in named if moment and _modified(path) > moment]


def _modified(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0


def _context(target: Target) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context()
        if target.ca_path:
            context.load_verify_locations(target.ca_path)
    except OSError as error:
        raise InferenceError("ca_path", f"{target.ca_path} cannot be used ({error.strerror})", "a file of PEM certificates") from None
    if not target.validate_certs:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _read(response: Any, end: float) -> bytes:
    parts = []
    size = 0
    while size < MAX_BODY:
        if time.monotonic() > end:
            raise TimeoutError
        part = response.read1(65536)
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _run(command: list[str]) -> Optional[str]:
    """Return what a program prints, None where it fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TOOL_TIMEOUT,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _first_lines(command: list[str], count: int) -> list[str]:
    """Return the first ``count`` lines that a program prints; less where it fails or takes too long."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"}
        )
    except OSError:
        return []
    timer = threading.Timer(TOOL_TIMEOUT, process.kill)
    timer.start()
    with process:
        lines = [line.decode(errors="replace") for line in itertools.islice(process.stdout or (), count)]
        timer.cancel()
        process.kill()
    return lines


def _message(entry: dict[str, Any]) -> str:
    message = entry.get("MESSAGE")
    if isinstance(message, list):  # bytes that are not text
        return bytes(item for item in message if isinstance(item, int) and 0 <= item < 256).decode(errors="replace")
    return message if isinstance(message, str) else ""


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _integer(text: Optional[str]) -> int:
    return int(text) if text and text.isdigit() else 0


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return None


def _name(process: str) -> str:
    return _text(Path("/proc", process, "comm")).strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
