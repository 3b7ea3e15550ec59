# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whole journals of servers, in the words of several releases: which line is the reason, among tracebacks and consequences."""

from __future__ import annotations

import textwrap

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._health import Log

STAMP = "[2026-11-30 10:00:00"
RAISED = "During handling of the above exception, another exception occurred:"


def ranks(size: int, text: str) -> str:
    """What every rank says, the first line under its own prefix, and the lines of the ranks mixed."""
    first, *rest = text.splitlines()
    return "\n".join([*(f"{STAMP} TP{rank}] {first}" for rank in range(size)), *(line for line in rest for _rank in range(size))])


def journal(*parts: str) -> Log:
    log = Log()
    log.add(textwrap.dedent("\n".join(parts)).splitlines())
    return log


NORMAL_0_5_8 = f"""\
Started SGLang server sglang.
{STAMP}] WARNING model_config.py:901: DeepGemm is disabled because it is not installed or the GPU is not supported.
{STAMP}] server_args=ServerArgs(model_path='nvidia/GLM-5-NVFP4', tp_size=8, api_key='********')
{STAMP} TP0] Init torch distributed begin.
{STAMP} TP0] Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs. To silence this warning, specify ...
{STAMP} TP0] Load weight begin. avail mem=94.50 GB
Loading safetensors checkpoint shards:   0% Completed | 0/47 [00:00<?, ?it/s]\rLoading safetensors checkpoint shards:   4% Completed | 2/47
{STAMP} TP0] Load weight end. type=GlmMoeDsaForCausalLM, dtype=torch.bfloat16, avail mem=30.10 GB, mem usage=64.40 GB.
{STAMP} TP0] Config file not found at /x/E=160,N=192,device_name=NVIDIA_RTX_PRO_6000.json. Fallback to triton.
{STAMP} TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=12.00 GB
Capturing batches (bs=32 avail_mem=11.81 GB):  50%|#####     | 4/8 [00:02<00:02,  1.9it/s]
{STAMP} TP0] FlashInfer workspace initialized for rank 0, world_size 8
{STAMP} TP0] Capture cuda graph end. Time elapsed: 31.05 s. mem usage=1.20 GB. avail mem=10.90 GB.
{STAMP}] INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)
{STAMP}] INFO:     127.0.0.1:51001 - "GET /health HTTP/1.1" 503 Service Unavailable
{STAMP}] The server is fired up and ready to roll!
"""
NORMAL_0_5_23 = f"""\
{STAMP} TP0] FlashInfer AllReduce Fusion enabled and workspace initialized: backend=trtllm, rank=0, world_size=8, max_token_num=2048
{STAMP} TP0] Running FlashInfer autotune with cache: /var/cache/sglang/autotune.json
{STAMP} TP0] [Autotuner]: Skipping tactic (<object>, 7) due to failure while profiling: Failed to initialize cutlass TMA WS grouped gemm.
{STAMP} TP0] FlashInfer autotune completed.
{STAMP} TP0] Capture target decode CUDA graph begin. backend=full, num_tokens_per_bs=1, bs=[1, 2, 4], avail mem=11.00 GB
{STAMP} TP0] Capture target decode CUDA graph end. elapsed=4.10 s, mem usage=0.90 GB, avail mem=10.10 GB.
{STAMP}] The server is fired up and ready to roll!
"""

CLOSED_MODULE = ranks(
    8,
    f"""\
Scheduler hit an exception: Traceback (most recent call last):
  File "/opt/sglang/venv/lib/python3.12/site-packages/sglang/srt/model_executor/cuda_graph_runner.py", line 371, in __init__
    self.capture()
  File "/opt/sglang/venv/lib/python3.12/site-packages/flashinfer/jit/comm.py", line 61, in gen_trtllm_comm_module
    nvcc_flags = current_compilation_context.get_nvcc_flags_list(
  File "/opt/sglang/venv/lib/python3.12/site-packages/flashinfer/compilation_context.py", line 62, in get_nvcc_flags_list
    raise RuntimeError(
RuntimeError: No supported CUDA architectures found for major versions [9, 10].

{RAISED}

Traceback (most recent call last):
  File "/opt/sglang/venv/lib/python3.12/site-packages/sglang/srt/managers/scheduler.py", line 2705, in run_scheduler_process
    scheduler = Scheduler(
Exception: Capture cuda graph failed: No supported CUDA architectures found for major versions [9, 10].
Possible solutions:
1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)
2. set --cuda-graph-max-bs to a smaller value (e.g., 16)
""",
)
DIED = f"""\
{STAMP}] Received sigquit from a child process. It usually means the child failed.
sglang.service: Main process exited, code=killed, status=9/KILL
sglang.service: Failed with result 'signal'.
"""
CLOSED_BACKEND = ranks(
    8,
    """\
Scheduler hit an exception: Traceback (most recent call last):
  File "/opt/sglang/venv/lib/python3.12/site-packages/sglang/srt/layers/flashinfer_comm_fusion.py", line 49, in _resolve_backend
    raise ValueError(
ValueError: FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs.
""",
)
OLD_NVCC = ranks(
    2,
    """\
Failed to get device capability: SM 12.x requires CUDA >= 12.9.
Scheduler hit an exception: Traceback (most recent call last):
  File "/opt/sglang/venv/lib/python3.12/site-packages/flashinfer/jit/core.py", line 90, in check_cuda_arch
    raise RuntimeError("FlashInfer requires GPUs with sm75 or higher")
RuntimeError: FlashInfer requires GPUs with sm75 or higher
""",
)
PREFILL_GRAPH = f"""\
{STAMP} TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/runner/prefill_cuda_graph_runner.py", line 521, in capture
    raise Exception(
Exception: Capture prefill CUDA graph failed: CUDA error: out of memory
Possible solutions:
"""
KILLED_RANK = f"""\
{STAMP} TP0] Load weight begin. avail mem=94.50 GB
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/x/sglang/srt/entrypoints/engine.py", line 2030, in _wait_for_scheduler_ready
RuntimeError: Rank 3 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common cause ...
"""
COMPILER_KILLED = f"""\
{STAMP} TP0] Scheduler hit an exception: Traceback (most recent call last):
subprocess.CalledProcessError: Command '['ninja', '-v', '-C', '/var/cache/sglang']' returned non-zero exit status 1.

The above exception was the direct cause of the following exception:

RuntimeError: Ninja build failed. Ninja output:
ninja: Entering directory `/var/cache/sglang/.cache/flashinfer/0.6.1/120a/cached_ops'
[1/3] /usr/local/cuda/bin/nvcc --generate-dependencies-with-compile -c trtllm_allreduce_fusion.cu -o trtllm_allreduce_fusion.cuda.o
FAILED: [code=137] trtllm_comm/trtllm_allreduce_fusion.cuda.o
/usr/local/cuda/bin/nvcc --generate-dependencies-with-compile -c trtllm_allreduce_fusion.cu
Killed
ninja: build stopped: subcommand failed.
"""
WATCHDOG = f"""\
{STAMP} TP3] Decode batch, #running-req: 12, #token: 90000, token usage: 0.31, cuda graph: True, gen throughput (token/s): 801.2
{STAMP} TP3] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)
{STAMP}] SIGQUIT received. signum=3, frame=<frame at 0x1>. It usually means one child failed.
"""
NCCL = f"""\
{STAMP} TP1] Init torch distributed begin.
{STAMP} TP1] Scheduler hit an exception: Traceback (most recent call last):
RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)
"""
PORT = """\
INFO:     Started server process [4711]
ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use
"""
UNKNOWN_FLAG = """\
usage: launch_server.py [-h] --model-path MODEL_PATH
launch_server.py: error: unrecognized arguments: --flashinfer-allreduce-fusion-backend trtllm
sglang.service: Main process exited, code=exited, status=2/INVALIDARGUMENT
"""
NO_MODEL = """\
Traceback (most recent call last):
requests.exceptions.HTTPError: 404 Client Error: Not Found for url: https://huggingface.co/nvidia/GLM-5/resolve/main/config.json

The above exception was the direct cause of the following exception:

OSError: nvidia/GLM-5 is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'
"""
HOST_MEMORY = """\
Memory cgroup out of memory: Killed process 4712 (sglang::schedul) total-vm:1kB, anon-rss:1kB
sglang.service: A process of this unit has been killed by the OOM killer.
sglang.service: Failed with result 'oom-kill'.
"""
NO_GATES = """\
blackwell.inference: opened gates have changed on disk, as after a reinstall. Run: ansible-playbook blackwell.inference.site
sglang.service: Control process exited, code=exited, status=1/FAILURE
Failed to start SGLang server sglang.
"""


@pytest.mark.parametrize("text", [NORMAL_0_5_8, NORMAL_0_5_23], ids=["0.5.8", "0.5.23"])
def test_a_normal_start_gives_no_reason(text):
    log = journal(text)
    assert (log.reason, log.hardware, log.exception) == (None, None, "")
    assert log.progress.endswith("The server is fired up and ready to roll!")
    assert log.fusion_ranks == {0}


@pytest.mark.parametrize(
    ("parts", "name", "line"),
    [
        ((NORMAL_0_5_8, CLOSED_MODULE, DIED), "fusion-module-closed", "RuntimeError: No supported CUDA architectures"),
        ((CLOSED_BACKEND, DIED), "fusion-backend-closed", "ValueError: FlashInfer allreduce fusion requires"),
        ((OLD_NVCC, DIED), "nvcc-too-old-for-12", "SM 12.x requires CUDA >= 12.9"),
        ((NORMAL_0_5_23, PREFILL_GRAPH, DIED), "graph-capture-memory", "Exception: Capture prefill CUDA graph failed"),
        ((KILLED_RANK,), "rank-killed", "RuntimeError: Rank 3 scheduler died"),
        ((COMPILER_KILLED, DIED), "compiler-killed", "FAILED: [code=137]"),
        ((NORMAL_0_5_8, WATCHDOG), "watchdog", "TP3] Scheduler watchdog timeout"),
        ((NCCL, DIED), "nccl-error", "RuntimeError: NCCL error"),
        ((NORMAL_0_5_8, PORT), "port-in-use", "[Errno 98]"),
        ((UNKNOWN_FLAG,), "fusion-flag-unknown", "unrecognized arguments"),
        ((NO_MODEL,), "model-not-found", "OSError: nvidia/GLM-5 is not a local folder"),
        ((NORMAL_0_5_8, HOST_MEMORY, DIED), "host-memory", "Memory cgroup out of memory"),
        ((NO_GATES,), "gates-changed", "blackwell.inference: opened gates have changed"),
        ((NORMAL_0_5_8, DIED), "child-died", "Received sigquit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_reason_is_found(parts, name, line):
    signature, text = journal(*parts).reason
    assert signature.name == name
    assert line in text


def test_without_a_signature_the_exception_of_the_first_traceback_is_told():
    log = journal(
        "ImportError: cannot import name 'x' from 'y', going on without",
        "Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/x/model.py", line 1, in load',
        "    raise KeyError(name)",
        "KeyError: 'model.layers.78.mlp.gate'",
        RAISED,
        "Traceback (most recent call last):",
        "RuntimeError: Initialization failed. Please see the error messages above.",
    )
    assert (log.reason, log.exception) == (None, "KeyError: 'model.layers.78.mlp.gate'")


def test_an_exception_without_text_is_one():
    assert journal("Traceback (most recent call last):", "    assert a == b", "AssertionError").exception == "AssertionError"
