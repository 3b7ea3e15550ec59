# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._server_args_rules import contradictions, read_environment

FUSION = {"enable-flashinfer-allreduce-fusion": True, "tensor-parallel-size": 8}
DECLARED = frozenset({"SGLANG_ENABLE_SPEC_V2", "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"})


def found(values=None, environment=None, declared=DECLARED, compute_capability="", gpus=0):
    return contradictions(values or {}, environment or {}, declared, compute_capability, gpus)


@pytest.mark.parametrize(
    ("values", "environment", "start"),
    [
        ({**FUSION, "tensor-parallel-size": 6}, {}, "tensor-parallel-size: 6 with allreduce fusion"),
        ({"flashinfer-allreduce-fusion-backend": "trtllm"}, {}, "tensor-parallel-size: 1 with allreduce fusion"),
        ({**FUSION, "pipeline-parallel-size": 2}, {}, "pipeline-parallel-size: 2"),
        ({**FUSION, "nnodes": 2}, {}, "nnodes: 2"),
        ({**FUSION, "enable-dp-attention": True}, {}, "enable-dp-attention: on"),
        ({**FUSION, "attn-dp-size": 2}, {}, "enable-dp-attention: on"),
        ({**FUSION, "enable-deterministic-inference": True}, {}, "enable-deterministic-inference: on"),
        (FUSION, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "PYTORCH_CUDA_ALLOC_CONF: "),
        (FUSION, {"PYTORCH_ALLOC_CONF": "a:1, expandable_segments: true"}, "PYTORCH_ALLOC_CONF: "),
        (FUSION, {"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE: 1"),
        ({"tensor-parallel-size": 3}, {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}, "tensor-parallel-size: 3 with PCIe-IPC allreduce"),
        ({}, {"FLASHINFER_CUDA_ARCH_LIST": "12.0a,12.1a"}, "FLASHINFER_CUDA_ARCH_LIST: "),
        ({}, {"FLASHINFER_CUDA_ARCH_LIST": "sm_120"}, "FLASHINFER_CUDA_ARCH_LIST: "),
        ({}, {"CUDA_HOME": ":/usr/local/cuda"}, "CUDA_HOME: "),
        ({}, {"FLASHINFER_DISABLE_VERSION_CHECK": "1"}, "FLASHINFER_DISABLE_VERSION_CHECK: set"),
        ({}, {"HF_TOKEN": "hf_abc"}, "HF_TOKEN: it is a secret"),
        ({}, {"AWS_SECRET_ACCESS_KEY": "abc"}, "AWS_SECRET_ACCESS_KEY: it is a secret"),
        ({"skip-server-warmup": True}, {}, "skip-server-warmup: on"),
        ({"speculative-algorithm": "NEXTN"}, {}, "speculative-algorithm: NEXTN without SGLANG_ENABLE_SPEC_V2"),
        (
            {"tensor-parallel-size": 4},
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            "CUDA_VISIBLE_DEVICES: 2 GPUs for 4 ranks; expected 4 or more in sglang_server_gpus",
        ),
    ],
)
def test_a_contradiction_is_told_in_one_line(values, environment, start):
    [line] = found(values, environment)
    assert line.startswith(start)
    assert "; expected " in line


@pytest.mark.parametrize(
    ("values", "environment"),
    [
        (FUSION, {}),
        ({"pipeline-parallel-size": 2, "nnodes": 2, "enable-dp-attention": True}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ({}, {"FLASHINFER_CUDA_ARCH_LIST": "12.0a 12.1a", "CUDA_HOME": "/usr/local/cuda"}),
        ({"speculative-algorithm": "NEXTN"}, {"SGLANG_ENABLE_SPEC_V2": "True"}),
        ({"tensor-parallel-size": 4}, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}),
        ({}, {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1", "TOKENIZERS_PARALLELISM": "false"}),
        ({"tensor-parallel-size": 8, "nnodes": 2}, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}),
    ],
)
def test_what_goes_together_is_not_refused(values, environment):
    assert found(values, environment) == []


def test_more_ranks_than_gpus_are_refused_where_it_is_known_how_many_there_are():
    ranks = {"tensor-parallel-size": 4, "pipeline-parallel-size": 2}
    assert found(ranks) == found(ranks, gpus=8) == found({**ranks, "nnodes": 2}, gpus=4) == []
    assert found(ranks, gpus=7) == ["tensor-parallel-size: 7 GPUs for 8 ranks; expected 8 or more"]


def test_rules_that_depend_on_the_release():
    assert found({"speculative-algorithm": "NEXTN"}, declared=frozenset()) == []
    [line] = found({"tensor-parallel-size": 8}, {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}, declared=frozenset())
    assert "0.5.22" in line


def test_backends_without_kernels_are_refused_on_12_alone():
    values = {"attention-backend": "trtllm_mla", "moe-runner-backend": "flashinfer_trtllm", "fp4-gemm-backend": "flashinfer_cudnn"}
    assert found(values, compute_capability="10.0") == found(values) == []
    assert [line.split(":")[0] for line in found(values, compute_capability="12.0")] == ["attention-backend", "moe-runner-backend"]


def test_declared_variables_are_read_from_the_release(tmp_path):
    assert read_environment(str(tmp_path)) == frozenset()
    source = tmp_path / "srt" / "environ.py"
    source.parent.mkdir()
    source.write_text("class Envs:\n    SGLANG_ENABLE_SPEC_V2 = EnvBool(False)\n    # SGLANG_OLD = 1\n")
    assert read_environment(str(tmp_path)) == {"SGLANG_ENABLE_SPEC_V2"}
