# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A venv with pinned packages: what was asked for, what is installed, and the lock that holds the two together.

The lock is a requirements file with the version of everything that is installed, and the pins that led to it as a comment.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._processes import kill

_PIN = re.compile(r"([A-Za-z0-9][\w.-]*)(?:\[[\w.,-]+\])?==([A-Za-z0-9][\w.+!]*)", re.ASCII)
_ASKED = "# asked for: "
_CREDENTIALS = re.compile(r"://[^/@\s]+@")

Versions = dict[str, str]  # normalised name of a distribution -> its version


class Lock(NamedTuple):
    """What the installer made of some pins."""

    pins: list[str]  # sorted, e.g. ["flashinfer-python==0.6.1", "sglang==0.5.8"]
    versions: Versions  # of everything that was installed then


class Installer(NamedTuple):
    """The programs that make a venv and install into it."""

    name: str  # uv or pip
    create: list[str]  # and the path of the venv
    install: list[str]  # and requirements


def parse_pins(packages: Sequence[str]) -> Versions:
    """Return the versions that are asked for.

    Raises:
        InferenceError: One is no ``name==version``, or a name stands there twice.
    """
    versions: Versions = {}
    for package in packages:
        pin = _PIN.fullmatch(package.strip())
        if not pin:
            raise InferenceError("packages", repr(package), "name==version, e.g. sglang==0.5.18")
        name = _normalised(pin[1])
        if name in versions:
            raise InferenceError("packages", f"{name} stands there twice", "one version of it")
        versions[name] = pin[2]
    return versions


def read_lock(path: str) -> Optional[Lock]:
    """Return what a lock says; None where there is none that this collection wrote."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    asked = next((line[len(_ASKED) :].split() for line in lines if line.startswith(_ASKED)), None)
    pins = (_PIN.fullmatch(line) for line in lines)
    return None if asked is None else Lock(asked, {pin[1]: pin[2] for pin in pins if pin})


def find_lock(paths: Sequence[str], pins: Sequence[str]) -> tuple[Optional[str], Optional[Lock]]:
    """Return the first of these locks that some pins led to, with its path; (None, None) where none did."""
    locks = ((path, read_lock(path)) for path in paths)
    return next(((path, lock) for path, lock in locks if lock and lock.pins == pins), (None, None))


def render_lock(venv: str, lock: Lock) -> str:
    """Return the text of a lock, a requirements file."""
    lines = [f"{name}=={version}" for name, version in sorted(lock.versions.items())]
    return "\n".join([f"# Managed by blackwell.inference: what is installed in {venv}", _ASKED + " ".join(lock.pins), *lines, ""])


def sites(venv: str) -> list[str]:
    """Return the folders that a venv has its packages in: one, or none where there is no venv."""
    return [os.path.realpath(path) for path in Path(venv).glob("lib/python3*/site-packages")]


def installed(venv: str) -> Versions:
    """Return what is installed in a venv; nothing where there is none."""
    found: Versions = {}
    for entry in (entry for site in sites(venv) for entry in os.listdir(site) if entry.endswith(".dist-info")):
        name, _hyphen, version = entry[: -len(".dist-info")].partition("-")
        found[_normalised(name)] = version
    return found


def missing(wanted: Mapping[str, str], found: Mapping[str, str]) -> Versions:
    """Return those of ``wanted`` that are not ``found`` in their version; a pin without a local part (+cu130) takes any."""
    return {name: version for name, version in wanted.items() if version not in (found.get(name), found.get(name, "").partition("+")[0])}


def can_resolve(installer: Installer, found: Mapping[str, str]) -> bool:
    """Return whether the installer of a venv, in which this is ``found``, can say what it would install: pip from 22.2 on."""
    numbers = re.findall(r"\d+", found.get("pip", ""))[:2]
    return installer.name == "uv" or [int(number) for number in numbers] >= [22, 2]


def find_installer(kind: str, venv: str, python: str) -> Installer:
    """Return how to install.

    Args:
        kind: ``uv``, ``pip``, or ``auto`` for uv where there is one.
        venv: Path of the venv.
        python: Name or path of the interpreter to make it with.

    Raises:
        InferenceError: There is no such program.
    """
    own = os.path.join(venv, "bin", "python")
    uv = shutil.which(
        "uv", path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/bin", os.path.expanduser("~/.local/bin")])
    )
    if kind == "uv" and not uv:
        raise InferenceError("installer", "there is no uv on this host", "one in PATH", "Install uv, or set installer to pip.")
    if uv and kind != "pip":
        return Installer("uv", [uv, "venv", "--quiet", "--python", python], [uv, "pip", "install", "--quiet", "--python", own])
    base = shutil.which(python)
    if not base:
        raise InferenceError("base_python", f"{python} is not on this host", "an interpreter to make the venv with")
    quietly = ["--quiet", "--disable-pip-version-check", "--no-input"]
    return Installer("pip", [base, "-m", "venv"], [own, "-m", "pip", "install", *quietly])


def refuse_credentials(arguments: Sequence[str]) -> None:
    """Raise InferenceError where arguments of an installer hold a password: they are seen by every user of the host, and logged."""
    for argument in arguments:
        if _CREDENTIALS.search(argument):
            found = f"{_CREDENTIALS.sub('://***@', argument)} holds credentials"
            raise InferenceError("extra_args", found, "an address without", "Put them into ~/.netrc of the user that installs.")


def run(command: Sequence[str], what: str, timeout: float) -> None:
    """Run an installer.

    Raises:
        InferenceError: It failed or did not end; its own first error is in the message.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
            umask=0o022,  # the server's user reads what root installs
        )
    except OSError as error:
        raise InferenceError(what, f"{command[0]} cannot be run ({error.strerror})", "a program that installs") from None
    try:
        output, _nothing = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(process)
        raise InferenceError("timeout", f"{what}: not done after {timeout:g} s", "a longer time, or a nearer index") from None
    if process.returncode:
        raise InferenceError(what, reason(output), "an installer without errors")


def reason(output: str) -> str:
    """Return in one line why an installer failed: from its first error on."""
    error = re.search(r"^\s*(error:|ERROR:|\u00d7|Error:).*", output, re.MULTILINE | re.DOTALL)  # uv marks it with a multiplication sign
    words = " ".join((error[0] if error else output).split()) or "it said nothing"
    return _CREDENTIALS.sub("://***@", words if len(words) <= 600 else f"{words[:600]} ...").rstrip(".")


@contextlib.contextmanager
def alone(folder: str) -> Iterator[None]:
    """Hold a lock on a folder, without leaving a file in it.

    Raises:
        InferenceError: Another run holds it.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise InferenceError("path", f"another run installs into {folder}", "one run at a time", "Wait for it.") from None
    finally:
        os.close(fd)


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
