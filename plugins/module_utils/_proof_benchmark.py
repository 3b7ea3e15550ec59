# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run sglang's own benchmark against a running server, read what it says, and keep it by configuration of the server."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.blackwell.inference.plugins.module_utils import _account
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError

_SAMPLED = {"power_w": "power.draw", "power_limit_w": "power.limit", "sm_mhz": "clocks.sm", "utilization": "utilization.gpu"}
_SAMPLES = [f"--query-gpu={','.join(_SAMPLED.values())}", "--format=csv,noheader,nounits", "--loop=1"]

Json = dict[str, Any]


class Load(NamedTuple):
    """What the server gets to do."""

    input_tokens: int  # of each request, random ones
    output_tokens: int  # of each answer; the end of a text is ignored
    requests_per_stream: int  # one after the other, for each of the concurrent ones


class Client(NamedTuple):
    """Who asks the server."""

    python: str  # the serving venv's interpreter
    url: str
    account: pwd.struct_passwd  # the server's: what is downloaded must be the server's, too
    environment: Mapping[str, str]
    nvidia_smi: str  # name or path
    timeout: float  # seconds for one run


def arguments(url: str, load: Load, concurrency: int, seed: int, output: str) -> list[str]:
    """Return the arguments of ``python -m sglang.bench_serving`` for one run. They need no data set.

    The requests of a seed are always the same, so a server that has seen them would take them from its prefix cache.
    """
    return [
        *("--backend", "sglang", "--base-url", url, "--dataset-name", "random-ids", "--random-range-ratio", "1"),
        *("--random-input-len", str(load.input_tokens), "--random-output-len", str(load.output_tokens)),
        *("--num-prompts", str(concurrency * load.requests_per_stream), "--max-concurrency", str(concurrency)),
        *("--seed", str(seed), "--flush-cache", "--disable-tqdm", "--output-file", output),
    ]


def read(text: str, expected: int) -> Json:
    """Return the figures of one run, from what bench_serving wrote to its output file.

    Args:
        text: JSON lines; the last one counts.
        expected: How many requests there were.

    Raises:
        InferenceError: There is no result, or requests failed.
    """
    lines = text.strip().splitlines()
    try:
        found = json.loads(lines[-1])
        row = {
            "tokens_per_s": round(found["output_throughput"], 2),
            "ttft_ms": {"median": round(found["median_ttft_ms"], 2), "p99": round(found["p99_ttft_ms"], 2)},
            "tpot_ms": {"median": round(found["median_tpot_ms"], 3), "p99": round(found["p99_tpot_ms"], 3)},
            "acceptance": found.get("accept_length"),
        }
        completed = found["completed"]
    except (IndexError, ValueError, KeyError, TypeError):
        raise InferenceError("sglang.bench_serving", "it wrote no result", "a line of JSON with its figures") from None
    if completed != expected:
        raise InferenceError(
            "sglang.bench_serving", f"{completed} of {expected} requests were answered", "all of them", "Read the server's log."
        )
    return row


def samples(text: str) -> Json:
    """Return the means of what nvidia-smi sampled, over all GPUs; None for what the driver does not know."""
    rows = [line.split(", ") for line in text.splitlines() if line.count(", ") == len(_SAMPLED) - 1]
    return {
        name: round(statistics.mean(values), 1) if (values := [float(row[column]) for row in rows if _is_number(row[column])]) else None
        for column, name in enumerate(_SAMPLED)
    }


def run(client: Client, load: Load, concurrency: int, seed: int) -> Json:
    """Run bench_serving once; return its figures with power, clocks and utilisation sampled meanwhile.

    Raises:
        InferenceError: It cannot be run, fails, or is not done in time.
    """
    with tempfile.TemporaryDirectory(prefix="blackwell-inference-benchmark-") as folder:
        os.chown(folder, client.account.pw_uid, client.account.pw_gid)
        output = os.path.join(folder, "result.jsonl")
        command = [client.python, "-m", "sglang.bench_serving", *arguments(client.url, load, concurrency, seed, output)]
        with _sampling(client.nvidia_smi, os.path.join(folder, "samples")) as sampled:
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    env=_account.environment(client.account, client.environment),
                    cwd=folder,
                    timeout=client.timeout,
                    check=False,
                    **_account.identity(client.account),
                )
            except subprocess.TimeoutExpired:
                found = f"a run at concurrency {concurrency} was not done after {client.timeout:g} s"
                raise InferenceError("timeout", found, "a longer time") from None
            except OSError as error:
                found = f"{client.account.pw_name} cannot run {client.python} ({error.strerror})"
                raise InferenceError("python", found, "the serving venv's interpreter") from None
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
            raise InferenceError("sglang.bench_serving", last, f"a run against {client.url}", "Look whether the server is healthy.")
        row = read(_text(output), concurrency * load.requests_per_stream)
        return {**row, **samples(_text(sampled))}


def tabulated(rows: Sequence[Json], strategy: str) -> list[Json]:
    """Return runs as the decision takes them: one entry a concurrency, with the rates of all its runs."""
    levels = sorted({row["concurrency"] for row in rows})
    return [
        {
            "strategy": strategy,
            "concurrency": level,
            "tokens_per_s": [row["tokens_per_s"] for row in rows if row["concurrency"] == level],
            "acceptance": min((row["acceptance"] for row in rows if row["concurrency"] == level and row["acceptance"]), default=None),
        }
        for level in levels
    ]


def configuration_name(server: str, strategy: str, configuration: Mapping[str, Any]) -> str:
    """Return the name of the file that keeps the runs of a configuration: the same one whenever the server runs like that."""
    digest = hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()
    return f"{server}-{strategy}-{digest[:12]}.json"


@contextlib.contextmanager
def _sampling(smi: str, path: str) -> Iterator[str]:
    """Let nvidia-smi write a line a second and a GPU to ``path``; without nvidia-smi, leave it empty."""
    with open(path, "w", encoding="utf-8") as file:
        process = None
        with contextlib.suppress(OSError):
            process = subprocess.Popen([smi, *_SAMPLES], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.DEVNULL)
        try:
            yield path
        finally:
            if process:
                process.kill()
                process.wait()


def _text(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False
