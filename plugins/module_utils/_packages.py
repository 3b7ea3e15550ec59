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

# import name -> distribution name on the package index
DISTRIBUTIONS = {
    "flashinfer": "flashinfer-python",
    "flashinfer_cubin": "flashinfer-cubin",
    "flashinfer_jit_cache": "flashinfer-jit-cache",
    "sglang": "sglang",
    "torch": "torch",
}

# Runs in the serving interpreter, isolated (-I): neither the working folder nor PYTHONPATH may answer.
_PROBE = r"""
import importlib.metadata as metadata, importlib.util, json, os, sys
packages = {}
for name, distribution in json.loads(sys.argv[1]).items():
    try:
        spec = importlib.util.find_spec(name)
    except Exception:
        spec = None
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        continue
    found = next(iter(metadata.distributions(name=distribution)), None)
    folder = getattr(found, "_path", None)
    packages[name] = {
        "location": os.path.realpath(folders[0]),
        "version": found.version if found else None,
        "record": str(folder) if folder and found.read_text("RECORD") else None,
    }
json.dump({"packages": packages, "version": sys.version_info[:3], "prefix": sys.prefix}, sys.stdout)
"""


class Package(NamedTuple):
    """One installed package, as the serving interpreter imports it."""

    name: str  # import name, e.g. "flashinfer"
    distribution: str  # name on the package index, e.g. "flashinfer-python"
    version: str  # "unknown" where no metadata is installed beside the package
    location: str  # absolute path of the package folder, symlinks resolved
    dist_info: Optional[str]  # its dist-info folder where that holds a RECORD, else None

    @property
    def root(self) -> str:
        """The folder that paths such as ``flashinfer/jit/comm.py`` are relative to."""
        return os.path.dirname(self.location)


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
        answer = subprocess.run(
            [python, "-I", "-c", _PROBE, json.dumps(DISTRIBUTIONS)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InferenceError("python", f"{python} did not answer within {timeout:g} s", expected) from None
    except OSError as error:
        raise InferenceError("python", f"{python} cannot be run ({error.strerror})", expected) from None
    try:
        found = json.loads(answer.stdout)["packages"]
    except (ValueError, KeyError, TypeError):
        last = (answer.stderr.strip() or answer.stdout.strip() or f"exit status {answer.returncode}").splitlines()[-1]
        raise InferenceError("python", f"{python} did not answer as Python 3 does ({last})", expected) from None
    label = f"python {python}"
    return Site(label, {name: _package(name, item["version"], item["location"], item["record"]) for name, item in found.items()})


def _read_site_packages(site_packages: str) -> Site:
    if not os.path.isdir(site_packages):
        raise InferenceError("site_packages", f"{site_packages} is not a folder", "the path of a site-packages folder")
    dist_infos: dict[str, list[str]] = {}
    for entry in sorted(os.listdir(site_packages)):
        if entry.endswith(".dist-info"):
            dist_infos.setdefault(_normalised(entry.split("-")[0]), []).append(entry)
    packages = {}
    for name, distribution in DISTRIBUTIONS.items():
        location = os.path.join(site_packages, name)
        if not os.path.isdir(location):
            continue
        entries = dist_infos.get(_normalised(distribution), [])
        if len(entries) > 1:
            raise InferenceError(
                "site_packages",
                f"{site_packages} holds {' and '.join(entries)}",
                f"one installed version of {distribution}",
                "Remove the one that a broken upgrade left behind.",
            )
        folder = os.path.join(site_packages, entries[0]) if entries else None
        version = entries[0][: -len(".dist-info")].split("-")[1] if entries else None
        has_record = folder is not None and os.path.isfile(os.path.join(folder, "RECORD"))
        packages[name] = _package(name, version, os.path.realpath(location), folder if has_record else None)
    return Site(f"site_packages {site_packages}", packages)


def _package(name: str, version: Optional[str], location: str, dist_info: Optional[str]) -> Package:
    return Package(name, DISTRIBUTIONS[name], version or "unknown", location, dist_info)


def _normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
