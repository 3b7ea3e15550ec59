# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Find the packages that a serving venv imports, without importing them.

Two ways lead there: the venv's interpreter, which is asked (so the copy that it would import wins, editable
installs and conda layouts included), or a site-packages folder, which is read.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import NamedTuple, Optional

from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._processes import kill

# import name -> distribution name on the package index
DISTRIBUTIONS = {
    "flashinfer": "flashinfer-python",
    "flashinfer_cubin": "flashinfer-cubin",
    "flashinfer_jit_cache": "flashinfer-jit-cache",
    "sglang": "sglang",
    "torch": "torch",
}

UNKNOWN_VERSION = "unknown"

# Runs in the serving interpreter, isolated (-I): neither the working folder nor PYTHONPATH may answer.
_PROBE = r"""
import importlib.metadata as metadata, importlib.util, json, sys
packages = {}
for name, distribution in json.loads(sys.argv[1]).items():
    try:
        spec = importlib.util.find_spec(name)
    except Exception:
        spec = None
    folders = list(spec.submodule_search_locations or []) if spec else []
    if folders:
        found = next(iter(metadata.distributions(name=distribution)), None)
        packages[name] = {"folder": folders[0], "version": found.version if found else None}
print("\n" + json.dumps(packages))
"""


class Package(NamedTuple):
    """One installed package, as the serving interpreter imports it."""

    name: str  # import name, e.g. "flashinfer"
    distribution: str  # name on the package index, e.g. "flashinfer-python"
    version: str  # UNKNOWN_VERSION where no metadata is installed beside the package
    location: str  # absolute path of the package folder, symlinks resolved
    root: str  # the folder that paths such as ``flashinfer/jit/comm.py`` are relative to, symlinks resolved
    dist_info: Optional[str]  # its dist-info folder beside it where that holds a RECORD, else None

    @property
    def reinstall(self) -> str:
        """What to do to have its files as released."""
        return f"Reinstall it: pip install --force-reinstall --no-deps {self.distribution}=={self.version}"

    def path(self, name: str) -> str:
        """The absolute path of one of its files, e.g. ``flashinfer/jit/comm.py``."""
        return os.path.join(self.location, *name.split("/")[1:])


class Site(NamedTuple):
    """The place that packages are imported from, and those that were found there."""

    label: str  # the option that named it and its value, for messages
    packages: dict[str, Package]  # import name -> package

    def require(self, *names: str) -> None:
        """Raise InferenceError unless every one of ``names`` (import names) is installed here."""
        for name in names:
            if name not in self.packages:
                raise InferenceError(
                    self.label,
                    f"{DISTRIBUTIONS[name]} is not installed there",
                    "the venv that serves sglang",
                    f"Name that venv, or install {DISTRIBUTIONS[name]} into it.",
                )


def locate(python: Optional[str] = None, site_packages: Optional[str] = None, timeout: float = 60) -> Site:
    """Find the packages of DISTRIBUTIONS through an interpreter or in a site-packages folder.

    Args:
        python: Path of the serving venv's interpreter.
        site_packages: Path of a site-packages folder; exactly one of the two is given.
        timeout: Seconds that the interpreter may take.

    Raises:
        InferenceError: The path does not exist, is not an interpreter, or does not answer.
    """
    if python:
        return _ask_interpreter(python, timeout)
    return _read_site_packages(site_packages or "")


def _ask_interpreter(python: str, timeout: float) -> Site:
    expected = "the path of the serving venv's interpreter, e.g. /opt/sglang/venv/bin/python"
    if not os.path.isfile(python):
        raise InferenceError("python", f"{python} does not exist" if not os.path.exists(python) else f"{python} is not a file", expected)
    try:
        process = subprocess.Popen(
            [python, "-I", "-c", _PROBE, json.dumps(DISTRIBUTIONS)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise InferenceError("python", f"{python} cannot be run ({error.strerror})", expected) from None
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(process)
        raise InferenceError("python", f"{python} did not answer within {timeout:g} s", expected) from None
    lines = output.strip().splitlines()
    try:
        found = json.loads(lines[-1])  # what a .pth file or sitecustomize prints stands before it
        packages = {name: _package(name, item["folder"], item["version"]) for name, item in found.items()}
    except (LookupError, ValueError, TypeError, AttributeError):
        last = (errors.strip().splitlines() or lines or [f"exit status {process.returncode}"])[-1]
        raise InferenceError("python", f"{python} did not answer as Python 3 does ({last})", expected) from None
    return Site(f"python {python}", packages)


def _read_site_packages(site_packages: str) -> Site:
    if not os.path.isdir(site_packages):
        raise InferenceError("site_packages", f"{site_packages} is not a folder", "the path of a site-packages folder")
    folders = {name: os.path.join(site_packages, name) for name in DISTRIBUTIONS}
    return Site(
        f"site_packages {site_packages}",
        {name: _package(name, folder, None) for name, folder in folders.items() if os.path.isdir(folder)},
    )


def _package(name: str, folder: str, version: Optional[str]) -> Package:
    """The package in ``folder``; ``version`` counts where no metadata lies beside it, as with an editable install."""
    distribution, root = DISTRIBUTIONS[name], os.path.realpath(os.path.dirname(folder))
    try:
        entries = [entry for entry in sorted(os.listdir(root)) if _is_dist_info(entry, distribution)]
    except OSError as error:
        raise InferenceError(root, f"cannot be read ({error.strerror})", "the folder that the server imports from") from None
    if len(entries) > 1:
        raise InferenceError(
            root,
            f"it holds {' and '.join(entries)}",
            f"one installed version of {distribution}",
            "Remove the one that a broken upgrade left behind.",
        )
    dist_info = os.path.join(root, entries[0]) if entries else None
    if entries:
        version = entries[0][: -len(".dist-info")].split("-")[1]
    recorded = dist_info is not None and os.path.isfile(os.path.join(dist_info, "RECORD"))
    return Package(name, distribution, version or UNKNOWN_VERSION, os.path.realpath(folder), root, dist_info if recorded else None)


def _is_dist_info(entry: str, distribution: str) -> bool:
    return entry.endswith(".dist-info") and entry.count("-") >= 2 and _normalised(entry.split("-")[0]) == _normalised(distribution)


def _normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
