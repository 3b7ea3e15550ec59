# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Log lines as people have reported them, and the document that is made from the signatures.

Run as a program, this writes that part of docs/TROUBLESHOOTING.md; how is told there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._signatures import (
    FATAL,
    HARDWARE,
    INFO,
    PROGRESS,
    SIGNATURES,
    WARNING,
    explain,
)

ROOT = Path(__file__).parents[4]
DOCUMENT = ROOT / "docs" / "TROUBLESHOOTING.md"
# Above it stands in the document what is written by hand.
MARK = "## What a line of the log means\n"
INTRODUCTION = f"""{MARK}
What follows is made from
[the signatures](https://github.com/blackwell-inference/blackwell.inference/blob/main/plugins/module_utils/_signatures.py):
`PYTHONPATH=.venv/collections python -m ansible_collections.blackwell.inference.tests.unit.plugins.module_utils.test_server_signatures`.
Severity: *fatal* lines explain why a server died, *hardware* lines call for a reset or a reboot rather than a restart, *warnings* cost
speed or features, the rest is part of a normal start.
"""


def of_signatures() -> str:
    parts = [INTRODUCTION]
    for symptom in dict.fromkeys(signature.symptom for signature in SIGNATURES):
        parts.append(f"\n### {symptom}\n\n| a line of the log matches | severity | meaning | what to do |\n|---|---|---|---|\n")
        for signature in SIGNATURES:
            if signature.symptom == symptom:
                pattern = signature.pattern.replace("|", "\\|")
                parts.append(f"| `{pattern}` | {signature.severity} | {signature.meaning} | {signature.remedy} |\n")
    return "".join(parts)


def test_the_document_is_made_from_the_signatures():
    _by_hand, mark, made = DOCUMENT.read_text().partition(MARK)
    assert mark + made == of_signatures()


def test_the_document_quotes_what_a_play_really_says():
    by_hand = DOCUMENT.read_text().partition(MARK)[0].partition("## What a play says")[2]
    ours = [path for folder in ("plugins", "playbooks", "roles") for path in (ROOT / folder).rglob("*")]
    said = "\n".join(path.read_text() for path in ours if path.suffix in (".py", ".yml", ".j2", ".sh"))
    quoted = re.findall(r"^\| `([^`]+)` \|", by_hand, re.MULTILINE)
    assert len(quoted) > 5
    assert [words for words in quoted if words not in said] == []


def test_signatures_are_complete():
    names = [signature.name for signature in SIGNATURES]
    assert len(names) == len(set(names))
    for signature in SIGNATURES:
        assert signature.severity in (FATAL, HARDWARE, WARNING, PROGRESS, INFO)
        assert signature.meaning.endswith(".")
        assert signature.remedy.endswith(".")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("RuntimeError: No supported CUDA architectures found for major versions [9, 10].", "fusion-module-closed"),
        ("RuntimeError: No supported CUDA architectures found for major versions [12].", "arch-list-empty"),
        ("RuntimeError: No supported CUDA architectures found for major versions [10, 11].", "module-not-for-this-gpu"),
        ("RuntimeError: FlashInfer requires GPUs with sm75 or higher", "arch-list-empty-misleading"),
        ("Failed to get device capability: SM 12.1+ requires CUDA >= 12.9.", "nvcc-too-old-for-12"),
        ("RuntimeError: SM120a compilation requires CUDA 12.9 or newer", "nvcc-too-old-for-12"),
        ("ValueError: FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs.", "fusion-backend-closed"),
        ("ValueError: FlashInfer allreduce fusion mnnvl backend requires a Blackwell system", "fusion-backend-not-here"),
        ("ValueError: FlashInfer allreduce fusion trtllm backend supports single-node only.", "fusion-backend-not-here"),
        ("FlashInfer AllReduce fusion disabled: the 8 ranks of this group are not confirmed", "fusion-off-everywhere"),
        ("Auto-enabling FlashInfer AllReduce Fusion (trtllm) for DeepseekV3ForCausalLM", "fusion-chosen-by-sglang"),
        ("flashinfer.comm unified allreduce_fusion API is not available, falling back", "flashinfer-too-old-for-fusion"),
        ("flashinfer.comm is not available, falling back to standard implementation", "flashinfer-too-old-for-fusion"),
        ("RuntimeError: [SymmDeviceMemory] Device does not support multicasting.", "workspace-needs-multicast"),
        ("launch_server.py: error: unrecognized arguments: --enable-flashinfer-allreduce-fusion", "fusion-flag-unknown"),
        ("launch_server.py: error: unrecognized arguments: --foo", "flag-unknown"),
        ("launch_server.py: error: argument --attention-backend: invalid choice: 'x'", "flag-unknown"),
        ("Skipping tactic x due to failure while profiling: Failed to initialize cutlass TMA WS grouped gemm", "autotuner-skips-tactic"),
        ("RuntimeError: Failed to initialize cutlass TMA WS grouped gemm", "moe-gemm-too-large"),
        ("Exception: Capture cuda graph failed: CUDA error: out of memory", "graph-capture-memory"),
        ("Exception: Capture cuda graph failed: Assertion", "graph-capture-failed"),
        ("Exception: Capture frozen-KV MTP cuda graph failed: Assertion", "graph-capture-failed"),
        ("Capture target decode CUDA graph begin. backend=full", "graphs-capturing"),
        ("Capture target decode CUDA graph end. elapsed=4.10 s", "graphs-captured"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "weights-leave-no-room"),
        ("OSError: [Errno 28] No space left on device: '/var/cache/sglang/x'", "disk-full"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.", "shared-memory-full"),
        ("RuntimeError: CUDA error: invalid device ordinal", "no-gpu"),
        ("ValueError: nccl_port at 30133 is not available in 30 seconds.", "port-in-use"),
        ("SIGQUIT received. signum=<Signals.SIGQUIT: 3>, frame=<frame>. It usually means one child failed.", "child-died"),
        ("Rank 0 scheduler is dead. Please check if there are relevant logs.", "child-died"),
        ("Subprocess scheduler_3 (pid=9) crashed with exit code -9. Triggering SIGQUIT for cleanup...", "rank-killed"),
        ("Subprocess scheduler_3 (pid=9) crashed with exit code -6. Triggering SIGQUIT for cleanup...", "child-died"),
        ("Cannot access gated repo for url https://huggingface.co/x", "model-forbidden"),
        ("OSError: We couldn't connect to 'https://huggingface.co' to load the files", "hub-out-of-reach"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB.", "gpu-memory"),
        ("[TP3] FlashInfer workspace initialized for rank 3, world_size 8", "fusion-active"),
        ("FlashInfer AllReduce Fusion enabled and workspace initialized: backend=trtllm, rank=0, world_size=8", "fusion-active"),
        ("Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs.", "custom-allreduce-off"),
        ("CustomAllReduceV2 is disabled because it's not supported on more than two PCIe-only GPUs", "custom-allreduce-off"),
        ("[Errno 98] error while attempting to bind on address: address already in use", "port-in-use"),
        ("Watchdog timeout (self.watchdog_timeout=300)", "watchdog"),
        ("NVRM: Xid (PCI:0000:41:00): 79, pid=1234, name=python3, GPU has fallen off the bus.", "xid"),
        ("Out of memory: Killed process 4711 (python3.12) total-vm:1kB", "host-memory"),
        ("sglang.service: Start request repeated too quickly.", "restart-limit"),
        ("blackwell.inference: opened gates have changed on disk, as after a reinstall", "gates-changed"),
        ("blackwell.inference: port 30000 is in use.", "preflight-refused"),
        ("Loading safetensors checkpoint shards:  40% Completed | 4/10", "weights-loading"),
    ],
)
def test_a_line_is_explained_by_its_most_special_signature(line, name):
    assert explain(line).name == name


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:41:00): 31, pid=1, MMU Fault",  # of a program, not of the GPU
        "Decode batch, #running-req: 3, #token: 100, token usage: 0.01, gen throughput (token/s): 95.00",
        "INFO: 127.0.0.1:1 - GET /health HTTP/1.1 200 OK",
    ],
)
def test_an_ordinary_line_means_nothing(line):
    assert explain(line) is None


if __name__ == "__main__":
    DOCUMENT.write_text(DOCUMENT.read_text().partition(MARK)[0] + of_signatures())
