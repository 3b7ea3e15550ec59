#!/usr/bin/python
# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: server_benchmark
short_description: Run sglang's own benchmark against a running server
version_added: 0.1.0
author: ["blackwell.inference contributors (@blackwell-inference)"]
description:
  - Runs C(python -m sglang.bench_serving) of the serving venv several times at each concurrency, with random token ids, so that no data
    set is needed, and samples power draw, clocks and utilisation of the GPUs meanwhile.
  - Keeps the runs on the host, in one file for each configuration of the server. To compare two configurations, run it for the first,
    the second, and the first again, and give all runs to M(blackwell.inference.fusion_proof).
attributes:
  check_mode:
    support: none
    description: Is skipped in check mode, since there is nothing to say without load on the server.
  diff_mode:
    support: none
    description: Only adds to what was measured.
  platform:
    platforms: linux
    support: full
    description: Uses NVIDIA GPUs.
options:
  python:
    description: Path of the serving venv's interpreter.
    type: path
    required: true
  url:
    description: Where the server answers.
    type: str
    default: http://127.0.0.1:30000
  api_key:
    description: The server's API key.
    type: str
  strategy:
    description: How the ranks of the server reduce now; it is kept with the runs.
    type: str
    choices: [fusion, pcie_ipc, nccl]
    required: true
  name:
    description: Name of the server, after which what is kept is named.
    type: str
    default: sglang
  configuration:
    description: What the server runs with, apart from secrets. Runs with the same one are kept together.
    type: dict
    default: {}
  user:
    description: The user that the server runs as; the benchmark runs as that user. Default is the user that the module runs as.
    type: str
  concurrency:
    description: Numbers of requests that the server gets at a time.
    type: list
    elements: int
    default: [1, 16, 64]
  runs:
    description: How often each is repeated.
    type: int
    default: 3
  requests:
    description: How many requests follow one another in each of the concurrent streams.
    type: int
    default: 4
  input_tokens:
    description: Length of a request.
    type: int
    default: 1024
  output_tokens:
    description: Length of an answer.
    type: int
    default: 256
  environment:
    description: The environment of the server, as its unit sets it. The benchmark gets it, and nothing else.
    type: dict
    default: {}
  timeout:
    description: Seconds that one run may take.
    type: int
    default: 1800
  executable:
    description: Name or path of C(nvidia-smi). Without it, nothing is sampled.
    type: str
    default: nvidia-smi
  state_dir:
    description: Folder that keeps the runs, as C(benchmarks/NAME-STRATEGY-*.json).
    type: path
    default: /var/lib/blackwell-inference
notes:
  - Each run has a seed of its own, the same one in every call, so that all configurations get the same requests. The server's prefix
    cache is emptied before each, so that none is answered from it.
  - A first run at each concurrency, which may still compile kernels, is not counted.
seealso:
  - module: blackwell.inference.fusion_proof
"""

EXAMPLES = r"""
- name: Benchmark the server as it is
  blackwell.inference.server_benchmark:
    python: /opt/sglang/venv/bin/python
    user: sglang
    environment:
      HOME: /var/lib/sglang
      HF_HOME: /var/lib/sglang/huggingface
    strategy: nccl
    concurrency: [1, 64]
  register: benchmark
"""

RETURN = r"""
benchmark:
  description: One entry for each concurrency, as M(blackwell.inference.fusion_proof) takes them.
  returned: success
  type: list
  elements: dict
  contains:
    strategy:
      description: As it was given.
      type: str
      sample: nccl
    concurrency:
      description: Requests at a time.
      type: int
      sample: 64
    tokens_per_s:
      description: Output tokens per second of each run.
      type: list
      elements: float
      sample: [3740.2, 3731.8, 3745.0]
    acceptance:
      description: The least accepted length of speculative decoding in any run. Null where the server does not speculate.
      type: float
      sample: 2.87
benchmark_file:
  description: Where they are kept.
  returned: success
  type: str
  sample: /var/lib/blackwell-inference/benchmarks/sglang-nccl-0a1b2c3d4e5f.json
runs:
  description: Every run, in their order.
  returned: success
  type: list
  elements: dict
  contains:
    concurrency:
      description: Requests at a time.
      type: int
    tokens_per_s:
      description: Output tokens per second.
      type: float
    ttft_ms:
      description: Time to the first token, C(median) and C(p99).
      type: dict
    tpot_ms:
      description: Time per further token, C(median) and C(p99).
      type: dict
    acceptance:
      description: Accepted length of speculative decoding, or null.
      type: float
    power_w:
      description: Mean power draw of a GPU. Null where it was not sampled.
      type: float
    power_limit_w:
      description: Its limit. Null where it was not sampled.
      type: float
    sm_mhz:
      description: Mean clock of a GPU. Null where it was not sampled.
      type: float
    utilization:
      description: Mean utilisation of a GPU in per cent. Null where it was not sampled.
      type: float
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.blackwell.inference.plugins.module_utils import _proof_benchmark as benchmark
from ansible_collections.blackwell.inference.plugins.module_utils._account import find
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._records import SCHEMA_VERSION, load, replace

POSITIVE = ("runs", "requests", "input_tokens", "output_tokens", "timeout")


def measure(params: dict) -> list[dict]:
    """Run everything; return one row a run."""
    for option in POSITIVE:
        if params[option] < 1:
            raise InferenceError(option, str(params[option]), "a positive number")
    if not params["concurrency"] or min(params["concurrency"]) < 1:
        raise InferenceError("concurrency", str(params["concurrency"]), "positive numbers, e.g. [1, 64]")
    account = find(params["user"])
    if account is None:
        raise InferenceError("user", f"{params['user']} does not exist on this host", "the user that the server runs as")
    environment = {name: str(value) for name, value in params["environment"].items() if value is not None}
    if params["api_key"]:
        environment["OPENAI_API_KEY"] = params["api_key"]
    client = benchmark.Client(params["python"], params["url"], account, environment, params["executable"], params["timeout"])
    rows = []
    for concurrency in params["concurrency"]:
        for number in range(params["runs"] + 1):
            row = benchmark.run(client, load_of(params), concurrency, number)
            if number:
                rows.append({"concurrency": concurrency, **row})
    return rows


def load_of(params: dict) -> benchmark.Load:
    """Return what the server gets to do."""
    return benchmark.Load(params["input_tokens"], params["output_tokens"], params["requests"])


def keep(params: dict, rows: list[dict]) -> str:
    """Add runs to those of the same configuration; return the file that keeps them."""
    name = benchmark.configuration_name(params["name"], params["strategy"], params["configuration"])
    path = os.path.join(params["state_dir"], "benchmarks", name)
    record = load(path) or {"schema_version": SCHEMA_VERSION, "sessions": []}
    session = {"measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "load": load_of(params)._asdict(), "runs": rows}
    described = {option: params[option] for option in ("name", "strategy", "configuration")}
    replace(path, {**record, **described, "sessions": [*record["sessions"], session]}, 0o640, 0o750)
    return path


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "python": {"type": "path", "required": True},
            "url": {"type": "str", "default": "http://127.0.0.1:30000"},
            "api_key": {"type": "str", "no_log": True},
            "strategy": {"type": "str", "choices": ["fusion", "pcie_ipc", "nccl"], "required": True},
            "name": {"type": "str", "default": "sglang"},
            "configuration": {"type": "dict", "default": {}},
            "user": {"type": "str"},
            "concurrency": {"type": "list", "elements": "int", "default": [1, 16, 64]},
            "runs": {"type": "int", "default": 3},
            "requests": {"type": "int", "default": 4},
            "input_tokens": {"type": "int", "default": 1024, "no_log": False},
            "output_tokens": {"type": "int", "default": 256, "no_log": False},
            "environment": {"type": "dict", "default": {}},
            "timeout": {"type": "int", "default": 1800},
            "executable": {"type": "str", "default": "nvidia-smi"},
            "state_dir": {"type": "path", "default": "/var/lib/blackwell-inference"},
        },
    )
    try:
        rows = measure(module.params)
        path = keep(module.params, rows)
    except InferenceError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=True, runs=rows, benchmark=benchmark.tabulated(rows, module.params["strategy"]), benchmark_file=path)


if __name__ == "__main__":
    main()
