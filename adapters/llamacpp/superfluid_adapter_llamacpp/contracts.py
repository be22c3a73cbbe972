"""What is known of llama.cpp's structs: `contracts.json`, typed.

A contract is a pair of layouts, of `llama_model_params` and `llama_context_params`, under a number
of ours. Offsets are in bytes and hold on LP64 (Linux and macOS, x86-64 and arm64). A new build is
a new row of data: `python -m superfluid_adapter_llamacpp.evidence LIB` prints what to write.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

Kind: TypeAlias = Literal["i32", "u32", "f32", "u64", "ptr", "bool"]
CODES: Final[Mapping[Kind, struct.Struct]] = {
    "i32": struct.Struct("<i"),
    "u32": struct.Struct("<I"),
    "f32": struct.Struct("<f"),
    "u64": struct.Struct("<Q"),
    "ptr": struct.Struct("<Q"),
    "bool": struct.Struct("<B"),
}
_FILE: Final = Path(__file__).with_name("contracts.json")


@dataclass(frozen=True, slots=True)
class Field:
    """One member of a struct, and what the library's own defaults may hold there."""

    name: str
    offset: int
    kind: Kind
    defaults: tuple[float, ...]

    def read(self, raw: bytes | bytearray) -> float:
        value: float = CODES[self.kind].unpack_from(raw, self.offset)[0]
        return value

    def write(self, raw: bytearray, value: float) -> None:
        whole = value if self.kind == "f32" else int(value)
        CODES[self.kind].pack_into(raw, self.offset, whole)

    @property
    def bytes(self) -> range:
        return range(self.offset, self.offset + CODES[self.kind].size)


@dataclass(frozen=True, slots=True)
class Layout:
    """A struct: its size, where its last member ends (`written`), its members by name."""

    name: str
    struct: str
    size: int
    written: int
    fields: Mapping[str, Field]

    def differences(self, raw: bytes) -> Iterator[str]:
        """Each member whose default in `raw` is none that this layout has, in words."""
        for field in self.fields.values():
            found = field.read(raw)
            if found not in field.defaults:
                wanted = " or ".join(f"{value:g}" for value in field.defaults)
                yield f"{field.name} reads {found:g}, wanted {wanted}"

    def covers(self) -> frozenset[int]:
        """Every byte that belongs to a member."""
        return frozenset(byte for field in self.fields.values() for byte in field.bytes)


@dataclass(frozen=True, slots=True)
class Contract:
    """One number: the two layouts, whether we serve it, the builds it was seen in."""

    number: int
    model: Layout
    context: Layout
    served: bool
    builds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """A published library file by its digest: which build of llama.cpp it is, and whose."""

    build: str
    source: str
    contract: int
    platform: str
    sha256: str


class _Layout(msgspec.Struct):
    struct: str
    size: int
    written: int
    fields: dict[str, tuple[int, Kind, float | Sequence[float]]]


class _Contract(msgspec.Struct):
    number: int
    model: str
    context: str
    served: bool
    builds: tuple[str, ...]


class _File(msgspec.Struct):
    layouts: dict[str, _Layout]
    contracts: list[_Contract]
    known: list[Known]


@functools.cache
def contracts() -> Mapping[int, Contract]:
    """Every contract by its number, ascending."""
    file = _read()
    layouts = {name: _typed(name, one) for name, one in file.layouts.items()}
    return {
        one.number: Contract(
            one.number, layouts[one.model], layouts[one.context], one.served, one.builds
        )
        for one in file.contracts
    }


def served() -> tuple[int, ...]:
    """The numbers that serve."""
    return tuple(number for number, one in contracts().items() if one.served)


@functools.cache
def known() -> Mapping[str, Known]:
    """Published libraries by their digest."""
    return {one.sha256: one for one in _read().known}


@functools.cache
def _read() -> _File:
    return msgspec.json.decode(_FILE.read_bytes(), type=_File)


def _typed(name: str, one: _Layout) -> Layout:
    fields = {}
    for field, (offset, kind, default) in one.fields.items():
        values = tuple(default) if isinstance(default, Sequence) else (default,)
        fields[field] = Field(field, offset, kind, values)
    return Layout(name, one.struct, one.size, one.written, fields)
