# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure on the real ranks whether fused allreduce is correct, and how long it takes next to NCCL.

One self-contained program for the serving venv, sent there by the module ``fusion_proof``, and of use by hand, too::

    python _proof_probe.py --world-size 8 --hidden-size 6144 --output probe.json

It refuses GPUs that are in use, then runs one stage after the other: ``links`` (data copied between each pair of
GPUs), ``fusion`` (FlashInfer's fused allreduce + residual + RMSNorm next to NCCL + RMSNorm) and ``pcie_ipc`` (the
allreduce without NVLink of newer releases next to the same). The ranks of a stage run under torch.distributed.run and
write down what they are at; a rank that stays at one thing for too long is killed with all others, so that a hang is
a result. The parent needs the standard library alone; the ranks need torch and flashinfer.

Exit status: 0 measured, 2 wrong options, 3 refused, 4 not everything could be measured.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

SCHEMA_VERSION = 1
TOKENS = (1, 8, 16, 17, 64, 128, 512, 2048)  # 2048 is the largest batch that sglang fuses; 16 and 17 differ in padding
SEEDS = 3
EPSILON = 1e-6
NORM_SLACK_ULP = 1 / 8  # float32 arithmetic, and a mean square of sums that are not rounded yet
MAX_TOKENS = 2048  # what sglang sizes the workspace for
PCIE_IPC_ROWS = 256  # sglang gives decode batches to PCIe-IPC and the others to NCCL
PCIE_IPC_TUNED = (1, 16, 128)  # each takes as many passes as there are, of some seconds
WORLD_SIZES = (2, 4, 8)  # what FlashInfer's heuristics know
START_SECONDS = 180  # for a rank to start Python; torch is large, and disks are cold
IDLE_MIB = 1024  # more than this in use on a GPU without a visible process is somebody else's, too
COPY_BYTES = 32 << 20
BUS_BYTES = 64 << 20
ROUNDS = 5  # of timing; their medians make the spread
FAULTS = ("corrupt", "hang", "missing")  # for the tests of this program

Json = dict[str, Any]


# ---------------------------------------------------------------------------------------------------------------------
# What is to be measured: read from files, without importing anything
# ---------------------------------------------------------------------------------------------------------------------


class EntryPoint(NamedTuple):
    """How the installed sglang calls FlashInfer's fused allreduce."""

    api: str  # "ipc": trtllm_create_ipc_workspace_for_all_reduce_fusion, "unified": create_allreduce_fusion_workspace
    fp32_acc: bool  # whether it asks for sums in float32
    source: str  # where that was read, for people


def entry_point(text: Optional[str], version: str, flashinfer_is_unified: bool) -> EntryPoint:
    """Return how sglang calls FlashInfer, from the ``text`` of its flashinfer_comm_fusion.py.

    Without sglang (``text`` is None), it is what the newest sglang for this FlashInfer would do.
    """
    if text is None:
        return EntryPoint("unified" if flashinfer_is_unified else "ipc", False, "no sglang in this venv")
    fp32_acc = False
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == "flashinfer_allreduce_residual_rmsnorm":
            names = [argument.arg for argument in node.args.args][-len(node.args.defaults) :] if node.args.defaults else []
            defaults = dict(zip(names, node.args.defaults))
            default = defaults.get("fp32_acc")
            fp32_acc = isinstance(default, ast.Constant) and default.value is True
    api = "unified" if "create_allreduce_fusion_workspace" in text else "ipc"
    return EntryPoint(api, fp32_acc, f"sglang {version}, layers/flashinfer_comm_fusion.py")


def installed_entry_point() -> EntryPoint:
    """Return the entry point of this interpreter's sglang."""
    return entry_point(
        _package_text("sglang", "srt/layers/flashinfer_comm_fusion.py"),
        _version("sglang") or "of an unknown version",
        "create_allreduce_fusion_workspace" in (_package_text("flashinfer", "comm/__init__.py") or ""),
    )


def pcie_ipc_absent() -> Optional[str]:
    """Return why sglang could not use PCIe-IPC here; None if it could."""
    if _package_text("flashinfer", "comm/pcie_ipc_ar.py") is None:
        return f"flashinfer {_version('flashinfer-python')} has no PCIe-IPC allreduce"
    environ = _package_text("sglang", "srt/environ.py")
    if environ is not None and "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE" not in environ:
        return f"sglang {_version('sglang')} has no SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"
    return None


def _package_text(package: str, path: str) -> Optional[str]:
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or []) if found else []:
        with contextlib.suppress(OSError):
            return Path(folder, path).read_text(encoding="utf-8")
    return None


def _version(distribution: str) -> Optional[str]:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


# ---------------------------------------------------------------------------------------------------------------------
# The parent: refuse, run the stages, watch the ranks
# ---------------------------------------------------------------------------------------------------------------------


class Refusal(Exception):
    """Something that makes a measurement impossible or void before it starts."""


class Options(NamedTuple):
    """What is asked for."""

    world_size: int
    hidden_size: int
    tokens: tuple[int, ...]
    phase_timeout: float  # seconds that the ranks may stay at one thing
    compile_timeout: float  # seconds that a JIT build may take
    fault: Optional[str]


GPU_FIELDS = ("index", "uuid", "name", "driver_version", "compute_cap", "memory.used", "power.limit")
PROCESS_FIELDS = ("gpu_uuid", "pid", "process_name")


def parse_gpus(text: str) -> list[Json]:
    """Read what ``nvidia-smi --query-gpu`` prints for GPU_FIELDS, one dictionary a GPU."""
    rows = (line.split(", ") for line in text.splitlines())
    return [dict(zip(GPU_FIELDS, row)) for row in rows if len(row) == len(GPU_FIELDS) and row[0].isdigit()]


def visible(gpus: Sequence[Json], variable: Optional[str]) -> list[Json]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; all of them where it is unset.

    As CUDA does, it ends the list at the first entry that is no GPU.
    """
    if variable is None:
        return list(gpus)
    chosen: list[Json] = []
    for entry in (entry.strip() for entry in variable.split(",")):
        found = [gpu for gpu in gpus if gpu["index"] == entry or (entry.startswith("GPU-") and gpu["uuid"].startswith(entry))]
        if len(found) != 1:
            break
        chosen.append(found[0])
    return chosen


def refuse(options: Options, gpus: Sequence[Json], processes: str) -> None:
    """Raise Refusal unless the ranks have a GPU each, all to themselves.

    Args:
        options: What is asked for.
        gpus: The visible GPUs.
        processes: What nvidia-smi prints for PROCESS_FIELDS.
    """
    if options.world_size not in WORLD_SIZES:
        raise Refusal(f"{options.world_size} ranks: FlashInfer's fused allreduce knows 2, 4 and 8")
    if len(gpus) < options.world_size:
        raise Refusal(f"{options.world_size} ranks on {len(gpus)} GPU{'' if len(gpus) == 1 else 's'}: each rank needs one of its own")
    busy = in_use(gpus[: options.world_size], processes)
    if busy:
        more = f" and {len(busy) - 1} more" if len(busy) > 1 else ""
        raise Refusal(f"the GPUs are in use: {busy[0]}{more}. Stop the server first; both would be slow, and no time would be true")


def in_use(gpus: Sequence[Json], processes: str) -> list[str]:
    """Return who uses which of the GPUs, from what nvidia-smi prints for GPU_FIELDS and PROCESS_FIELDS."""
    used = {gpu["uuid"]: gpu for gpu in gpus}
    rows = [row for row in (line.split(", ", 2) for line in processes.splitlines()) if len(row) == 3 and row[0] in used]
    return [f"GPU {used[uuid]['index']} by process {pid} ({name})" for uuid, pid, name in rows] or [
        f"GPU {gpu['index']} holds {gpu['memory.used']} MiB of somebody's"
        for gpu in gpus
        if gpu["memory.used"].isdigit() and int(gpu["memory.used"]) > IDLE_MIB
    ]


class Progress(NamedTuple):
    """What one rank wrote down last."""

    phase: str
    limit: float  # seconds it may take
    done: bool
    error: Optional[str]
    written: float  # when, as time.time()


def overdue(progress: Mapping[int, Optional[Progress]], ages: Mapping[int, float]) -> list[int]:
    """Return the ranks that have been at one thing for longer than it may take.

    Args:
        progress: What each rank wrote last; None for one that has not started.
        ages: Seconds since each wrote that.
    """
    return [
        rank
        for rank, at in progress.items()
        if ages[rank] > (START_SECONDS if at is None else math.inf if at.done or at.error else at.limit)
    ]


def outcome(progress: Mapping[int, Optional[Progress]], hung: Sequence[int], log: str) -> Json:
    """Return status, phase and message of a stage that has ended.

    Args:
        progress: What each rank wrote last.
        hung: The ranks that were overdue when the stage was stopped.
        log: The end of what the stage printed.
    """
    if all(at is not None and at.done for at in progress.values()):
        return {"status": "measured", "phase": None, "message": None}
    errors = [(at.written, rank, at) for rank, at in progress.items() if at and at.error]
    if errors:
        _when, culprit, last = min(errors)  # the others fail of the first one
        return {"status": "failed", "phase": last.phase, "message": f"rank {culprit} failed in {last.phase}: {last.error}"}
    missing = [rank for rank, at in progress.items() if at is None]
    absent = f"; {_ranks(missing)} never started" if missing else ""
    waiting: dict[tuple[str, float], list[int]] = {}
    for rank, at in progress.items():
        if at and not at.done:
            waiting.setdefault((at.phase, at.limit), []).append(rank)
    end = "hung" if hung else "ended"
    where = ", ".join(
        f"{_ranks(ranks)} {end} in {phase}{f' for more than {limit:g} s' if {*ranks} & {*hung} else ''}"
        for (phase, limit), ranks in waiting.items()
    )
    where, phase = where or f"the launcher {end}", next(iter(waiting), ("start", 0))[0]
    if hung:
        return {"status": "hung", "phase": phase, "message": f"{where}{absent}"}
    return {"status": "failed", "phase": phase, "message": f"{where}{absent}; the last it said: {last_words(log)}"}


def last_words(log: str) -> str:
    """Return the last line that a rank printed, and where none did, the launcher's last one."""
    lines = [line for line in log.splitlines() if line.strip()]
    # A dead rank's own words come before what the launcher makes of its death.
    own = list(itertools.takewhile(lambda line: "torch/distributed/elastic" not in line, lines))
    return (own or lines or ["nothing"])[-1].strip()


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def read_progress(path: str) -> tuple[Optional[Progress], Json, Optional[int]]:
    """Return what a rank wrote last, its report so far and its process; nothing where it has not written yet."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        return None, {}, None
    return Progress(*(content[name] for name in Progress._fields)), content["report"], content["pid"]


def run_stage(stage: str, options: Options, environment: Mapping[str, str]) -> Json:
    """Run one stage to its end or to the first overdue rank; return its outcome with whatever was measured."""
    started = time.monotonic()
    ranks = range(1 if stage == "links" else options.world_size)
    with tempfile.TemporaryDirectory(prefix="fusion-proof-") as folder:
        request = {**options._asdict(), "stage": stage, "folder": folder}
        command = [sys.executable, "-u", os.path.abspath(__file__), "--rank-request", json.dumps(request)]
        if stage != "links":
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.world_size), "--max-restarts", "0"]
            command = [sys.executable, *launcher, *command[2:]]
        log_path = os.path.join(folder, "log")
        with open(log_path, "w+", encoding="utf-8", errors="replace") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
            hung = _watch(process, folder, ranks)
            wedged = _stop(process, folder, [pid for _at, _report, pid in _read_all(folder, ranks).values() if pid])
            log.seek(0)
            printed = log.read()
        found = _read_all(folder, ranks)
    result: Json = outcome({rank: at for rank, (at, _report, _pid) in found.items()}, hung, printed)
    if wedged:
        result["message"] = f"{result['message']}; process {wedged[0]} survived being killed, so reset its GPU or reboot"
    if result["status"] != "measured":
        result["log"] = printed.splitlines()[-60:]
    result["seconds"] = round(time.monotonic() - started, 1)
    return {**result, "ranks": [rank for rank, (at, _report, _pid) in found.items() if at and at.done], **found[0][1]}


def _read_all(folder: str, ranks: Sequence[int]) -> dict[int, tuple[Optional[Progress], Json, Optional[int]]]:
    return {rank: read_progress(os.path.join(folder, f"rank{rank}.json")) for rank in ranks}


def _watch(process: subprocess.Popen[bytes], folder: str, ranks: Sequence[int]) -> list[int]:
    """Wait until the process ends; return the ranks that are overdue, or none."""
    since: dict[int, tuple[Optional[Progress], float]] = {rank: (None, time.monotonic()) for rank in ranks}
    while process.poll() is None:
        time.sleep(0.2)
        now = time.monotonic()
        for rank, (at, _report, _pid) in _read_all(folder, ranks).items():
            if at != since[rank][0]:
                since[rank] = (at, now)
        hung = overdue({rank: at for rank, (at, _then) in since.items()}, {rank: now - then for rank, (_at, then) in since.items()})
        if hung:
            return hung
    return []


def _stop(process: subprocess.Popen[bytes], folder: str, ranks: Sequence[int], patience: float = 30) -> list[int]:
    """Kill the ranks, which are sessions of their own, and their launcher; return the ranks that are still there."""
    for pid in ranks:
        if _is_rank(pid, folder):
            os.kill(pid, signal.SIGKILL)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + patience
    while True:
        left = [pid for pid in ranks if _is_rank(pid, folder)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def _is_rank(pid: int, folder: str) -> bool:
    """Whether the process is a rank of this stage, and not another one that got its number, or what is left of it."""
    try:
        return folder.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _nvidia_smi(*arguments: str) -> str:
    try:
        answer = subprocess.run(
            ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refusal(f"nvidia-smi does not answer ({error})") from None
    if answer.returncode:
        raise Refusal(f"nvidia-smi fails: {(answer.stderr or answer.stdout).strip()}")
    return answer.stdout


def _look(environment: Mapping[str, str]) -> tuple[list[Json], str]:
    """Return the visible GPUs and what nvidia-smi prints for PROCESS_FIELDS."""
    gpus = parse_gpus(_nvidia_smi(f"--query-gpu={','.join(GPU_FIELDS)}"))
    return visible(gpus, environment.get("CUDA_VISIBLE_DEVICES")), _nvidia_smi(f"--query-compute-apps={','.join(PROCESS_FIELDS)}")


def _settle(options: Options, environment: Mapping[str, str], patience: float = 30) -> None:
    """Wait until the driver has taken back what killed ranks held, so that the next one finds the GPUs idle."""
    deadline = time.monotonic() + patience
    with contextlib.suppress(Refusal):
        while time.monotonic() < deadline:
            gpus, processes = _look(environment)
            if not in_use(gpus[: options.world_size], processes):
                return
            time.sleep(1)


def measure(options: Options, environment: Mapping[str, str]) -> Json:
    """Refuse or run every stage; return the whole result, see README.md of the role ``fusion_proof``."""
    started = time.time()
    result: Json = {
        "schema_version": SCHEMA_VERSION,
        "status": "refused",
        "message": None,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "parameters": {
            "world_size": options.world_size,
            "hidden_size": options.hidden_size,
            "dtype": "bfloat16",
            "tokens": list(options.tokens),
            "seeds": SEEDS,
            "rounds": ROUNDS,
        },
        "versions": {name: _version(name) for name in ("flashinfer-python", "sglang", "torch")},
        "gpus": [],
        "fault": options.fault,
        "stages": {},
    }
    try:
        gpus, processes = _look(environment)
        result["gpus"] = gpus[: options.world_size]
        refuse(options, gpus, processes)
    except Refusal as refusal:
        return {**result, "message": str(refusal)}
    for stage in ("links", "fusion", "pcie_ipc"):
        why = pcie_ipc_absent() if stage == "pcie_ipc" else None
        if why:
            result["stages"][stage] = {"status": "absent", "phase": None, "message": why, "ranks": []}
            continue
        result["stages"][stage] = run_stage(stage, options, environment)
        if result["stages"][stage]["status"] != "measured":
            _settle(options, environment)
        if stage == "links" and result["stages"][stage]["status"] != "measured":
            break
    result["status"] = "measured" if all(stage["status"] in ("measured", "absent") for stage in result["stages"].values()) else "incomplete"
    result["message"] = "; ".join(
        f"{name}: {stage['message']}" for name, stage in result["stages"].items() if stage["status"] in ("failed", "hung")
    )
    result["seconds"] = round(time.time() - started, 1)
    return result


def table(result: Json) -> str:
    """Return the result as a table for people."""
    gpus, versions, parameters = result["gpus"], result["versions"], result["parameters"]
    lines = [
        f"{parameters['world_size']} x {gpus[0]['name'] if gpus else 'no GPU'}, driver {gpus[0]['driver_version'] if gpus else 'unknown'}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        + f", hidden size {parameters['hidden_size']}, {parameters['dtype']}"
    ]
    if result["message"]:
        lines.append(f"{result['status']}: {result['message']}")
    for name, stage in result["stages"].items():
        lines.append(f"{name}: {stage['status']}{'; ' + stage['message'] if stage['message'] else ''}")
        for pair in stage.get("pairs", []):
            lines.append(
                f"  GPU {pair['from']} -> {pair['to']}: {pair['gb_per_s']} GB/s, peer access {'yes' if pair['peer_access'] else 'no'}, "
                f"copies {'right' if pair['copied'] and pair['written'] else 'WRONG'}"
            )
        if "bus" in stage:
            lines.append(f"  NCCL bus bandwidth: {stage['bus']['gb_per_s']} GB/s")
        times = stage.get("times", [])
        if times:
            lines.append(f"  tokens    NCCL us  {name:>8} us    gain  spread  shot   sum ulp  norm ulp  rel. error")
        checks = {check["tokens"]: check for check in stage.get("checks", {}).get(name, [])}
        lines += [_table_row(name, row, checks.get(row["tokens"])) for row in times]
    return "\n".join(lines)


def _table_row(name: str, row: Json, check: Optional[Json]) -> str:
    nccl, own = row["medians_us"]["nccl"], row["medians_us"].get(name)
    start = f"  {row['tokens']:6d}  {nccl:9.1f}"
    if own is None or check is None:
        return f"{start}  {'-':>11}"
    return (
        f"{start}  {own:11.1f}  {nccl / own - 1:+6.0%}  {max(row['spreads'].values()):6.1%}  {check['shot'] or '':4}"
        f"  {check['sum_error_ulp']:8.3f}  {check['norm_error_ulp']:8.3f}  {check['relative_error']:10.2e}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# A rank: needs torch and flashinfer
# ---------------------------------------------------------------------------------------------------------------------


class Buffers(NamedTuple):
    """The tensors of one allreduce + residual + RMSNorm, [tokens, hidden] and bfloat16 each."""

    x: Any  # this rank's part of the sum
    residual: Any  # the same on every rank
    weight: Any  # [hidden]
    norm: Any  # result: the normalised sum
    total: Any  # result: the sum, residual included


class Rank:
    """One process of a stage.

    Args:
        request: What run_stage put together.
    """

    def __init__(self, request: Json) -> None:
        _die_with_parent()
        self.options = Options(**{name: request[name] for name in Options._fields})
        self.folder = request["folder"]
        self.rank = int(os.environ.get("RANK", "0"))
        self.last = self.rank == self.options.world_size - 1
        self.report: Json = {}
        self._phase, self._limit = "", 0.0
        self._at("importing torch", START_SECONDS)
        self.torch = importlib.import_module("torch")
        self.dist = importlib.import_module("torch.distributed")
        self.group: Any = None  # gloo: objects and barriers that need no GPU
        self.torch.cuda.set_device(self.rank)

    def join(self) -> None:
        """Meet the other ranks."""
        with self.phase("joining the other ranks"):
            # The parent watches the time; nobody else may give up earlier.
            patience = importlib.import_module("datetime").timedelta(seconds=2 * self.options.compile_timeout)
            self.dist.init_process_group("nccl", timeout=patience, device_id=self.torch.device("cuda", self.rank))
            self.group = self.dist.new_group(backend="gloo", timeout=patience)
            self.everyone(0)

    @contextlib.contextmanager
    def phase(self, name: str, limit: Optional[float] = None) -> Iterator[None]:
        """Write down what is being done and how many seconds it may take."""
        self._at(name, limit or self.options.phase_timeout)
        yield
        self.torch.cuda.synchronize()

    def finish(self, error: Optional[BaseException] = None) -> None:
        """Write down how it ended."""
        self._at(self._phase, self._limit, done=error is None, error=_words(error) if error else None)

    def _at(self, phase: str, limit: float, done: bool = False, error: Optional[str] = None) -> None:
        self._phase, self._limit = phase, limit
        path = os.path.join(self.folder, f"rank{self.rank}.json")
        progress = Progress(phase, limit, done, error, time.time())
        content = {**progress._asdict(), "pid": os.getpid(), "report": self.report}
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(f"{path}.new", path)

    def everyone(self, value: Any) -> list[Any]:
        """Return what each rank gave, in their order."""
        values = [None] * self.options.world_size
        self.dist.all_gather_object(values, value, group=self.group)
        return values

    def buffers(self, tokens: int, seed: int) -> tuple[Buffers, list[Any]]:
        """Return fresh inputs and poisoned outputs, and the parts of every rank."""
        torch, shape = self.torch, (tokens, self.options.hidden_size)

        def normal(number: int, *size: int) -> Any:
            generator = torch.Generator(device="cuda").manual_seed(1000 * seed + number)
            return torch.randn(*size, generator=generator, device="cuda", dtype=torch.float32).to(torch.bfloat16)

        parts = [normal(rank, *shape) for rank in range(self.options.world_size)]
        for part in parts:
            part[:, ::97] = -0.0  # what the Lamport kernels mark an empty cell with
        residual, weight = normal(900, *shape), 1 + 0.1 * normal(901, shape[1])
        poison = torch.full(shape, math.nan, device="cuda", dtype=torch.bfloat16)
        return Buffers(parts[self.rank], residual, weight, poison, poison.clone()), parts

    def compile(self, builder: Any) -> None:
        """Let rank 0 build and load a JIT module, and then the others load it; they all fail if one of them does."""
        with self.phase("compiling", self.options.compile_timeout):
            for first in (True, False):
                problem = None
                try:
                    if (self.rank == 0) is first:
                        builder()
                except Exception as error:  # raised below, by everyone
                    problem = _words(error)
                problem = next(filter(None, self.everyone(problem)), None)
                if problem:
                    raise RuntimeError(problem)


def _words(error: BaseException) -> str:
    """Return an error on one line, its end if it is long: compilers say what is wrong there."""
    text = " ".join(str(error).split())
    return text[-600:] if isinstance(error, RuntimeError) and text else f"{type(error).__name__}: {text[-600:]}"


class Nccl:
    """NCCL's allreduce and a fused residual add + RMSNorm: what the server does without fusion."""

    name = "nccl"
    norm_bound_ulp = 1.5  # half an ulp for its own rounding, and one since it works on the sum before that is rounded

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.add_rms_norm, rank.report["norm"] = self._torch_norm, "torch"
        with rank.phase("importing flashinfer", START_SECONDS):
            fused = importlib.import_module("flashinfer.norm").fused_add_rmsnorm
            b, _parts = rank.buffers(1, 0)
        with contextlib.suppress(RuntimeError):  # it cannot be built here: torch's will do
            rank.compile(lambda: fused(b.x, b.residual, b.weight, EPSILON))
            self.add_rms_norm, rank.report["norm"] = fused, "flashinfer"

    def _torch_norm(self, x: Any, residual: Any, weight: Any, epsilon: float) -> None:
        """Add x to the residual and normalise it into x, both in place."""
        torch = self.rank.torch
        total = x.float() + residual.float()
        residual.copy_(total)
        x.copy_(total * torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon) * weight.float())

    def roundings(self) -> int:
        """How often a sum is rounded to bfloat16 at most."""
        return self.rank.options.world_size

    def shot(self, _tokens: int) -> Optional[str]:
        """Which variant the library takes."""
        return None

    def supports(self, _b: Buffers) -> bool:
        """Whether the server would give it this batch."""
        return True

    def prepare(self, b: Buffers) -> None:
        """Put the inputs where the step works in place."""
        b.norm.copy_(b.x)
        b.total.copy_(b.residual)

    def step(self, b: Buffers) -> Buffers:
        """Compute once; return the buffers that hold the result."""
        self.rank.dist.all_reduce(b.norm)
        self.add_rms_norm(b.norm, b.total, b.weight, EPSILON)
        return b


class Fusion(Nccl):
    """FlashInfer's fused allreduce + residual + RMSNorm, called as the installed sglang calls it."""

    name = "fusion"
    norm_bound_ulp = 0.5  # it works on the rounded sum

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.entry = installed_entry_point()
        self.comm = importlib.import_module("flashinfer.comm")
        self.trtllm = importlib.import_module("flashinfer.comm.trtllm_ar")
        rank.report["entry_point"] = {**self.entry._asdict(), "workspace": None}
        rank.compile(self.trtllm.get_trtllm_comm_module)
        with rank.phase("making the workspace"):
            rank.report["entry_point"]["workspace"] = self._make_workspace()
            rank.everyone(0)

    def _make_workspace(self) -> str:
        options, comm, torch = self.rank.options, self.comm, self.rank.torch
        if self.entry.api == "ipc":
            workspace = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
                self.rank.rank, options.world_size, MAX_TOKENS, options.hidden_size, group=self.rank.dist.group.WORLD
            )
            self.keep, self.workspace = workspace[0], workspace[1]
            return "torch symmetric memory" if hasattr(self.trtllm, "_alloc_symm_buffer_bytes") else "CUDA IPC"
        # The backend by name: what "auto" would take on newer GPUs needs NVLink multicast.
        wanted = {"group": self.rank.dist.group.WORLD}
        known = inspect.signature(comm.create_allreduce_fusion_workspace).parameters
        self.workspace = comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=options.world_size,
            rank=self.rank.rank,
            max_token_num=MAX_TOKENS,
            hidden_dim=options.hidden_size,
            dtype=torch.bfloat16,
            **{name: value for name, value in wanted.items() if name in known},
        )
        handles = getattr(self.workspace, "mem_handles", None) or [None]
        return "symmetric device memory" if type(handles[0]).__name__ == "SymmDeviceMemory" else "torch symmetric memory"

    def roundings(self) -> int:
        """As in the parent; sums in float32 are rounded once, and again with the residual."""
        return 2 if self.entry.fp32_acc else self.rank.options.world_size

    def shot(self, tokens: int) -> Optional[str]:
        """As in the parent."""
        decide = getattr(self.trtllm, "_should_use_oneshot", None)
        options = self.rank.options
        return ("one" if decide(tokens, options.hidden_size, self.rank.torch.bfloat16, options.world_size) else "two") if decide else None

    def prepare(self, b: Buffers) -> None:
        """Nothing: it does not work in place."""

    def step(self, b: Buffers) -> Buffers:
        """As in the parent."""
        common = {
            "launch_with_pdl": True,
            "use_oneshot": None,
            "residual_in": b.residual,
            "residual_out": b.total,
            "norm_out": b.norm,
            "rms_gamma": b.weight,
            "rms_eps": EPSILON,
            "fp32_acc": self.entry.fp32_acc,
        }
        pattern = self.comm.AllReduceFusionPattern.kARResidualRMSNorm
        if self.entry.api == "ipc":
            self.comm.trtllm_allreduce_fusion(
                allreduce_in=b.x,
                world_size=self.rank.options.world_size,
                world_rank=self.rank.rank,
                token_num=b.x.shape[0],
                hidden_dim=b.x.shape[1],
                workspace_ptrs=self.workspace,
                trigger_completion_at_end=False,
                pattern_code=pattern,
                allreduce_out=None,
                quant_out=None,
                scale_out=None,
                scale_factor=None,
                layout_code=None,
                **common,
            )
            return b
        if "trigger_completion_at_end" in inspect.signature(self.comm.allreduce_fusion).parameters:
            common["trigger_completion_at_end"] = False
        self.comm.allreduce_fusion(input=b.x, workspace=self.workspace, pattern=pattern, **common)
        return b


class PcieIpc(Nccl):
    """FlashInfer's allreduce for hosts without NVLink, and the same norm as after NCCL."""

    name = "pcie_ipc"

    def __init__(self, rank: Rank, nccl: Nccl) -> None:
        self.rank, self.add_rms_norm = rank, nccl.add_rms_norm
        options, torch = rank.options, rank.torch
        comm = importlib.import_module("flashinfer.comm")
        pcie = importlib.import_module("flashinfer.comm.pcie_ipc_ar")
        rank.compile(pcie.get_pcie_ipc_comm_module)
        with rank.phase("making the workspace"):
            self.workspace = comm.PcieIpcAllReduceWorkspace(
                group=rank.dist.group.WORLD,
                max_numel=PCIE_IPC_ROWS * options.hidden_size,
                dtype=torch.bfloat16,
                tune_batches=PCIE_IPC_TUNED,
                tune_cache=os.path.join(rank.folder, "tactics.json"),
            )
        with rank.phase("tuning", options.compile_timeout):
            try:
                # By default it repeats more often, and takes minutes.
                self.workspace.tune([options.hidden_size], dtype=torch.bfloat16, tune_group=rank.group, warmup=3, repeat=10)
                rank.report["tuned"] = True
            except Exception:  # the server, too, then goes on with the untuned kernels
                rank.report["tuned"] = False

    def supports(self, b: Buffers) -> bool:
        """As in the parent."""
        return bool(b.x.shape[0] <= PCIE_IPC_ROWS and self.workspace.supports(b.x))

    def step(self, b: Buffers) -> Buffers:
        """As in the parent; it does not reduce in place."""
        reduced = self.workspace.all_reduce(b.norm)
        self.add_rms_norm(reduced, b.total, b.weight, EPSILON)
        return b._replace(norm=reduced)


def ulp(torch: Any, x: Any) -> Any:
    """The distance between neighbouring bfloat16 numbers at each float64 of ``x``."""
    bits = x.abs().clamp_min(2.0**-100).view(torch.int64)
    return ((bits & (0x7FF << 52)) - (7 << 52)).view(torch.float64)


def errors(torch: Any, b: Buffers, parts: Sequence[Any], roundings: int, norm_bound_ulp: float) -> Json:
    """Compare one result with float64.

    The sum may be off by half an ulp for each rounding on the way, an ulp being that of the largest value on the way.
    The norm is compared with the float64 norm of the sum that came with it, in ulps of the larger of the two.
    """
    total, norm, weight = b.total.double(), b.norm.double(), b.weight.double()
    exact, largest = b.residual.double(), b.residual.double().abs()
    for part in parts:
        exact, largest = exact + part.double(), largest + part.double().abs()

    def normalised(x: Any) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight

    from_sum, from_exact = normalised(total), normalised(exact)
    return {
        "finite": bool(torch.isfinite(norm).all() and torch.isfinite(total).all()),
        "sum_error_ulp": float(((total - exact).abs() / ulp(torch, largest * (1 + 2.0**-8) ** roundings)).max()),
        "sum_bound_ulp": roundings / 2,
        "norm_error_ulp": float(((norm - from_sum).abs() / ulp(torch, torch.maximum(norm.abs(), from_sum.abs()))).max()),
        "norm_bound_ulp": norm_bound_ulp + NORM_SLACK_ULP,
        "relative_error": float((norm - from_exact).norm() / from_exact.norm()),
    }


def fingerprint(torch: Any, b: Buffers) -> str:
    """A checksum of the bits of a result, to compare ranks with."""
    cells = torch.cat((b.norm.reshape(-1), b.total.reshape(-1))).view(torch.int16).cpu()
    return hashlib.sha256(cells.numpy().tobytes()).hexdigest()


def worst(checks: Sequence[Json]) -> Json:
    """Return the worst of several checks; what is not finite is the worst of all, and JSON knows no NaN."""
    largest = {}
    for name in ("sum_error_ulp", "norm_error_ulp", "relative_error"):
        values = [check[name] for check in checks]
        largest[name] = max(values) if all(map(math.isfinite, values)) else 1e30
    return {**checks[0], **largest, "finite": all(check["finite"] for check in checks)}


def check(rank: Rank, operations: Sequence[Nccl]) -> None:
    """Check every operation at every size, seed after seed, so that sizes change from call to call as they do in a server."""
    found: dict[str, dict[int, list[Json]]] = {operation.name: {} for operation in operations}
    agreed: dict[str, dict[int, bool]] = {operation.name: {} for operation in operations}
    for seed in range(SEEDS):
        for tokens in rank.options.tokens:
            for operation in operations:
                b, parts = rank.buffers(tokens, seed)
                if not operation.supports(b):
                    continue
                with rank.phase(f"checking {operation.name} at {tokens} tokens"):
                    operation.prepare(b)
                    rank.everyone(0)
                    if rank.options.fault == "hang" and rank.last and operation.name != "nccl":
                        time.sleep(3600)
                    result = operation.step(b)
                    rank.torch.cuda.synchronize()
                    if rank.options.fault == "corrupt" and rank.last and operation.name != "nccl":
                        result.norm.view(rank.torch.int16)[-1, -1] += 1  # one ulp in one number
                    found_here = errors(rank.torch, result, parts, operation.roundings(), operation.norm_bound_ulp)
                    everyone = rank.everyone((found_here, fingerprint(rank.torch, result)))
                found[operation.name].setdefault(tokens, []).extend(check for check, _bits in everyone)
                same = len({bits for _check, bits in everyone}) == 1
                agreed[operation.name][tokens] = agreed[operation.name].get(tokens, True) and same
    rank.report["checks"] = {
        operation.name: [
            {"tokens": tokens, "shot": operation.shot(tokens), **worst(checks), "ranks_agree": agreed[operation.name][tokens]}
            for tokens, checks in found[operation.name].items()
        ]
        for operation in operations
    }


def clock(rank: Rank, operations: Sequence[Nccl]) -> None:
    """Time every operation at every size in CUDA graphs, in turns, so that a drift meets all of them."""
    rows = rank.report["times"] = []
    for tokens in rank.options.tokens:
        medians: dict[str, list[float]] = {}
        with rank.phase(f"preparing to time {tokens} tokens"):
            b, _parts = rank.buffers(tokens, 0)
            able = [operation for operation in operations if operation.supports(b)]
            graphs = {operation.name: Timed(rank, operation, rank.buffers(tokens, 0)[0]) for operation in able}
        for _round in range(ROUNDS):
            for name, timed in graphs.items():
                with rank.phase(f"timing {name} at {tokens} tokens"):
                    rank.everyone(0)
                    medians.setdefault(name, []).append(max(rank.everyone(timed.us())))
        stable = all(rank.everyone(all(timed.stable() for timed in graphs.values())))
        rows.append(
            {
                "tokens": tokens,
                "medians_us": {name: round(statistics.median(values), 3) for name, values in medians.items()},
                "spreads": {name: round((max(values) - min(values)) / statistics.median(values), 4) for name, values in medians.items()},
                "stable": stable,
            }
        )


class Timed:
    """An operation in a CUDA graph, a chain of steps like the layers of a model."""

    def __init__(self, rank: Rank, operation: Nccl, b: Buffers) -> None:
        self.torch = torch = rank.torch
        operation.prepare(b)
        self.result = operation.step(b)
        # In place, each step works on what the last one left.
        self.first = fingerprint(torch, self.result) if isinstance(operation, Fusion) else None
        eager = max(rank.everyone(_elapsed_us(torch, lambda: operation.step(b), 3)))
        self.steps = min(50, max(2, round(2000 / eager)))
        self.replays = min(10, max(3, round(20000 / (self.steps * eager))))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # NCCL's own threads go on
            for _step in range(self.steps):
                operation.step(b)

    def us(self) -> float:
        """Microseconds a step, the median of a few replays."""
        return float(statistics.median([_elapsed_us(self.torch, self.graph.replay, 1) / self.steps for _replay in range(self.replays)]))

    def stable(self) -> bool:
        """Whether the result is still the one from before the timing."""
        return self.first is None or self.first == fingerprint(self.torch, self.result)


def _elapsed_us(torch: Any, work: Any, times: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    work()  # warm
    start.record()
    for _time in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end) * 1000 / times)


def bus_bandwidth(rank: Rank) -> None:
    """Measure NCCL's bus bandwidth with one large allreduce."""
    with rank.phase("measuring NCCL's bus bandwidth"):
        large = rank.torch.zeros(BUS_BYTES // 2, device="cuda", dtype=rank.torch.bfloat16)
        us = max(rank.everyone(_elapsed_us(rank.torch, lambda: rank.dist.all_reduce(large), 10)))
        world = rank.options.world_size
        rank.report["bus"] = {"bytes": BUS_BYTES, "gb_per_s": round(BUS_BYTES * 2 * (world - 1) / world / us / 1000, 1)}


def links(rank: Rank) -> None:
    """Copy data between each pair of GPUs, as one block and by the stores of a kernel, and look whether it arrives."""
    torch, pairs = rank.torch, rank.report.setdefault("pairs", [])
    world = rank.options.world_size
    for source in range(world):
        generator = torch.Generator().manual_seed(source)
        sent = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, generator=generator)
        for target in (number for number in range(world) if number != source):
            with rank.phase(f"copying from GPU {source} to GPU {target}"):
                here, there = sent.to(f"cuda:{source}"), torch.zeros(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{target}")
                with torch.cuda.device(source):
                    us = _elapsed_us(torch, lambda here=here, there=there: there.copy_(here), 5)
                copied = bool(torch.equal(there.cpu(), sent))
                # Two cells of four: not one block, so a kernel on the source writes to its peer.
                there.zero_()
                torch.cuda.synchronize(target)
                there.view(-1, 4)[:, :2].copy_(here.view(-1, 4)[:, :2])
                torch.cuda.synchronize(source)
                torch.cuda.synchronize(target)
                written = bool(torch.equal(there.view(-1, 4)[:, :2].cpu(), sent.view(-1, 4)[:, :2]))
            access = bool(torch.cuda.can_device_access_peer(source, target))
            speed = round(COPY_BYTES / us / 1000, 1)
            pairs.append({"from": source, "to": target, "peer_access": access, "copied": copied, "written": written, "gb_per_s": speed})


def run_rank(request: Json) -> int:
    """Run one rank of a stage; return the exit status."""
    if request["fault"] == "missing" and int(os.environ.get("RANK", "0")) == request["world_size"] - 1 and request["stage"] != "links":
        return 0
    rank = Rank(request)
    try:
        if request["stage"] == "links":
            links(rank)
        else:
            rank.join()
            torch = rank.torch
            rank.report["runtime"] = {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
            bus_bandwidth(rank)
            nccl = Nccl(rank)
            operations = [nccl, Fusion(rank) if request["stage"] == "fusion" else PcieIpc(rank, nccl)]
            check(rank, operations)
            clock(rank, operations)
    except Exception as error:
        rank.finish(error)
        raise
    rank.finish()
    sys.stdout.flush()
    os._exit(0)  # taking the groups down would only be another chance to hang


def main() -> int:
    """Read the options and run the parent, or a rank."""
    parser = argparse.ArgumentParser(description="Measure FlashInfer's fused allreduce next to NCCL, on idle GPUs.")
    parser.add_argument("--world-size", type=int, default=2, help="ranks, one a GPU: the server's tensor parallel size")
    parser.add_argument("--hidden-size", type=int, default=6144, help="of the model")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="batch sizes, comma-separated")
    parser.add_argument("--phase-timeout", type=float, default=60, help="seconds that the ranks may stay at one thing")
    parser.add_argument("--compile-timeout", type=float, default=1800, help="seconds that a JIT build may take")
    parser.add_argument("--output", help="file for the JSON; without it, standard output gets it")
    parser.add_argument("--fault", choices=FAULTS, help="break something on purpose, to test this program")
    parser.add_argument("--rank-request", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_request:
        return run_rank(json.loads(arguments.rank_request))
    if not arguments.tokens.replace(",", "").isdigit():
        parser.error(f"--tokens: {arguments.tokens!r} found; expected numbers such as 1,8,128")
    tokens = tuple(int(text) for text in arguments.tokens.split(",") if text)
    if not all(1 <= number <= MAX_TOKENS for number in tokens):
        parser.error(f"--tokens: {arguments.tokens} found; expected 1 to {MAX_TOKENS}, which is what sglang fuses")
    if arguments.hidden_size < 8 or arguments.hidden_size % 8:
        parser.error(f"--hidden-size: {arguments.hidden_size} found; expected a multiple of 8")
    options = Options(
        arguments.world_size, arguments.hidden_size, tokens, arguments.phase_timeout, arguments.compile_timeout, arguments.fault
    )
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "OMP_NUM_THREADS": "1", **os.environ}
    result = measure(options, environment)
    text = json.dumps(result, indent=1) + "\n"
    if arguments.output:
        Path(arguments.output).write_text(text, encoding="utf-8")
        sys.stdout.write(table(result) + "\n")
    else:
        sys.stdout.write(text)
        sys.stderr.write(table(result) + "\n")
    return {"measured": 0, "refused": 3}.get(result["status"], 4)


if __name__ == "__main__":
    raise SystemExit(main())
