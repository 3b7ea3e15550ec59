# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stand in for the nvidia-smi of a host with 8x RTX PRO 6000 Blackwell Server Edition: a simulated one.

Answers the questions that blackwell.inference asks, and the bare call. Every GPU's name says "(simulated)".
"""

from __future__ import annotations

import sys

DRIVER, CUDA = "580.95.05", "13.0"
NAME = "NVIDIA RTX PRO 6000 Blackwell Server Edition (simulated)"
# PCI bus -> watts while idle; the first four sit on socket 0, the others on socket 1
CARDS = {"01": 34.12, "21": 33.80, "41": 35.01, "61": 34.55, "81": 33.97, "A1": 34.20, "C1": 35.42, "E1": 34.06}
CPUS = ("0-31,64-95", "32-63,96-127")  # by socket

GPUS = [
    {
        "index": str(index),
        "uuid": f"GPU-00000000-0000-0000-0000-{index + 1:012d}",
        "name": NAME,
        "compute_cap": "12.0",
        "driver_version": DRIVER,
        "memory.total": "97887 MiB",
        "power.limit": "600.00 W",
        "power.draw": f"{watts:.2f} W",
        "pci.bus_id": f"00000000:{bus}:00.0",
        "pcie.link.gen.current": "1",
        "pcie.link.gen.max": "5",
        "pcie.link.width.current": "16",
        "pcie.link.width.max": "16",
        "mig.mode.current": "Disabled",
        "persistence_mode": "Enabled",
    }
    for index, (bus, watts) in enumerate(CARDS.items())
]

XML = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">
<nvidia_smi_log>
\t<driver_version>{driver}</driver_version>
\t<cuda_version>{cuda}</cuda_version>
\t<attached_gpus>{count}</attached_gpus>
{gpus}</nvidia_smi_log>
"""
XML_GPU = """\t<gpu id="{pci.bus_id}">
\t\t<product_name>{name}</product_name>
\t\t<product_architecture>Blackwell</product_architecture>
\t\t<persistence_mode>{persistence_mode}</persistence_mode>
\t\t<mig_mode>
\t\t\t<current_mig>{mig.mode.current}</current_mig>
\t\t</mig_mode>
\t\t<mig_devices>
\t\t\tNone
\t\t</mig_devices>
\t\t<uuid>{uuid}</uuid>
\t\t<pci>
\t\t\t<pci_bus_id>{pci.bus_id}</pci_bus_id>
\t\t\t<pci_gpu_link_info>
\t\t\t\t<pcie_gen>
\t\t\t\t\t<max_link_gen>{pcie.link.gen.max}</max_link_gen>
\t\t\t\t\t<current_link_gen>{pcie.link.gen.current}</current_link_gen>
\t\t\t\t</pcie_gen>
\t\t\t\t<link_widths>
\t\t\t\t\t<max_link_width>{pcie.link.width.max}x</max_link_width>
\t\t\t\t\t<current_link_width>{pcie.link.width.current}x</current_link_width>
\t\t\t\t</link_widths>
\t\t\t</pci_gpu_link_info>
\t\t</pci>
\t\t<fb_memory_usage>
\t\t\t<total>{memory.total}</total>
\t\t</fb_memory_usage>
\t\t<gpu_power_readings>
\t\t\t<average_power_draw>{power.draw}</average_power_draw>
\t\t\t<current_power_limit>{power.limit}</current_power_limit>
\t\t</gpu_power_readings>
\t</gpu>
"""


def main(arguments: list[str]) -> int:
    """Print the answer to nvidia-smi's ``arguments`` and return the exit status."""
    if not arguments:
        print(table(), end="")
    elif arguments == ["-q", "-x"]:
        print(xml(), end="")
    elif arguments == ["topo", "-m"]:
        print(topology(), end="")
    elif len(arguments) == 2 and arguments[0].startswith("--query-gpu=") and arguments[1].startswith("--format=csv"):
        return query(arguments[0].split("=")[1].split(","), arguments[1].split(",")[1:])
    else:
        print("This nvidia-smi is simulated; it answers to --query-gpu=... --format=csv, -q -x, topo -m and no arguments.")
        return 2
    return 0


def query(fields: list[str], options: list[str]) -> int:
    """Print ``fields`` of every GPU as CSV."""
    for field in fields:
        if field not in GPUS[0]:
            print(f'Field "{field}" is not a valid field to query.\n')
            return 2
    units = {field: f" [{GPUS[0][field].split()[1]}]" for field in ("memory.total", "power.limit", "power.draw")}
    if "noheader" not in options:
        print(", ".join(field + ("" if "nounits" in options else units.get(field, "")) for field in fields))
    for gpu in GPUS:
        print(", ".join(gpu[field].split()[0] if field in units and "nounits" in options else gpu[field] for field in fields))
    return 0


def xml() -> str:
    """Return the answer to ``-q -x``, shortened to what is read of it."""
    gpus = ""
    for gpu in GPUS:
        text = XML_GPU
        for field, value in gpu.items():
            text = text.replace("{" + field + "}", value)
        gpus += text
    return XML.format(driver=DRIVER, cuda=CUDA, count=len(GPUS), gpus=gpus)


def topology() -> str:
    """Return the answer to ``topo -m``: two sockets of four GPUs, pairs below one host bridge."""
    names = [f"GPU{gpu['index']}" for gpu in GPUS]
    lines = ["\t\033[4m" + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\033[0m"]
    for row, name in enumerate(names):
        links = [" X " if row == column else link(row, column) for column in range(len(names))]
        lines.append("\t".join([name, *links, CPUS[row // 4], str(row // 4), "", "N/A"]))
    return "\n".join(lines) + "\n"


def link(one: int, other: int) -> str:
    """Return what joins two GPUs."""
    if one // 4 != other // 4:
        return "SYS"
    return "PHB" if one // 2 == other // 2 else "NODE"


def table() -> str:
    """Return the answer to the bare call."""
    rule = f"+{'-' * 41}+{'-' * 24}+{'-' * 22}+\n"
    head = (
        f"+{'-' * 89}+\n"
        f"| NVIDIA-SMI {DRIVER + ' (simulated)':<22} Driver Version: {DRIVER:<14} CUDA Version: {CUDA:<8} |\n"
        f"{rule}"
        "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |\n"
        "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |\n"
        "|                                         |                        |               MIG M. |\n"
        f"|{'=' * 41}+{'=' * 24}+{'=' * 22}|\n"
    )
    rows = [
        f"| {index:>3}  {'RTX PRO 6000 (simulated)':<27}    On  |   00000000:{bus}:00.0 Off |                    0 |\n"
        f"| N/A   30C    P8            {watts:>3.0f}W /  600W |       0MiB /  97887MiB |      0%      Default |\n"
        "|                                         |                        |             Disabled |\n"
        for index, (bus, watts) in enumerate(CARDS.items())
    ]
    return head + "".join(row + rule for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
