# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The part of a build that runs in the serving venv: as the service's user, in the service's environment.

_jit_build sends the text of this file to the venv's interpreter, with a request as JSON in the first argument. The
answer is JSON on standard output; all else that is printed, the compilers' output included, goes to standard error.
It imports the venv's torch and flashinfer and nothing of this collection.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

FINGERPRINT = "blackwell-inference.json"  # in the folder of a module, so that it lives and dies with what it describes


def describe(request: dict[str, Any]) -> dict[str, Any]:
    """Say what a build would use and what is built already. Writes nothing below the real cache.

    ``request``: ``base`` (folder that holds ``.cache/flashinfer``), ``modules`` (names), ``capabilities`` (["12.0"], or none).
    """
    with tempfile.TemporaryDirectory() as scratch:  # importing flashinfer.jit makes folders, so it gets others
        try:
            jit = _import_jit(scratch, request["capabilities"])
        except RuntimeError as error:  # upstream found its toolchain or its packages unfit
            return {"error": f"{error}; found {_nvcc_release()}" if "CUDA" in str(error) else str(error)}
        found = _toolchain(jit)
        workspace = Path(request["base"], jit.env.FLASHINFER_WORKSPACE_DIR.relative_to(scratch))
        found["workspace"] = str(workspace)
        found["writable"] = os.access(next(path for path in (workspace, *workspace.parents) if path.exists()), os.W_OK)
        found["modules"] = {name: _describe_module(jit, name, workspace, found) for name in request["modules"]}
        return found


def build(request: dict[str, Any]) -> dict[str, Any]:
    """Build modules, one after the other in this one process, and leave a fingerprint with each.

    ``request``: as for ``describe``. Answers ``{name: {library, seconds}}``.
    """
    jit = _import_jit(request["base"], request["capabilities"])
    toolchain = _toolchain(jit)
    built = {}
    for name in request["modules"]:
        started = time.monotonic()
        spec = _generator(jit, name)()
        spec.build(verbose=True, need_lock=True)
        folder = Path(spec.jit_library_path).parent
        sources = _sources(folder, toolchain["package"])
        fingerprint = {**_fingerprint(toolchain, (folder / "build.ninja").read_text()), "sources": _digests(toolchain["package"], sources)}
        draft = folder / f"{FINGERPRINT}.new"
        draft.write_text(json.dumps(fingerprint, indent=1, sort_keys=True) + "\n")
        draft.replace(folder / FINGERPRINT)
        built[name] = {"library": str(spec.get_library_path()), "seconds": round(time.monotonic() - started, 1)}
    return built


def _import_jit(base: str, capabilities: list[str]) -> Any:
    """Import flashinfer.jit, for GPUs of these capabilities where torch sees none.

    flashinfer/__init__.py is left out: it loads every operator, and with them much that no build needs.
    """
    torch = importlib.import_module("torch")
    found = importlib.util.find_spec("flashinfer")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("flashinfer-python is not installed")
    package = types.ModuleType("flashinfer")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["flashinfer"] = package
    os.environ["FLASHINFER_WORKSPACE_BASE"] = base
    if capabilities and "FLASHINFER_CUDA_ARCH_LIST" not in os.environ and not torch.cuda.device_count():
        # What this release makes of a real GPU: newer ones add the suffix to a list themselves, older ones do not.
        normalises = "_normalize_cuda_arch" in Path(package.__path__[0], "compilation_context.py").read_text()
        listed = (capability if normalises or float(capability) < 9 else f"{capability}a" for capability in capabilities)
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(listed)
    jit = importlib.import_module("flashinfer.jit")
    # sglang sets this when it loads a model, long after it has imported flashinfer: the folder and modules that name their
    # architectures are settled by then, other modules take theirs from here.
    devices = _devices(torch) or capabilities
    if devices:
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = devices[0] if float(devices[0]) < 9 else f"{devices[0]}a"
    return jit


def _devices(torch: Any) -> list[str]:
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return [f"{major}.{minor}" for major, minor in capabilities]


def _toolchain(jit: Any) -> dict[str, Any]:
    torch = importlib.import_module("torch")
    cpp_ext = importlib.import_module("flashinfer.jit.cpp_ext")
    devices = _devices(torch)
    found: dict[str, Any] = {
        "package": sys.modules["flashinfer"].__path__[0],
        "flashinfer": importlib.import_module("flashinfer.version").__version__,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "devices": devices,
        "archs": [f"{major}{minor}" for major, minor in sorted(jit.current_compilation_context.TARGET_CUDA_ARCHS)],
        "ninja": shutil.which("ninja"),
        "compiler": shutil.which(os.environ.get("CXX", "c++")),
        "cuda_home": None,
        "nvcc": None,
        "nvcc_version": None,
        "arch_error": None,
    }
    try:
        found["cuda_home"] = str(cpp_ext.get_cuda_path())
        found["nvcc"] = shutil.which(os.environ.get("FLASHINFER_NVCC", os.path.join(found["cuda_home"], "bin", "nvcc")))
        found["nvcc_version"] = str(cpp_ext.get_cuda_version()) if found["nvcc"] else None
        for device in devices:  # upstream only logs why it took none of them
            getattr(jit.core.CompilationContext, "_normalize_cuda_arch", lambda *_: None)(*map(int, device.split(".")))
    except RuntimeError as error:
        found["arch_error"] = str(error)
    return found


def _nvcc_release() -> str:
    """Return which nvcc would be used, where upstream's own answer is an error."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = os.path.join(home, "bin", "nvcc") if home else shutil.which("nvcc")
    if not nvcc:
        return "no nvcc"
    release = re.search(r"release ([\d.]+)", subprocess.run([nvcc, "--version"], stdout=subprocess.PIPE, text=True, check=False).stdout)
    return f"nvcc {release.group(1) if release else 'of an unknown release'} ({nvcc})"


def _describe_module(jit: Any, name: str, workspace: Path, toolchain: dict[str, Any]) -> dict[str, Any]:
    generator = _generator(jit, name)
    if generator is None or any(option.default is option.empty for option in inspect.signature(generator).parameters.values()):
        return {"error": None, "known": False}
    found: dict[str, Any] = {"known": True, "error": None, "prebuilt": []}
    try:
        spec = generator()
        prebuilt = [item.path for item in spec.aot_artifacts] if hasattr(spec, "aot_artifacts") else [spec.aot_path] if spec.is_aot else []
        found["prebuilt"] = [str(path) for path in prebuilt]
        # Without a list of its own a module is for all GPUs.
        found["codes"] = _codes(" ".join(spec.extra_cuda_cflags)) or sorted(f"sm_{arch}" for arch in toolchain["archs"])
        spec.write_ninja()
    except RuntimeError as error:
        return {**found, "error": str(error)}
    planned = spec.ninja_path.read_text().replace(str(jit.env.FLASHINFER_WORKSPACE_DIR.resolve()), os.path.realpath(workspace))
    folder = workspace / "cached_ops" / name
    fingerprint = folder / FINGERPRINT
    ninja = folder / "build.ninja"
    recorded = json.loads(fingerprint.read_text()) if fingerprint.is_file() else None
    if recorded:
        sources = recorded["sources"]
        expected = {**_fingerprint(toolchain, planned), "sources": _digests(toolchain["package"], sources)}
    return {
        **found,
        "library": str(folder / f"{name}.so"),
        "codes": _codes(planned),
        "recorded": recorded,
        "expected": expected if recorded else None,
        "replaced": _replaced(folder / f"{name}.so", toolchain) if not recorded else None,
        "same_plan": ninja.is_file() and ninja.read_text() == planned,
        "up_to_date": bool(toolchain["ninja"]) and ninja.is_file() and "no work to do" in _ninja(folder, "-n"),
        "nvcc_error": _nvcc_error(toolchain["nvcc"], planned),
        "link_error": _link_error(toolchain, planned),
    }


def _codes(flags: str) -> list[str]:
    return sorted(set(re.findall(r",code=(\w+)", flags)))


def _generator(jit: Any, name: str) -> Any:
    return getattr(jit, f"gen_{name}_module", None) or getattr(importlib.import_module("flashinfer.jit.comm"), f"gen_{name}_module", None)


def _fingerprint(toolchain: dict[str, Any], plan: str) -> dict[str, Any]:
    """Return what decides the machine code, apart from the sources; the plan holds all flags and paths."""
    versions = {name: toolchain[name] for name in ("flashinfer", "torch", "torch_cuda", "nvcc_version")}
    return {**versions, "plan": hashlib.sha256(plan.encode()).hexdigest()}


def _sources(folder: Path, package: str) -> list[str]:
    """Return the files of the package that a build read, relative to it: ninja has recorded them, headers included."""
    root = os.path.realpath(package) + os.sep
    paths = {os.path.normpath(line.strip()) for line in _ninja(folder, "-t", "deps").splitlines() if line.startswith("    ")}
    return sorted(os.path.relpath(path, root) for path in map(os.path.realpath, paths) if path.startswith(root))


def _replaced(library: Path, toolchain: dict[str, Any]) -> Optional[str]:
    """Return a source that was written, moved or linked into place after the library was made, if there is one.

    ninja goes by the date of a file, which installers and ``cp -p`` set as they like; when its inode changed, only the kernel says.
    """
    if not toolchain["ninja"] or not library.is_file():
        return None
    made = library.stat().st_mtime
    paths = {name: Path(toolchain["package"], name) for name in _sources(library.parent, toolchain["package"])}
    return next((name for name, path in paths.items() if not path.is_file() or path.stat().st_ctime > made), None)


def _digests(package: str, sources: Any) -> dict[str, str]:
    found = {}
    for name in sources:
        path = Path(package, name)
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "absent"
    return found


def _ninja(folder: Path, *arguments: str) -> str:
    command = ["ninja", "-C", str(folder), "-f", "build.ninja", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False).stdout


def _nvcc_error(nvcc: Optional[str], plan: str) -> str:
    """Ask nvcc whether it knows the architectures, without compiling anything."""
    if not nvcc:
        return ""
    flags = sorted(set(re.findall(r"-gencode=\S+", plan)))
    return complaint([nvcc, "--dryrun", *flags, "-c", "-x", "cu", os.devnull, "-o", os.devnull], "fatal")


def _link_error(toolchain: dict[str, Any], plan: str) -> str:
    """Link nothing with the plan's flags: that finds a missing libcuda or libcudart in a moment."""
    flags = re.search(r"^ldflags = ((?:.*\$\n)*.*)$", plan, re.MULTILINE)
    if not flags or not toolchain["compiler"]:
        return ""
    words = shlex.split(flags.group(1).replace("$\n", " ").replace("$cuda_home", toolchain["cuda_home"] or ""))
    with tempfile.TemporaryDirectory() as folder:
        return complaint([toolchain["compiler"], "-x", "c++", os.devnull, *words, "-o", os.path.join(folder, "probe.so")], "ld")


def complaint(command: list[str], marker: str, environment: Optional[Mapping[str, str]] = None) -> str:
    """Run a command; return the line that says why it failed, one that holds ``marker`` rather than another, or nothing."""
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    lines = [line for line in done.stderr.splitlines() if line and not line.startswith("#$")]
    return next((line for line in lines if marker in line), lines[-1] if lines else "no reason given") if done.returncode else ""


def main() -> None:
    """Answer the request in the first argument."""
    request = json.loads(sys.argv[1])
    sys.path[:] = [folder for folder in sys.path if folder]  # the working folder is not the service's
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump({"describe": describe, "build": build}[request["action"]](request), answer)
    answer.flush()


if __name__ == "__main__":
    main()
