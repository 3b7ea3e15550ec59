# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What ``nvidia-smi`` says about the GPUs of this host, as data.

The CSV query is asked first, since it alone knows the compute capability. The XML adds what CSV cannot say, and
stands in for it where an old driver refuses a field. One matrix says what joins the cards, another which of them may
read each other's memory.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional, TypeVar
from xml.etree import ElementTree

from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._processes import kill

# Every capability that NVIDIA lists for a product (developer.nvidia.com/cuda-gpus and cuda-legacy-gpus, from Maxwell
# on), and two that only nvcc lists as targets: 8.8, and 10.1, which CUDA 13 renamed to 11.0.
ARCHITECTURES: dict[tuple[int, int], str] = {
    (5, 0): "Maxwell",
    (5, 2): "Maxwell",
    (5, 3): "Maxwell",
    (6, 0): "Pascal",
    (6, 1): "Pascal",
    (6, 2): "Pascal",
    (7, 0): "Volta",
    (7, 2): "Volta",
    (7, 5): "Turing",
    (8, 0): "Ampere",
    (8, 6): "Ampere",
    (8, 7): "Ampere",
    (8, 8): "Ampere",
    (8, 9): "Ada Lovelace",
    (9, 0): "Hopper",
    (10, 0): "Blackwell",
    (10, 1): "Blackwell",
    (10, 3): "Blackwell",
    (11, 0): "Blackwell",
    (12, 0): "Blackwell",
    (12, 1): "Blackwell",
}
KNOWN_CAPABILITIES: tuple[tuple[int, int], ...] = tuple(ARCHITECTURES)

# Capability by product name, for drivers too old to be asked for it; the first match wins. From the same lists.
PRODUCT_CAPABILITIES: tuple[tuple[str, str], ...] = (
    (r"\bGB10\b", "12.1"),
    (r"\bRTX PRO \d{4} Blackwell|\bGeForce RTX 50\d\d", "12.0"),
    (r"\bThor\b", "11.0"),
    (r"\bG?B300\b", "10.3"),
    (r"\bG?B200\b", "10.0"),
    (r"\b(GH200|H100|H200)\b", "9.0"),
    (r"\b(L4|L40|L40S)\b|\bRTX \d{4} (SFF )?Ada\b|\bGeForce RTX 40\d\d", "8.9"),
    (r"\bOrin\b", "8.7"),
    (r"\b(A2|A10|A10G|A16|A40|RTX A\d{4})\b|\bGeForce RTX 30\d\d", "8.6"),
    (r"\b(A30|A100)\b", "8.0"),
    (r"\b(T4|T400|T600|T1000|TITAN RTX|Quadro RTX \d{4})\b|\bGeForce (RTX 20|GTX 16)\d\d", "7.5"),
    (r"\bXavier\b", "7.2"),
    (r"\b(V100S?|GV100|TITAN V)\b", "7.0"),
)

# What nvidia-smi says of trouble -> what a person does about it. Each is a failure, whatever the exit status: a host
# that has lost a card still lists the others.
_TROUBLE: tuple[tuple[str, str], ...] = (
    ("couldn't communicate with the NVIDIA driver", "Load the driver (modprobe nvidia), or install the one for the running kernel."),
    ("NVML: Driver Not Loaded", "Load the driver (modprobe nvidia), or install the one for the running kernel."),
    ("Driver/library version mismatch", "Reboot, or reload the kernel modules: the driver was upgraded under the running system."),
    ("NVML: Insufficient Permissions", "Become root, or let this user open /dev/nvidia*."),
    ("Unable to determine the device handle", "Reboot: a card has fallen off the bus, and the kernel log says why."),
    ("GPU is lost", "Reboot: a card has fallen off the bus, and the kernel log says why."),
    ("GPU requires reset", "Reset that card (nvidia-smi --gpu-reset), or reboot."),
)

# field -> what --query-gpu calls it
_CSV_FIELDS: dict[str, str] = {
    "index": "index",
    "uuid": "uuid",
    "name": "name",
    "compute_capability": "compute_cap",
    "driver_version": "driver_version",
    "memory_mib": "memory.total",
    "power_limit_w": "power.limit",
    "power_draw_w": "power.draw",
    "pci_bus_id": "pci.bus_id",
    "pcie_gen": "pcie.link.gen.current",
    "pcie_gen_max": "pcie.link.gen.max",
    "pcie_width": "pcie.link.width.current",
    "pcie_width_max": "pcie.link.width.max",
    "mig_mode": "mig.mode.current",
    "persistence_mode": "persistence_mode",
}
# field -> where the XML has it below <gpu>, newest driver first
_XML_PATHS: dict[str, tuple[str, ...]] = {
    "uuid": ("uuid",),
    "name": ("product_name",),
    "memory_mib": ("fb_memory_usage/total",),
    "power_limit_w": ("gpu_power_readings/current_power_limit", "gpu_power_readings/power_limit", "power_readings/power_limit"),
    "power_draw_w": ("gpu_power_readings/average_power_draw", "gpu_power_readings/power_draw", "power_readings/power_draw"),
    "pci_bus_id": ("pci/pci_bus_id",),
    "pcie_gen": ("pci/pci_gpu_link_info/pcie_gen/current_link_gen",),
    "pcie_gen_max": ("pci/pci_gpu_link_info/pcie_gen/max_link_gen",),
    "pcie_width": ("pci/pci_gpu_link_info/link_widths/current_link_width",),
    "pcie_width_max": ("pci/pci_gpu_link_info/link_widths/max_link_width",),
    "mig_mode": ("mig_mode/current_mig",),
    "persistence_mode": ("persistence_mode",),
}

_NO_GPU = "No devices were found"
_UNKNOWN_FIELD = "is not a valid field to query"
_USABLE = (0, 14)  # exit statuses: success, and the warning that an infoROM is corrupted
_NO_VALUE = ("", "N/A", "Not Supported", "Not Available", "Unknown Error", "Requested functionality has been deprecated")

CSV_QUERY = ["--query-gpu=" + ",".join(_CSV_FIELDS.values()), "--format=csv,noheader,nounits"]
XML_QUERY = ["-q", "-x"]
TOPOLOGY_QUERY = ["topo", "-m"]
PEER_QUERY = ["topo", "-p2p", "r"]

Card = dict[str, str]  # field -> nvidia-smi's words for it; fields that the driver does not know are left out


class Answer(NamedTuple):
    """What one call of nvidia-smi came to."""

    status: int  # exit status, negative for a signal
    text: str  # what it wrote, standard output before standard error


Runner = Callable[[Sequence[str]], Answer]  # nvidia-smi's arguments -> its answer


class NvidiaSmiMissing(InferenceError):
    """There is no such executable, as on a host without an NVIDIA driver."""


@dataclass(frozen=True)
class Gpu:
    """One card; None is what its driver does not know."""

    index: int
    uuid: Optional[str]
    name: Optional[str]
    compute_capability: Optional[str]  # e.g. "12.0"
    memory_mib: Optional[int]  # None where the card shares the host's memory
    driver_version: Optional[str]
    power_limit_w: Optional[float]
    power_draw_w: Optional[float]
    pci_bus_id: Optional[str]
    pcie_gen: Optional[int]  # at this moment: an idle card falls back to 1
    pcie_gen_max: Optional[int]  # what card and slot reach together
    pcie_width: Optional[int]  # lanes, at this moment
    pcie_width_max: Optional[int]
    mig_mode: Optional[bool]
    mig_devices: int
    persistence_mode: Optional[bool]


class Link(NamedTuple):
    """What joins two cards."""

    gpus: tuple[int, int]  # their indexes, the lower one first
    link: str  # NV18, PIX, PXB, PHB, NODE or SYS
    peer_access: Optional[str] = None  # OK, or why not: CNS, GNS, TNS, NS, DR, U; None where the driver cannot tell


class Inventory(NamedTuple):
    """The cards of one host."""

    gpus: list[Gpu]
    cuda_version: Optional[str]  # the newest that the driver runs, e.g. "13.0"
    links: list[Link]  # empty where the driver cannot tell

    @property
    def compute_capabilities(self) -> list[str]:
        """The distinct capabilities, in rising order."""
        return _rising(gpu.compute_capability for gpu in self.gpus if gpu.compute_capability)

    @property
    def compute_capability(self) -> Optional[str]:
        """The capability that all cards share; None without cards and where they differ."""
        return _shared(gpu.compute_capability for gpu in self.gpus)

    @property
    def architecture(self) -> Optional[str]:
        """NVIDIA's name for the generation that all cards share, e.g. ``Blackwell``; None as above."""
        return _shared(_architecture(gpu.compute_capability) for gpu in self.gpus)

    @property
    def driver_version(self) -> Optional[str]:
        """The driver's version, e.g. ``580.95.05``; None without cards."""
        return _shared(gpu.driver_version for gpu in self.gpus)


def parse_capability(text: str) -> tuple[int, int]:
    """Return a compute capability such as ``12.0`` as (major, minor).

    Raises:
        InferenceError: It is not written MAJOR.MINOR, or is none of KNOWN_CAPABILITIES.
    """
    match = re.fullmatch(r"(\d{1,3})\.(\d)", text.strip(), re.ASCII)
    if not match:
        raise InferenceError("compute_capability", f"{text!r} is not a compute capability", "MAJOR.MINOR, e.g. 12.0")
    capability = int(match[1]), int(match[2])
    if capability not in ARCHITECTURES:
        known = ", ".join(f"{major}.{minor}" for major, minor in KNOWN_CAPABILITIES)
        raise InferenceError("compute_capability", f"no GPU of {match[0]} is known", f"one of {known}")
    return capability


def detect_capabilities(executable: str = "nvidia-smi", timeout: float = 30) -> list[str]:
    """Return the distinct compute capabilities of this host in rising order, e.g. ``["9.0", "12.0"]``.

    The list is empty where there is no GPU or no nvidia-smi. Costs one call of nvidia-smi, two on an old driver.

    Args:
        executable: Name or path of nvidia-smi.
        timeout: Seconds that one call may take.

    Raises:
        InferenceError: nvidia-smi hangs or fails, or a card's capability cannot be told.
    """
    run = nvidia_smi(executable, timeout)
    try:
        cards = _query_csv(run)
        if cards is None or any("compute_capability" not in card for card in cards):
            cards, _cuda_version = _add_xml(cards, run)
    except NvidiaSmiMissing:
        return []
    for card in cards:
        if "compute_capability" not in card:
            raise InferenceError(
                "compute_capability",
                f"driver {card.get('driver_version', '')} cannot tell that of {card.get('name', 'a GPU')}",
                "driver 510 or newer",
                "Upgrade the driver, or give compute_capability.",
            )
    return _rising(card["compute_capability"] for card in cards)


def query_inventory(run: Runner) -> Inventory:
    """Ask nvidia-smi for everything that Inventory holds, in at most four calls.

    Raises:
        NvidiaSmiMissing: There is no such executable.
        InferenceError: nvidia-smi hangs or fails.
    """
    cards = _query_csv(run)
    if cards == []:
        return Inventory([], None, [])
    cards, cuda_version = _add_xml(cards, run)
    links, access = (_query_matrix(run, query) if len(cards) > 1 else {} for query in (TOPOLOGY_QUERY, PEER_QUERY))
    return Inventory(
        [_gpu(position, card) for position, card in enumerate(cards)],
        cuda_version,
        [Link(pair, link, access.get(pair)) for pair, link in links.items()],
    )


def nvidia_smi(executable: str, timeout: float) -> Runner:
    """Return the runner that calls ``executable`` and kills it, children included, after ``timeout`` seconds.

    Raises:
        NvidiaSmiMissing: From the runner: there is no such executable.
        InferenceError: ``timeout`` is not positive; from the runner: it cannot be run, or hangs.
    """
    if timeout <= 0:
        raise InferenceError("timeout", f"{timeout:g}", "seconds, more than 0")

    def run(arguments: Sequence[str]) -> Answer:
        try:
            process = subprocess.Popen(
                [executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            expected = "the name or path of nvidia-smi"
            if isinstance(error, FileNotFoundError) and not os.path.exists(executable):
                raise NvidiaSmiMissing("executable", f"{executable} does not exist on this host", expected) from None
            raise InferenceError("executable", f"{executable} cannot be run ({error.strerror})", expected) from None
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            kill(process)
            raise InferenceError(
                "nvidia-smi",
                f"{executable} {arguments[0].split('=')[0]} hangs",
                f"an answer within {timeout:g} s",
                "Look for a wedged GPU in the kernel log (NVRM, Xid), or raise timeout.",
            ) from None
        return Answer(process.returncode, output + errors)

    return run


def parse_csv(text: str) -> list[Card]:
    """Read the rows that CSV_QUERY prints; lines of another shape, such as warnings, are passed over."""
    rows = (line.split(", ") for line in text.splitlines())
    return [
        {field: value for field, value in zip(_CSV_FIELDS, map(_words, row)) if value}
        for row in rows
        if len(row) == len(_CSV_FIELDS) and row[0].strip().isdigit()
    ]


def parse_xml(text: str) -> tuple[list[Card], Optional[str]]:
    """Read what XML_QUERY prints: the cards, with a further field ``mig_devices``, and the driver's CUDA version.

    Raises:
        InferenceError: It is not the XML of nvidia-smi.
    """
    document = re.search(r"<nvidia_smi_log\b.*</nvidia_smi_log>", text, re.DOTALL)  # leaves out the DTD, and warnings around it
    try:
        log = ElementTree.fromstring(document[0] if document else "")  # noqa: S314 - written by the driver
    except ElementTree.ParseError:
        raise InferenceError("nvidia-smi", "its XML cannot be read", "<nvidia_smi_log>...</nvidia_smi_log>") from None
    driver_version = _words(log.findtext("driver_version")) or _words(log.findtext("kmd_version"))
    cards = []
    for gpu in log.findall("gpu"):
        card = {"mig_devices": str(len(gpu.findall("mig_devices/mig_device")))}
        if driver_version:
            card["driver_version"] = driver_version
        for field, paths in _XML_PATHS.items():
            value = next(filter(None, (_words(gpu.findtext(path)) for path in paths)), None)
            if value:
                card[field] = value
        cards.append(card)
    return cards, _words(log.findtext("cuda_version")) or _words(log.findtext("cuda_umd_version"))


def parse_matrix(text: str) -> dict[tuple[int, int], str]:
    """Read a matrix that ``nvidia-smi topo`` prints: the cell of each pair of GPUs, the lower first, whatever other columns there are."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)  # the header is underlined
    lines = [[cell.strip() for cell in line.split("\t")] for line in plain.splitlines()]
    header = next((line for line in lines if "GPU0" in line[1:]), [])
    columns = {cell: column for column, cell in enumerate(header) if re.fullmatch(r"GPU\d+", cell)}
    return {
        (gpu, other): row[column]
        for row in lines
        if row[0] in columns
        for name, column in columns.items()
        if (gpu := _number_of(row[0])) < (other := _number_of(name))
    }


def _ask(run: Runner, query: Sequence[str]) -> str:
    """Return what nvidia-smi answers, which may be that it knows no GPU or not every field; fail on any trouble."""
    answer = run(query)
    for sign, remedy in _TROUBLE:
        if sign in answer.text:
            line = next(line for line in answer.text.splitlines() if sign in line)
            raise InferenceError("nvidia-smi", line.strip().rstrip("."), "a list of GPUs", remedy)
    if answer.status in _USABLE or _NO_GPU in answer.text or _UNKNOWN_FIELD in answer.text:
        return answer.text
    raise InferenceError("nvidia-smi", f"exit status {answer.status}, {_excerpt(answer.text)}", "a list of GPUs")


def _query_matrix(run: Runner, query: Sequence[str]) -> dict[tuple[int, int], str]:
    """Ask for a matrix; a driver that does not know it is no trouble."""
    answer = run(query)
    return parse_matrix(answer.text) if answer.status in _USABLE else {}


def _query_csv(run: Runner) -> Optional[list[Card]]:
    """Ask for the cards by CSV; None where the driver is too old for one of the fields."""
    text = _ask(run, CSV_QUERY)
    if _UNKNOWN_FIELD in text:
        return None
    cards = parse_csv(text)
    if not cards and _NO_GPU not in text:
        raise InferenceError("nvidia-smi", _excerpt(text), "a list of GPUs")
    return cards


def _add_xml(cards: Optional[list[Card]], run: Runner) -> tuple[list[Card], Optional[str]]:
    """Complete the cards by XML, which stands alone where there are none by CSV; with the driver's CUDA version."""
    text = _ask(run, XML_QUERY)
    if _NO_GPU in text:
        return [], None
    described, cuda_version = parse_xml(text)
    by_uuid = {card.get("uuid"): card for card in described}
    if cards is None:
        cards = described
    return [_with_capability({**by_uuid.get(card.get("uuid"), {}), **card}) for card in cards], cuda_version


def _with_capability(card: Card) -> Card:
    """Add the capability that the card's name stands for, unless the driver told it or the name is unknown."""
    if "compute_capability" in card:
        return card
    capability = next((known for pattern, known in PRODUCT_CAPABILITIES if re.search(pattern, card.get("name", ""))), None)
    return {**card, "compute_capability": capability} if capability else card


def _excerpt(text: str) -> str:
    words = " ".join(text.split())
    return repr(words[:200]) if words else "no answer"


def _words(text: Optional[str]) -> Optional[str]:
    """Return a field's value; None for ``[N/A]``, ``[Not Supported]`` and the like."""
    value = (text or "").strip()
    return None if value.startswith("[") or value in _NO_VALUE else value


def _number(text: Optional[str]) -> Optional[float]:
    """Return the number that a value such as ``97887``, ``600.00 W`` or ``16x`` begins with."""
    match = re.match(r"\d+(\.\d+)?", text or "")
    return float(match[0]) if match else None


def _whole(text: Optional[str]) -> Optional[int]:
    number = _number(text)
    return None if number is None else int(number)


def _switch(text: Optional[str]) -> Optional[bool]:
    return {"Enabled": True, "Disabled": False}.get(text or "")


def _gpu(position: int, card: Card) -> Gpu:
    return Gpu(
        index=int(card.get("index", position)),
        uuid=card.get("uuid"),
        name=card.get("name"),
        compute_capability=card.get("compute_capability"),
        memory_mib=_whole(card.get("memory_mib")),
        driver_version=card.get("driver_version"),
        power_limit_w=_number(card.get("power_limit_w")),
        power_draw_w=_number(card.get("power_draw_w")),
        pci_bus_id=card.get("pci_bus_id"),
        pcie_gen=_whole(card.get("pcie_gen")),
        pcie_gen_max=_whole(card.get("pcie_gen_max")),
        pcie_width=_whole(card.get("pcie_width")),
        pcie_width_max=_whole(card.get("pcie_width_max")),
        mig_mode=_switch(card.get("mig_mode")),
        mig_devices=int(card.get("mig_devices", 0)),
        persistence_mode=_switch(card.get("persistence_mode")),
    )


def _number_of(name: str) -> int:
    return int(name[len("GPU") :])


def _architecture(capability: Optional[str]) -> Optional[str]:
    return ARCHITECTURES.get(_as_pair(capability)) if capability else None


def _as_pair(capability: str) -> tuple[int, int]:
    major, minor = capability.split(".")
    return int(major), int(minor)


def _rising(capabilities: Iterable[str]) -> list[str]:
    return sorted(set(capabilities), key=_as_pair)


_T = TypeVar("_T")


def _shared(values: Iterable[Optional[_T]]) -> Optional[_T]:
    """Return the one value that all have; None where they differ or there are none."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None
