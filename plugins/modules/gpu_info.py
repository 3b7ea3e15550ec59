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
  - Asks C(nvidia-smi) at most three times, first for CSV, then for the XML with what CSV lacks or an old driver refuses,
    and, with more than one GPU, for the topology matrix.
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
    type: bool
    default: false
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
"""

from dataclasses import asdict

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._gpu import Inventory, NvidiaSmiMissing, nvidia_smi, query_inventory


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "executable": {"type": "str", "default": "nvidia-smi"},
            "timeout": {"type": "int", "default": 30},
            "allow_missing": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    try:
        inventory = query_inventory(nvidia_smi(module.params["executable"], module.params["timeout"]))
    except NvidiaSmiMissing as error:
        if not module.params["allow_missing"]:
            module.fail_json(msg=str(error))
        inventory = Inventory([], None, [])
    except InferenceError as error:
        module.fail_json(msg=str(error))
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
    )


if __name__ == "__main__":
    main()
