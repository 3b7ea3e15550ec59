# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Build flashinfer's JIT modules before a server needs them: ask the serving venv, refuse what cannot work, build, verify.

What is asked and built happens in the serving venv (_jit_cache_venv); here is what its answers mean.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ansible_collections.blackwell.inference.plugins.module_utils import _account, _jit_cache_venv
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._jit_cache_elf import device_code, runs_on

ARCH_LIST = re.compile(r"\d+\.\d[af]?( \d+\.\d[af]?)*")
_ERROR = re.compile(r"\): error|: (fatal )?error:|^(ptxas|nvcc|nvlink|cicc)\b.*\b(fatal|error)\b|\bld: |Killed|signal 9")
_GIB = 1 << 20  # in the KiB of /proc/meminfo
HOST_GIB, COMPILER_GIB = 16, 8  # left to the host; what one nvcc may take

Description = Mapping[str, Any]  # the answer of _jit_cache_venv.describe
Progress = Callable[[str], None]


class NotYet(InferenceError):
    """Something that an earlier task of the same run may put right: in check mode a warning."""


class Service(NamedTuple):
    """The server that the modules are for."""

    python: str  # its venv's interpreter
    user: Optional[str]  # None is the user that runs this
    environment: Mapping[str, str]
    base: str  # the folder that holds .cache/flashinfer


def describe(service: Service, modules: Sequence[str], capabilities: Sequence[str], timeout: float = 300) -> Description:
    """Ask the serving venv what a build would use and what is built already.

    Raises:
        InferenceError: The environment is not fit for any build, or the venv does not answer.
    """
    _refuse_environment(service.environment)
    description: Description = _ask(service, "describe", modules, capabilities, timeout)
    if "error" in description:
        raise InferenceError(f"python {service.python}", description["error"], "packages and a toolchain that fit each other")
    return description


def cuda_home(environment: Mapping[str, str]) -> Optional[str]:
    """Return the toolkit that FlashInfer takes in a service with this environment; None if there is none."""
    found = shutil.which("nvcc", path=environment.get("PATH", _account.PATH))
    beside = os.path.dirname(os.path.dirname(found)) if found else "/usr/local/cuda"
    return environment.get("CUDA_HOME") or environment.get("CUDA_PATH") or (beside if os.path.isdir(beside) else None)


def nvcc(environment: Mapping[str, str]) -> Optional[str]:
    """Return the compiler that a service with this environment finds, as a path without links; None if it finds none."""
    name = environment.get("FLASHINFER_NVCC") or os.path.join(cuda_home(environment) or "", "bin", "nvcc")
    found = shutil.which(name, path=environment.get("PATH", _account.PATH))
    return os.path.realpath(found) if found else None


def refuse(description: Description, service: Service, capabilities: Sequence[str]) -> None:
    """Raise InferenceError for what would make a build fail, or succeed and be of no use, before anything is compiled."""
    nvcc = f"nvcc {description['nvcc_version']} ({description['nvcc']})"
    if not description["nvcc"]:
        raise InferenceError(
            "environment CUDA_HOME",
            f"no nvcc in {description['cuda_home'] or 'PATH'}",
            "the folder of a CUDA toolkit, e.g. /usr/local/cuda",
            "Install the toolkit, or name its folder.",
        )
    for tool, program in (("ninja", "ninja"), ("compiler", "C++ compiler")):
        if not description[tool]:
            raise InferenceError("environment PATH", f"no {program} in it", f"one that the server finds too: its PATH is {_path(service)}")
    flashinfer = f"flashinfer {description['flashinfer']}"
    if description["arch_error"]:
        raise InferenceError(flashinfer, f"{description['arch_error']}; found {nvcc}", "a newer CUDA toolkit")
    archs = description["archs"]
    if not archs:
        raise InferenceError("compute_capability", "torch sees no GPU here", "the capability to build for, e.g. 12.0, or a GPU")
    strange = [capability for capability in capabilities if not _covers(archs, capability)]
    if strange:
        raise InferenceError("compute_capability", strange[0], f"one that the server would build for, which is {', '.join(archs)}")
    bare = [arch for arch in archs if arch.isdigit() and int(arch) >= 100]
    if bare:
        raise InferenceError(
            "environment FLASHINFER_CUDA_ARCH_LIST",
            f"{flashinfer} takes it as sm_{bare[0]}, for which the kernels do not compile",
            f"{bare[0][:-1]}.{bare[0][-1]}a",
            "Leave it unset where the server sees its GPUs.",
        )
    if not description["writable"]:
        raise NotYet(description["workspace"], f"{service.user or 'this user'} cannot write there", "a folder of the server's user")
    for name, module in description["modules"].items():
        _refuse_module(name, module, archs, nvcc)


def missing_code(libraries: Sequence[str], codes: Sequence[str]) -> list[str]:
    """Return those of ``codes`` (e.g. "sm_120a") for whose GPU none of the libraries holds anything that runs."""
    held = [image for library in libraries for image in device_code(library)]
    return [code for code in codes if not any(runs_on(image, code) for image in held)]


def stale_because(module: Mapping[str, Any]) -> Optional[str]:
    """Return why a module, as described, has to be built (again); None if the server can load it as it is."""
    if not os.path.isfile(module["library"]):
        return "it is not built"
    try:
        held = device_code(module["library"])
    except InferenceError:
        return "it is not a whole library"
    if held != module["codes"]:
        return f"it holds code for {', '.join(held) or 'no GPU'} and not for {', '.join(module['codes'])}"
    recorded, expected = module["recorded"], module["expected"]
    if recorded:
        sources = [name for name, digest in recorded["sources"].items() if expected["sources"][name] != digest]
        if sources:
            more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
            return f"flashinfer/{sources[0]}{more} changed since"
        for name, label in (("flashinfer", "flashinfer"), ("torch", "torch"), ("torch_cuda", "torch's CUDA"), ("nvcc_version", "nvcc")):
            if recorded[name] != expected[name]:
                return f"it was built with {label} {recorded[name]}, now it is {expected[name]}"
    if not module["same_plan"] or (recorded and recorded["plan"] != expected["plan"]):
        return "compiler flags or paths changed"
    if module["replaced"]:
        return f"flashinfer/{module['replaced']} was replaced after a server had built it"
    return None if module["up_to_date"] else "ninja would build it again"


def build(
    service: Service, modules: Sequence[str], capabilities: Sequence[str], jobs: int, timeout: float, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Build modules in one process of the serving venv; return ``{module: {library, seconds}}``.

    Args:
        service: Whose modules.
        modules: Their names.
        capabilities: For which GPUs, where torch sees none.
        jobs: Compilers that run at once.
        timeout: Seconds for all of them.
        progress: Called every few seconds with what is being compiled.

    Raises:
        InferenceError: The build failed; the first compiler error is in the message.
    """
    environment = {**service.environment, "MAX_JOBS": str(jobs)}
    return _ask(service._replace(environment=environment), "build", modules, capabilities, timeout, progress)


def verify(module: Mapping[str, Any], library: str) -> list[str]:
    """Check that a built library is the described one and holds code for exactly its architectures; return these.

    Raises:
        InferenceError: It is another one, or holds other code.
    """
    if library != module["library"]:
        raise InferenceError(library, "is what flashinfer would load", module["library"])
    held = device_code(library)
    if held != module["codes"]:
        raise InferenceError(library, f"holds code for {', '.join(held) or 'no GPU'}", ", ".join(module["codes"]))
    return held


def max_jobs(meminfo: str, cores: int) -> int:
    """Return how many compilers may run at once, from the text of /proc/meminfo and the number of cores."""
    available = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    gib = int(available.group(1)) / _GIB if available else 0
    return max(1, min(cores, int((gib - HOST_GIB) / COMPILER_GIB)))


def max_jobs_here(environment: Mapping[str, str]) -> int:
    """Return how many compilers may run at once on this host, now: no more than MAX_JOBS of a service's environment says."""
    fit = max_jobs(Path("/proc/meminfo").read_text(encoding="ascii"), len(os.sched_getaffinity(0)))
    wanted = environment.get("MAX_JOBS", "")
    return min(fit, int(wanted)) if wanted.isdigit() and int(wanted) else fit


def first_error(output: str) -> str:
    """Return the line of a build's output that tells what went wrong: the first error of a compiler or linker."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # ninja prints commands too, and a command may well hold such a word.
    found = (line for line in lines if _ERROR.search(line) and " -c " not in line)
    return next(found, lines[-1] if lines else "it said nothing")


def _refuse_environment(environment: Mapping[str, str]) -> None:
    name = next((name for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)), None)
    if name and not (os.path.isabs(environment[name]) and os.path.isfile(os.path.join(environment[name], "bin", "nvcc"))):
        raise InferenceError(f"environment {name}", f"{environment[name]!r} holds no bin/nvcc", "the one folder of a CUDA toolkit")
    arch_list = environment.get("FLASHINFER_CUDA_ARCH_LIST")
    if arch_list is not None and not ARCH_LIST.fullmatch(arch_list):
        raise InferenceError("environment FLASHINFER_CUDA_ARCH_LIST", repr(arch_list), "e.g. 12.0a, several separated by one space")
    if environment.get("FLASHINFER_DISABLE_JIT"):
        raise InferenceError("environment FLASHINFER_DISABLE_JIT", "it is set, so the server builds and loads nothing", "it unset")


def _refuse_module(name: str, module: Mapping[str, Any], archs: Sequence[str], nvcc: str) -> None:
    if not module["known"]:
        raise InferenceError("modules", f"this flashinfer cannot build {name} by its name alone", "e.g. trtllm_comm")
    if module["error"]:
        found = f"flashinfer refuses to build it ({module['error']})"
        raise NotYet(f"module {name}", found, "an open gate", "Open it with blackwell.inference.gate.")
    left_out = [arch for arch in archs if not any(runs_on(code, f"sm_{arch}") for code in module["codes"])]
    if left_out:
        raise NotYet(
            f"module {name}",
            f"flashinfer builds it for {', '.join(module['codes'])} and leaves out sm_{left_out[0]}",
            "code for every GPU of the host",
            "Open the gate with blackwell.inference.gate.",
        )
    if module["nvcc_error"]:
        raise InferenceError(f"module {name}", f"{module['nvcc_error']}; found {nvcc}", "a newer CUDA toolkit")
    if module["link_error"]:
        raise InferenceError(
            f"module {name}",
            module["link_error"],
            "libraries that the linker finds",
            "Name the folder of libcuda.so (a driver's, or a toolkit's stubs) in FLASHINFER_EXTRA_LDFLAGS=-L<folder>.",
        )


def _covers(archs: Sequence[str], capability: str) -> bool:
    wanted = capability.replace(".", "")
    return any(runs_on(f"sm_{arch}", f"sm_{wanted}") for arch in archs)


def _ask(
    service: Service,
    action: str,
    modules: Sequence[str],
    capabilities: Sequence[str],
    timeout: float,
    progress: Optional[Progress] = None,
) -> dict[str, Any]:
    """Run _jit_cache_venv in the serving venv, as the service's user and with its environment alone; return its answer."""
    account = _account.find(service.user)
    if account is None:
        raise NotYet("user", f"{service.user or os.geteuid()} does not exist on this host", "the user that the server runs as")
    request = {"action": action, "base": service.base, "modules": list(modules), "capabilities": list(capabilities)}
    with tempfile.TemporaryFile("w+") as answer, tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            process = subprocess.Popen(
                [service.python, "-B", "-c", inspect.getsource(_jit_cache_venv), json.dumps(request)],
                stdin=subprocess.DEVNULL,
                stdout=answer,
                stderr=log,
                env=_account.environment(account, service.environment),
                cwd="/",
                start_new_session=True,
                **_account.identity(account),
            )
        except OSError as error:
            found = f"{account.pw_name} cannot run {service.python} ({error.strerror})"
            raise InferenceError("python", found, "an interpreter that the server's user can run") from None
        try:
            _wait(process, timeout, progress)
        except subprocess.TimeoutExpired:
            found = f"not done after {timeout:g} s, compiling {', '.join(_compiling(process.pid)) or 'nothing'}"
            raise InferenceError("timeout", found, "a longer time, or fewer modules") from None
        finally:
            _stop(process)
        if process.returncode == 0:
            answer.seek(0)
            answered: dict[str, Any] = json.load(answer)
            return answered
        log.seek(0)
        reason = first_error(log.read())
    if action == "describe":
        raise InferenceError(f"python {service.python}", f"it cannot use flashinfer's JIT ({reason})", "the venv that serves sglang")
    remedy = "Give fewer max_jobs." if re.search("Killed|signal 9", reason) else ""
    raise InferenceError(f"modules {', '.join(modules)}", f"the build failed: {reason}", "one without errors", remedy)


def _wait(process: subprocess.Popen[str], timeout: float, progress: Optional[Progress], interval: float = 10) -> None:
    started = time.monotonic()
    while True:
        elapsed = time.monotonic() - started
        try:
            process.wait(min(interval, max(timeout - elapsed, 0)))
            return
        except subprocess.TimeoutExpired:
            if elapsed >= timeout:
                raise
        if progress:
            progress(f"{time.monotonic() - started:.0f} s: compiling {', '.join(_compiling(process.pid)) or 'nothing'}")


def _session(session: int) -> list[int]:
    """Return the processes of a session; ninja gives each compiler a process group of its own."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # it ended
            if name.isdigit() and os.getsid(int(name)) == session:
                found.append(int(name))
    return found


def _compiling(session: int) -> list[str]:
    """Return the sources that compilers of a session work on now."""
    sources = set()
    for pid in _session(session):
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            source = words[words.index("-c", 1) + 1]
            if source.endswith((".cu", ".cpp", ".cc")):
                sources.add(os.path.basename(source))
    return sorted(sources)


def _stop(process: subprocess.Popen[str]) -> None:
    """End what is left of a session; a compiler must not outlive the task that started it."""
    while process.poll() is None or _session(process.pid):
        for pid in _session(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _path(service: Service) -> str:
    return service.environment.get("PATH", _account.PATH)
