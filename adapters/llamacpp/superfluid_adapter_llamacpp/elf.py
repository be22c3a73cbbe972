"""What an ELF file says of itself before anything loads it: machine, dependencies, versions.

Layout: the System V ABI's ELF-64, and the symbol version sections of the Linux Standard Base.
"""

from __future__ import annotations

import itertools
import mmap
import os
import platform
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_EHDR: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_PHDR: Final = struct.Struct("<IIQQQQQQ")
_DYN: Final = struct.Struct("<QQ")
_VERNEED: Final = struct.Struct("<HHIII")
_VERNAUX: Final = struct.Struct("<IHHII")
_PT_LOAD, _PT_DYNAMIC = 1, 2
_NEEDED, _STRTAB, _SONAME, _RPATH, _RUNPATH, _VERNEED_AT, _VERNEED_COUNT = (
    1, 5, 14, 15, 29, 0x6FFFFFFE, 0x6FFFFFFF,
)  # fmt: skip
_MOST: Final = 4096
_MACHINES: Final = {3: "x86", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}


class NotElf(Exception):
    """The file is no ELF-64 shared library; the message says what it is."""


@dataclass(frozen=True, slots=True)
class Elf:
    """`glibc` is the newest GLIBC version that the file's symbols need, as (2, 34)."""

    machine: str
    needed: tuple[str, ...]
    runpath: tuple[str, ...]
    glibc: tuple[int, ...]


def read_elf(path: Path) -> Elf:
    """Read `path`. Raises `NotElf`, `OSError`."""
    with path.open("rb") as file:
        if not file.read(1):
            raise NotElf("an empty file")
        if not os.fstat(file.fileno()).st_size:
            raise NotElf("a file that tells no size")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(data).read()
            except (struct.error, IndexError, OverflowError) as error:
                raise NotElf("an ELF file whose tables lie outside of it") from error


def here() -> str:
    """This machine, as `Elf.machine` names it."""
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(
        platform.machine().lower(), platform.machine().lower()
    )


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._loads: list[tuple[int, int, int]] = []
        self._strings = 0

    def read(self) -> Elf:
        if self._data[:4] != b"\x7fELF":
            raise NotElf(f"a file that begins with {self._data[:4].hex(' ')}")
        if self._data[4:6] != b"\x02\x01":
            raise NotElf("an ELF file that is not 64-bit little-endian")
        head = _EHDR.unpack_from(self._data)
        if head[1] != 3:
            raise NotElf(f"an ELF file of type {head[1]}, a shared library has 3")
        dynamic = self._dynamic(head[5], head[10])
        named = dict(dynamic)
        self._strings = self._at(named.get(_STRTAB, 0))
        paths = [self._string(at) for tag, at in dynamic if tag in (_RPATH, _RUNPATH)]
        return Elf(
            machine=_MACHINES.get(head[2], f"machine {head[2]}"),
            needed=tuple(self._string(at) for tag, at in dynamic if tag == _NEEDED),
            runpath=tuple(one for path in paths for one in path.split(":") if one),
            glibc=max(self._versions(named), default=()),
        )

    def _dynamic(self, table: int, count: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for index in range(count):
            kind, _, offset, address, _, size, _, _ = _PHDR.unpack_from(
                self._data, table + index * _PHDR.size
            )
            if kind == _PT_LOAD:
                self._loads.append((address, offset, size))
            elif kind == _PT_DYNAMIC:
                entries = range(offset, offset + min(size, _MOST * _DYN.size), _DYN.size)
                found = [_DYN.unpack_from(self._data, at) for at in entries]
        return found

    def _at(self, address: int) -> int:
        for start, offset, size in self._loads:
            if start <= address < start + size:
                return offset + address - start
        raise NotElf(f"an ELF file whose address {address:#x} lies in no segment")

    def _string(self, offset: int) -> str:
        start = self._strings + offset
        end = self._data.find(b"\0", start, start + _MOST)
        if end < 0:
            raise NotElf("an ELF file with a name that does not end")
        return self._data[start:end].decode(errors="replace")

    def _versions(self, dynamic: dict[int, int]) -> Iterator[tuple[int, ...]]:
        words = itertools.islice(self._version_names(dynamic), _MOST)
        for word in words:
            if word.startswith("GLIBC_") and re.fullmatch(r"[0-9.]*[0-9]", word[6:]):
                yield tuple(int(part) for part in word[6:].split(".") if part)

    def _version_names(self, dynamic: dict[int, int]) -> Iterator[str]:
        if _VERNEED_AT not in dynamic:
            return
        at = self._at(dynamic[_VERNEED_AT])
        for _ in range(min(dynamic.get(_VERNEED_COUNT, 0), _MOST)):
            _, count, _, first, following = _VERNEED.unpack_from(self._data, at)
            entry = at + first
            for _ in range(count):
                _, _, _, name, step = _VERNAUX.unpack_from(self._data, entry)
                yield self._string(name)
                entry += step
            at += following
