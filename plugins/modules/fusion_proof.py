#!/usr/bin/python
# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: fusion_proof
short_description: Measure whether fused allreduce is correct and faster on this host, and decide
version_added: 0.1.0
author: ["blackwell.inference contributors (@blackwell-inference)"]
description:
  - Runs a probe on the GPUs of the host, in the serving venv and with as many ranks as the server has. It copies data between each pair
    of GPUs, compares fused allreduce + residual + RMSNorm with float64, and times it next to NCCL + RMSNorm in CUDA graphs; where the
    installed release has it, PCIe-IPC allreduce too.
  - Whatever hangs is killed after O(phase_timeout) seconds, and is a result like any other.
  - Keeps the result with a fingerprint of the driver, the GPUs and their links, the packages, the CUDA compiler, the gates and the
    options. While that is unchanged, nothing is measured again.
  - Decides for V(fusion) or V(pcie_ipc) only where it is correct on every rank and faster than NCCL by more than 5 %, on the server 7 %,
    and more than the spread of the measurement, and slower by that at no batch size. Otherwise for V(nccl), with the reason.
  - What was measured for a server that runs stands until it is measured again, where only the driver, the GPUs and their links, or the
    CUDA compiler have changed.
attributes:
  check_mode:
    support: full
    description: Says whether it would measure. What the measurement will say, nobody can; what was measured before is shown.
  diff_mode:
    support: full
    description: Shows the decision before and after.
  platform:
    platforms: linux
    support: full
    description: Uses NVIDIA GPUs.
options:
  python:
    description: Path of the serving venv's interpreter.
    type: path
    required: true
  world_size:
    description: Number of ranks, the server's tensor parallel size.
    type: int
    required: true
  name:
    description: Name of the server, after which what is kept is named. A host may have several, on GPUs of their own.
    type: str
    default: sglang
  hidden_size:
    description: Hidden size of the model. Default is what is known of O(model).
    type: int
  model:
    description: What is known of the model that the server has.
    type: dict
    suboptions:
      path:
        description: Its name or folder. Where that is a folder on the host, the hidden size in its C(config.json) counts.
        type: str
      hidden_size:
        description: Its hidden size, which counts where there is no such folder.
        type: int
        default: 6144
  user:
    description:
      - The user that the server runs as; the probe runs as that user, and makes the folder of its caches where it is missing.
      - Default is the user that the module runs as.
    type: str
  environment:
    description: The environment of the server, as its unit sets it. NCCL's settings in there are part of what is measured.
    type: dict
    default: {}
  measure:
    description: Whether to measure where nothing valid is kept. Otherwise only what is kept counts.
    type: bool
    default: true
  required:
    description: Whether to fail where nothing valid is kept and the host cannot be measured now, as while a server uses the GPUs.
    type: bool
    default: false
  force:
    description: Whether to measure although the host is unchanged.
    type: bool
    default: false
  phase_timeout:
    description: Seconds that the ranks may stay at one thing before that counts as a hang.
    type: int
    default: 60
  timeout:
    description: Seconds that everything may take, a first build of the kernels included.
    type: int
    default: 3600
  unit:
    description: Name of the server's unit, by which it is known whether it runs.
    type: str
    version_added: 0.3.0
  config_file:
    description: Configuration that it runs with, as the role C(sglang_server) writes it; it tells how the ranks reduce.
    type: path
    version_added: 0.3.0
  stops:
    description:
      - Whether O(unit) is stopped before the measurement. With O(measure=false) and in check mode, its processes are then not in the
        way, and otherwise the measurement has to succeed.
    type: bool
    default: false
    version_added: 0.3.0
  benchmark:
    description:
      - Runs of M(blackwell.inference.server_benchmark) on this server, A-B-A, to be kept with what was measured. From then on they
        have the last word; a new measurement drops them.
      - A strategy with which the server did not serve has one entry with C(strategy) and C(error) instead.
      - Needs a valid measurement.
    type: list
    elements: dict
  executable:
    description: Name or path of C(nvidia-smi).
    type: str
    default: nvidia-smi
  state_dir:
    description: Folder that keeps what was measured, as C(proofs/NAME.json).
    type: path
    default: /var/lib/blackwell-inference
  facts_dir:
    description: Folder that receives C(blackwell_inference_proof_NAME.fact), the decision without the figures.
    type: path
    default: /etc/ansible/facts.d
notes:
  - A measurement takes about a minute, and minutes more where the kernels have to be built first.
  - GPUs that anything else uses are never measured. The server has to be stopped for that, as the playbook C(site) does.
seealso:
  - module: blackwell.inference.server_benchmark
  - module: blackwell.inference.gate
  - module: blackwell.inference.jit_cache
"""

EXAMPLES = r"""
- name: Measure, unless this host was measured as it is
  blackwell.inference.fusion_proof:
    python: /opt/sglang/venv/bin/python
    world_size: 8
    user: sglang
    environment:
      HOME: /var/lib/sglang
      PATH: /opt/sglang/venv/bin:/usr/local/cuda/bin:/usr/bin:/bin
      CUDA_HOME: /usr/local/cuda
      NCCL_P2P_LEVEL: SYS
  register: proof

- name: Only look at what is kept
  blackwell.inference.fusion_proof:
    python: /opt/sglang/venv/bin/python
    world_size: 8
    measure: false
"""

RETURN = r"""
status:
  description:
    - V(measured), in this run, or would be in check mode; V(kept), by an earlier run and the host is unchanged.
    - V(stale), by an earlier run and the host has changed; V(missing), never.
    - V(refused), it cannot be measured now; V(pointless), there is nothing to measure.
  returned: success
  type: str
  sample: kept
measured:
  description: The decision.
  returned: success
  type: dict
  contains:
    strategy:
      description: How the ranks should reduce, V(fusion), V(pcie_ipc) or V(nccl).
      type: str
      sample: fusion
    reason:
      description: Why, in a sentence.
      type: str
      sample: fusion is correct and 1.86 times as fast as NCCL over 8 batch sizes, +10% at 2048 tokens, where it gains least
    gain:
      description: How much faster than NCCL it is, 0.5 being half as fast again. Null with V(nccl).
      type: float
      sample: 0.8594
    margin:
      description: By how much the gain is more than was required. Null with V(nccl).
      type: float
      sample: 0.8094
    candidates:
      description: Whether V(fusion) and V(pcie_ipc) are each C(correct) and C(faster), the C(gain), what is C(required), and the C(reason).
      type: dict
candidate:
  description: What the probe alone decides for, whatever a benchmark says.
  returned: success
  type: str
  sample: fusion
changed_since:
  description: What changed on the host since it was measured.
  returned: success
  type: list
  elements: str
  sample: ["driver was 580.95.05 and is 590.44.01"]
probe:
  description: What the probe measured, as it is kept. Null where nothing is.
  returned: success
  type: dict
proof_file:
  description: Where that is kept.
  returned: success
  type: str
  sample: /var/lib/blackwell-inference/proofs/sglang.json
"""

import os
import re
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.blackwell.inference.plugins.module_utils import _proof as proof
from ansible_collections.blackwell.inference.plugins.module_utils._decision import Decision, decide, differences
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._gpu import Inventory, NvidiaSmiMissing, nvidia_smi, query_inventory
from ansible_collections.blackwell.inference.plugins.module_utils._packages import locate
from ansible_collections.blackwell.inference.plugins.module_utils._processes import of_unit
from ansible_collections.blackwell.inference.plugins.module_utils._records import SCHEMA_VERSION, load, replace
from ansible_collections.blackwell.inference.plugins.module_utils._remedy import FULL_RUN


def prove(params: dict, check_mode: bool) -> dict:
    """Measure where that is due; return what the module returns."""
    for option in ("world_size", "hidden_size", "phase_timeout", "timeout"):
        if params[option] is not None and params[option] < 1:
            raise InferenceError(option, str(params[option]), "a positive number")
    if not re.fullmatch(r"[\w.-]+", params["name"], re.ASCII):
        raise InferenceError("name", repr(params["name"]), "letters, digits, dots and dashes")
    environment = {name: str(value) for name, value in params["environment"].items() if value is not None}
    hidden_size = params["hidden_size"] or proof.hidden_size(params["model"]["path"]) or params["model"]["hidden_size"]
    server = proof.Server(params["python"], params["user"], environment, params["world_size"], hidden_size)
    path = record_path(params)
    run = nvidia_smi(params["executable"], 60)
    try:
        inventory = query_inventory(run)
    except NvidiaSmiMissing:
        inventory = Inventory([], None, [])
    if not inventory.gpus or server.world_size == 1:
        return answer(path, "pointless", nccl("one rank has nothing to reduce" if inventory.gpus else "there is no GPU on this host"))

    site = locate(server.python)
    site.require("flashinfer", "sglang")
    current = proof.fingerprint(server, inventory, site, params["state_dir"])
    record = load(path)
    processes = of_unit(params["unit"]) if params["unit"] else set()
    running = proof.running_strategy(params["config_file"]) if processes and params["config_file"] else None
    before = consequence(server, record, current, running)
    changed_since = differences(record["fingerprint"], current) if record else []
    if params["benchmark"] is not None:
        if not record or changed_since:
            raise InferenceError("benchmark", before.reason, "a host that was measured as it is")
        return keep(params, check_mode, {**record, "benchmark": params["benchmark"]}, server, current, before)
    if record and not changed_since and not params["force"]:
        return answer(path, "kept", before, record)

    looks = check_mode or not params["measure"]
    refusal = proof.refusal(server, site, run, processes if params["stops"] and looks else set())
    if not refusal and not params["measure"]:
        return answer(path, "stale" if record else "missing", before, record, changed_since)
    if not refusal and check_mode:
        earlier = decide(record["probe"], server.world_size, benchmark=record.get("benchmark")) if record else before
        expected = earlier._replace(reason="it would be measured, and the result is not known yet")
        return {**answer(path, "measured", expected, record, changed_since), "changed": True, "diff": diff(path, before, expected)}
    if not refusal:
        result = proof.measure(server, site, params["executable"], params["phase_timeout"], params["timeout"])
        refusal = result["message"] if result["status"] == "refused" else None  # somebody was faster
    if refusal and (params["required"] or (params["stops"] and params["measure"])):
        remedy = f"The full run stops the server and starts it again: {FULL_RUN}." if processes else ""
        raise InferenceError(f"world_size {server.world_size}", refusal, "a host that can be measured", remedy)
    if refusal:
        why = f"it cannot be measured now: {refusal}"
        decision = before._replace(reason=f"{why}; {before.reason}") if record else nccl(why)
        return answer(path, "refused", decision, record, changed_since)

    measured_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    record = {"schema_version": SCHEMA_VERSION, "measured_at": measured_at, "fingerprint": current, "probe": result}
    kept = keep(params, False, record, server, current, before)
    return {**kept, "changed": True, "status": "measured", "changed_since": changed_since}


def keep(params: dict, check_mode: bool, record: dict, server: proof.Server, current: dict, before: Decision) -> dict:
    """Write a record and the facts that follow from it; return what the module returns."""
    path = record_path(params)
    fact_path = os.path.join(params["facts_dir"], f"blackwell_inference_proof_{params['name']}.fact")
    after = consequence(server, record, current)
    fact = {**described(after), "world_size": server.world_size, "measured_at": record["measured_at"]}
    changed = [replace(path, record, 0o640, 0o750, check_mode), replace(fact_path, fact, 0o644, 0o755, check_mode)]
    return {**answer(path, "kept", after, record), "changed": any(changed), "diff": diff(path, before, after)}


def record_path(params: dict) -> str:
    """Return the file that keeps what was measured."""
    return os.path.join(params["state_dir"], "proofs", f"{params['name']}.json")


def consequence(server: proof.Server, record: dict | None, current: dict, running: str | None = None) -> Decision:
    """Return what follows from a record for the host as it is, and for a server that runs with this strategy."""
    if record is None:
        return decide(None)
    return decide(record["probe"], server.world_size, record["fingerprint"], current, record.get("benchmark"), running)


def nccl(reason: str) -> Decision:
    """Return the decision where nothing can be proven."""
    return Decision("nccl", reason, None, None, {})


def described(decision: Decision) -> dict:
    """Return a decision as data."""
    return {**decision._asdict(), "candidates": {name: verdict._asdict() for name, verdict in decision.candidates.items()}}


def diff(path: str, before: Decision, after: Decision) -> dict:
    """Return two decisions as Ansible shows a difference."""
    texts = {name: f"{decision.strategy}: {decision.reason}\n" for name, decision in (("before", before), ("after", after))}
    return {"before_header": path, "after_header": path, **texts}


def answer(path: str, status: str, decision: Decision, record: dict | None = None, changed_since: list | None = None) -> dict:
    """Return what the module returns when it changes nothing."""
    return {
        "changed": False,
        "status": status,
        "measured": described(decision),
        "candidate": decide(record["probe"]).strategy if record and not changed_since else "nccl",
        "changed_since": changed_since or [],
        "probe": record["probe"] if record else None,
        "proof_file": path,
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "python": {"type": "path", "required": True},
            "world_size": {"type": "int", "required": True},
            "name": {"type": "str", "default": "sglang"},
            "hidden_size": {"type": "int"},
            "model": {
                "type": "dict",
                "apply_defaults": True,
                "options": {"path": {"type": "str"}, "hidden_size": {"type": "int", "default": proof.HIDDEN_SIZE}},
            },
            "user": {"type": "str"},
            "environment": {"type": "dict", "default": {}},
            "measure": {"type": "bool", "default": True},
            "required": {"type": "bool", "default": False},
            "force": {"type": "bool", "default": False},
            "phase_timeout": {"type": "int", "default": 60},
            "timeout": {"type": "int", "default": 3600},
            "unit": {"type": "str"},
            "config_file": {"type": "path"},
            "stops": {"type": "bool", "default": False},
            "benchmark": {"type": "list", "elements": "dict"},
            "executable": {"type": "str", "default": "nvidia-smi"},
            "state_dir": {"type": "path", "default": "/var/lib/blackwell-inference"},
            "facts_dir": {"type": "path", "default": "/etc/ansible/facts.d"},
        },
        supports_check_mode=True,
    )
    try:
        result = prove(module.params, module.check_mode)
    except InferenceError as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
