# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A simulated benchmark: ``python -m sglang.bench_serving`` for the simulated engine, which has no throughput to measure.

It asks the server whether it fuses. The figures are made up: SETTINGS of the engine says TOKENS_PER_S and TOKENS_PER_S_FUSED.
"""

from __future__ import annotations

import argparse
import json
import os
import urllib.request

from sglang.launch_server import settings


def main() -> None:
    """Write a line of figures, as upstream does."""
    parser = argparse.ArgumentParser()
    for name in ("backend", "base-url", "dataset-name", "output-file"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("random-input-len", "random-output-len", "random-range-ratio", "num-prompts", "max-concurrency", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("flush-cache", "disable-tqdm"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    request = urllib.request.Request(options.base_url + "/server_info")  # noqa: S310  the server of this host
    request.add_header("Authorization", f"Bearer {os.environ.get('OPENAI_API_KEY', '')}")
    with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
        fuses = json.load(answer)["enable_flashinfer_allreduce_fusion"]
    rate = float(settings()["TOKENS_PER_S_FUSED" if fuses else "TOKENS_PER_S"]) * (1 + options.seed / 1000)
    figures = {"output_throughput": rate, "completed": options.num_prompts, "accept_length": None, "simulated": True}
    figures |= {f"{kind}_{name}_ms": 1000 / rate for kind in ("median", "p99") for name in ("ttft", "tpot")}
    with open(options.output_file, "a", encoding="utf-8") as file:
        file.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
