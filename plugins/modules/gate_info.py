#!/usr/bin/python
# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: gate_info
short_description: Tell which architecture gates are open on a host
version_added: 0.1.0
description:
  - Reads the installed FlashInfer and SGLang and evaluates each catalogued gate of allreduce fusion at the compute
    capability of the host's GPUs. Neither package is imported, and nothing is changed.
  - A gate is a condition over the compute capability. Its verdict says whether it holds on this host, whoever made it so.
  - With O(scope=all) it also looks through all sources of the packages for gates that are closed here, catalogued or not.
    That takes seconds, and as many processes as the host has cores.
options:
  python:
    description:
      - Interpreter of the venv that serves SGLang. It is asked where it would import the packages from.
      - Exactly one of O(python) and O(site_packages) is required.
    type: path
  site_packages:
    description:
      - Folder that the packages are installed in, where there is no interpreter to ask.
    type: path
  compute_capability:
    description:
      - Compute capabilities of the host's GPUs, for example V(12.0). On a mixed host a gate is as closed as it is for any of them.
      - Asked from C(nvidia-smi) by default. On a host without GPUs no gate is evaluated.
    type: list
    elements: str
  gates:
    description:
      - Ids of the gates to look at. All catalogued gates by default.
    type: list
    elements: str
  optional:
    description:
      - Count the optional set, C(flashinfer.trtllm_allreduce.*), as gates that may be opened, so that they are V(closed) until they are.
    type: bool
    default: false
    version_added: 0.2.0
  scope:
    description:
      - V(fusion) reads the catalogued gates of allreduce fusion.
      - V(all) reads those, and audits all sources of the packages, tests and benchmarks left out.
    type: str
    choices: [fusion, all]
    default: fusion
  packages:
    description:
      - Import names of more installed packages to audit, for example V(sgl_kernel), V(deep_gemm) or V(vllm).
      - Needs O(scope=all).
    type: list
    elements: str
    default: []
  state_dir:
    description:
      - Folder with the ledger of M(blackwell.inference.gate), which tells V(opened) from V(open).
    type: path
    default: /var/lib/blackwell-inference
attributes:
  check_mode:
    support: full
    description: This module changes nothing.
  diff_mode:
    support: N/A
    description: This module changes nothing.
  platform:
    support: full
    platforms: linux
    description: Hosts with Python 3.9 or newer.
seealso:
  - module: blackwell.inference.gate
  - module: blackwell.inference.gpu_info
author:
  - blackwell.inference contributors (@blackwell-inference)
"""

EXAMPLES = r"""
- name: Look at the gates of the serving venv
  blackwell.inference.gate_info:
    python: /opt/sglang/venv/bin/python
  register: gates

- name: Show what is closed
  ansible.builtin.debug:
    msg: "{{ gates.gates | selectattr('verdict', 'equalto', 'closed') }}"

- name: Find every gate that is closed on this host, catalogued or not
  blackwell.inference.gate_info:
    python: /opt/sglang/venv/bin/python
    scope: all
    packages: [sgl_kernel]
  register: audit

- name: Refuse a host where something keeps the fused allreduce shut
  ansible.builtin.assert:
    that: audit.findings | selectattr('blocks') | length == 0

- name: Ask what an RTX PRO 6000 would find in a venv on a machine without a GPU
  blackwell.inference.gate_info:
    python: /opt/sglang/venv/bin/python
    compute_capability: ["12.0"]
"""

RETURN = r"""
packages:
  description: The packages that were read, by import name.
  returned: success
  type: dict
  sample:
    flashinfer:
      location: /opt/sglang/venv/lib/python3.12/site-packages/flashinfer
      newer_than_tested: false
      version: 0.6.1
gates:
  description: One entry for each gate, in the catalogue's order.
  returned: success
  type: list
  elements: dict
  contains:
    id:
      description: Name of the gate.
      type: str
      sample: flashinfer.trtllm_comm.majors
    package:
      description: Import name of the package that holds it.
      type: str
      sample: flashinfer
    version:
      description: Version of that package.
      type: str
      sample: 0.6.1
    file:
      description: Its file, relative to the folder that the package is imported from. Null where this version has no such gate.
      type: str
      sample: flashinfer/jit/comm.py
    line:
      description: Its line in that file, from 1.
      type: int
      sample: 61
    expression:
      description: The condition as it stands there, on one line.
      type: str
      sample: supported_major_versions=[9, 10]
    verdict:
      description:
        - V(open), upstream or somebody else admits this compute capability.
        - V(opened), this collection opened it.
        - V(closed), it may be opened and is not.
        - V(absent), this version has no such gate, or it is not on the fusion path of the installed pair.
        - V(not_admitted), it is closed, and the catalogue forbids to open it here.
        - V(unknown), the file is there and its shape is not recognised.
        - V(conflict), the file was edited by somebody else, and the gate is closed.
      type: str
      sample: closed
    reason:
      description: Why, in a sentence.
      type: str
summary:
  description: How many gates have each verdict.
  returned: success
  type: dict
  sample: {open: 1, opened: 0, closed: 2, absent: 6, not_admitted: 3, unknown: 0, conflict: 0}
compute_capabilities:
  description: The compute capabilities that the gates were evaluated at. Empty on a host without GPUs.
  returned: success
  type: list
  elements: str
  sample: ["12.0"]
complete:
  description: Whether no gate that may be opened is left closed, unknown or in conflict.
  returned: success
  type: bool
half_open:
  description: Gates that are open while a gate that they need is closed, one sentence each. Such a server crashes, or computes nonsense.
  returned: success
  type: list
  elements: str
restart_pending:
  description: Processes of servers that go on with what they imported before files with gates were last written.
  returned: success
  type: list
  elements: str
  sample: []
findings:
  description:
    - One entry for each gate in the sources that is closed here, in order of file and line.
    - A condition that only older hardware meets is none. Neither is what stands in a comment, in a string, or in code that
      the host does not reach.
  returned: with O(scope=all)
  type: list
  elements: dict
  contains:
    id:
      description: Name of the finding. It stays the same when only its line moves, so that an audit can be compared with an earlier one.
      type: str
      sample: 3f1c0e5d9a7b2468
    file:
      description: Its file, relative to the folder that the package is imported from.
      type: str
      sample: flashinfer/data/include/flashinfer/trtllm/fmha/fmhaRunner.cuh
    line:
      description: The line that it starts at, from 1.
      type: int
      sample: 37
    expression:
      description: The whole condition on one line, with what the names in it stand for where they tell nothing by themselves.
      type: str
      sample: mSM == kSM_100 || mSM == kSM_103
    kind:
      description:
        - Of Python, V(condition), V(raise), V(early return), V(return), V(assert), V(decorator), V(list), V(lookup),
          V(assignment) or V(argument).
        - Of CUDA and C++, V(preprocessor), V(run-time check) or V(compile-time check).
        - V(catalogue) for a catalogued gate that names no architecture.
      type: str
      sample: run-time check
    guards:
      description: The function or kernel that it stands in or decorates. Empty where that has no name.
      type: str
      sample: TllmGenFmhaRunner
    replaced:
      description: Whether other code serves the host in place of what the gate keeps from it.
      type: bool
    on_path:
      description:
        - Whether it lies on the fusion path. That is derived from the installed sources, from sglang's option to the kernels.
      type: bool
    blocks:
      description: Whether it keeps the fused allreduce from this host, and is not meant to.
      type: bool
    catalogued:
      description: Id of the gate in the catalogue. Null where it has none.
      type: str
      sample: sglang.fusion.backend
    advice:
      description: What to do about it.
      type: str
      sample: 'use another backend: --attention-backend flashinfer or triton'
undecidable:
  description: Conditions over an architecture whose value cannot be told from the sources, and files that cannot be read as Python.
  returned: with O(scope=all)
  type: list
  elements: dict
  contains:
    file:
      description: Its file.
      type: str
    line:
      description: Its line, from 1.
      type: int
    expression:
      description: The whole condition on one line.
      type: str
    guards:
      description: The function that it stands in.
      type: str
"""

import gc

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.blackwell.inference.plugins.module_utils import _gate_options as options
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._survey import report, survey


def main() -> None:
    gc.disable()  # a short life with hardly any cycles: looking for them takes a tenth of the time
    module = AnsibleModule(
        argument_spec=dict(
            options.ARGUMENTS,
            scope={"type": "str", "choices": ["fusion", "all"], "default": "fusion"},
            packages={"type": "list", "elements": "str", "default": []},
        ),
        mutually_exclusive=[options.ONE_SITE],
        required_one_of=[options.ONE_SITE],
        supports_check_mode=True,
    )
    everything = module.params["scope"] == "all"
    try:
        if module.params["packages"] and not everything:
            raise InferenceError("packages", "given with scope=fusion", "scope=all, which audits packages")
        capabilities, gates = options.capabilities(module.params), options.gates(module.params)
        installation = options.installation(module.params, gates) if capabilities else None
        found = survey(installation, capabilities, gates) if installation else []
        result = {
            "restart_pending": options.restart_pending(installation) if installation else [],
            **report(installation, capabilities, found),
        }
        if everything:
            # Imported here: the catalogued gates alone take less time than that does.
            from ansible_collections.blackwell.inference.plugins.module_utils._audit_findings import NOTHING, audited

            result.update(audited(installation.site, module.params["packages"], capabilities, found) if installation else NOTHING)
        module.exit_json(changed=False, **result)
    except InferenceError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
