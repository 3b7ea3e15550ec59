# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stand in for the nvidia-smi of a host with 2x NVIDIA H200: simulated from what a real one printed."""

import contextlib
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

IDLE = {"memory.used": "0", "utilization.gpu": "0"}  # as the XML has them
PEER_ACCESS = " \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n"  # not captured; two GPUs that NVLink joins

options = dict(word.lstrip("-").partition("=")[::2] for word in sys.argv[1:])
query = [field for field in options.get("query-gpu", "").split(",") if field]
unknown = set(query) - {*FIELDS, *IDLE}
if unknown:
    sys.exit(f'Field "{unknown.pop()}" is not a valid field to query.')
if query:
    with (CAPTURES / "h200-x2.query.csv").open() as file:
        for row in csv.reader(file, skipinitialspace=True):
            if row[0] in options.get("id", row[0]).split(","):
                print(", ".join(IDLE[field] if field in IDLE else row[FIELDS.index(field)] for field in query))
elif sys.argv[1:] == ["topo", "-p2p", "r"]:
    print(PEER_ACCESS, end="")
elif "query-compute-apps" in options:  # none was running; here the ranks of the simulated engine are, each on the GPU of its number
    with (CAPTURES / "h200-x2.query.csv").open() as file:
        uuids = [row[FIELDS.index("uuid")] for row in csv.reader(file, skipinitialspace=True)]
    for process in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            name = process.read_text().strip()
            if name.startswith("sim:TP"):
                print(f"{uuids[int(name[-1])]}, {process.parent.name}, {name}")
else:
    answer = {"": "h200-x2.smi.txt", "-q -x": "h200-x2.smi.xml", "topo -m": "h200-x2.topo-raw.txt"}[" ".join(sys.argv[1:])]
    print((CAPTURES / answer).read_text(), end="")
