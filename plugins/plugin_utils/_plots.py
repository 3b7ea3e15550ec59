# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plots of what was measured, as SVG: for the report on the controller, with matplotlib."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]

NAMES = {"nccl": "NCCL + RMSNorm", "fusion": "fused allreduce + RMSNorm", "pcie_ipc": "PCIe-IPC + RMSNorm"}
COLOURS = {"nccl": "#777777", "fusion": "#0072b2", "pcie_ipc": "#d55e00"}  # told apart by everyone, and in grey
LEAST = 5  # per cent: the least gain that counts
# Title, unit, what of a run is drawn, and what of that in which style.
PANELS = (
    ("Throughput", "output tokens/s", "tokens_per_s", {"-": None}),
    ("Time to the first token", "ms (dashed: p99)", "ttft_ms", {"-": "median", "--": "p99"}),
    ("Time per further token", "ms (dashed: p99)", "tpot_ms", {"-": "median", "--": "p99"}),
)
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "blackwell.inference",  # the same data give the same file
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
}


def probe_plot(probe: Json) -> str:
    """Return the time of each allreduce against the size of its message, and the gain over NCCL, as SVG.

    Args:
        probe: The JSON of the probe.

    Raises:
        ValueError: Nothing was timed.
        ImportError: matplotlib is not installed.
    """
    stages = {name: stage["times"] for name, stage in probe["stages"].items() if stage.get("times")}
    if not stages:
        raise ValueError("nothing was timed in this result")
    hidden = probe["parameters"]["hidden_size"]

    def draw(figure: Any) -> None:
        time, gain = figure.subplots(1, 2)
        gain.axhspan(-LEAST, LEAST, color="#eeeeee", zorder=0)
        for stage, rows in stages.items():
            timed = {name: [row for row in rows if name in row["medians_us"]] for name in ("nccl", stage)}
            for name in timed if stage == next(iter(stages)) else [stage]:
                sizes = [_kib(row["tokens"], hidden) for row in timed[name]]
                medians = [row["medians_us"][name] for row in timed[name]]
                halves = [row["medians_us"][name] * row["spreads"][name] / 2 for row in timed[name]]
                time.errorbar(sizes, medians, yerr=halves, marker="o", markersize=3, color=COLOURS[name], label=NAMES[name])
            gains = [100 * (row["medians_us"]["nccl"] / row["medians_us"][stage] - 1) for row in timed[stage]]
            sizes = [_kib(row["tokens"], hidden) for row in timed[stage]]
            gain.plot(sizes, gains, marker="o", markersize=3, color=COLOURS[stage], label=NAMES[stage])
        time.set(xscale="log", yscale="log", xlabel="message, KiB", ylabel="µs", title="Time")
        gain.set(xscale="log", xlabel="message, KiB", ylabel="%", title=f"Gain over NCCL (grey: under {LEAST} %, does not count)")
        for axis in (time.xaxis, time.yaxis, gain.xaxis):
            axis.set_major_formatter("{x:g}")
        time.legend()

    versions = probe["versions"]
    return _svg(draw, (9, 3.4), f"{_cards(probe)}, flashinfer {versions['flashinfer-python']}, hidden size {hidden}, bfloat16")


def benchmark_plot(benchmarks: Sequence[Json]) -> str:
    """Return throughput and latencies of a server against its concurrent requests, by strategy, as SVG.

    Args:
        benchmarks: What server_benchmark keeps, one for each configuration of one server. Only runs under the load of the last one
            are comparable, so only they are drawn.

    Raises:
        ValueError: There are none.
        ImportError: matplotlib is not installed.
    """
    rows = comparable(benchmarks)
    if not rows:
        raise ValueError("there are no runs of a benchmark")

    def draw(figure: Any) -> None:
        for axes, (title, unit, field, styles) in zip(figure.subplots(1, len(PANELS)), PANELS):
            for strategy, own in rows.items():
                levels, colour = sorted({row["concurrency"] for row in own}), COLOURS[strategy]
                for style, part in styles.items():
                    found = [[row[field][part] if part else row[field] for row in own if row["concurrency"] == level] for level in levels]
                    label = strategy if style == "-" else None
                    axes.plot(levels, list(map(statistics.median, found)), style, marker="o", markersize=3, color=colour, label=label)
                    axes.fill_between(levels, list(map(min, found)), list(map(max, found)), color=colour, alpha=0.2)
            axes.set(xscale="log", xlabel="concurrent requests", ylabel=unit, title=title, ylim=(0, None))
            axes.set_xticks(sorted({row["concurrency"] for own in rows.values() for row in own}))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
            axes.legend()

    load = _last_load(benchmarks)
    return _svg(draw, (11, 3.4), f"{load['input_tokens']} tokens in, {load['output_tokens']} out; lines are medians, areas all runs")


def comparable(benchmarks: Sequence[Json]) -> dict[str, list[Json]]:
    """Return the runs under the load of the last session, by strategy."""
    rows: dict[str, list[Json]] = {}
    load = _last_load(benchmarks)
    for benchmark in benchmarks:
        for session in benchmark["sessions"]:
            if session["load"] == load:
                rows.setdefault(benchmark["strategy"], []).extend(session["runs"])
    return rows


def _last_load(benchmarks: Sequence[Json]) -> Any:
    sessions = [session for benchmark in benchmarks for session in benchmark["sessions"]]
    return max(sessions, key=lambda session: session["measured_at"])["load"] if sessions else None


def _kib(tokens: int, hidden: int) -> float:
    return tokens * hidden * 2 / 1024


def _cards(probe: Json) -> str:
    gpus = probe["gpus"]
    return f"{len(gpus)} x {gpus[0]['name']}" if gpus else "no GPU"


def _svg(draw: Callable[[Any], None], size: tuple[float, float], title: str) -> str:
    """Let ``draw`` fill a figure of ``size`` inches; return it without what only a file of its own needs."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        figure.suptitle(title)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    text = written.getvalue()
    return "\n".join(line.rstrip() for line in text[text.index("<svg") :].splitlines()) + "\n"
