# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stand in for the nvidia-smi of a host with 2x NVIDIA H200: simulated from what a real one printed."""

import csv
import sys
from pathlib import Path

CAPTURES = Path(__file__).parent / "nvidia-smi"
FIELDS = [
    "index",
    "uuid",
    "name",
    "compute_cap",
    "driver_version",
    "memory.total",
    "power.limit",
    "power.draw",
    "pci.bus_id",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "mig.mode.current",
    "persistence_mode",
]

query = next((word.split("=")[1].split(",") for word in sys.argv if word.startswith("--query-gpu=")), [])
if set(query) - set(FIELDS):
    sys.exit(f'Field "{(set(query) - set(FIELDS)).pop()}" is not a valid field to query.')
if query:
    with (CAPTURES / "h200-x2.query.csv").open() as file:
        for row in csv.reader(file, skipinitialspace=True):
            print(", ".join(row[FIELDS.index(field)] for field in query))
else:
    answer = {"": "h200-x2.smi.txt", "-q -x": "h200-x2.smi.xml", "topo -m": "h200-x2.topo-raw.txt"}[" ".join(sys.argv[1:])]
    print((CAPTURES / answer).read_text(), end="")
