# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import subprocess
import sys

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils import _jit_build as jit_build
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._jit_cache_elf import device_code
from ansible_collections.blackwell.inference.plugins.module_utils._processes import describe
from ansible_collections.blackwell.inference.tests.unit.jit_stand_in import elf, shared_library

# Headers that nvcc 13.0 wrote for a kernel of one line: kind, sizes, number and flags of an image. Sizes are set to what follows here.
CAPTURED = {
    "sm_120": "02000101 70000000 1000000000000000 00000000 40000000 08000100 78000000 00000000 00000000 11000001 00000000",
    "sm_120a": "02000101 70000000 1000000000000000 00000000 40000000 08000100 78000000 00000000 00000000 11001001 00000000",
    "sm_120f": "02000101 70000000 1000000000000000 b0040000 40000000 08000100 78000000 00000000 00000000 11802001 00000000",
    "sm_90a": "02000101 40000000 1000000000000000 00000000 00000000 08000100 5a000000 00000000 00000000 11001000 00000000",
    "compute_120": "01000101 50000000 1000000000000000 02010000 40000000 00000900 78000000 00000000 00000000 11800000 00000000",
}


def fat_binary(*codes: str) -> bytes:
    images = b""
    for code in codes:
        header = bytes.fromhex(CAPTURED[code])
        images += header.ljust(header[4], b"\0") + bytes(16)
    return bytes.fromhex("50ed55ba 0100 1000") + len(images).to_bytes(8, "little") + images


@pytest.mark.parametrize("code", CAPTURED)
def test_device_code_of_one_image(tmp_path, code):
    (tmp_path / "library.so").write_bytes(elf(fat_binary(code)))
    assert device_code(str(tmp_path / "library.so")) == [code]


def test_device_code_of_several_objects_linked_into_one(tmp_path):
    section = fat_binary("sm_90a", "sm_120f") + bytes(8) + fat_binary("sm_120f", "compute_120")
    (tmp_path / "library.so").write_bytes(elf(section))
    assert device_code(str(tmp_path / "library.so")) == ["compute_120", "sm_120f", "sm_90a"]


def test_a_library_without_code_for_gpus(tmp_path):
    (tmp_path / "library.so").write_bytes(elf(b""))
    assert device_code(str(tmp_path / "library.so")) == []


@pytest.mark.parametrize("length", [0, 3, 70, 150, -40])
def test_a_library_cut_short_is_one_line(tmp_path, length):
    (tmp_path / "library.so").write_bytes(shared_library("sm_120a")[:length])
    with pytest.raises(InferenceError, match=r"library\.so: is not a whole ELF file; expected the library of a built module\."):
        device_code(str(tmp_path / "library.so"))


@pytest.mark.parametrize(
    ("images", "code", "runs"),
    [
        (["sm_120a"], "sm_120f", True),
        (["sm_120f"], "sm_120a", True),
        (["sm_120f"], "sm_121a", True),
        (["sm_120a"], "sm_121a", False),
        (["sm_120"], "sm_121a", True),
        (["sm_121a"], "sm_120a", False),
        (["sm_90a", "sm_100f"], "sm_120a", False),
        (["compute_90"], "sm_120a", True),
        (["compute_90a"], "sm_120a", False),
        ([], "sm_120a", False),
    ],
)
def test_which_images_run_on_which_gpu(tmp_path, images, code, runs):
    (tmp_path / "library.so").write_bytes(shared_library(*images))
    assert (jit_build.missing_code([str(tmp_path / "library.so")], [code]) == []) == runs


@pytest.mark.parametrize(
    ("gib", "cores", "jobs"),
    [(0, 64, 1), (15, 64, 1), (23, 2, 1), (32, 64, 2), (100, 64, 10), (500, 64, 60), (500, 16, 16)],
)
def test_max_jobs_leaves_the_host_its_memory(gib, cores, jobs):
    assert jit_build.max_jobs(f"MemTotal:  1 kB\nMemAvailable:   {gib << 20} kB\n", cores) == jobs


@pytest.mark.parametrize(("wanted", "jobs"), [("8", 2), ("1", 1), ("0", 2), ("", 2), ("many", 2)])
def test_max_jobs_of_the_unit_is_a_limit_and_no_order(monkeypatch, wanted, jobs):
    monkeypatch.setattr(jit_build.os, "sched_getaffinity", lambda pid: range(64))
    monkeypatch.setattr(jit_build.Path, "read_text", lambda path, encoding: f"MemAvailable: {32 << 20} kB\n")
    assert jit_build.max_jobs_here({"MAX_JOBS": wanted}) == jobs


def test_max_jobs_where_the_kernel_does_not_say():
    assert jit_build.max_jobs("MemTotal:  1 kB\n", 64) == 1


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("[1/4] nvcc -Werror -c a.cu\na.cuh(7): error: no\n1 error detected\nninja: build stopped", "a.cuh(7): error: no"),
        ("a.cpp:3:1: fatal error: x.h: No such file\ncompilation terminated.", "a.cpp:3:1: fatal error: x.h: No such file"),
        ("ptxas fatal   : Value 'sm_120' is not\nninja: build stopped", "ptxas fatal   : Value 'sm_120' is not"),
        ("ptxas /tmp/x.ptx, line 9; error   : Feature\nninja: stopped", "ptxas /tmp/x.ptx, line 9; error   : Feature"),
        ("nvcc fatal   : Unsupported gpu architecture\nTraceback", "nvcc fatal   : Unsupported gpu architecture"),
        ("/usr/bin/ld: cannot find -lcuda\ncollect2: error: ld returned 1 exit status", "/usr/bin/ld: cannot find -lcuda"),
        ("FAILED: x\nKilled\nninja: build stopped", "Killed"),
        ("Traceback\n  File\nModuleNotFoundError: No module named 'torch'\n", "ModuleNotFoundError: No module named 'torch'"),
        ("", "it said nothing"),
    ],
)
def test_the_first_error_of_a_build(output, line):
    assert jit_build.first_error(output) == line


def test_while_a_build_runs_its_sources_are_told(tmp_path):
    compiler = tmp_path / "compiler.py"
    compiler.write_text("import time; time.sleep(60)")
    build = f"import subprocess, sys; subprocess.run([sys.executable, {str(compiler)!r}, '-c', '/sources/trtllm_allreduce.cu'])"
    told = []
    with subprocess.Popen([sys.executable, "-c", build], text=True, start_new_session=True) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            jit_build._wait(process, timeout=3, progress=told.append, interval=1)
        assert "trtllm_allreduce.cu" in jit_build._compiling(process.pid)
        jit_build._stop(process)
    assert told[-1].endswith(" s: compiling trtllm_allreduce.cu")
    assert jit_build._session(process.pid) == []


def test_a_process_is_named_without_its_arguments():
    code = "print('ready', flush=True); input()"
    command = [sys.executable, "-c", code, "--api-key", "secret"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        assert describe(process.pid) == f"pid {process.pid} ({sys.executable})"
        process.communicate("\n")
    assert describe(process.pid) == f"pid {process.pid}"


def test_a_module_that_runs_is_named(tmp_path):
    (tmp_path / "serve.py").write_text("print('ready', flush=True); input()")
    command = [sys.executable, "-m", "serve", "--api-key", "secret"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        process.stdout.readline()
        assert describe(process.pid) == f"pid {process.pid} ({sys.executable} -m serve)"
        process.communicate("\n")
