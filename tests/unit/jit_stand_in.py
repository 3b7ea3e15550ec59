# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A serving venv whose flashinfer and sglang are the released ones, on a machine without GPU, torch, ninja or nvcc.

Stand-ins: torch (says which GPUs there are), tvm_ffi, and the programs nvcc, c++ and ninja. The stand-in ninja "builds"
a library by wrapping the architectures of build.ninja into the container that nvcc uses; it holds no machine code.
"""

from __future__ import annotations

import struct
import sys
import venv
from pathlib import Path

from ansible_collections.blackwell.inference.tests.unit.wheels import unpack

KINDS = {"compute": 1, "sm": 2}
SUFFIX_BITS = {"": 0, "a": 0x100000, "f": 0x200000}
MEMBERS = ("jit/*", "version.py", "_build_meta.py", "compilation_context.py", "artifacts.py", "utils.py", "data/csrc/*", "data/include/*")

TORCH = """
import os, types

class Anything:
    def __getattr__(self, name):
        return Anything()

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything()

gpus = [tuple(map(int, gpu.split("."))) for gpu in os.environ.get("STAND_IN_GPUS", "").split()]
__version__, version = "2.9.1+cu130", types.SimpleNamespace(cuda="13.0", hip=None)
cuda = types.SimpleNamespace(device_count=lambda: len(gpus), get_device_capability=lambda device: gpus[device])
_C = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)
"""
TVM_FFI = """
import types
libinfo = types.SimpleNamespace(find_include_path=lambda: "/tvm", find_dlpack_include_path=lambda: "/dlpack")
"""
NVCC = """#!/bin/sh
echo 'Cuda compilation tools, release '"${STAND_IN_NVCC:-13.0}"', V0'
case "$*" in
  *--dryrun*compute_"${STAND_IN_UNKNOWN:-none}"*)
    echo "nvcc fatal   : Unsupported gpu architecture 'compute_$STAND_IN_UNKNOWN'" >&2
    exit 1 ;;
esac
"""
CXX = """#!/bin/sh
test -z "$STAND_IN_LINK_ERROR" || { echo "/usr/bin/ld: cannot find -lcuda: No such file or directory" >&2; exit 1; }
"""
NINJA = """#!{python}
import os, pathlib, re, sys, time
sys.path[:0] = {path!r}
from ansible_collections.blackwell.inference.tests.unit.jit_stand_in import shared_library
folder = pathlib.Path(sys.argv[sys.argv.index("-C") + 1])
plan = (folder / "build.ninja").read_text()
sources = [pathlib.Path(name) for name in re.findall(r"cuda_compile (\\S+)", plan)]
library = folder / f"{{folder.name}}.so"
if "deps" in sys.argv:
    print("x.cuda.o: #deps 1, deps mtime 1 (VALID)", *(f"    {{name}}" for name in sources), sep="\\n")
elif library.exists() and all(name.stat().st_mtime <= library.stat().st_mtime for name in sources):
    print("ninja: no work to do.")
elif "-n" not in sys.argv:
    if "STAND_IN_ERROR" in os.environ:
        print("FAILED: x.cuda.o", "nvcc -c x.cu error: not this", os.environ["STAND_IN_ERROR"], "ninja: build stopped", sep="\\n")
        sys.exit(1)
    time.sleep(float(os.environ.get("STAND_IN_SECONDS", "0")))
    codes = os.environ.get("STAND_IN_CODES", "").split() or re.findall(r",code=(\\w+)", plan)
    library.write_bytes(shared_library(*codes))
    (folder / "environment").write_text("".join(f"{{name}}={{value}}\\n" for name, value in os.environ.items()))
"""


def shared_library(*codes: str) -> bytes:
    """Return an ELF file with the section that nvcc makes, holding an empty image for each code such as ``sm_120a``."""
    images = b""
    for code in codes:
        kind, arch = code.split("_")
        number, suffix = arch.rstrip("af"), arch[len(arch.rstrip("af")) :]
        image = struct.pack("<HHIQ8xHHI8xQ16x", KINDS[kind], 0x101, 64, 16, 8, 1, int(number), 0x11 | SUFFIX_BITS[suffix])
        images += image + bytes(16)
    return elf(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(images)) + images)


def elf(fat_binary: bytes) -> bytes:
    """Return an ELF file with this content in its section ``.nv_fatbin``."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    content = fat_binary + names
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, 64 + len(content), 0, 64, 0, 0, 64, 3, 2)
    sections = bytes(64)
    for name, offset, size in ((1, 64, len(fat_binary)), (12, 64 + len(fat_binary), len(names))):
        sections += struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, offset, size, 0, 0, 0, 0)
    return header + content + sections


def serving_venv(folder: Path, flashinfer: str, sglang: str) -> Path:
    """Make a venv in ``folder`` with these releases; return its interpreter. The programs are in ``folder/cuda/bin``."""
    venv.create(folder, system_site_packages=False, symlinks=True)
    python = folder / "bin" / "python"
    (packages,) = (folder / "lib").glob("python*/site-packages")
    unpack("flashinfer-python", flashinfer, packages, *(f"flashinfer/{member}" for member in MEMBERS))
    unpack("sglang", sglang, packages, "sglang/srt/environ.py")
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text(TORCH)
    (packages / "tvm_ffi.py").write_text(TVM_FFI)
    here = [path for path in sys.path if path]
    # What flashinfer's JIT imports besides, from the venv of the tests.
    (packages / "tests.pth").write_text("\n".join(path for path in here if path.endswith("site-packages")) + "\n")
    programs = folder / "cuda" / "bin"
    programs.mkdir(parents=True)
    for name, text in (("nvcc", NVCC), ("c++", CXX), ("ninja", NINJA.format(python=sys.executable, path=here))):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return python
