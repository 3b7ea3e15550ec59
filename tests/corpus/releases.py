# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The releases that are tested, in pairs, and what each ships closed: every one from the oldest to the newest that counts.

This is data. docs/releases.md says what a new release takes.
"""

from __future__ import annotations

import re
import zipfile
from functools import cache
from typing import NamedTuple

from ansible_collections.blackwell.inference.tests.unit.wheels import wheel


def order(version: str) -> tuple[tuple[int, ...], int]:
    """A sortable form of a version such as 0.6.16.post4."""
    numbers, _dot, post = version.partition(".post")
    return tuple(map(int, re.findall(r"\d+", numbers))), int(post or 0)


class Pair(NamedTuple):
    """An sglang and the flashinfer beside it."""

    sglang: str
    flashinfer: str = ""  # empty: the one that this sglang asks for; where that was published as source only, the oldest wheel

    def __str__(self) -> str:
        return f"sglang-{self.sglang}+{f'flashinfer-{self.flashinfer}' if self.flashinfer else 'its-own'}"

    @property
    def pinned(self) -> bool:
        """Whether it is the pair that pip installs."""
        return self.flashinfer == pinned_flashinfer(self.sglang)

    def resolved(self) -> Pair:
        """The same pair with both versions named."""
        own = pinned_flashinfer(self.sglang)
        return self if self.flashinfer else Pair(self.sglang, own if own in FLASHINFER else FLASHINFER[0])


@cache
def pinned_flashinfer(sglang: str) -> str:
    """The release of flashinfer that the metadata of an sglang wheel asks for."""
    with zipfile.ZipFile(wheel("sglang", sglang)) as archive:
        metadata = archive.read(f"sglang-{sglang}.dist-info/METADATA").decode()
    return re.search(r"^Requires-Dist: flashinfer[-_]python(?:\[\w+\])?==([\w.]+)", metadata, re.MULTILINE)[1]


SGLANG = (
    "0.5.2", "0.5.3", "0.5.3.post1", "0.5.3.post2", "0.5.3.post3", "0.5.4", "0.5.4.post1", "0.5.4.post2", "0.5.4.post3",
    "0.5.5", "0.5.5.post1", "0.5.5.post2", "0.5.5.post3", "0.5.6", "0.5.6.post1", "0.5.6.post2", "0.5.7", "0.5.8", "0.5.8.post1",
    "0.5.9", "0.5.10", "0.5.10.post1", "0.5.11", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14", "0.5.15",
    "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23",
)  # fmt: skip
FLASHINFER = (
    "0.5.0", "0.5.1", "0.5.2", "0.5.3", "0.6.0", "0.6.1", "0.6.2", "0.6.3", "0.6.4", "0.6.5", "0.6.6", "0.6.7", "0.6.7.post1",
    "0.6.7.post2", "0.6.7.post3", "0.6.8", "0.6.8.post1", "0.6.9", "0.6.10", "0.6.10.post1", "0.6.11", "0.6.11.post1",
    "0.6.11.post2", "0.6.11.post3", "0.6.12", "0.6.13", "0.6.14", "0.6.15", "0.6.15.post1", "0.6.16", "0.6.16.post1",
    "0.6.16.post2", "0.6.16.post3", "0.6.16.post4", "0.6.17", "0.6.18", "0.6.18.post1", "0.7.0", "0.7.0.post1", "0.7.1",
    "0.7.2", "0.7.2.post1", "0.7.4",
)  # fmt: skip

# As pip installs them; then each flashinfer beside an sglang that was not released with it: one that calls no more than 0.5 has,
# and one that has every kind of gate; then some that are far apart.
PINNED = tuple(Pair(version) for version in SGLANG)
MISMATCHED = (
    *(Pair("0.5.9" if order(version) < order("0.6") else "0.5.14", version) for version in FLASHINFER if version != "0.6.12"),  # its own
    Pair("0.5.3", "0.6.17"), Pair("0.5.7", "0.6.1"), Pair("0.5.8", "0.6.18"), Pair("0.5.9", "0.6.9"), Pair("0.5.10", "0.6.14"),
    Pair("0.5.11", "0.6.17"), Pair("0.5.19", "0.6.9"), Pair("0.5.21", "0.6.16.post4"), Pair("0.5.23", "0.6.9"), Pair("0.5.23", "0.7.4"),
)  # fmt: skip
EVERY = PINNED + MISMATCHED
# Few, for every run: each place and shape of a gate, and each set of gates that opens together, is in one of them.
SPREAD = (Pair("0.5.3.post3"), Pair("0.5.8"), Pair("0.5.11"), Pair("0.5.16"), Pair("0.5.19", "0.6.9"), Pair("0.5.21"), Pair(SGLANG[-1]))
FLASHINFER_SPREAD = ("0.5.0", "0.6.1", "0.6.16.post4", "0.6.17", FLASHINFER[-1])  # for what does not depend on sglang


class ShippedClosed(NamedTuple):
    """Releases that ship a gate closed at 12.0, from the first that is named up to the one that no longer does; empty: no end.

    A release that closes again what was open gets a line of its own.
    """

    gate: str
    flashinfer: tuple[str, str] = ("", "")
    sglang: tuple[str, str] = ("", "")

    def counts_in(self, pair: Pair) -> bool:
        """Whether this pair, with both versions named, is one of them."""
        ends = ((pair.flashinfer, self.flashinfer), (pair.sglang, self.sglang))
        return all(order(first) <= order(version) and (not end or order(version) < order(end)) for version, (first, end) in ends)


SHIPPED_CLOSED = (
    ShippedClosed("flashinfer.trtllm_comm.majors", flashinfer=("", "0.6.17")),
    ShippedClosed("flashinfer.workspace.multicast_device", flashinfer=("0.6.0", "0.6.10"), sglang=("0.5.10", "")),
    ShippedClosed("flashinfer.workspace.multicast_granularity", flashinfer=("0.6.0", "0.6.10"), sglang=("0.5.10", "")),
    ShippedClosed("sglang.fusion.applies"),
    ShippedClosed("sglang.fusion.workspace_preflight", sglang=("0.5.11", "")),
    ShippedClosed("sglang.fusion.backend", sglang=("0.5.14", "")),
)
