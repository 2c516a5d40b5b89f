"""A loadable `libcuda.so.1` with nothing in it, for hosts without a driver.

The CUDA build of vLLM links against the driver's library. Its functions are bound lazily, so loading needs the library to be
there but nothing from it, as long as no CUDA call is made. The file is written here, byte by byte: no compiler is needed.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import tempfile
from pathlib import Path

from probe_cli.errors import EngineError

__all__ = ["SONAME", "driver_is_installed", "load_stub", "stub_bytes"]

SONAME = "libcuda.so.1"

_MACHINES = {"x86_64": 62, "aarch64": 183}
_HEADER, _PROGRAM_HEADER, _SYMBOL, _DYNAMIC = 64, 56, 24, 16


def driver_is_installed() -> bool:
    """Whether the real library can be loaded here."""
    try:
        ctypes.CDLL(SONAME)
    except OSError:
        return False
    return True


def load_stub() -> None:
    """Make a library of that name known to the loader of this process, unless the real one is there."""
    if driver_is_installed():
        return
    descriptor, name = tempfile.mkstemp(suffix=".so")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(stub_bytes(platform.machine()))
        # The loader knows libraries by their soname: those loaded later find this one.
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise EngineError(
            f"a stand-in for {SONAME} cannot be loaded: {error}",
            hint="a temporary directory mounted noexec? set TMPDIR",
        ) from None
    finally:
        Path(name).unlink(missing_ok=True)


def stub_bytes(machine: str) -> bytes:
    """A shared object (ELF64, little endian) that defines no symbol and needs no library. Raises EngineError for a machine
    type that vLLM has no CUDA build for."""
    if machine not in _MACHINES:
        raise EngineError(f"there is no CUDA build of vLLM for {machine} hosts")
    strings = b"\0" + SONAME.encode() + b"\0"
    strings += b"\0" * (-len(strings) % 8)
    symbols = bytes(_SYMBOL)  # the null symbol
    buckets = struct.pack("<4I", 1, 1, 0, 0)  # a hash table over it: one bucket, one chain, both empty
    strings_at = _HEADER + 3 * _PROGRAM_HEADER
    symbols_at = strings_at + len(strings)
    buckets_at = symbols_at + len(symbols)
    dynamic_at = buckets_at + len(buckets)
    dynamic = b"".join(
        struct.pack("<qQ", tag, value)
        for tag, value in (
            (14, 1),  # DT_SONAME: offset in the string table
            (4, buckets_at),  # DT_HASH
            (5, strings_at),  # DT_STRTAB
            (6, symbols_at),  # DT_SYMTAB
            (10, len(strings)),  # DT_STRSZ
            (11, _SYMBOL),  # DT_SYMENT
            (0, 0),
        )
    )
    size = dynamic_at + len(dynamic)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",
        3,  # a shared object
        _MACHINES[machine],
        1,
        0,
        _HEADER,
        0,
        0,
        _HEADER,
        _PROGRAM_HEADER,
        3,
        64,
        0,
        0,
    )
    programs = (
        # Loaded whole and writable: the loader relocates the dynamic section in place.
        struct.pack("<IIQQQQQQ", 1, 6, 0, 0, 0, size, size, 0x10000)
        + struct.pack("<IIQQQQQQ", 2, 6, dynamic_at, dynamic_at, dynamic_at, len(dynamic), len(dynamic), 8)
        # The stack stays non-executable.
        + struct.pack("<IIQQQQQQ", 0x6474E551, 6, 0, 0, 0, 0, 0, 16)
    )
    return header + programs + strings + symbols + buckets + dynamic
