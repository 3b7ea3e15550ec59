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
        "memory.used": "0 MiB",
        "utilization.gpu": "0 %",
        "clocks.sm": "180 MHz",
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
# No process uses one of them; what could be asked of it all the same.
PROCESS = {"gpu_uuid": "", "gpu_name": "", "gpu_bus_id": "", "pid": "", "process_name": "", "used_memory": "0 MiB"}

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
    answers = {(): table, ("-q", "-x"): xml, ("topo", "-m"): topology, ("topo", "-p2p", "r"): peer_access}
    if tuple(arguments) in answers:
        print(answers[tuple(arguments)](), end="")
        return 0
    options = dict(word.lstrip("-").partition("=")[::2] for word in arguments)
    asked = [options.pop(kind, None) for kind in ("query-gpu", "query-compute-apps")]
    form, chosen = options.pop("format", "").split(","), options.pop("id", None)
    if options or form[0] != "csv" or None not in asked or asked == [None, None]:
        known = "--query-gpu=... or --query-compute-apps=... with --format=csv and --id=..., -q -x, topo -m, topo -p2p r and no arguments"
        print(f"This nvidia-smi is simulated; it answers to {known}.")
        return 2
    gpus = [gpu for gpu in GPUS if chosen is None or {gpu["index"], gpu["uuid"], gpu["pci.bus_id"]} & set(chosen.split(","))]
    if not gpus:
        print("No devices were found")
        return 6
    return query(asked[0], gpus, GPUS[0], form) if asked[0] else query(asked[1], [], PROCESS, form)


def query(fields: str, rows: list[dict[str, str]], example: dict[str, str], form: list[str]) -> int:
    """Print ``fields`` of ``rows`` as CSV; ``example`` is a row that has all fields there are, with their units."""
    names = fields.split(",")
    for name in names:
        if name not in example:
            print(f'Field "{name}" is not a valid field to query.\n')
            return 2
    if "noheader" not in form:
        print(", ".join(f"{name} [{unit(example[name])}]" if unit(example[name]) and "nounits" not in form else name for name in names))
    for row in rows:
        print(", ".join(row[name].removesuffix(" " + unit(row[name])) if "nounits" in form else row[name] for name in names))
    return 0


def unit(value: str) -> str:
    """Return the unit of a value, "" where it has none."""
    last = value.rpartition(" ")[2]
    return last if last in ("MiB", "MHz", "W", "%") else ""


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


def peer_access() -> str:
    """Return the answer to ``topo -p2p r``: every pair may."""
    names = [f"GPU{gpu['index']}" for gpu in GPUS]
    rows = ([f" {name}", *("X" if other == name else "OK" for other in names), ""] for name in names)
    return "\n".join("\t".join(row) for row in ([" ", *names, ""], *rows)) + "\n"


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
