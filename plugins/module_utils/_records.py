# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What was measured on a host, kept there as JSON files that are whole at any time."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any, Optional

from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError

SCHEMA_VERSION = 1

Json = dict[str, Any]


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
        raise InferenceError(path, f"it cannot be read ({error.strerror})", "the record of a measurement", "Run as its owner.") from None
    except ValueError:
        record = None
    version = record.get("schema_version") if isinstance(record, dict) else None
    if version != SCHEMA_VERSION:
        found = f"its schema_version is {version}" if version else "it is no record of a measurement"
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
        for folder in (os.path.dirname(os.path.dirname(path)), os.path.dirname(path)):  # `mode` is only that of the last one
            os.makedirs(folder, mode=folder_mode, exist_ok=True)
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
