# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the installed sglang accepts on its command line, read from its source, and options checked against that.

An unknown flag kills the server minutes after its start. So the flags are read from the release itself, never
imported: the ``add_argument`` calls of ``server_args.py``, and since 0.5.14 the annotated fields beside them.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ansible_collections.blackwell.inference.plugins.module_utils._server_args_source import Flag, read_flags

__all__ = ["Checked", "Flag", "check", "holds_secret", "read_flags"]

# One option for all releases; the role's strategy sets it.
FUSION = "flashinfer-allreduce-fusion"
_FUSION_BACKEND = "flashinfer-allreduce-fusion-backend"
_FUSION_SWITCH = "enable-flashinfer-allreduce-fusion"
_FUSION_FORBID = "enforce-disable-flashinfer-allreduce-fusion"

# Older and newer name of one option, as upstream's own deprecation notices pair them.
RENAMED = (
    ("cuda-graph-bs", "cuda-graph-bs-decode"),
    ("cuda-graph-max-bs", "cuda-graph-max-bs-decode"),
    ("mamba-scheduler-strategy", "mamba-radix-cache-strategy"),
    ("nsa-decode-backend", "dsa-decode-backend"),
    ("nsa-prefill-backend", "dsa-prefill-backend"),
    ("piecewise-cuda-graph-compiler", "cuda-graph-tc-compiler"),
    ("piecewise-cuda-graph-max-tokens", "cuda-graph-max-bs-prefill"),
    ("piecewise-cuda-graph-tokens", "cuda-graph-bs-prefill"),
    ("speculative-dflash-draft-window-size", "speculative-draft-window-size"),
)
_OTHER_NAME = {**dict(RENAMED), **{new: old for old, new in RENAMED}}

# Their values belong in no argv, log or diff: the caller puts them into the configuration file by key.
SECRETS = ("admin-api-key", "api-key", "ssl-keyfile-password", "watermark-config", "watermark-key", "watermark-key-b")


class Checked(NamedTuple):
    """Options as this release takes them, and those that it does not take."""

    config: dict[str, Any]  # key in the --config file -> value
    argv: list[str]  # what this release cannot read from a --config file
    hidden_keys: dict[str, str]  # hidden option as it was named -> its key in the --config file
    values: dict[str, Any]  # every spelling of each flag that is set -> its value
    translated: dict[str, str]  # option as it was named -> what this release calls it; "" where it needs no flag
    unknown: list[str]  # one line for each option that this release lacks
    invalid: list[str]  # one line for each value that this release refuses


class _Refused(Exception):
    """This value is not one that the flag takes; the text says what it takes."""


def check(flags: list[Flag], arguments: dict[str, Any], hidden: tuple[str, ...] = ()) -> Checked:
    """Check ``arguments`` against the ``flags`` of a release.

    Args:
        flags: What read_flags found in the release.
        arguments: Option name (dashes or underscores, with or without the leading dashes) to value. A boolean turns a
            switch on or leaves it off, null leaves the option at its default.
        hidden: Names of options whose values the caller keeps to itself.
    """
    release = _Release(flags)
    result = Checked({}, [], {}, {}, {}, [], [])
    used: dict[str, str] = {}
    for given, value in arguments.items():
        name = _normalised(given)
        if value is None:
            continue
        if name in SECRETS:
            result.invalid.append(f"{given}: it is a secret; expected in sglang_server_secrets, since options are logged")
            continue
        try:
            targets = release.translate(name, value)
        except _Refused as refusal:
            result.invalid.append(f"{given}: {refusal}")
            continue
        if targets is None:
            result.unknown.append(release.explain_unknown(given, name))
            continue
        if [target for target, _value in targets] != [name]:
            result.translated[given] = " ".join(f"--{target}" for target, _value in targets)
        for target, target_value in targets:
            flag = release.flags[target]
            other = used.setdefault(flag.dest, given)
            if other != given:
                result.invalid.append(f"{given}: sets the same option as {other}; expected one of the two, and null for the other")
                continue
            try:
                release.place(flag, target, target_value, result)
            except _Refused as refusal:
                result.invalid.append(f"{given}: {refusal}")
    for given in hidden:
        name = _normalised(given)
        if name not in release.flags:
            result.unknown.append(release.explain_unknown(given, name))
            continue
        key = release.config_key(release.flags[name], name)
        if key is None:
            result.invalid.append(f"{given}: this release takes it on the command line alone, where everybody can read it; expected none")
            continue
        used[release.flags[name].dest] = given
        result.hidden_keys[given] = key
    for flag in flags:
        if flag.required and flag.dest not in used:
            result.invalid.append(f"{flag.names[0]}: missing; expected a value, the server does not start without it")
    return result


def holds_secret(config_file: str) -> bool:
    """Return whether a --config file, which need not exist, has a value for one of SECRETS."""
    try:
        lines = Path(config_file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any(_normalised(line.partition(":")[0]) in SECRETS for line in lines)


def _normalised(name: str) -> str:
    return name.strip().lstrip("-").replace("_", "-")


class _Release:
    """The flags of one release by name, and what its --config file can carry."""

    def __init__(self, flags: list[Flag]) -> None:
        self.flags = {name: flag for flag in flags for name in flag.names}
        self.has_config = "config" in self.flags
        # The release looks keys up by destination, and refuses those of any flag that is more than a plain store,
        # even where a plain flag shares that destination.
        self._refused_keys = {flag.dest for flag in flags if not flag.plain}

    def translate(self, name: str, value: Any) -> Optional[list[tuple[str, Any]]]:
        """Return (flag name, value) pairs for an option, or None where this release has nothing like it."""
        if name == FUSION or (name == _FUSION_BACKEND and name not in self.flags):
            return self._translate_fusion(value)
        flag = self.flags.get(name)
        if flag is None:
            if name == _FUSION_FORBID and _FUSION_SWITCH in self.flags:
                return []  # off unless asked for
            if name == _FUSION_SWITCH and _FUSION_BACKEND in self.flags:
                return self._translate_fusion("auto" if value else "off")
            other = _OTHER_NAME.get(name)
            return [(other, value)] if other in self.flags else None
        if flag.replacement:
            target, _equals, constant = flag.replacement.lstrip("-").partition("=")
            if target in self.flags and value is not False:
                new_value = constant or value
                try:
                    _rendered(self.flags[target], new_value)
                    return [(target, new_value)]
                except _Refused:
                    pass  # the old flag takes values of its own
        return [(name, value)]

    def _translate_fusion(self, value: Any) -> Optional[list[tuple[str, Any]]]:
        backend = self.flags.get(_FUSION_BACKEND)
        known = list(backend.choices or ()) if backend else ["auto", "trtllm"] if _FUSION_SWITCH in self.flags else []
        if not known:
            return None
        if value is False or value == "off":
            return [(_FUSION_FORBID, True)] if _FUSION_FORBID in self.flags else []
        if value not in known:
            raise _Refused(_unlisted(value, [*known, "off"]))
        return [(_FUSION_BACKEND, value)] if backend else [(_FUSION_SWITCH, True)]

    def explain_unknown(self, given: str, name: str) -> str:
        """Say in one line that this release has no such option, and which one is closest."""
        near = difflib.get_close_matches(name, [*self.flags, FUSION], n=1, cutoff=0.6)
        return f"{given}: this release has no such option" + (f"; the nearest is {near[0]}" if near else "")

    def place(self, flag: Flag, name: str, value: Any, result: Checked) -> None:
        """Add a value to the configuration, or to argv where the configuration cannot carry it."""
        if flag.error:
            raise _Refused(f"this release has retired it ({flag.error})")
        rendered = _rendered(flag, value)
        if rendered is None:
            return
        result.values.update(dict.fromkeys(flag.names, rendered))
        key = self.config_key(flag, name)
        items = rendered if isinstance(rendered, list) else [rendered]
        dashed = any(isinstance(item, str) and item.startswith("-") for item in items)
        if key is not None and not dashed:
            result.config[key] = rendered
        elif rendered is True:
            result.argv.append(f"--{name}")
        elif rendered is False:
            result.argv.append(f"--no-{name}")
        elif isinstance(rendered, list):
            if dashed:
                raise _Refused(f"found {value!r}; expected no item that starts with a dash, which would be taken for a flag")
            result.argv.extend([f"--{name}", *(str(item) for item in rendered)])
        else:
            result.argv.append(f"--{name}={rendered}")

    def config_key(self, flag: Flag, name: str) -> Optional[str]:
        """Return the key under which a --config file carries the flag, or None."""
        if not self.has_config or not flag.plain:
            return None
        for candidate in (name, *flag.names):
            underscored = candidate.replace("-", "_")
            if underscored not in self._refused_keys and (flag.kind != "switch" or underscored == flag.dest):
                return candidate
        return None


def _rendered(flag: Flag, value: Any) -> Any:
    """Return the value as the --config file holds it: True, False, a scalar or a list; None to leave the flag out.

    Raises:
        _Refused: The flag does not take this value.
    """
    if flag.kind in ("switch", "toggle"):
        if not isinstance(value, bool):
            raise _Refused(f"found {value!r}; expected true or false")
        if flag.kind == "switch" and not value:
            if flag.default is True:
                raise _Refused("found false; expected true, this release has no way to turn it off")
            return None
        return value
    if flag.kind == "list":
        items = value if isinstance(value, list) else [value]
        if not items:
            return None
        return [_scalar(flag, item) for item in items]
    if flag.kind == "optional" and value is True:
        return []  # the bare flag
    if isinstance(value, list) and flag.type not in ("json", "object"):
        raise _Refused(f"found a list; expected {_expectation(flag)}")
    return _scalar(flag, value)


_SUFFIXED = re.compile(r"^(-?\d+|\d+(\.\d+)?[kMGT]|\d+[KMGT]i)$")


def _scalar(flag: Flag, value: Any) -> Any:
    if flag.type in ("json", "object") or (isinstance(value, dict) and flag.type == "str" and flag.choices is None):
        return _json(flag, value)
    if isinstance(value, (bool, dict, list)) or value is None:
        raise _Refused(f"found {value!r}; expected {_expectation(flag)}")
    result: Any = value
    if flag.type in ("int", "float"):
        convert = int if flag.type == "int" else float
        try:
            # int() would cut 1.5 to 1
            result = convert(str(value)) if flag.type == "int" or isinstance(value, str) else value
        except ValueError:
            raise _Refused(f"found {value!r}; expected {_expectation(flag)}") from None
    elif flag.type == "suffixed":
        if not _SUFFIXED.match(str(value)):
            raise _Refused(f"found {value!r}; expected {_expectation(flag)}")
    else:
        result = str(value)
    if flag.choices is not None and result not in flag.choices:
        raise _Refused(_unlisted(value, list(flag.choices)))
    return result


def _json(flag: Flag, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        data = json.loads(text)
    except ValueError:
        raise _Refused(f"found {value!r}; expected {_expectation(flag)}") from None
    if flag.type == "object" and not isinstance(data, dict):
        raise _Refused(f"found {value!r}; expected {_expectation(flag)}")
    return text


def _expectation(flag: Flag) -> str:
    if flag.choices is not None:
        return "one of " + ", ".join(map(str, flag.choices))
    names = {"int": "a whole number", "float": "a number", "suffixed": "a whole number such as 4096 or 4k"}
    return {**names, "json": "JSON", "object": "a JSON object"}.get(flag.type, "text")


def _unlisted(value: Any, choices: list[Any]) -> str:
    names = [str(choice) for choice in choices]
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.4)
    return f"found {value!r}; expected one of {', '.join(names)}" + (f" (the nearest is {near[0]})" if near else "")
