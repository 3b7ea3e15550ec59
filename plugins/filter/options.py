# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter for the options of roles; it is described in the YAML file of its name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import Any

# One letter too few, too many or another one, in a word of six; "gpus" is far from "gpu_ids".
_NEAR = 0.83


def misspelt(names: Iterable[str], known: Collection[str], prefix: str) -> dict[str, str]:
    """Return each name with the prefix that is not known but near to one that is, with the nearest."""
    ends = [name[len(prefix) :] for name in known if name.startswith(prefix)]
    unknown = [name for name in names if name.startswith(prefix) and name not in known]
    nearest = {name: get_close_matches(name[len(prefix) :], ends, n=1, cutoff=_NEAR) for name in unknown}
    return {name: prefix + found[0] for name, found in nearest.items() if found}


class FilterModule:
    """The filters by name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"misspelt": misspelt}
