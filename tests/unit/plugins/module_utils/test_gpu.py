# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils import _gpu as gpu
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.tests.unit.conftest import program

ROOT = Path(__file__).resolve().parents[4]
FIXTURES = ROOT / "tests/unit/fixtures/nvidia-smi"
SIMULATED = str(ROOT / "demo/nvidia-smi")
UUID = "GPU-00000000-0000-0000-0000-00000000000"


class Recorded:
    """A runner that answers with recorded texts, and counts its calls."""

    def __init__(self, csv: str | gpu.Answer, xml: str = "", topology: str = "", access: str = "") -> None:
        self.calls: list[str] = []
        self.answers = {gpu.CSV_QUERY[0]: csv, gpu.XML_QUERY[0]: xml, "topo -m": topology, "topo -p2p r": access}

    def __call__(self, arguments):
        question = " ".join(arguments) if arguments[0] == "topo" else arguments[0]
        self.calls.append(question.split("=")[0])
        answer = self.answers[question]
        return answer if isinstance(answer, gpu.Answer) else gpu.Answer(0, answer)


def read(name: str) -> str:
    path = FIXTURES / name
    return path.read_text() if path.exists() else ""


def recorded(host: str) -> Recorded:
    csv = read(f"{host}.query.csv")
    xml = read(f"{host}.xml") or read(f"{host}.smi.xml")
    return Recorded(gpu.Answer(2, csv) if csv.startswith("Field") else csv, xml, read(f"{host}.topo.txt"), read(f"{host}.p2p.txt"))


def test_captured_host():
    inventory = gpu.query_inventory(recorded("h200-x2"))
    first = gpu.Gpu(
        index=0,
        uuid=UUID + "1",
        name="NVIDIA H200",
        compute_capability="9.0",
        memory_mib=143771,
        driver_version="580.159.04",
        power_limit_w=700.0,
        power_draw_w=79.42,
        pci_bus_id="00000000:00:06.0",
        pcie_gen=5,
        pcie_gen_max=5,
        pcie_width=16,
        pcie_width_max=16,
        mig_mode=False,
        mig_devices=0,
        persistence_mode=True,
    )
    second = replace(first, index=1, uuid=UUID + "2", power_draw_w=78.33, pci_bus_id="00000000:00:07.0")
    assert inventory == gpu.Inventory([first, second], "13.0", [gpu.Link((0, 1), "NV18")])


@pytest.mark.parametrize(
    ("host", "capability", "capabilities", "architecture", "driver", "cuda", "memory", "links"),
    [
        ("h200-x2", "9.0", ["9.0"], "Hopper", "580.159.04", "13.0", [143771] * 2, {"NV18": 1}),
        ("rtx-pro-6000-x8", "12.0", ["12.0"], "Blackwell", "580.95.05", "13.0", [97887] * 8, {"PHB": 4, "NODE": 8, "SYS": 16}),
        ("rtx-5090-x2", "12.0", ["12.0"], "Blackwell", "580.126.20", "13.0", [32607] * 2, {"PHB": 1}),
        ("gb10", "12.1", ["12.1"], "Blackwell", "580.126.09", "13.0", [None], {}),
        ("mixed-9.0-12.0", None, ["9.0", "12.0"], None, "580.95.05", "13.0", [95830, 97887], {"SYS": 1}),
        ("mig-rtx-pro-6000", "12.0", ["12.0"], "Blackwell", "580.95.05", "13.0", [97887] * 3, {"NODE": 1, "SYS": 2}),
        ("old-driver-v100s-x2", "7.0", ["7.0"], "Volta", "460.73.01", "11.2", [32510] * 2, {"PHB": 1}),
    ],
)
def test_hosts(host, capability, capabilities, architecture, driver, cuda, memory, links):
    run = recorded(host)
    inventory = gpu.query_inventory(run)
    assert inventory.compute_capability == capability
    assert inventory.compute_capabilities == capabilities
    assert inventory.architecture == architecture
    assert inventory.driver_version == driver
    assert inventory.cuda_version == cuda
    assert [card.memory_mib for card in inventory.gpus] == memory
    assert Counter(link.link for link in inventory.links) == links
    assert [card.index for card in inventory.gpus] == list(range(len(memory)))
    assert run.calls == ["--query-gpu", "-q", "topo -m", "topo -p2p r"][: 4 if len(memory) > 1 else 2]


def test_values_that_a_driver_does_not_know_are_none():
    (card,) = gpu.query_inventory(recorded("gb10")).gpus
    assert (card.memory_mib, card.power_limit_w, card.mig_mode) == (None, None, None)
    assert (card.power_draw_w, card.persistence_mode) == (3.41, True)


def test_mig():
    cards = gpu.query_inventory(recorded("mig-rtx-pro-6000")).gpus
    assert [(card.mig_mode, card.mig_devices) for card in cards] == [(False, 0), (False, 0), (True, 4)]


def test_old_driver_is_read_from_its_xml():
    card = gpu.query_inventory(recorded("old-driver-v100s-x2")).gpus[1]
    assert (card.uuid, card.power_limit_w, card.power_draw_w) == (UUID + "2", 250.0, 229.11)
    assert (card.pcie_gen, card.pcie_width_max, card.mig_mode, card.persistence_mode) == (3, 16, None, False)


def test_xml_says_the_same_as_csv():
    """Both were captured on one host; only the power draw moved in between."""
    refused = recorded("h200-x2")
    refused.answers[gpu.CSV_QUERY[0]] = gpu.Answer(2, 'Field "compute_cap" is not a valid field to query.\n')

    def steady(run):
        return [replace(card, power_draw_w=None) for card in gpu.query_inventory(run).gpus]

    assert steady(refused) == steady(recorded("h200-x2"))


def test_old_driver_words_for_missing_values():
    row = read("gb10.query.csv").replace("[N/A]", "[Not Supported]")
    assert gpu.parse_csv(row) == gpu.parse_csv(read("gb10.query.csv"))


def test_elements_that_coming_drivers_rename():
    xml = read("gb10.xml").replace("driver_version", "kmd_version").replace("cuda_version", "cuda_umd_version")
    cards, cuda_version = gpu.parse_xml(xml)
    assert (cards[0]["driver_version"], cuda_version) == ("580.126.09", "13.0")


def test_topology_ignores_network_cards_and_underlines():
    assert "NIC1" in read("rtx-pro-6000-x8.topo.txt")
    links = gpu.parse_matrix(read("rtx-pro-6000-x8.topo.txt"))
    assert {pair: link for pair, link in links.items() if 0 in pair} == {
        (0, 1): "PHB",
        **{(0, other): "NODE" for other in (2, 3)},
        **{(0, other): "SYS" for other in (4, 5, 6, 7)},
    }
    assert gpu.parse_matrix(read("h200-x2.topo-raw.txt")) == gpu.parse_matrix(read("h200-x2.topo.txt"))


def test_peer_access_is_what_the_driver_says_of_each_pair():
    assert gpu.query_inventory(recorded("rtx-5090-x2")).links == [gpu.Link((0, 1), "PHB", "GNS")]


def test_an_unknown_matrix_is_no_failure():
    run = recorded("rtx-5090-x2")
    run.answers["topo -p2p r"] = gpu.Answer(2, "Unknown option")
    assert gpu.query_inventory(run).links == [gpu.Link((0, 1), "PHB", None)]
    run.answers["topo -m"] = gpu.Answer(3, "Not Supported")
    assert gpu.query_inventory(run).links == []


def test_no_gpu():
    run = Recorded(gpu.Answer(6, "No devices were found\n"))
    inventory = gpu.query_inventory(run)
    assert inventory == gpu.Inventory([], None, [])
    assert (inventory.compute_capability, inventory.compute_capabilities, inventory.architecture, inventory.driver_version) == (
        None,
        [],
        None,
        None,
    )
    assert run.calls == ["--query-gpu"]


def test_a_corrupted_inforom_is_only_a_warning():
    run = recorded("h200-x2")
    run.answers = {
        question: gpu.Answer(14, f"{text}\nWARNING: infoROM is corrupted at gpu 0000:00:06.0\n") for question, text in run.answers.items()
    }
    inventory = gpu.query_inventory(run)
    assert (len(inventory.gpus), inventory.links) == (2, [gpu.Link((0, 1), "NV18")])


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (
            9,
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
            "Make sure that the latest NVIDIA driver is installed and running.\n\n",
            "communicate with the NVIDIA driver.*; expected a list of GPUs. Load the driver",
        ),
        (
            18,
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n",
            "^nvidia-smi: Failed to initialize NVML: Driver/library version mismatch; expected a list of GPUs. Reboot",
        ),
        (4, "Failed to initialize NVML: Insufficient Permissions\n", "Become root"),
        (15, "Unable to determine the device handle for GPU0: 0000:01:00.0: Unknown Error\nNo devices were found\n", "GPU0: .*fallen off"),
        (0, "0, [GPU is lost], [GPU is lost]\n" + read("gb10.query.csv"), r"^nvidia-smi: 0, \[GPU is lost\].*fallen off"),
        (0, "1, [GPU requires reset]\n", "--gpu-reset"),
        (255, "Failed to initialize NVML: Unknown Error\n", "exit status 255, 'Failed to initialize NVML: Unknown Error'; expected"),
        (0, "", "^nvidia-smi: no answer; expected a list of GPUs.$"),
        (0, "hello\n", "^nvidia-smi: 'hello'; expected a list of GPUs.$"),
    ],
)
def test_trouble(status, text, message):
    with pytest.raises(InferenceError, match=message) as caught:
        gpu.query_inventory(Recorded(gpu.Answer(status, text)))
    assert "\n" not in str(caught.value)


def test_unreadable_xml():
    with pytest.raises(InferenceError, match="XML cannot be read"):
        gpu.query_inventory(Recorded(read("gb10.query.csv"), read("gb10.xml")[:700]))


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA GB10", "12.1"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "12.0"),
        ("NVIDIA GeForce RTX 5070 Ti", "12.0"),
        ("NVIDIA Thor", "11.0"),
        ("NVIDIA GB300", "10.3"),
        ("NVIDIA B200", "10.0"),
        ("NVIDIA H100 80GB HBM3", "9.0"),
        ("NVIDIA GH200 480GB", "9.0"),
        ("NVIDIA RTX 5000 Ada Generation", "8.9"),
        ("NVIDIA GeForce RTX 4090", "8.9"),
        ("NVIDIA L40S", "8.9"),
        ("NVIDIA RTX A5000", "8.6"),
        ("GeForce RTX 3090", "8.6"),
        ("NVIDIA A10", "8.6"),
        ("A100-SXM4-80GB", "8.0"),
        ("Quadro RTX 5000", "7.5"),
        ("Tesla T4", "7.5"),
        ("Tesla V100-SXM2-32GB", "7.0"),
        ("Tesla K80", None),
    ],
)
def test_capability_by_name(name, capability):
    xml = read("old-driver-v100s-x2.xml").replace("Tesla V100S-PCIE-32GB", name)
    inventory = gpu.query_inventory(Recorded(read("old-driver-v100s-x2.query.csv"), xml))
    assert inventory.compute_capability == capability


def test_every_named_capability_is_known():
    for pattern, capability in gpu.PRODUCT_CAPABILITIES:
        assert gpu.parse_capability(capability) in gpu.KNOWN_CAPABILITIES
        re.compile(pattern)


@pytest.mark.parametrize(("text", "pair"), [("12.0", (12, 0)), (" 9.0 ", (9, 0)), ("10.3", (10, 3))])
def test_parse_capability(text, pair):
    assert gpu.parse_capability(text) == pair


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("banana", "compute_capability: 'banana' is not a compute capability; expected MAJOR.MINOR, e.g. 12.0."),
        ("12", "compute_capability: '12' is not a compute capability; expected MAJOR.MINOR, e.g. 12.0."),
        ("sm_120", "compute_capability: 'sm_120' is not a compute capability; expected MAJOR.MINOR, e.g. 12.0."),
        ("12.0a", "compute_capability: '12.0a' is not a compute capability; expected MAJOR.MINOR, e.g. 12.0."),
        ("", "compute_capability: '' is not a compute capability; expected MAJOR.MINOR, e.g. 12.0."),
    ],
)
def test_parse_capability_refuses_other_words(text, message):
    with pytest.raises(InferenceError) as caught:
        gpu.parse_capability(text)
    assert str(caught.value) == message


def test_parse_capability_refuses_an_unknown_one():
    with pytest.raises(InferenceError, match=r"^compute_capability: no GPU of 13\.0 is known; expected one of 5\.0, .*, 12\.0, 12\.1\.$"):
        gpu.parse_capability("13.0")


@pytest.fixture
def script(tmp_path):
    """Write an nvidia-smi, return its path."""
    return lambda *text: program(tmp_path / "nvidia-smi", *text)


def replay(host: str) -> str:
    """Return a script body that answers for ``host``."""
    answers = f"{FIXTURES}/{host}"
    return f"""case $1 in
      --query-gpu=*) cat {answers}.query.csv;;
      -q) cat {answers}.xml;;
    esac"""


def test_detect_on_the_simulated_host():
    assert gpu.detect_capabilities(SIMULATED) == ["12.0"]


@pytest.mark.parametrize(
    ("body", "capabilities"),
    [
        (replay("mixed-9.0-12.0"), ["9.0", "12.0"]),
        (replay("old-driver-v100s-x2"), ["7.0"]),
        ("echo No devices were found; exit 6", []),
    ],
)
def test_detect(script, body, capabilities):
    assert gpu.detect_capabilities(script(body)) == capabilities


def test_detect_needs_one_call(script, tmp_path):
    gpu.detect_capabilities(script(f"echo call >>{tmp_path}/calls\n{replay('rtx-pro-6000-x8')}"))
    assert (tmp_path / "calls").read_text() == "call\n"


def test_detect_without_nvidia_smi(tmp_path):
    assert gpu.detect_capabilities(str(tmp_path / "nvidia-smi")) == []


def test_detect_fails_with_nvidia_smi(script):
    with pytest.raises(InferenceError, match="Reboot, or reload the kernel modules"):
        gpu.detect_capabilities(script("echo Failed to initialize NVML: Driver/library version mismatch; exit 18"))


def test_detect_refuses_to_guess(script):
    body = replay("old-driver-v100s-x2") + " | sed 's/V100S-PCIE-32GB/K80/'"
    with pytest.raises(InferenceError, match=r"^compute_capability: driver 460\.73\.01 cannot tell that of Tesla K80; expected driver 510"):
        gpu.detect_capabilities(script(body))


def test_a_hanging_nvidia_smi_is_killed_with_its_children(script, tmp_path):
    hanging = script(f"sleep 60 & echo $! >{tmp_path}/child; wait")
    with pytest.raises(
        InferenceError, match=f"^nvidia-smi: {hanging} --query-gpu hangs; expected an answer within 1 s. Look for a wedged GPU"
    ):
        gpu.detect_capabilities(hanging, timeout=1)
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    deadline = time.monotonic() + 10
    while alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(stat: Path) -> bool:
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("interpreter", ["/nonexistent/sh", "/etc"])
def test_an_executable_that_cannot_run(script, interpreter):
    with pytest.raises(InferenceError, match=r"^executable: .*/nvidia-smi cannot be run "):
        gpu.detect_capabilities(script("", interpreter))


def test_timeout_must_be_positive():
    with pytest.raises(InferenceError, match=r"^timeout: 0; expected seconds, more than 0\.$"):
        gpu.detect_capabilities(timeout=0)


def test_simulated_host_says_so_and_is_the_reconstructed_one():
    simulated = gpu.query_inventory(gpu.nvidia_smi(SIMULATED, 30))
    reconstructed = gpu.query_inventory(recorded("rtx-pro-6000-x8"))
    assert all(card.name.endswith(" (simulated)") for card in simulated.gpus)
    assert [replace(card, name=card.name.replace(" (simulated)", "")) for card in simulated.gpus] == reconstructed.gpus
    assert simulated[1:] == reconstructed[1:]


def test_simulated_host_answers_the_bare_call():
    table = gpu.nvidia_smi(SIMULATED, 30)([]).text.splitlines()
    assert sum("(simulated)" in line and "RTX PRO 6000" in line for line in table) == 8
    assert {len(line) for line in table} == {len(read("h200-x2.smi.txt").splitlines()[1])}
