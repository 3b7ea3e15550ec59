# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The gates that are known: where each is, what it keeps shut, and which compute capabilities it may admit, and why.

This is data. A release that keeps a known shape needs nothing here; one that moves or renames a gate needs a line in
its ``places``; a new gate needs a record and a test. Nothing but what stands here is ever edited.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ansible_collections.blackwell.inference.plugins.module_utils._predicate import Capability
from ansible_collections.blackwell.inference.plugins.module_utils._shapes import (
    Condition,
    Default,
    MajorList,
    MulticastQuery,
    NoRaise,
    Shape,
)
from ansible_collections.blackwell.inference.plugins.module_utils._shapes_cuda import ArchGuards, Companion, DeviceCode, RunTimeCheck


class Place(NamedTuple):
    """Where a gate stands in some releases."""

    file: str  # relative to site-packages
    shape: Shape


class Uses(NamedTuple):
    """Something that must be called in ``file`` for a gate to lie on the fusion path at all."""

    file: str
    call: str


class Gate(NamedTuple):
    """One gate, in every release that has it."""

    id: str
    package: str  # import name
    keeps_shut: str  # what is impossible while it is closed
    places: tuple[Place, ...]  # the first one that a release has counts
    since: str  # the release that brought it; a later one where it is not found is not recognised. Empty: any may lack it
    admits: Mapping[Capability, str]  # the capabilities that it may be opened for, each with the reason
    refuses: str  # why it is not opened for any other
    until: str = ""  # the last release that has it; empty: it is still there
    open_since: str = ""  # the release from which on upstream has it open for what it admits; empty: never
    needs: tuple[str, ...] = ()  # gates that must be open beside it: without them an open one is worse than a closed one
    path: tuple[Uses, ...] = ()  # empty: always on the path
    jit_module: str = ""  # the JIT module whose build depends on it
    optional: str = ""  # why it is left closed unless it is asked for; empty: it is not

    def unasked(self) -> Gate:
        """An optional gate where nobody asked for it: it admits nothing."""
        return self._replace(admits={}, refuses=self.optional) if self.optional else self


# The newest releases that were looked at. A later one with the same shapes is opened too, unless that is refused, and is reported as newer.
NEWEST_TESTED: Mapping[str, str] = {"flashinfer": "0.7.4", "sglang": "0.5.23"}

_SM120: Capability = (12, 0)
_KERNELS_RUN = "the fused allreduce kernels have no upper architecture bound, and FlashInfer ships them for 12.x from 0.6.17"
_ONLY_SM120 = (
    "only 9.0 and 10.x have it upstream and only 12.0 is known to work beyond that; 12.1 (GB10) is one GPU per host and unproven, "
    "older GPUs lack the instructions"
)
_NO_MULTICAST_NEEDED = "the trtllm workspace maps plain peer memory, and a PCIe card has no multicast to ask for"

_COMMUNICATOR = "sglang/srt/layers/communicator.py"
_ADD_NORM = "sglang/srt/layers/layer_boundary/residual/add_norm.py"
_FUSION = "sglang/srt/layers/flashinfer_comm_fusion.py"
_MNNVL = "flashinfer/comm/mnnvl.py"
_UNIFIED_API = (Uses(_FUSION, "create_allreduce_fusion_workspace"), Uses("flashinfer/comm/trtllm_ar.py", "SymmDeviceMemory"))
_WITHOUT_MULTICAST = {"enable_multicast": False, "self._enable_multicast": False}

_ALLREDUCE_KERNELS = "flashinfer/data/include/flashinfer/comm/trtllm_allreduce.cuh"
_UNFUSED = (
    "flashinfer.trtllm_allreduce.guards",
    "flashinfer.trtllm_allreduce.lamport_stride",
    "flashinfer.trtllm_allreduce.cluster_size",
)
_NOBODY_CALLS_IT = (
    "FlashInfer's other allreduce API needs it, which no sglang release calls: opened with its whole set, when that is asked for"
)
_UPSTREAM_FIXED_IT = "FlashInfer 0.6.17 made this change together with the other two of the set"
_ONLY_WITH_GUARDS = "it serves the guards, which are opened for 12.0 only"
# The largest cluster that this GPU can launch, asked once; utils.cuh has a function for it from 0.6.17 on.
_CLUSTER_SIZE = """warp_min_number), [] {
    static const int size = [] {
      cudaLaunchConfig_t config = {};
      config.gridDim = details::kClusterMaxSize;
      config.blockDim = details::kWarpSize;
      int largest = 0;
      cudaError_t status = cudaOccupancyMaxPotentialClusterSize(
          &largest,
          reinterpret_cast<void const*>(
              lamport_style_one_shot_all_reduce_norm_kernel<1, T, RanksPerNode, Bias, Affine>),
          &config);
      if (status != cudaSuccess) (void)cudaGetLastError();
      return status == cudaSuccess && largest > 0 ? std::min(largest, details::kClusterMaxSize) : 1;
    }();
    return size;
  }())"""

GATES: tuple[Gate, ...] = (
    Gate(
        id="flashinfer.trtllm_comm.majors",
        package="flashinfer",
        keeps_shut="compiling the fused allreduce kernels (JIT module trtllm_comm)",
        places=(Place("flashinfer/jit/comm.py", MajorList("gen_trtllm_comm_module")),),
        since="0.3.0",
        open_since="0.6.17",
        admits={_SM120: _KERNELS_RUN},
        refuses=_ONLY_SM120,
        needs=("flashinfer.trtllm_comm.prebuilt",),
        jit_module="trtllm_comm",
    ),
    Gate(
        id="flashinfer.workspace.multicast_device",
        package="flashinfer",
        keeps_shut="creating the workspace of the unified allreduce API",
        places=(
            Place(
                _MNNVL,
                NoRaise(
                    "SymmDeviceMemory.__init__",
                    assumed=_WITHOUT_MULTICAST,
                    admits="not enable_multicast",
                    first="self._enable_multicast = enable_multicast",
                ),
            ),
        ),
        since="0.6.0",
        open_since="0.6.15",
        admits={_SM120: _NO_MULTICAST_NEEDED},
        refuses=_ONLY_SM120,
        needs=("flashinfer.workspace.multicast_granularity",),
        path=_UNIFIED_API,
    ),
    Gate(
        id="flashinfer.workspace.multicast_granularity",
        package="flashinfer",
        keeps_shut="sizing the workspace of the unified allreduce API",
        places=(
            Place(
                _MNNVL,
                MulticastQuery(
                    "SymmDeviceMemory._get_allocation_prop",
                    call="cuMulticastGetGranularity",
                    assumed=_WITHOUT_MULTICAST,
                    only_if="self._enable_multicast",
                    otherwise=("self._mc_granularity = alloc_granularity", "mc_prop = None"),
                ),
            ),
        ),
        since="0.6.0",
        open_since="0.6.15",
        admits={_SM120: _NO_MULTICAST_NEEDED},
        refuses=_ONLY_SM120,
        needs=("flashinfer.workspace.multicast_device",),
        path=_UNIFIED_API,
    ),
    Gate(
        id="sglang.fusion.applies",
        package="sglang",
        keeps_shut="the fused allreduce in the model's layers; while closed the flag is accepted and does nothing",
        places=(
            Place(_COMMUNICATOR, Condition("apply_flashinfer_allreduce_fusion")),
            Place(_ADD_NORM, Condition("flashinfer_ar_fusion_applies")),
            Place(_ADD_NORM, Condition("apply_flashinfer_allreduce_fusion")),
            Place(_COMMUNICATOR, Condition("_gather_hidden_states_and_residual", before="forward_with_allreduce_fusion")),
        ),
        since="0.5.2",
        admits={_SM120: _KERNELS_RUN},
        refuses=_ONLY_SM120,
        needs=("flashinfer.trtllm_comm.majors", "flashinfer.workspace.multicast_device", "flashinfer.workspace.multicast_granularity"),
    ),
    Gate(
        id="sglang.fusion.mlp_to_next_layer",
        package="sglang",
        keeps_shut="fusing the MLP's allreduce into the next layer's norm (it asks no architecture: the flag alone opens it)",
        places=(Place(_COMMUNICATOR, Condition("should_fuse_mlp_allreduce_with_next_layer")),),
        since="0.5.2",
        until="0.5.7",
        admits={},
        refuses="it has no architecture test to open",
        needs=("flashinfer.trtllm_comm.majors", "sglang.fusion.applies"),
    ),
    Gate(
        id="sglang.fusion.backend",
        package="sglang",
        keeps_shut="the backend choice; while closed the server does not start with the fusion flag",
        places=(Place(_FUSION, NoRaise("_resolve_backend", assumed={"backend": "trtllm", "is_multi_node": False})),),
        since="0.5.14",
        admits={_SM120: _KERNELS_RUN},
        refuses=_ONLY_SM120,
        needs=("flashinfer.trtllm_comm.majors", "sglang.fusion.applies"),
    ),
    Gate(
        id="sglang.fusion.workspace_preflight",
        package="sglang",
        keeps_shut="the fusion workspace; while closed a warning is logged and NCCL is used",
        places=(Place(_FUSION, MulticastQuery("_flashinfer_trtllm_workspace_allocation_sizes", "cuMulticastGetGranularity", assumed={})),),
        since="0.5.11",
        admits={_SM120: _NO_MULTICAST_NEEDED},
        refuses=_ONLY_SM120,
        needs=("flashinfer.trtllm_comm.majors", "sglang.fusion.applies"),
    ),
    # A set that is opened when it is asked for, and then as a whole.
    Gate(
        id="flashinfer.trtllm_allreduce.guards",
        package="flashinfer",
        keeps_shut="the kernels of trtllm_custom_all_reduce, which are compiled empty",
        places=(Place(_ALLREDUCE_KERNELS, ArchGuards()),),
        since="0.3.0",
        open_since="0.6.17",
        admits={_SM120: _UPSTREAM_FIXED_IT},
        refuses=_ONLY_SM120,
        needs=_UNFUSED[1:],
        jit_module="trtllm_comm",
        optional=_NOBODY_CALLS_IT,
    ),
    Gate(
        id="flashinfer.trtllm_allreduce.lamport_stride",
        package="flashinfer",
        keeps_shut="right results of trtllm_custom_all_reduce: its buffers are packed closer than the kernels read them",
        places=(
            Place(
                "flashinfer/data/csrc/trtllm_allreduce.cu",
                Companion("trtllm_custom_all_reduce", replaces="[i + tp_size", by="[i + MAX_RANKS_PER_NODE"),
            ),
        ),
        since="0.3.0",
        open_since="0.6.17",
        admits={_SM120: _UPSTREAM_FIXED_IT},
        refuses=_ONLY_WITH_GUARDS,
        needs=(_UNFUSED[0], _UNFUSED[2]),
        jit_module="trtllm_comm",
        optional=_NOBODY_CALLS_IT,
    ),
    Gate(
        id="flashinfer.trtllm_allreduce.cluster_size",
        package="flashinfer",
        keeps_shut="launching trtllm_custom_all_reduce on GPUs whose clusters are smaller than 8 blocks",
        places=(
            Place(
                _ALLREDUCE_KERNELS,
                Companion(
                    "lamport_style_one_shot_all_reduce_norm_kernel_launcher",
                    replaces="warp_min_number), details::kClusterMaxSize)",
                    by=_CLUSTER_SIZE,
                    also_open="GetMaxClusterSize(",
                ),
            ),
        ),
        since="0.3.0",
        open_since="0.6.17",
        admits={_SM120: _UPSTREAM_FIXED_IT},
        refuses=_ONLY_WITH_GUARDS,
        needs=_UNFUSED[:2],
        jit_module="trtllm_comm",
        optional=_NOBODY_CALLS_IT,
    ),
    # What follows is known, and never opened.
    Gate(
        id="flashinfer.trtllm_comm.prebuilt",
        package="flashinfer",
        keeps_shut="using kernels that are compiled on the host (a prebuilt library is loaded in their place)",
        places=(
            Place("flashinfer_jit_cache/jit_cache/trtllm_comm/trtllm_comm.so", DeviceCode()),
            Place("flashinfer/data/aot/trtllm_comm/trtllm_comm.so", DeviceCode()),
        ),
        since="",
        admits={},
        refuses=(
            "no edit puts code into a library: set it aside (jit_cache with prebuilt=set_aside), "
            "or install a flashinfer-jit-cache that has it (0.6.17 and newer)"
        ),
    ),
    Gate(
        id="sglang.fusion.auto_enable",
        package="sglang",
        keeps_shut="turning fusion on without being asked",
        places=(
            Place("sglang/srt/arg_groups/overrides.py", Default("flashinfer_allreduce_fusion_backend")),
            Place("sglang/srt/server_args.py", Default("flashinfer_allreduce_fusion_backend")),
            Place("sglang/srt/server_args.py", Default("enable_flashinfer_allreduce_fusion")),
        ),
        since="0.5.2",
        admits={},
        refuses="fusion is turned on by its flag, after it was measured on the host, never by default",
        needs=("flashinfer.trtllm_comm.majors", "sglang.fusion.applies"),
    ),
    Gate(
        id="sglang.mnnvl.supported",
        package="sglang",
        keeps_shut="the mnnvl fusion backend",
        places=(Place(_FUSION, Condition("_mnnvl_supported", assumed={"is_multi_node": False})),),
        since="0.5.14",
        admits={},
        refuses="mnnvl needs NVLink multicast, and the backend `auto` would resolve to it",
    ),
    Gate(
        id="flashinfer.mnnvl_comm.majors",
        package="flashinfer",
        keeps_shut="compiling the mnnvl allreduce kernels (JIT module trtllm_mnnvl_comm)",
        places=(Place("flashinfer/jit/comm.py", MajorList("gen_trtllm_mnnvl_comm_module")),),
        since="0.6.13",
        admits={},
        refuses="mnnvl needs NVLink multicast; upstream leaves 12.x out on purpose",
    ),
    Gate(
        id="flashinfer.mixed_comm.majors",
        package="flashinfer",
        keeps_shut="compiling the mixed communication kernels (JIT module mixed_comm)",
        places=(Place("flashinfer/jit/comm.py", MajorList("gen_mixed_comm_module")),),
        since="0.6.10",
        admits={},
        refuses="the kernels use NVLink multicast and NVSHMEM, and no sglang release calls them",
    ),
    Gate(
        id="flashinfer.cutlass_mla.majors",
        package="flashinfer",
        keeps_shut="compiling the CUTLASS MLA kernels (JIT module mla)",
        places=(Place("flashinfer/jit/mla.py", MajorList("gen_mla_module")),),
        since="0.3.0",
        admits={},
        refuses="the kernels are written in tcgen05 instructions, which 12.x does not have; choose another attention backend",
    ),
    Gate(
        id="flashinfer.trtllm_gen.fmha",
        package="flashinfer",
        keeps_shut="the trtllm-gen attention kernels (attention backends trtllm_mha and trtllm_mla)",
        places=(Place("flashinfer/data/include/flashinfer/trtllm/fmha/fmhaRunner.cuh", RunTimeCheck("FLASHINFER_CHECK", "mSM")),),
        since="0.3.0",
        admits={},
        refuses="the kernels come compiled, for 10.x alone; choose another attention backend",
    ),
)
BY_ID: Mapping[str, Gate] = {gate.id: gate for gate in GATES}
