#!/usr/bin/python
# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: server_args_info
short_description: Check server options against the installed sglang release
version_added: 0.1.0
description:
  - Reads from the source of the installed release which command line flags it has, without importing it, and checks options against them.
  - Options that the release calls by another name are translated. Unknown options, wrong choices, wrong types and settings that contradict
    each other are reported, one line each. Nothing is started or changed.
options:
  python:
    description: Interpreter of the serving virtual environment.
    type: path
  site_packages:
    description: Folder that sglang is installed in.
    type: path
  arguments:
    description:
      - Options of C(sglang.launch_server). Dashes and underscores are the same.
      - V(true) turns a switch on, V(null) leaves an option at its default.
      - C(flashinfer_allreduce_fusion) is an option for all releases, with V(auto), V(trtllm), V(off) and what else the release has.
    type: dict
    default: {}
  hidden:
    description: Names of options whose values are not told, since they are secrets, for example C(api_key). Only their keys are checked.
    type: list
    elements: str
    default: []
  environment:
    description: Environment variables of the server, which O(arguments) are checked against.
    type: dict
    default: {}
  compute_capability:
    description: Compute capability of the GPUs, for example V(12.0). Backends without kernels for it are then reported.
    type: str
    default: ""
  gpus:
    description: How many GPUs the host has, V(0) where that is not known. More ranks are then reported.
    type: int
    default: 0
  config_file:
    description: Path of the configuration file of the server; need not exist. RV(secret_written) tells of it.
    type: path
  replaces:
    description: Paths of files that are to be written for the server; need not exist. RV(written_by_hand) tells of them.
    type: list
    elements: path
    default: []
    version_added: 0.3.0
  unit:
    description:
      - Path of the systemd unit of the server; need not exist. Other servers that this collection has put into units beside it
        are then compared, and the same port or the same GPUs reported.
    type: path
  strict:
    description: Whether to fail where there is something to report. Otherwise it is only returned.
    type: bool
    default: false
author:
  - blackwell.inference contributors (@blackwell-inference)
attributes:
  check_mode:
    support: full
    description: The module only reads, so check mode is the same.
  diff_mode:
    support: none
    description: Nothing is changed.
  platform:
    support: full
    platforms: posix
    description: Runs on the host that sglang is installed on.
"""

EXAMPLES = r"""
- name: Check the options of a server
  blackwell.inference.server_args_info:
    python: /opt/sglang/venv/bin/python
    arguments:
      model_path: nvidia/GLM-5-NVFP4
      tensor_parallel_size: 8
      flashinfer_allreduce_fusion: trtllm
  register: release

- name: Show what this release calls them
  ansible.builtin.debug:
    var: release.config
"""

RETURN = r"""
version:
  description: Version of the installed sglang.
  returned: success
  type: str
  sample: 0.5.8
config:
  description: Options as they go into the file of C(--config), by flag name. Empty where the release has no such file.
  returned: success
  type: dict
  sample:
    model-path: nvidia/GLM-5-NVFP4
    tensor-parallel-size: 8
    enable-flashinfer-allreduce-fusion: true
argv:
  description: Options that this release cannot read from a file, as command line arguments.
  returned: success
  type: list
  elements: str
  sample:
    - --cuda-graph-max-bs-decode=32
hidden_keys:
  description: Key in the file of C(--config) of each option in O(hidden).
  returned: success
  type: dict
  sample:
    api_key: api-key
secret_written:
  description: Whether O(config_file), as it is now, holds a secret, so that what is replaced in it is not to be shown either.
  returned: success
  type: bool
  sample: false
written_by_hand:
  description: Those of O(replaces) that hold something which this collection has not written.
  returned: success
  type: list
  elements: str
  sample: [/etc/systemd/system/sglang.service]
translated:
  description: What this release calls an option that was named otherwise. Empty text where it needs no flag for it.
  returned: success
  type: dict
  sample:
    flashinfer_allreduce_fusion: --enable-flashinfer-allreduce-fusion
unknown:
  description: One line for each option that this release does not have.
  returned: always
  type: list
  elements: str
  sample: []
invalid:
  description: One line for each value that this release refuses.
  returned: always
  type: list
  elements: str
  sample: []
contradictions:
  description: One line for each pair of settings that cannot work together, those of other servers on the host included.
  returned: always
  type: list
  elements: str
  sample: []
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._packages import locate
from ansible_collections.blackwell.inference.plugins.module_utils._server_args import check, holds_secret, read_flags
from ansible_collections.blackwell.inference.plugins.module_utils._server_args_rules import contradictions, read_environment
from ansible_collections.blackwell.inference.plugins.module_utils._server_neighbours import overlaps, written_by_hand


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "python": {"type": "path"},
            "site_packages": {"type": "path"},
            "arguments": {"type": "dict", "default": {}},
            "hidden": {"type": "list", "elements": "str", "default": []},
            "environment": {"type": "dict", "default": {}},
            "compute_capability": {"type": "str", "default": ""},
            "gpus": {"type": "int", "default": 0},
            "config_file": {"type": "path"},
            "replaces": {"type": "list", "elements": "path", "default": []},
            "unit": {"type": "path"},
            "strict": {"type": "bool", "default": False},
        },
        mutually_exclusive=[("python", "site_packages")],
        required_one_of=[("python", "site_packages")],
        supports_check_mode=True,
    )
    options = module.params
    try:
        site = locate(python=options["python"], site_packages=options["site_packages"])
        site.require("sglang")
        sglang = site.packages["sglang"]
        checked = check(read_flags(sglang.location), options["arguments"], tuple(options["hidden"]))
    except InferenceError as error:
        module.fail_json(msg=str(error))
    environment = {name: str(value) for name, value in options["environment"].items()}
    declared = read_environment(sglang.location)
    problems = {
        "unknown": checked.unknown,
        "invalid": checked.invalid,
        "contradictions": [
            *contradictions(checked.values, environment, declared, options["compute_capability"], options["gpus"]),
            *(overlaps(options["unit"], checked.values, environment) if options["unit"] else ()),
        ],
    }
    lines = [line for found in problems.values() for line in found]
    if options["strict"] and lines:
        module.fail_json(msg="\n".join([f"sglang {sglang.version} cannot be started with these options:", *lines]), **problems)
    module.exit_json(
        changed=False,
        version=sglang.version,
        config=checked.config,
        argv=checked.argv,
        hidden_keys=checked.hidden_keys,
        secret_written=bool(options["config_file"]) and holds_secret(options["config_file"]),
        written_by_hand=written_by_hand(options["replaces"]),
        translated=checked.translated,
        **problems,
    )


if __name__ == "__main__":
    main()
