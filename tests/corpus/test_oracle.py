# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The pair that the demo host has, and upstream's own code as the judge: closed, opened, restored."""

from __future__ import annotations

from ansible_collections.blackwell.inference.tests.corpus.host import Host
from ansible_collections.blackwell.inference.tests.corpus.releases import Pair

MAJORS, APPLIES = "flashinfer.trtllm_comm.majors", "sglang.fusion.applies"
REFUSED = "RuntimeError: No supported CUDA architectures found for major versions [9, 10]."


def test_closed_opened_restored(tmp_path):
    host = Host(tmp_path, Pair("0.5.8", "0.6.1"))
    released = host.oracle()
    assert host.gate("12.0")["restart_required"] is True
    opened = host.oracle()
    assert host.gate("12.0", state="restored")["changed"] is True
    restored = host.oracle()

    module = [answer["details"]["jit"]["12.0"][MAJORS] for answer in (released, opened, restored)]
    assert module == [REFUSED, ["-gencode=arch=compute_120a,code=sm_120a"], REFUSED]
    fused = {capability: [answer[APPLIES][capability] for answer in (released, opened, restored)] for capability in released[APPLIES]}
    unchanged = {"8.9": False, "9.0": True, "10.0": True, "10.3": True, "12.1": False}
    assert fused == {"12.0": [False, True, False], **{capability: [fuses] * 3 for capability, fuses in unchanged.items()}}
    assert restored == released
