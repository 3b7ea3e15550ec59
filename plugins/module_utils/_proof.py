# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Measure a host as its server would use it, and keep the result with a fingerprint of what it depends on.

What runs on the GPUs is _proof_probe, in the serving venv; what follows from its result is decided in _decision.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

from ansible_collections.blackwell.inference.plugins.module_utils import _proof_probe as probe
from ansible_collections.blackwell.inference.plugins.module_utils._catalogue import GATES
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._gpu import Inventory, Runner, parse_capability
from ansible_collections.blackwell.inference.plugins.module_utils._jit_cache import sglang_redirects, workspace_base
from ansible_collections.blackwell.inference.plugins.module_utils._opening import recovered
from ansible_collections.blackwell.inference.plugins.module_utils._packages import Site
from ansible_collections.blackwell.inference.plugins.module_utils._store import Store
from ansible_collections.blackwell.inference.plugins.module_utils._survey import Installation, survey
from ansible_collections.blackwell.inference.plugins.module_utils._version import COLLECTION_VERSION

SCHEMA_VERSION = 1
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # what systemd gives a unit that sets none
_CACHES = ("CACHE_DIR", "CACHE_PATH", "CACHE_HOME", "EXTENSIONS_DIR", "WORKSPACE_BASE")  # how variables that name one end

Json = dict[str, Any]


class Server(NamedTuple):
    """The server that the proof is for."""

    python: str  # its venv's interpreter
    user: Optional[str]  # None is the user that runs this
    environment: Mapping[str, str]
    world_size: int  # tensor parallel size
    hidden_size: int  # of the model


def fingerprint(server: Server, inventory: Inventory, site: Site, state_dir: str) -> Json:
    """Return what a measurement depends on: driver, GPUs, links, packages, gates, and how the server uses them."""
    capabilities = [parse_capability(text) for text in inventory.compute_capabilities]
    installation = recovered(Installation(site, Store(state_dir), {"flashinfer", "sglang"}), COLLECTION_VERSION)
    return {
        "driver": inventory.driver_version,
        "gpus": {str(gpu.index): f"{gpu.name} {gpu.uuid}" for gpu in inventory.gpus},
        "links": {f"{first}-{second}": link for (first, second), link in inventory.links},
        "packages": {package.distribution: package.version for package in site.packages.values()},
        "gates": {found.gate.id: found.verdict for found in survey(installation, capabilities, GATES) if found.verdict != "absent"},
        "server": {
            "world_size": server.world_size,
            "hidden_size": server.hidden_size,
            # NCCL's own settings make the time that the others are compared with.
            "environment": {
                name: value for name, value in server.environment.items() if name.startswith("NCCL_") or name == "CUDA_VISIBLE_DEVICES"
            },
        },
    }


def refusal(server: Server, site: Site, run: Runner) -> Optional[str]:
    """Return why nothing can be measured now, as the probe itself would say; None if it can."""
    if "torch" not in site.packages:
        return f"{site.label} has no torch, so nothing runs there"
    listed = ["--format=csv,noheader,nounits"]
    gpus = probe.parse_gpus(run([f"--query-gpu={','.join(probe.GPU_FIELDS)}", *listed]).text)
    options = probe.Options(server.world_size, server.hidden_size, probe.TOKENS, 0, 0, None)
    try:
        seen = probe.visible(gpus, server.environment.get("CUDA_VISIBLE_DEVICES"))
        probe.refuse(options, seen, run([f"--query-compute-apps={','.join(probe.PROCESS_FIELDS)}", *listed]).text)
    except probe.Refusal as refused:
        return str(refused)
    return None


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
    account = _account(server.user)
    folder = tempfile.mkdtemp(prefix="blackwell-inference-proof-")
    try:
        program, output = os.path.join(folder, "probe.py"), os.path.join(folder, "probe.json")
        with open(program, "w", encoding="utf-8") as file:
            file.write(inspect.getsource(probe))
        identity: Json = {}
        if os.geteuid() == 0 and account.pw_uid != 0:
            os.chown(folder, account.pw_uid, account.pw_gid)
            os.chmod(program, 0o644)
            groups = os.getgrouplist(account.pw_name, account.pw_gid)
            identity = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": groups}
        command = [server.python, program, "--world-size", str(server.world_size), "--hidden-size", str(server.hidden_size)]
        command += ["--phase-timeout", str(phase_timeout), "--compile-timeout", str(timeout), "--output", output]
        printed = _run(command, _environment(server, site, account, nvidia_smi, folder), folder, timeout, identity)
        try:
            with open(output, encoding="utf-8") as file:
                result: Json = json.load(file)
        except (OSError, ValueError):
            last = printed.strip().splitlines()[-1] if printed.strip() else "it said nothing"
            raise InferenceError(f"python {server.python}", f"the probe ended without a result: {last}", "a JSON") from None
        return result
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def load(path: str) -> Optional[Json]:
    """Return the record in ``path``; None if there is none.

    Raises:
        InferenceError: It cannot be read, or is of another schema.
    """
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InferenceError(path, f"it cannot be read ({error.strerror})", "the record of the last proof", "Run as its owner.") from None
    except ValueError:
        record = None
    version = record.get("schema_version") if isinstance(record, dict) else None
    if version != SCHEMA_VERSION:
        found = f"its schema_version is {version}" if version else "it is no record of a proof"
        raise InferenceError(path, found, f"schema_version {SCHEMA_VERSION}", "Remove it, and measure again.")
    return dict(record)


def replace(path: str, content: Mapping[str, Any], mode: int, folder_mode: int, check_mode: bool = False) -> bool:
    """Write ``content`` to ``path`` as JSON, whole or not at all; return whether that changed the file, or would in check mode.

    Raises:
        InferenceError: It cannot be written.
    """
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    temporary = f"{path}.new"
    try:
        with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as file:
            if file.read() == text:
                return False
        if check_mode:
            return True
        os.makedirs(os.path.dirname(path), mode=folder_mode, exist_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode), "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise InferenceError(path, f"it cannot be written ({error.strerror})", "a folder that can be written") from None
    return True


def _account(user: Optional[str]) -> pwd.struct_passwd:
    """Return the service's user, or the own one where that does not exist yet."""
    own = pwd.getpwuid(os.geteuid())
    try:
        account = pwd.getpwnam(user) if user else own
    except KeyError:
        return own
    if os.geteuid() not in (0, account.pw_uid):
        raise InferenceError("user", f"{account.pw_name}, but the module runs as {own.pw_name}", "root or that user", "Use become.")
    return account


def _environment(server: Server, site: Site, account: pwd.struct_passwd, nvidia_smi: str, scratch: str) -> dict[str, str]:
    """Return the environment of the service; where its caches do not exist yet, or are not this user's, with throw-away ones."""
    given = {"PATH": _PATH, "HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name, **server.environment}
    base = workspace_base(given, sglang_redirects(site.packages["sglang"].location), account.pw_name)
    if server.user in (None, account.pw_name) and os.path.isdir(base):
        caches = {"FLASHINFER_WORKSPACE_BASE": base}
    else:
        caches = dict.fromkeys(["HOME", "FLASHINFER_WORKSPACE_BASE", *(name for name in given if name.endswith(_CACHES))], scratch)
    folder = os.path.dirname(nvidia_smi)
    return {**given, **caches, "PATH": f"{folder}:{given['PATH']}" if folder else given["PATH"]}


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
