# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What every module has to do that audits the packages, and nothing of what an audit is: audit.py times it.

It reads all sources on all cores, looks whether they hold a few of the words that gates start from, and hands over an answer
with as many rows as the audit's. It parses nothing and evaluates nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.blackwell.inference.plugins.module_utils._audit_files import Buffer, Exchange, on_every_core, sources

PYTHON_WORDS = (b"apabilit", b"is_sm", b"arch", b"major")
CUDA_WORDS = (b"CUDA_ARCH", b"#if", b"ComputeCapability")
ROW = {
    "id": "0123456789abcdef",
    "file": "flashinfer/data/include/flashinfer/comm/trtllm_allreduce.cuh",
    "line": 1,
    "expression": "#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200",
    "kind": "preprocessor",
    "guards": "allreduce_kernel",
    "replaced": False,
    "on_path": False,
    "blocks": False,
    "catalogued": None,
    "advice": "nothing to do: other code serves this GPU there",
}


def main() -> None:
    """Be that module."""
    module = AnsibleModule(argument_spec={"site_packages": {"type": "path"}, "rows": {"type": "int"}})
    site = module.params["site_packages"]

    def look(share: Sequence[str], exchange: Exchange) -> int:
        buffer, found = Buffer(), 0
        for file in share:
            length = buffer.read(os.path.join(site, file))
            for word in PYTHON_WORDS if file.endswith(".py") else CUDA_WORDS:
                found += buffer.raw.find(word, 0, length) >= 0
        exchange(None)
        return found

    found = sum(on_every_core(look, [file for package in ("flashinfer", "sglang") for file in sources(site, package)]))
    module.exit_json(changed=False, found=found, findings=[dict(ROW) for _index in range(module.params["rows"])])


if __name__ == "__main__":
    main()
