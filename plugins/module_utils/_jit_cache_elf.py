# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which GPUs a shared library holds code for, read from its ELF sections: what ``cuobjdump --list-elf --list-ptx`` tells.

nvcc puts its output into the section ``.nv_fatbin`` as a row of fat binaries, each a header and a row of images.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError

_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
_MAGIC = 0xBA55ED50
_KINDS = {1: "compute_", 2: "sm_"}  # PTX, machine code
_SUFFIXES = {0x100000: "a", 0x200000: "f"}  # bits of an image's flags: for this chip only, for its family


def device_code(path: str) -> list[str]:
    """Return e.g. ``["sm_120a", "sm_90a"]``, sorted and without repeats; PTX shows as ``compute_120``.

    Raises:
        InferenceError: The file cannot be read or is not a whole 64-bit ELF file.
    """
    try:
        return images(Path(path).read_bytes())
    except OSError as error:
        raise InferenceError(path, f"cannot be read ({error.strerror})", "the library of a built module") from None
    except ValueError:
        raise InferenceError(
            path, "is not a whole ELF file", "the library of a built module", "Clear the module and build it again."
        ) from None


def images(data: bytes) -> list[str]:
    """The same of a library's bytes.

    Raises:
        ValueError: They are not a whole 64-bit ELF file.
    """
    try:
        return sorted({name for section in _sections(data) for name in _images(section)})
    except (struct.error, IndexError):
        raise ValueError("not a whole ELF file") from None


def runs_on(image: str, code: str) -> bool:
    """Tell whether an image such as ``sm_120f`` runs on the GPU that code such as ``sm_120a`` is for."""
    kind, _separator, arch = image.partition("_")
    wanted = int(code.partition("_")[2].rstrip("af"))
    if kind == "compute":  # PTX: for this and later GPUs, unless it is bound to a chip
        return arch.isdigit() and int(arch) <= wanted
    if arch.endswith("a"):
        return int(arch[:-1]) == wanted
    number = int(arch.rstrip("f"))
    return number // 10 == wanted // 10 and number <= wanted


def _sections(data: bytes) -> Iterator[bytes]:
    """Yield the contents of the sections that hold code for GPUs."""
    if data[:6] != b"\x7fELF\x02\x01":  # 64 bits, little endian: all that CUDA runs on
        raise ValueError
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + index * entry_size) for index in range(count)]
    names = headers[names_index][4]
    for name, _kind, _flags, _address, offset, size in headers:
        if data[names + name : data.index(b"\0", names + name)] in _SECTIONS:
            if offset + size > len(data):
                raise ValueError
            yield data[offset : offset + size]


def _images(section: bytes) -> Iterator[str]:
    position = 0
    while position + 16 <= len(section):
        magic, _version, header, size = struct.unpack_from("<IHHQ", section, position)
        if magic != _MAGIC:
            position += 8  # padding between fat binaries
            continue
        image, end = position + header, position + header + size
        while image < end:
            kind, _version, image_header, image_size = struct.unpack_from("<HHIQ", section, image)
            if image_header < 48:
                raise ValueError
            arch, flags = struct.unpack_from("<I8xQ", section, image + 28)
            if kind in _KINDS:
                yield f"{_KINDS[kind]}{arch}{''.join(suffix for bit, suffix in _SUFFIXES.items() if flags & bit)}"
            image += image_header + image_size
        position = end
