#!/usr/bin/python
# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: gate
short_description: Open architecture gates for the GPUs of a host, or restore them
version_added: 0.1.0
description:
  - Edits the installed FlashInfer and SGLang so that the catalogued gates of allreduce fusion admit the compute capability of
    the host's GPUs and answer as before at every other one. A gate that is already open is left alone, whoever opened it.
  - All files are computed and evaluated before the first one is written, and they are replaced together or not at all.
    The bytes as released are kept, so O(state=restored) brings every file back to the byte.
  - Only catalogued gates are edited, and only for compute capabilities that the catalogue admits. O(force) does not change that.
  - Nothing is edited while a server of this venv is starting. A running server is left alone and goes on with what it has imported.
notes:
  - A list of major versions cannot tell 12.0 from 12.1. Where V(flashinfer.trtllm_comm.majors) is opened for 12.0, FlashInfer
    would compile its kernels for 12.1 as well. The gates of SGLang stay exact, so a 12.1 host does not use them.
  - V(flashinfer.workspace.multicast_device) and V(flashinfer.workspace.multicast_granularity) then ask whether multicast was
    requested, not whether the device has it. For other GPUs without multicast their answer changes as well, and the other gates
    of those GPUs stay closed.
options:
  state:
    description:
      - V(open) opens what may be opened here. Gates that need one another are opened together, or the module fails.
      - V(restored) undoes what this collection did, whatever GPUs the host has by now.
    type: str
    choices: [open, restored]
    default: open
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
      - Where one of them would stay closed, the gate is left closed for all, as the ranks of a server have to agree. Name those of the
        GPUs that serve together.
      - With O(state=open), asked from C(nvidia-smi) by default. A host without GPUs has nothing to open.
      - With O(state=restored) it only decides what the returned verdicts are about, by default every capability that may be opened.
    type: list
    elements: str
  gates:
    description:
      - Ids of the gates to open or restore. All catalogued gates by default.
    type: list
    elements: str
  optional:
    description:
      - With O(state=open) and without O(gates), open the optional set as well, C(flashinfer.trtllm_allreduce.*). It is for programs
        that call FlashInfer's C(trtllm_custom_all_reduce) themselves; no SGLang release does.
      - What is open stays open without it, and O(state=restored) restores it all the same.
    type: bool
    default: false
    version_added: 0.2.0
  state_dir:
    description:
      - Folder for the ledger, the bytes as released and the checksums of the edited files. It is made when it is first needed.
    type: path
    default: /var/lib/blackwell-inference
  force:
    description:
      - With O(state=open), edit a file in which somebody else has edited something, as long as its gate is recognised. What stands
        there now counts as its released bytes from then on.
      - With O(state=restored), restore a file although somebody else has edited it since.
    type: bool
    default: false
  untested:
    description:
      - With O(state=open), what becomes of a closed gate in a release that is newer than the newest one tested, where it is recognised.
      - V(open) opens it like any other. Its reason tells where upstream had it open before and has closed it again.
      - V(refuse) fails before anything is written.
    type: str
    choices: [open, refuse]
    default: open
    version_added: 0.3.0
  pycache_prefix:
    description:
      - E(PYTHONPYCACHEPREFIX) of the server, if it has one. Compiled files of the edited sources are removed there, too.
    type: path
  lock_timeout:
    description:
      - Seconds to wait for another run on the same host to end.
    type: int
    default: 60
attributes:
  check_mode:
    support: full
    description: Computes and verifies everything, and writes nothing.
  diff_mode:
    support: full
    description: One diff for each file.
  platform:
    support: full
    platforms: linux
    description: Hosts with Python 3.9 or newer.
seealso:
  - module: blackwell.inference.gate_info
  - module: blackwell.inference.jit_cache
author:
  - blackwell.inference contributors (@blackwell-inference)
"""

EXAMPLES = r"""
- name: Open the gates for the GPUs of this host
  blackwell.inference.gate:
    python: /opt/sglang/venv/bin/python
  register: gates

- name: Clear what became stale
  blackwell.inference.jit_cache:
    state: absent
    python: /opt/sglang/venv/bin/python
    user: sglang
    modules: "{{ gates.stale_jit_modules }}"

- name: Undo it all, to the byte
  blackwell.inference.gate:
    state: restored
    python: /opt/sglang/venv/bin/python
"""

RETURN = r"""
gates:
  description: One entry for each gate, in the catalogue's order. Empty on a host without GPUs.
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
      description: Its line in that file, from 1, after this run.
      type: int
      sample: 61
    expression:
      description: The condition as it stands there after this run, on one line.
      type: str
      sample: supported_major_versions=[9, 10, 12]
    before:
      description: The verdict before this run, one of those that M(blackwell.inference.gate_info) explains.
      type: str
      sample: closed
    after:
      description: The verdict after this run, read again from the files on disk. In check mode, what it would be.
      type: str
      sample: opened
    verdict:
      description: The same as RV(gates[].after).
      type: str
      sample: opened
    reason:
      description: Why, in a sentence.
      type: str
files:
  description: The files that were replaced, or would be in check mode.
  returned: success
  type: list
  elements: dict
  contains:
    path:
      description: Absolute path.
      type: str
    sha256_before:
      description: Checksum before this run.
      type: str
    sha256_after:
      description: Checksum after this run.
      type: str
stale_jit_modules:
  description:
    - FlashInfer JIT modules whose compiled form no longer fits, for M(blackwell.inference.jit_cache).
    - Those of earlier runs stay among them until that module has cleared or built them.
  returned: success
  type: list
  elements: str
  sample: [trtllm_comm]
restart_required:
  description: Whether files have changed that a running server has imported.
  returned: success
  type: bool
restart_pending:
  description: Processes of servers that go on with what they imported before files with gates were last written.
  returned: success
  type: list
  elements: str
  sample: []
packages:
  description: The packages that were read, by import name.
  returned: success
  type: dict
  sample:
    flashinfer:
      location: /opt/sglang/venv/lib/python3.12/site-packages/flashinfer
      newer_than_tested: false
      version: 0.6.1
summary:
  description: How many gates have each verdict after this run.
  returned: success
  type: dict
  sample: {open: 1, opened: 2, closed: 0, absent: 6, not_admitted: 3, unknown: 0, conflict: 0}
compute_capabilities:
  description: The compute capabilities that the gates were evaluated at.
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
from ansible_collections.blackwell.inference.plugins.module_utils._opening import (
    execute,
    plan_opening,
    plan_restoring,
    refuse_untested,
    refuse_unwritable,
    verify_on_disk,
)
from ansible_collections.blackwell.inference.plugins.module_utils._starting_servers import refuse_starting_server
from ansible_collections.blackwell.inference.plugins.module_utils._survey import report
from ansible_collections.blackwell.inference.plugins.module_utils._version import COLLECTION_VERSION


def run(module: AnsibleModule) -> dict:
    parameters = module.params
    if parameters["lock_timeout"] < 0:
        raise InferenceError("lock_timeout", str(parameters["lock_timeout"]), "seconds to wait, 0 or more")
    opening = parameters["state"] == "open"
    gates = options.gates(parameters)
    # What was opened is undone whatever GPUs the host has by now, and whatever its driver says.
    capabilities = options.capabilities(parameters) if opening or parameters["compute_capability"] else options.admitted_capabilities()
    if not capabilities:
        return {
            "changed": False,
            "files": [],
            "stale_jit_modules": [],
            "restart_required": False,
            "restart_pending": [],
            **report(None, (), []),
        }

    def look():
        installation = options.installation(parameters, gates)
        make_plan = plan_opening if opening else plan_restoring
        plan = make_plan(installation, capabilities, gates, parameters["force"], COLLECTION_VERSION)
        if opening and parameters["untested"] == "refuse":
            refuse_untested(plan, installation)
        for root in plan.roots(installation):
            refuse_starting_server(root)
        refuse_unwritable(plan, installation)
        return installation, plan

    installation, plan = look()
    if plan.writes and not module.check_mode:
        with installation.store.lock(parameters["lock_timeout"]):
            installation, plan = look()  # whoever held the lock may have changed the files
            execute(plan, installation, parameters["pycache_prefix"] or "")
            verify_on_disk(plan, options.installation(parameters, gates), capabilities, gates)
    stale = {*plan.stale_jit_modules(), *options.stale_jit_modules(installation)}
    result = report(installation, capabilities, plan.after)
    for row, finding in zip(result["gates"], plan.before):
        row.update(before=finding.verdict, after=row["verdict"])
    return {
        "changed": bool(plan.changes),
        "files": [{"path": old.path, "sha256_before": old.sha256, "sha256_after": new.sha256} for old, new in plan.changes],
        "stale_jit_modules": sorted(stale),
        "restart_required": bool(plan.changes),
        "restart_pending": options.restart_pending(installation, written_now=bool(plan.changes)),
        "diff": plan.diffs(installation),
        **result,
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec=dict(
            options.ARGUMENTS,
            state={"type": "str", "choices": ["open", "restored"], "default": "open"},
            force={"type": "bool", "default": False},
            untested={"type": "str", "choices": ["open", "refuse"], "default": "open"},
            pycache_prefix={"type": "path"},
            lock_timeout={"type": "int", "default": 60},
        ),
        mutually_exclusive=[options.ONE_SITE],
        required_one_of=[options.ONE_SITE],
        supports_check_mode=True,
    )
    try:
        module.exit_json(**run(module))
    except InferenceError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
