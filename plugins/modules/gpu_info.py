#!/usr/bin/python
# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_info
short_description: List the NVIDIA GPUs of a host
version_added: 0.1.0
description:
  - Reports the GPUs of the host, their compute capability, their driver, and what joins each pair of them.
  - Asks C(nvidia-smi) at most four times, first for CSV, then for the XML with what CSV lacks or an old driver refuses,
    and, with more than one GPU, for the matrices of links and of peer access.
  - With O(environment), also reports the toolchain and the limits that a server will find, and warns of what stands in its way.
  - A host without GPUs is a success with RV(count=0). A driver that hangs or fails is a failure.
options:
  executable:
    description:
      - Name or path of C(nvidia-smi) on the host.
    type: str
    default: nvidia-smi
  timeout:
    description:
      - Seconds that one call of C(nvidia-smi) may take. One that takes longer is killed, and the module fails.
    type: int
    default: 30
  allow_missing:
    description:
      - Whether a host that has no O(executable) counts as a host without GPUs. It is a failure otherwise.
      - A path that is given and missing is a failure all the same.
    type: bool
    default: false
  environment:
    description:
      - The environment of the server, as its unit sets it; an empty one where it sets none. Without this option nothing but the GPUs
        is looked at.
      - E(PATH), E(CUDA_HOME), E(CUDA_PATH), E(CXX), E(FLASHINFER_NVCC), E(FLASHINFER_EXTRA_LDFLAGS) and E(MAX_JOBS) count.
      - The compilers that it leads to are run, as the user of the module.
    type: dict
    version_added: 0.2.0
  python:
    description:
      - Path of the serving venv's interpreter, with O(environment). Which CUDA a server needs depends on what is installed there.
      - It need not exist.
    type: path
    version_added: 0.2.0
  ignore:
    description: Problems, by their RV(problems[].id), that are neither returned nor warned of.
    type: list
    elements: str
    choices:
      [torch, nvcc, driver, ninja, compiler, libcuda, memory, max_jobs, shm, memlock, persistence_mode, peer_access, iommu]
    default: []
    version_added: 0.2.0
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
author:
  - blackwell.inference contributors (@blackwell-inference)
"""

EXAMPLES = r"""
- name: List the GPUs
  blackwell.inference.gpu_info:
  register: gpus

- name: List the GPUs of a host that may have none
  blackwell.inference.gpu_info:
    allow_missing: true
  register: gpus

- name: Look at all that a server needs
  blackwell.inference.gpu_info:
    python: /opt/sglang/venv/bin/python
    environment:
      PATH: /opt/sglang/venv/bin:/usr/local/cuda/bin:/usr/bin:/bin
      CUDA_HOME: /usr/local/cuda
    ignore: [persistence_mode]
  register: gpus
  failed_when: gpus.problems | selectattr('fatal') | length > 0

- name: Show the links that leave a socket
  ansible.builtin.debug:
    msg: "{{ gpus.links | selectattr('link', 'equalto', 'SYS') }}"
"""

RETURN = r"""
gpus:
  description: The GPUs in the order of C(nvidia-smi). A value that the driver does not know is V(null).
  returned: success
  type: list
  elements: dict
  contains:
    index:
      description: Its number on this host.
      type: int
      sample: 0
    uuid:
      description: Its identity, which survives a change of slot.
      type: str
      sample: GPU-00000000-0000-0000-0000-000000000001
    name:
      description: The name of the product.
      type: str
      sample: NVIDIA RTX PRO 6000 Blackwell Server Edition
    compute_capability:
      description:
        - Its compute capability.
        - Drivers older than 510 cannot tell it, so there it follows from the name; V(null) where the name is not known.
      type: str
      sample: "12.0"
    memory_mib:
      description: Its memory in MiB. V(null) where it shares the memory of the host, as GB10 does.
      type: int
      sample: 97887
    driver_version:
      description: The version of its driver.
      type: str
      sample: 580.95.05
    power_limit_w:
      description: The limit of its power in watts.
      type: float
      sample: 600.0
    power_draw_w:
      description: Its power draw now, in watts.
      type: float
      sample: 34.5
    pci_bus_id:
      description: Its place on the PCI bus.
      type: str
      sample: "00000000:01:00.0"
    pcie_gen:
      description: The generation of its PCIe link now. An idle GPU saves power on a lower one.
      type: int
      sample: 1
    pcie_gen_max:
      description: The highest generation that GPU and slot have in common.
      type: int
      sample: 5
    pcie_width:
      description: The lanes of its PCIe link now.
      type: int
      sample: 16
    pcie_width_max:
      description: The most lanes that GPU and slot have in common.
      type: int
      sample: 16
    mig_mode:
      description: Whether it is partitioned (MIG). V(null) where it cannot be.
      type: bool
      sample: false
    mig_devices:
      description: The number of its MIG partitions.
      type: int
      sample: 0
    persistence_mode:
      description: Whether the driver keeps it initialised while nothing uses it.
      type: bool
      sample: true
count:
  description: The number of GPUs.
  returned: success
  type: int
  sample: 8
compute_capability:
  description: The compute capability that all GPUs share. V(null) where they differ and where there is none.
  returned: success
  type: str
  sample: "12.0"
compute_capabilities:
  description: The distinct compute capabilities in rising order.
  returned: success
  type: list
  elements: str
  sample: ["12.0"]
architecture:
  description: NVIDIA's name for the generation that all GPUs share. V(null) where they differ and where there is none.
  returned: success
  type: str
  sample: Blackwell
driver_version:
  description: The version of the driver. V(null) without GPUs.
  returned: success
  type: str
  sample: 580.95.05
cuda_version:
  description: The newest CUDA that the driver can run. V(null) without GPUs.
  returned: success
  type: str
  sample: "13.0"
links:
  description: What joins each pair of GPUs. Empty where the driver does not know the topology.
  returned: success
  type: list
  elements: dict
  contains:
    gpus:
      description: The numbers of the two, the lower one first.
      type: list
      elements: int
      sample: [0, 1]
    link:
      description:
        - The path as C(nvidia-smi topo -m) names it.
        - V(NV18) is 18 NVLinks, V(PIX) one PCIe bridge, V(PXB) several, V(PHB) a host bridge, V(NODE) host bridges of one NUMA node,
          V(SYS) the link between sockets.
      type: str
      sample: NODE
    peer_access:
      description:
        - Whether the two may read each other's memory, as C(nvidia-smi topo -p2p r) says; V(null) where the driver cannot tell.
        - V(OK) is yes; V(CNS), V(GNS) and V(TNS) are no, the chipset, the GPUs or the topology do not support it. V(DR) is disabled by
          a registry key, V(NS) not supported, V(U) unknown.
        - It is what the driver promises. Whether data arrives is for a measurement to say.
      type: str
      sample: OK
host:
  description: Memory and limits. V(null) is what the kernel does not say.
  returned: when O(environment) is given
  type: dict
  contains:
    cores:
      description: The cores that this module may use.
      type: int
      sample: 128
    memory_mib:
      description: The memory of the host in MiB.
      type: int
      sample: 1031700
    memory_available_mib:
      description: What of it is available now, in MiB.
      type: int
      sample: 998400
    compile_jobs:
      description: The compilers that may run at once, at 8 GiB each with 16 GiB left over.
      type: int
      sample: 119
    shm_mib:
      description: The size of C(/dev/shm) in MiB.
      type: int
      sample: 515850
    memlock_mib:
      description: The most that a unit may lock, in MiB, where PID 1 may not raise it, as in some containers. V(null) is no limit.
      type: int
      sample: null
    iommu:
      description:
        - How the IOMMU treats the GPUs; V(null) where there is none.
        - V(DMA) and V(DMA-FQ) translate addresses, V(identity) does not.
      type: str
      sample: identity
toolkit:
  description: What a build of kernels would use, found as FlashInfer finds it. V(null) is what is not there.
  returned: when O(environment) is given
  type: dict
  contains:
    cuda_home:
      description: The folder of the CUDA toolkit.
      type: str
      sample: /usr/local/cuda
    nvcc:
      description: Its compiler, links resolved.
      type: str
      sample: /usr/local/cuda-13.0/bin/nvcc
    nvcc_version:
      description: The release of that.
      type: str
      sample: "13.0"
    ninja:
      description: The C(ninja) in E(PATH).
      type: str
      sample: /opt/sglang/venv/bin/ninja
    compiler:
      description: The C++ compiler.
      type: str
      sample: /usr/bin/c++
    link_error:
      description: What the linker says when it is given libcuda and libcudart as FlashInfer does; V(null) where it finds them.
      type: str
      sample: "/usr/bin/ld: cannot find -lcuda: No such file or directory"
venv:
  description: What is installed in the serving venv. V(null) is what is not, or is not known.
  returned: when O(environment) is given
  type: dict
  contains:
    flashinfer:
      description: The version of flashinfer-python.
      type: str
      sample: 0.6.12
    torch:
      description: The version of torch.
      type: str
      sample: 2.11.0
    torch_cuda:
      description: The CUDA that torch was built for; V(none) for a build without.
      type: str
      sample: "13.0"
problems:
  description: What stands in the way of a server on these GPUs. Empty on a host without GPUs.
  returned: when O(environment) is given
  type: list
  elements: dict
  contains:
    id:
      description: What it is about, as in O(ignore).
      type: str
      sample: nvcc
    message:
      description: What was found, what is expected, and what to do, in one line.
      type: str
      sample: "nvcc: 12.8 (/usr/local/cuda-12.8/bin/nvcc); expected 12.9 or newer, with which flashinfer 0.6.12 builds for 12.0."
    fatal:
      description: Whether no server can start with it. Of the others the module warns.
      type: bool
      sample: false
"""

import os
import platform
from dataclasses import asdict

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.blackwell.inference.plugins.module_utils import _gpu_host as gpu_host
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._gpu import Inventory, NvidiaSmiMissing, nvidia_smi, query_inventory


def inventory_of(params: dict) -> Inventory:
    """Return the GPUs of the host, none where there is no nvidia-smi and there need not be."""
    try:
        return query_inventory(nvidia_smi(params["executable"], params["timeout"]))
    except NvidiaSmiMissing:
        # Who gives a path has one there.
        if not params["allow_missing"] or os.path.isabs(params["executable"]):
            raise
        return Inventory([], None, [])


def preflight(inventory: Inventory, params: dict) -> dict:
    """Return what a server finds besides the GPUs, and what of that stands in its way."""
    environment = {name: str(value) for name, value in params["environment"].items() if value is not None}
    toolkit, host = gpu_host.find_toolkit(environment, params["timeout"]), gpu_host.read_host(inventory.gpus)
    venv = gpu_host.find_venv(params["python"])
    problems = gpu_host.problems(inventory, toolkit, host, venv, environment)
    return {
        "toolkit": toolkit._asdict(),
        "host": host._asdict(),
        "venv": venv._asdict(),
        "problems": [problem._asdict() for problem in problems if problem.id not in params["ignore"]],
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "executable": {"type": "str", "default": "nvidia-smi"},
            "timeout": {"type": "int", "default": 30},
            "allow_missing": {"type": "bool", "default": False},
            "environment": {"type": "dict"},
            "python": {"type": "path"},
            "ignore": {"type": "list", "elements": "str", "choices": list(gpu_host.IDS), "default": []},
        },
        supports_check_mode=True,
    )
    try:
        inventory = inventory_of(module.params)
        found = {} if module.params["environment"] is None else preflight(inventory, module.params)
    except InferenceError as error:
        module.fail_json(msg=str(error))
    for problem in found.get("problems", []):
        if not problem["fatal"]:
            module.warn(f"{platform.node()}: {problem['message']}")  # Ansible shows a warning without its host
    module.exit_json(
        changed=False,
        gpus=[asdict(gpu) for gpu in inventory.gpus],
        count=len(inventory.gpus),
        compute_capability=inventory.compute_capability,
        compute_capabilities=inventory.compute_capabilities,
        architecture=inventory.architecture,
        driver_version=inventory.driver_version,
        cuda_version=inventory.cuda_version,
        links=[link._asdict() for link in inventory.links],
        **found,
    )


if __name__ == "__main__":
    main()
