# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role itself, on several kinds of host in one run of ansible-playbook."""

from __future__ import annotations

import json
import platform
import venv
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.tests.unit.conftest import program
from ansible_collections.blackwell.inference.tests.unit.playbook import ROOT, recap, run_role

FIXTURES = ROOT / "tests/unit/fixtures/nvidia-smi"
# host -> what it shows, and the role's variables
HOSTS = {
    "simulated": (None, {"gpu_host_nvidia_smi": str(ROOT / "demo/nvidia-smi"), "gpu_host_min_count": 8}),
    "none": (None, {"gpu_host_nvidia_smi": "no-nvidia-smi"}),
    "wrong-path": (None, {"gpu_host_nvidia_smi": "/nonexistent/nvidia-smi"}),
    "missing": (None, {"gpu_host_nvidia_smi": "/nonexistent/nvidia-smi", "gpu_host_allow_missing": False}),
    "mixed": ("mixed-9.0-12.0", {"gpu_host_min_count": 4}),
    "mixed-allowed": ("mixed-9.0-12.0", {"gpu_host_allow_mixed": "true"}),
    "mig": ("mig-rtx-pro-6000", {}),
    "strict": ("rtx-5090-x2", {"gpu_host_strict": "true"}),
    "lenient": ("rtx-5090-x2", {"gpu_host_ignore": ["peer_access"]}),
    "unfit": ("rtx-5090-x2", {"gpu_host_python": "{{ playbook_dir }}/unfit-venv/bin/python"}),
}
SCRIPT = """\
case "$*" in --query*) name=query.csv;; -q*) name=xml;; *p2p*) name=p2p.txt;; *) name=topo.txt;; esac
cat {host}.$name
"""


class Run:
    """Runs of the role on all HOSTS; what it wrote lies in ``facts``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.hosts = folder, {}
        for host, (fixture, variables) in HOSTS.items():
            if fixture:
                script = program(folder / f"{host}-nvidia-smi", SCRIPT.format(host=FIXTURES / fixture))
                variables = {**variables, "gpu_host_nvidia_smi": script}
            common = {"gpu_host_facts_dir": str(self.facts(host).parent), "gpu_host_environment": {"CUDA_HOME": "/nonexistent/cuda"}}
            self.hosts[host] = {**variables, **common}
        venv.create(folder / "unfit-venv", symlinks=True)
        (packages,) = folder.glob("unfit-venv/lib/python*/site-packages")
        (packages / "torch").mkdir()
        (packages / "torch/__init__.py").touch()
        (packages / "torch/version.py").write_text("cuda: Optional[str] = '12.6'\n")

    def facts(self, host: str) -> Path:
        return self.folder / host / "facts.d/blackwell_inference.fact"

    def __call__(self, *options: str) -> str:
        """Run it; return what it printed."""
        return run_role("gpu_host", self.hosts, self.folder, *options, ANSIBLE_FORKS="8")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("gpu_host"))


@pytest.fixture(scope="module")
def first(run):
    return run()


def outcome(printed: str) -> dict[str, tuple[int, int]]:
    """Return host -> (changed, failed)."""
    return {host: (counts["changed"], counts["failed"]) for host, counts in recap(printed).items()}


def test_who_is_refused(first):
    assert outcome(first) == {
        "simulated": (1, 0),
        "none": (1, 0),
        "wrong-path": (0, 1),
        "missing": (0, 1),
        "mixed": (0, 1),
        "mixed-allowed": (1, 0),
        "mig": (0, 1),
        "strict": (0, 1),
        "lenient": (1, 0),
        "unfit": (0, 1),
    }


@pytest.mark.parametrize(
    "line",
    [
        "gpu_host_min_count: 2 found; expected at least 4 GPUs.",
        "gpu_host_allow_mixed: the compute capabilities 9.0 and 12.0 were found; expected one for all GPUs. "
        "Serve from one kind, or set gpu_host_allow_mixed to true.",
        "gpu_host_allow_mig: MIG is on for GPU 2; expected it off. "
        "Turn it off with nvidia-smi -i INDEX -mig 0, or set gpu_host_allow_mig to true.",
        "executable: /nonexistent/nvidia-smi does not exist on this host; expected the name or path of nvidia-smi.",
        "torch: torch unknown in the serving venv is built for CUDA 12.6; expected CUDA 12.8 or newer, which knows 12.0. "
        "Install another build of torch.",
    ],
)
def test_refusals_are_one_line_each(first, line):
    printed = " ".join(first.split())  # Ansible wraps what it prints
    assert line in printed


PEERS = "peer_access: none between the GPUs 0 and 1 (GNS); expected every pair to reach each other"


def test_what_stands_in_the_way_is_a_warning_unless_it_is_ignored_or_strictly_refused(first, run):
    lenient, strict = ("".join(run("--limit", host).split()) for host in ("lenient", "strict"))
    peers, nvcc = PEERS.replace(" ", ""), f"[WARNING]:{platform.node()}:nvcc:nonein/nonexistent/cuda;expected12.8ornewer."
    assert nvcc in lenient
    assert peers not in lenient
    assert f"[WARNING]:{platform.node()}:{peers}" in strict
    assert peers in strict.split("Refuseahostthatcannotserve")[1]


def test_facts(first, run):
    facts = json.loads(run.facts("simulated").read_text())
    assert run.facts("simulated").stat().st_mode & 0o777 == 0o644
    assert (facts["gpu_count"], facts["compute_capability"], facts["driver_version"]) == (8, "12.0", "580.95.05")
    assert facts["links"][0] == {"gpus": [0, 1], "link": "PHB", "peer_access": "OK"}
    assert facts["toolkit"]["cuda_home"] == "/nonexistent/cuda"
    assert set(facts["host"]) == {"cores", "memory_mib", "shm_mib", "memlock_mib", "iommu"}
    assert facts["gpus"][0] == {
        "index": 0,
        "uuid": "GPU-00000000-0000-0000-0000-000000000001",
        "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition (simulated)",
        "compute_capability": "12.0",
        "memory_mib": 97887,
        "power_limit_w": 600.0,
        "pci_bus_id": "00000000:01:00.0",
        "pcie_gen_max": 5,
        "pcie_width_max": 16,
        "mig_mode": False,
        "mig_devices": 0,
    }
    nothing = json.loads(run.facts("none").read_text())
    assert (nothing["gpus"], nothing["gpu_count"], nothing["compute_capability"]) == ([], 0, None)


def test_check_mode_and_further_runs(first, run):
    only = ("--limit", "simulated")
    assert outcome(run(*only)) == {"simulated": (0, 0)}, "a second run changes nothing"
    run.facts("simulated").unlink()
    run.facts("simulated").parent.rmdir()
    partial = run(*only, "--tags", "patch")
    assert "List the GPUs" in partial
    assert "nvcc" not in partial, "no warning is repeated in a partial run"
    assert outcome(run(*only, "--check")) == {"simulated": (1, 0)}
    assert not run.facts("simulated").parent.exists(), "neither other tags nor check mode write"
