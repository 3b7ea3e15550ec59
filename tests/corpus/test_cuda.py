# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The gates in FlashInfer's CUDA sources, release by release, with a preprocessor as the judge; the optional set opened and restored."""

from __future__ import annotations

import io
import re
import shutil

import pcpp
import pytest
from ansible_collections.blackwell.inference.tests.corpus.host import Host
from ansible_collections.blackwell.inference.tests.corpus.releases import Pair, order
from ansible_collections.blackwell.inference.tests.corpus.test_releases import ALONE, CUDA, OPEN

GUARDS, FMHA = "flashinfer.trtllm_allreduce.guards", "flashinfer.trtllm_gen.fmha"
SET = CUDA - {FMHA}


@pytest.fixture
def flashinfer_host(flashinfer, tmp_path):
    yield Host(tmp_path, Pair("0.5.14" if order(flashinfer) >= order("0.6") else "0.5.9", flashinfer))
    shutil.rmtree(tmp_path)


def preprocessed(text: str, **macros: int) -> str:
    """``text`` as the compiler sees it, without what it includes."""
    preprocessor, output = pcpp.Preprocessor(), io.StringIO()
    preprocessor.line_directive = None
    for name, value in macros.items():
        preprocessor.define(f"{name} {value}")
    preprocessor.parse(re.sub(r"^#include.*$", "", text, flags=re.MULTILINE))
    preprocessor.write(output)
    return output.getvalue()


def compiled(host: Host, file: str, capability: str) -> str:
    return preprocessed(host.files()[file].decode(), __CUDA_ARCH__=int(capability.replace(".", "")) * 10)


def lets_run(condition: str, capability: str) -> bool:
    """What a check at run time comes to, computed as a preprocessor condition."""
    constants = {name: int(name.removeprefix("kSM_")) for name in re.findall(r"kSM_\d+", condition)}
    return "yes" in preprocessed(f"#if {condition}\nyes\n#endif\n", mSM=int(capability.replace(".", "")), **constants)


def test_the_gates_are_read_as_they_are_compiled_and_the_optional_set_is_opened_exactly(flashinfer, flashinfer_host):
    host, fixed_upstream = flashinfer_host, order(flashinfer) >= order("0.6.17")
    rows = {gate["id"]: gate for gate in host.gate("12.0", module="gate_info", optional=True)["gates"]}
    kernels, fmha = rows[GUARDS]["file"], host.files()[rows[FMHA]["file"]].decode()
    condition = re.search(r"FLASHINFER_CHECK\((mSM[^,]*),", fmha)[1]
    all_kernels = compiled(host, kernels, "9.0")
    for capability in ALONE:
        verdicts = {gate["id"]: gate["verdict"] for gate in host.gate(capability, module="gate_info", optional=True)["gates"]}
        assert (verdicts[GUARDS] in OPEN) is (compiled(host, kernels, capability) == all_kernels), capability
        assert (verdicts[FMHA] in OPEN) is lets_run(condition, capability), capability

    opened = host.gate("12.0", optional=True)
    assert {row["id"] for row in opened["gates"] if row["id"] in SET and row["after"] == "opened"} == (set() if fixed_upstream else SET)
    assert {row["after"] for row in opened["gates"] if row["id"] in SET} == ({"open"} if fixed_upstream else {"opened"})
    assert compiled(host, kernels, "12.0") == compiled(host, kernels, "9.0")
    reach = {capability for capability in ALONE if compiled(host, kernels, capability) == compiled(host, kernels, "9.0")}
    assert reach == {"9.0", "10.0", "10.3", "12.0"} | ({"12.1"} if fixed_upstream else set())
    assert host.gate("12.0", optional=True)["changed"] is False

    host.gate(state="restored")
    assert host.files() == host.pristine and host.not_as_recorded() == []
