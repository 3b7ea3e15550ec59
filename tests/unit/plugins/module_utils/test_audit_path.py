# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fusion path through simulated packages, and what an audit says about gates on and off it."""

from __future__ import annotations

import shutil

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils import _audit_findings
from ansible_collections.blackwell.inference.plugins.module_utils._audit import search
from ansible_collections.blackwell.inference.plugins.module_utils._audit_findings import audited
from ansible_collections.blackwell.inference.plugins.module_utils._audit_path import derive
from ansible_collections.blackwell.inference.plugins.module_utils._catalogue import GATES
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._packages import locate
from ansible_collections.blackwell.inference.plugins.module_utils._store import Store
from ansible_collections.blackwell.inference.plugins.module_utils._survey import Installation, survey

SM100, SM120 = (10, 0), (12, 0)
# The functions with gates on the path are called so.
SOURCES = {
    "flashinfer/__init__.py": "",
    "flashinfer/jit/comm.py": """\
def gen_trtllm_comm_module():
    return gen_jit_spec("trtllm_comm", ["trtllm_allreduce_fusion.cu"], flags(supported_major_versions=[9, 10]))


def gen_mixed_comm_module():
    return gen_jit_spec("mixed_comm", ["mixed.cu"], flags(supported_major_versions=[9, 10]))
""",
    "flashinfer/comm/trtllm_ar.py": """\
from ..jit.comm import gen_trtllm_comm_module


def get_trtllm_comm_module():
    module = gen_trtllm_comm_module().build_and_load()

    @register_custom_op("trtllm_allreduce_fusion")
    def trtllm_allreduce_fusion(tensor):
        module.trtllm_allreduce_fusion(tensor)

    return SimpleNamespace(trtllm_allreduce_fusion=trtllm_allreduce_fusion)


def on_path_checks_device(device):
    if get_compute_capability(device)[0] not in (9, 10):
        raise ValueError("no")


def allreduce_fusion(tensor):
    on_path_checks_device(tensor.device)
    get_trtllm_comm_module().trtllm_allreduce_fusion(tensor)


def something_else(tensor):
    assert is_sm90_supported()
""",
    "flashinfer/data/csrc/trtllm_allreduce_fusion.cu": """\
#include "../include/flashinfer/comm/fusion.cuh"
void trtllm_allreduce_fusion(Tensor x) {
  allreduce_fusion_op(x);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(trtllm_allreduce_fusion, trtllm_allreduce_fusion);
""",
    "flashinfer/data/include/flashinfer/comm/fusion.cuh": """\
__global__ void on_path_kernel(int* x) {
#if __CUDA_ARCH__ < 1200
  x[0] = 1;
#endif
}
__global__ void other_kernel(int* x) {
#if __CUDA_ARCH__ == 900
  x[0] = 1;
#endif
}
void allreduce_fusion_op(Tensor x) {
  on_path_kernel<<<1, 1>>>(x);
}
""",
    "flashinfer/data/csrc/mixed.cu": "__global__ void mixed() {\n#if __CUDA_ARCH__ == 900\n  work();\n#endif\n}\n",
    "sglang/__init__.py": "",
    "sglang/srt/server_args.py": """\
class ServerArgs:
    enable_flashinfer_allreduce_fusion: bool = False

    def __post_init__(self):
        if is_sm100_supported():
            self.enable_flashinfer_allreduce_fusion = True
""",
    "sglang/srt/layers/communicator.py": """\
from sglang.srt.layers.flashinfer_comm_fusion import flashinfer_allreduce_fusion_rmsnorm


def on_path_applies(batch):
    return (
        (is_sm90_supported() or is_sm100_supported())
        and get_global_server_args().enable_flashinfer_allreduce_fusion
    )


def forward(x):
    if on_path_applies(x.batch):
        return flashinfer_allreduce_fusion_rmsnorm(x)
    return slow(x)


def unrelated(x):
    return fast(x) if is_sm100_supported() else slow(x)
""",
    "sglang/srt/layers/flashinfer_comm_fusion.py": """\
import flashinfer.comm as flashinfer_comm


def on_path_backend(backend):
    if not is_sm100_supported():
        raise ValueError(backend)


def for_another_backend(backend):
    if backend == "mnnvl":
        if not is_sm100_supported():
            raise ValueError(backend)


def flashinfer_allreduce_fusion_rmsnorm(x):
    on_path_backend(x.backend)
    for_another_backend(x.backend)
    return flashinfer_comm.allreduce_fusion(x)
""",
}
ON_PATH = {
    ("flashinfer/comm/trtllm_ar.py", "on_path_checks_device"),
    ("flashinfer/data/include/flashinfer/comm/fusion.cuh", "on_path_kernel"),
    ("flashinfer/jit/comm.py", "gen_trtllm_comm_module"),
    ("sglang/srt/layers/communicator.py", "forward"),
    ("sglang/srt/layers/communicator.py", "on_path_applies"),
    ("sglang/srt/layers/flashinfer_comm_fusion.py", "on_path_backend"),
}
OFF_PATH = {
    ("flashinfer/comm/trtllm_ar.py", "something_else"),
    ("flashinfer/data/csrc/mixed.cu", "mixed"),
    ("flashinfer/data/include/flashinfer/comm/fusion.cuh", "other_kernel"),
    ("flashinfer/jit/comm.py", "gen_mixed_comm_module"),
    ("sglang/srt/layers/communicator.py", "unrelated"),
    ("sglang/srt/layers/flashinfer_comm_fusion.py", "for_another_backend"),
    ("sglang/srt/server_args.py", "ServerArgs.__post_init__"),
}


@pytest.fixture
def site(venv):
    """The simulated packages, installed."""
    for package in ("flashinfer", "sglang"):
        shutil.rmtree(venv.path(package))
    venv.install(SOURCES)
    return venv.site


def rows(site, hosts=(SM120,), further=(), gates=()):
    return audited(locate(site_packages=str(site)), further, list(hosts), gates)


def test_the_path_leads_from_the_option_to_the_kernels(site):
    roots = {"flashinfer": str(site), "sglang": str(site)}
    path = derive(roots, search(roots, [SM120]).option_files)
    assert path.files == [
        "flashinfer/comm/trtllm_ar.py",
        "flashinfer/data/csrc/trtllm_allreduce_fusion.cu",
        "flashinfer/data/include/flashinfer/comm/fusion.cuh",
        "flashinfer/jit/comm.py",
        "sglang/srt/layers/communicator.py",
        "sglang/srt/layers/flashinfer_comm_fusion.py",
    ]


def test_each_gate_is_on_it_or_not(site):
    found = rows(site)["findings"]
    assert {(row["file"], row["guards"]) for row in found if row["on_path"]} == ON_PATH
    assert {(row["file"], row["guards"]) for row in found if not row["on_path"]} == OFF_PATH
    assert {row["guards"] for row in found if row["blocks"]} == {guards for _file, guards in ON_PATH} - {"forward"}
    (follows,) = (row for row in found if row["guards"] == "forward")
    assert follows["advice"] == "nothing to do here: it follows from on_path_applies()"


def test_what_blocks_and_nothing_opens_is_said(site):
    for row in rows(site)["findings"]:
        assert row["advice"].startswith("leave fusion off" if row["blocks"] else ("use another backend", "nothing to do")), row
        assert row["catalogued"] is None


def test_nothing_blocks_a_host_that_every_gate_admits(site):
    assert [row["guards"] for row in rows(site, [SM100])["findings"] if row["blocks"]] == []


def test_a_row_is_complete_and_its_id_survives_a_move(venv, site):
    name = "sglang/srt/layers/flashinfer_comm_fusion.py"
    before, _other = (row for row in rows(site)["findings"] if row["file"] == name)
    assert {key: value for key, value in before.items() if key not in ("id", "advice")} == {
        "file": name,
        "line": 5,
        "expression": "not is_sm100_supported()",
        "kind": "raise",
        "guards": "on_path_backend",
        "replaced": False,
        "on_path": True,
        "blocks": True,
        "catalogued": None,
    }
    venv.install({**SOURCES, name: f"# moved\n{SOURCES[name]}"})
    after, _other = (row for row in rows(site)["findings"] if row["file"] == name)
    assert (after["id"], after["line"]) == (before["id"], 6)


def test_catalogued_gates_are_named_and_advised(venv):
    site = locate(site_packages=str(venv.site))
    gates = survey(Installation(site, Store(str(venv.state)), ["flashinfer", "sglang"]), [SM120], GATES)
    found = {row["catalogued"]: row for row in rows(venv.site, gates=gates)["findings"] if row["catalogued"]}
    assert {gate.gate.id for gate in gates if gate.verdict in ("closed", "not_admitted")} == found.keys()
    assert found["flashinfer.trtllm_comm.majors"]["advice"].startswith("open it")
    assert found["sglang.fusion.auto_enable"]["advice"].startswith("leave it closed") and not found["sglang.fusion.auto_enable"]["blocks"]
    without_architecture = found["flashinfer.workspace.multicast_device"]
    assert (without_architecture["kind"], without_architecture["advice"][:7]) == ("catalogue", "open it")


def test_further_packages(venv, site):
    venv.install({"vllm/attention/mla.py": "assert is_sm90_supported()\n"}, releases=())
    (row,) = (row for row in rows(site, further=["vllm"])["findings"] if row["file"].startswith("vllm/"))
    assert (row["on_path"], row["advice"]) == (False, "use another backend: --attention-backend flashinfer or triton")


@pytest.mark.parametrize("name", ["absent", "../etc", ""])
def test_a_package_that_is_not_there_is_named(site, name):
    with pytest.raises(InferenceError, match=f"packages: '{name}' is not in "):
        rows(site, further=[name])


def test_every_advice_says_what_to_do():
    for _words, advice in _audit_findings._INSTEAD:
        assert advice.startswith(("use another backend: --", "nothing to do: "))
