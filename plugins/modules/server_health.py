#!/usr/bin/python
# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: server_health
short_description: Wait until an SGLang server serves, or tell why it does not
version_added: 0.1.0
description:
  - Watches a server on its host until it has answered a request of this module, has died, hangs, or the time is over.
  - Looks at the systemd unit, at the journal, for running compilers and at the answers of the server. Log lines are explained
    by signatures that are part of the collection.
  - One request is under way at a time. Nothing is changed.
options:
  url:
    description: Where the server listens.
    type: str
    default: http://127.0.0.1:30000
  unit:
    description: Name of the systemd unit of the server. Without it only O(url) is watched.
    type: str
  timeout:
    description: Seconds to wait at most, beside those of a request that is under way. With V(0) the server is looked at once.
    type: int
    default: 1800
  interval:
    description: Seconds between two requests to the server, more than 5. A request of ours has three times as long to be answered.
    type: int
    default: 10
  canary:
    description: Requests for a few tokens that the server has to answer in a row. With V(0) C(/health) is enough, as for embedding models.
    type: int
    default: 1
  api_key:
    description: API key of the server. It is sent to O(url) and told to nobody else.
    type: str
  since:
    description: Where the log begins that is read, as C(journalctl --since) takes it. Without it, at the last start of O(unit).
    type: str
  files:
    description:
      - Files that the server has loaded. RV(restart_pending) tells which of them changed after its start.
      - The files named in a list of SHA-256 checksums count where its own name ends in C(.sha256).
    type: list
    elements: path
    default: []
  python:
    description: Interpreter of the server. Of the files named in a list, those in its venv count.
    type: path
    version_added: 0.3.0
  ca_path:
    description: File of PEM certificates to trust beside those of the system.
    type: path
  validate_certs:
    description: Whether to check the certificate of a server that O(url) asks over HTTPS.
    type: bool
    default: true
author:
  - blackwell.inference contributors (@blackwell-inference)
attributes:
  check_mode:
    support: full
    description: The module only looks and asks, so check mode is the same.
  diff_mode:
    support: none
    description: Nothing is changed.
  platform:
    support: full
    platforms: posix
    description: The unit and its log need systemd, and the right to read the journal.
"""

EXAMPLES = r"""
- name: Wait until the server serves
  blackwell.inference.server_health:
    unit: sglang.service
    timeout: 3600
    api_key: "{{ vault_sglang_api_key }}"

- name: Look at a server elsewhere, whatever it says
  blackwell.inference.server_health:
    url: https://inference.example.com
    timeout: 0
  register: server
  failed_when: false
"""

RETURN = r"""
state:
  description:
    - V(ready) where the server has answered. V(starting) or V(compiling) where the time was over before. V(failed) where it died.
    - V(hung) where it lives and does not answer. V(wedged) where a GPU or its link is lost, so that a restart does not help.
  returned: when the server could be looked at
  type: str
  sample: ready
diagnosis:
  description: Why the server is not ready, V(null) where it is.
  returned: when the server could be looked at
  type: dict
  contains:
    signature:
      description: Name of the signature that explains the line, V(null) where none does.
      type: str
      sample: fusion-module-closed
    meaning:
      description: What it means.
      type: str
      sample: The GPU has no memory left.
    remedy:
      description: What to do.
      type: str
      sample: Lower mem_fraction_static.
    line:
      description: The line of the log.
      type: str
      sample: "torch.OutOfMemoryError: CUDA out of memory."
timeline:
  description: How it came to that.
  returned: when the server could be looked at
  type: list
  elements: dict
  sample:
    - seconds: 12
      state: starting
      line: Load weight end. elapsed=10.92 s
server:
  description:
    - What a server that is ready says about itself, as version, model_path, tp_size and fusion.
    - Fusion is V(active) where every rank has said so, V(requested_but_inactive), V(off), or V(unknown) where there is no
      log of its start to prove it.
  returned: when the server could be looked at
  type: dict
  sample:
    version: 0.5.8
    model_path: nvidia/GLM-5-NVFP4
    tp_size: 8
    fusion: active
seconds:
  description: How long it took.
  returned: when the server could be looked at
  type: float
  sample: 421.5
enabled:
  description: Whether O(unit) starts with the host. Null without O(unit).
  returned: when the server could be looked at
  type: bool
  sample: true
restart_pending:
  description: Those of O(files) that changed after the server was started. Empty where the unit does not run.
  returned: when the server could be looked at
  type: list
  elements: str
  sample: []
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._health import READY, watch
from ansible_collections.blackwell.inference.plugins.module_utils._health_host import LocalHost, Target, changed_since


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "default": "http://127.0.0.1:30000"},
            "unit": {"type": "str"},
            "timeout": {"type": "int", "default": 1800},
            "interval": {"type": "int", "default": 10},
            "canary": {"type": "int", "default": 1},
            "api_key": {"type": "str", "no_log": True},
            "since": {"type": "str"},
            "files": {"type": "list", "elements": "path", "default": []},
            "python": {"type": "path"},
            "ca_path": {"type": "path"},
            "validate_certs": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    options = module.params
    try:
        _check(options)
        target = Target(**{name: options[name] for name in Target._fields})
        host = LocalHost(target)
        report = watch(host, options["timeout"], options["interval"], options["canary"])
        pending = changed_since(options["files"], host.started(), options["python"])
    except InferenceError as error:
        module.fail_json(msg=str(error))
    result = {**report._asdict(), "restart_pending": pending, "enabled": host.enabled()}
    if report.state == READY:
        module.exit_json(changed=False, **result)
    diagnosis = report.diagnosis or {}
    name = options["unit"] or options["url"]
    line = f" Line: {diagnosis['line']}" if diagnosis["line"] else ""
    module.fail_json(msg=f"{name} is {report.state}: {diagnosis['meaning']} {diagnosis['remedy']}{line}", **result)


def _check(options: dict) -> None:
    if not options["url"].startswith(("http://", "https://")):
        raise InferenceError("url", f"found {options['url']}", "an address such as http://127.0.0.1:30000")
    for name, least in (("timeout", 0), ("interval", 6), ("canary", 0)):
        if options[name] < least:
            raise InferenceError(name, f"found {options[name]}", f"{least} or more")


if __name__ == "__main__":
    main()
