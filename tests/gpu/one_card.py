# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A rank of the probe's stage ``pcie_ipc`` for ranks that share one card.

CUDA IPC joins two processes of one card as it joins two cards; NCCL does not, so gloo is the group. Results are checked as the probe
checks them, and nothing is timed: the ranks take turns on the card.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import sys

import torch
from ansible_collections.blackwell.inference.plugins.module_utils import _proof_probe as probe


class OneCard(probe.Rank):
    """A rank whose card is that of all others."""

    def __init__(self, request: probe.Json) -> None:
        torch.cuda.set_device = lambda _rank: None
        super().__init__(request)

    def join(self) -> None:
        """Meet the other ranks."""
        with self.phase("joining the other ranks"):
            self.dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2 * self.options.compile_timeout))
            self.group = self.dist.group.WORLD
            self.everyone(0)


def untuned() -> None:
    """Refuse to tune, after which the probe, as the server, goes on with the kernels as they are."""

    def tune(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("not asked for")

    importlib.import_module("flashinfer.comm").PcieIpcAllReduceWorkspace.tune = tune


def main() -> None:
    """Check the allreduce at every size."""
    rank = OneCard(json.loads(sys.argv[sys.argv.index("--rank-request") + 1]))
    try:
        rank.join()
        if "TUNE" in os.environ:
            probe.PCIE_IPC_TUNED = tuple(map(int, os.environ["TUNE"].split(",")))
        else:
            untuned()
        probe.check(rank, [probe.PcieIpc(rank, probe.Nccl(rank))])
    except Exception as error:
        rank.finish(error)
        raise
    rank.finish()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
