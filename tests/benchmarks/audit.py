# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long an audit of the newest pair of packages takes: the module `gate_info`, and the `grep` that people use in its place.

    PYTHONPATH=.venv/collections .venv/bin/python tests/benchmarks/audit.py

The reference is `grep -rE 'sm90|sm100|major.*9|supported_major'` over both packages, which finds lines and judges none; in a
UTF-8 locale, and in C as well. It writes to a pipe: into /dev/null it would stop at the first line of a file. "The least" is
what no module can do without, whatever it makes of what it reads: see least.py. Everything runs in turn in one session, each
time in a new process, from the page cache. On a busy machine one processor's worth of grep waits less than two processors'
worth of an audit: run it with `chrt -f 50` before it there, or look at the processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from ansible_collections.blackwell.inference.tests.unit.wheels import unpack

CHECKOUT = Path(__file__).parents[2]
FLASHINFER, SGLANG = "0.7.4", "0.5.23"
REFERENCE = "grep, C.UTF-8"  # as in a shell of today
PATTERN = "sm90|sm100|major.*9|supported_major"


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--site-packages", type=Path, help="installed packages, in place of the newest wheels")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="blackwell-benchmark-") as name:
        site = options.site_packages or Path(name)
        if not options.site_packages:
            unpack("flashinfer-python", FLASHINFER, site, "*")
            unpack("sglang", SGLANG, site, "*")
        compare(site, options.rounds)


def compare(site: Path, rounds: int) -> None:
    """Time each program over the packages in ``site``, and print the medians and the ratios to grep's."""
    files = [path for package in ("flashinfer", "sglang") for path in (site / package).rglob("*") if path.is_file()]
    print(f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.0f} MB; Python {platform.python_version()}, ", end="")
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, {rounds} rounds, medians")
    module = [sys.executable, CHECKOUT / "plugins/modules/gate_info.py"]
    host = {"site_packages": str(site), "compute_capability": ["12.0"], "state_dir": str(site / "state")}
    everything = arguments({**host, "scope": "all"})
    rows = len(json.loads(subprocess.run(module, input=everything, capture_output=True, check=True, env=environment()).stdout)["findings"])
    commands: dict[str, tuple[list[object], bytes]] = {
        REFERENCE: (["env", "LC_ALL=C.UTF-8", "grep", "-rE", PATTERN, "flashinfer", "sglang"], b""),
        "grep, C": (["env", "LC_ALL=C", "grep", "-rE", PATTERN, "flashinfer", "sglang"], b""),
        "gate_info scope=all": (module, everything),
        "the least": ([sys.executable, Path(__file__).with_name("least.py")], arguments({"site_packages": str(site), "rows": rows})),
        "gate_info scope=fusion": (module, arguments({**host, "scope": "fusion"})),
    }
    if shutil.which("rg"):
        commands["ripgrep"] = (["rg", "-uuu", PATTERN, "flashinfer", "sglang"], b"")
    taken: dict[str, list[tuple[float, float]]] = {title: [] for title in commands}
    for _round in range(rounds + 1):
        for title, (command, handed) in commands.items():
            taken[title].append(run(command, handed, site))
    for title, times in taken.items():
        wall, cpu = (statistics.median(values) for values in zip(*times[1:]))  # the first round fills the page cache
        ratios = [mine[0] / its[0] for mine, its in zip(times[1:], taken[REFERENCE][1:])]
        print(f"{title:24} {wall:6.2f} s wall   {cpu:6.2f} s processor   {statistics.median(ratios):5.2f} x grep's wall time")
    print(f"{'memory':24} {peak_memory(module, everything, site):6.0f} MB at the most, of all processes of scope=all together")
    print(f"{rows} findings")


def arguments(options: dict[str, object]) -> bytes:
    """What a module is handed on standard input."""
    return json.dumps({"ANSIBLE_MODULE_ARGS": options}).encode()


def run(command: list[object], handed: bytes, site: Path) -> tuple[float, float]:
    """Seconds that passed, and seconds of processor time, until all output was read."""
    before, begin = os.times(), time.monotonic()
    done = subprocess.run(command, cwd=site, input=handed, capture_output=True, check=False, env=environment())
    wall, after = time.monotonic() - begin, os.times()
    assert done.stdout and b'"failed": true' not in done.stdout[-200:], done.stderr
    return wall, after.children_user + after.children_system - before.children_user - before.children_system


def environment() -> dict[str, str]:
    """What the module needs to be found."""
    return {**os.environ, "PYTHONPATH": str(CHECKOUT / ".venv" / "collections")}


def peak_memory(command: list[object], handed: bytes, site: Path) -> float:
    """The most memory, in MB, that a program and its children held at once; pages that they share are counted once."""
    process = subprocess.Popen(command, cwd=site, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment())
    most = 0.0

    def watch() -> None:
        nonlocal most
        while process.poll() is None:
            most = max(most, sum(proportional(pid) for pid in (process.pid, *children(process.pid))))
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    process.communicate(handed)
    watcher.join()
    return most


def children(pid: int) -> list[int]:
    """The ids of the processes that ``pid`` started and that still run."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def proportional(pid: int) -> float:
    """The proportional set size of a process in MB; 0 where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    main()
