# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When flashinfer goes on with an old object, shown with its own JIT core and a tiny module; and that clearing helps."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.plugins.modules import jit_cache

SOURCE = '#include "value.h"\n__global__ void kernel(int *x) { *x = VALUE; }\nextern "C" int value() { return VALUE; }\n'
# Builds module "tiny" the way every operator of flashinfer is built, loads it and prints the number compiled into it.
BUILD = """
import ctypes, importlib.util, pathlib, sys, types
package = types.ModuleType("flashinfer")  # without loading all of its operators
package.__path__ = list(importlib.util.find_spec("flashinfer").submodule_search_locations)
sys.modules["flashinfer"] = package
from flashinfer.jit import core
folder, flags = pathlib.Path(sys.argv[1]), sys.argv[2:]
spec = core.gen_jit_spec("tiny", [folder / "tiny.cu"], extra_cuda_cflags=flags, extra_include_paths=[folder])
spec.build(verbose=False, need_lock=True)
print(ctypes.CDLL(str(spec.jit_library_path)).value())
"""


class Tiny:
    """The sources of the module, and the service that builds it."""

    def __init__(self, folder: Path, python: Path, environment: dict[str, str]) -> None:
        self.folder, self.python, self.environment = folder, python, environment
        folder.mkdir()
        (folder / "tiny.cu").write_text(SOURCE)
        self.define(1)

    def define(self, value: int, seconds_ago: int = 0) -> None:
        """Set the number in the header; give the header a date in the past."""
        header = self.folder / "value.h"
        before = header.stat().st_mtime if header.exists() else None
        header.write_text(f"#ifndef VALUE\n#define VALUE {value}\n#endif\n")
        if seconds_ago:
            os.utime(header, (before - seconds_ago,) * 2)

    def value(self, *flags: str) -> int:
        """Build the module and return the number that the library holds."""
        environment = {**self.environment, "FLASHINFER_CUDA_ARCH_LIST": "12.0a"}
        command = [self.python, "-c", BUILD, self.folder, *flags]
        return int(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


# build.ninja is written once and for all up to 0.6.11.
@pytest.fixture(params=["0.6.1", "0.7.4"])
def flashinfer(request) -> str:
    return request.param


@pytest.fixture
def tiny(flashinfer, serving_python, environment, tmp_path) -> Tiny:
    # Here no sglang is imported that would set it.
    environment = {**environment, "FLASHINFER_WORKSPACE_BASE": environment["HOME"]}
    return Tiny(tmp_path / "sources", serving_python(flashinfer), environment)


@pytest.fixture
def clear(tiny, run):
    def clear() -> None:
        arguments = {"python": str(tiny.python), "environment": tiny.environment, "modules": ["tiny"]}
        assert len(run(jit_cache, **arguments)["removed"]) == 1
        assert not run(jit_cache, **arguments)["changed"]

    return clear


def test_a_header_with_a_new_date_is_noticed(tiny):
    assert tiny.value() == 1
    tiny.define(2)
    assert tiny.value() == 2


def test_a_header_with_an_old_date_is_not(tiny, clear):
    assert tiny.value() == 1
    tiny.define(2, seconds_ago=3600)
    assert tiny.value() == 1
    clear()
    assert tiny.value() == 2


def test_other_flags_are_not_noticed_by_old_releases(tiny, clear, flashinfer):
    assert tiny.value("-DVALUE=3") == 3
    assert tiny.value("-DVALUE=4") == {"0.6.1": 3, "0.7.4": 4}[flashinfer]
    clear()
    assert tiny.value("-DVALUE=4") == 4


def test_a_second_venv_with_the_same_home_gets_the_code_of_the_first_from_old_releases(tiny, clear, flashinfer, tmp_path):
    second = Tiny(tmp_path / "second", tiny.python, tiny.environment)
    second.define(5)
    assert tiny.value() == 1
    assert second.value() == {"0.6.1": 1, "0.7.4": 5}[flashinfer]
    clear()
    assert second.value() == 5


def test_a_removal_cut_short_leaves_nothing_that_is_used_again(tiny):
    assert tiny.value() == 1
    tiny.define(2, seconds_ago=3600)
    (log,) = Path(tiny.environment["HOME"]).rglob("tiny/.ninja_log")
    log.unlink()  # what goes first
    assert tiny.value() == 2
