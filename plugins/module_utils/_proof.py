# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure a host as its server would use it, and keep the result with a fingerprint of what it depends on.

What runs on the GPUs is _proof_probe, in the serving venv; what follows from its result is decided in _decision.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple, Optional

from ansible_collections.blackwell.inference.plugins.module_utils import _account
from ansible_collections.blackwell.inference.plugins.module_utils import _proof_probe as probe
from ansible_collections.blackwell.inference.plugins.module_utils._catalogue import GATES
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._gpu import Inventory, Runner, parse_capability
from ansible_collections.blackwell.inference.plugins.module_utils._jit_build import max_jobs_here, nvcc
from ansible_collections.blackwell.inference.plugins.module_utils._jit_cache import sglang_redirects, workspace_base
from ansible_collections.blackwell.inference.plugins.module_utils._opening import recovered
from ansible_collections.blackwell.inference.plugins.module_utils._packages import Site
from ansible_collections.blackwell.inference.plugins.module_utils._store import Store
from ansible_collections.blackwell.inference.plugins.module_utils._survey import Installation, survey
from ansible_collections.blackwell.inference.plugins.module_utils._version import COLLECTION_VERSION

AS_RELEASED = ("absent", "open", "not_admitted")
HIDDEN_SIZE = 6144  # that of GLM-5

Json = dict[str, Any]


class Server(NamedTuple):
    """The server that the proof is for."""

    python: str  # its venv's interpreter
    user: Optional[str]  # None is the user that runs this
    environment: Mapping[str, str]
    world_size: int  # tensor parallel size
    hidden_size: int  # of the model


def fingerprint(server: Server, inventory: Inventory, site: Site, state_dir: str) -> Json:
    """Return what a measurement depends on: driver, GPUs, links, packages, compiler, gates, and how the server uses them."""
    capabilities = [parse_capability(text) for text in inventory.compute_capabilities]
    installation = recovered(Installation(site, Store(state_dir), {"flashinfer", "sglang"}), COLLECTION_VERSION)
    return {
        "driver": inventory.driver_version,
        "gpus": {str(gpu.index): f"{gpu.name} {gpu.uuid}" for gpu in inventory.gpus},
        "links": {f"{first}-{second}": link for (first, second), link, _access in inventory.links},
        "nvcc": nvcc(server.environment),
        "packages": {package.distribution: package.version for package in site.packages.values()},
        # The others are as they were released, which the versions say; a later catalogue may know more of them.
        "gates": {found.gate.id: found.verdict for found in survey(installation, capabilities, GATES) if found.verdict not in AS_RELEASED},
        "server": {
            "world_size": server.world_size,
            "hidden_size": server.hidden_size,
            # NCCL's own settings make the time that the others are compared with.
            "environment": {
                name: value for name, value in server.environment.items() if name.startswith("NCCL_") or name == "CUDA_VISIBLE_DEVICES"
            },
        },
    }


def hidden_size(model: Optional[str]) -> Optional[int]:
    """Return the hidden size that config.json in the folder of a model says; None where there is no such folder.

    Raises:
        InferenceError: It does not say one.
    """
    path = os.path.join(model or "", "config.json")
    if not model or not os.path.isabs(model) or not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        # A model that sees and hears has one for each of its parts.
        found = config.get("hidden_size") or config["text_config"]["hidden_size"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        found = None
    if not isinstance(found, int) or found < 1:
        raise InferenceError(path, "it says no hidden_size", "the configuration of a model", "Set hidden_size.")
    return found


def refusal(server: Server, site: Site, run: Runner, stopped: Set[int] = frozenset()) -> Optional[str]:
    """Return why nothing can be measured now, as the probe itself would say; None if it can.

    Args:
        server: Whose GPUs and packages.
        site: Its packages.
        run: Runs nvidia-smi.
        stopped: Processes that are stopped before, and not in the way.
    """
    if "torch" not in site.packages:
        return f"{site.label} has no torch; install sglang there with its dependencies"
    listed = ["--format=csv,noheader,nounits"]
    gpus = probe.parse_gpus(run([f"--query-gpu={','.join(probe.GPU_FIELDS)}", *listed]).text)
    options = probe.Options(server.world_size, server.hidden_size, probe.TOKENS, 0, 0, None)
    try:
        seen = probe.visible(gpus, server.environment.get("CUDA_VISIBLE_DEVICES"))
        processes = run([f"--query-compute-apps={','.join(probe.PROCESS_FIELDS)}", *listed]).text
        probe.refuse(options, *without(stopped, seen, processes))
    except probe.Refusal as refused:
        return str(refused)
    return None


def without(stopped: Set[int], gpus: Sequence[Json], processes: str) -> tuple[list[Json], str]:
    """Return GPUs and what nvidia-smi prints for PROCESS_FIELDS as they are when these processes are gone, and their memory with them."""
    lines = processes.splitlines(keepends=True)
    gone = [line for line in lines if line.split(", ")[1:2] and line.split(", ")[1] in map(str, stopped)]
    freed = {line.split(", ")[0] for line in gone}
    left = [{**gpu, "memory.used": "0"} if gpu["uuid"] in freed else gpu for gpu in gpus]
    return left, "".join(line for line in lines if line not in gone)


def running_strategy(config: str) -> Optional[str]:
    """Return how the ranks of a server reduce that runs with this configuration; None where the role has not written it."""
    try:
        with open(config, encoding="utf-8", errors="replace") as file:
            told = re.search(r"^# .*\bAllreduce: (\w+)\.", file.read(), re.MULTILINE)
    except OSError:
        return None
    return told[1] if told else None


def measure(server: Server, site: Site, nvidia_smi: str, phase_timeout: float, timeout: float) -> Json:
    """Run the probe in the serving venv, as the service's user and in its environment; return its JSON.

    Args:
        server: Whose GPUs and packages.
        site: Its packages.
        nvidia_smi: Name or path of nvidia-smi.
        phase_timeout: Seconds that the ranks may stay at one thing.
        timeout: Seconds for everything, a JIT build included.

    Raises:
        InferenceError: The user cannot run the probe, or it does not end in time.
    """
    account = _account.find(server.user)
    if account is None:
        raise InferenceError("user", f"{server.user} does not exist on this host", "the user that the server runs as")
    folder = tempfile.mkdtemp(prefix="blackwell-inference-proof-")
    try:
        program, output = os.path.join(folder, "probe.py"), os.path.join(folder, "probe.json")
        with open(program, "w", encoding="utf-8") as file:
            file.write(inspect.getsource(probe))
        os.chmod(program, 0o644)
        os.chown(folder, account.pw_uid, account.pw_gid)
        command = [server.python, program, "--world-size", str(server.world_size), "--hidden-size", str(server.hidden_size)]
        command += ["--phase-timeout", str(phase_timeout), "--compile-timeout", str(timeout), "--output", output]
        printed = _run(command, _environment(server, site, account, nvidia_smi), folder, timeout, _account.identity(account))
        try:
            with open(output, encoding="utf-8") as file:
                result: Json = json.load(file)
        except (OSError, ValueError):
            last = printed.strip().splitlines()[-1] if printed.strip() else "it said nothing"
            raise InferenceError(f"python {server.python}", f"the probe ended without a result: {last}", "a JSON") from None
        return result
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _environment(server: Server, site: Site, account: pwd.struct_passwd, nvidia_smi: str) -> dict[str, str]:
    """Return the environment of the service, with the folder of its caches made and that of nvidia-smi in PATH."""
    base = workspace_base(server.environment, sglang_redirects(site.packages["sglang"].location), account.pw_name)
    _account.make_folder(account, base)
    environment = {"MAX_JOBS": str(max_jobs_here(server.environment)), **_account.environment(account, server.environment)}
    environment["FLASHINFER_WORKSPACE_BASE"] = base
    folder = os.path.dirname(nvidia_smi)
    return {**environment, "PATH": f"{folder}:{environment['PATH']}"} if folder else environment


def _run(command: Sequence[str], environment: Mapping[str, str], folder: str, timeout: float, identity: Json) -> str:
    """Run the probe; return what it printed."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=folder,
                start_new_session=True,
                preexec_fn=_die_with_parent,
                **identity,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise InferenceError(
                "python", f"{command[0]} cannot be run ({error})", "an interpreter that the server's user can run"
            ) from None
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks go with it
            process.wait()
            raise InferenceError("timeout", f"the proof was not done after {timeout:g} s", "a longer time", "Raise timeout.") from None
        log.seek(0)
        return log.read()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
