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
  scope:
    description:
      - Which gates to look at. V(fusion) stands for the catalogued gates of allreduce fusion.
    type: str
    choices: [fusion]
    default: fusion
  gates:
    description:
      - Ids of the gates to look at. All catalogued gates by default.
    type: list
    elements: str
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
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.blackwell.inference.plugins.module_utils import _gate_options as options
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._survey import report, survey


def main() -> None:
    module = AnsibleModule(
        argument_spec=dict(options.ARGUMENTS, scope={"type": "str", "choices": ["fusion"], "default": "fusion"}),
        mutually_exclusive=[options.ONE_SITE],
        required_one_of=[options.ONE_SITE],
        supports_check_mode=True,
    )
    try:
        capabilities, gates = options.capabilities(module.params), options.gates(module.params)
        if not capabilities:
            module.exit_json(changed=False, **report(None, (), []))
        installation = options.installation(module.params, gates)
        module.exit_json(changed=False, **report(installation, capabilities, survey(installation, capabilities, gates)))
    except InferenceError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
