# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The hosts that the audit compares a host with: a condition is a gate only where it lets one of them through."""

from __future__ import annotations

from collections.abc import Iterable

from ansible_collections.blackwell.inference.plugins.module_utils._gpu import ARCHITECTURES
from ansible_collections.blackwell.inference.plugins.module_utils._predicate import Capability

# One of each kind that kernels are written for; 10.7 (Rubin) has no product yet, and code that asks for it.
REFERENCE: tuple[Capability, ...] = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (10, 7), (11, 0), (12, 0), (12, 1))


def is_gate(host: Capability, admitted: Iterable[Capability]) -> bool:
    """Whether code that only ``admitted`` get is kept from ``host``.

    It is not where nobody gets it, and where all hardware up to an earlier generation gets it: that is what came before.
    """
    found = set(admitted)
    return bool(found) and not (is_earlier(host, found) and found >= {known for known in REFERENCE if known <= max(found)})


def is_earlier(host: Capability, others: Iterable[Capability]) -> bool:
    """Whether all of ``others`` are of a generation before the one of ``host``."""
    newest = max(others)
    return newest < host and ARCHITECTURES.get(newest) != ARCHITECTURES.get(host)


def is_left_over(host: Capability, admitted: Iterable[Capability]) -> bool:
    """Whether ``admitted`` get what is left when a condition has let ``host`` through: then that is no gate.

    It is one where the condition lets most hosts through and the rest is not all older: `if not sm100: ... else: ...`.
    """
    found = set(admitted)
    return 2 * len(found) > len(REFERENCE) or is_earlier(host, found)
