"""A GGUF header, read without any engine: what the model is, and whether its file is whole.

Layout: the GGUF specification (docs/gguf.md of the ggml project), versions 2 and 3, little endian.
Long arrays are walked over and only counted. Types of tensors are llama.cpp's to judge; of those
we know, the bytes must lie within the file.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import re
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from superfluid_compat.errors import ModelDamaged, ModelError, ModelNotFound, UnsupportedType

_HEAD: Final = struct.Struct("<4sIQQ")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_CODES: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
                 12: "d"}  # fmt: skip
FLOAT32: Final = 6
STRING: Final = 8
_ARRAY: Final = 9
INTEGERS: Final = frozenset({0, 1, 2, 3, 4, 5, 7, 10, 11})
"""Kinds of whole numbers, truth values among them."""

_KEPT_ITEMS: Final = 4096
_MAX_KEYS: Final = 1 << 16
_MAX_TENSORS: Final = 1 << 20
_MAX_RANK: Final = 4
_MAX_NAME_BYTES: Final = 1 << 16
_SAMPLE_BYTES: Final = 64
_MOST: Final = 1 << 32
"""Counts are of 32 bits in llama.cpp."""

_PART: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

TYPES: Final[Mapping[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
    26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
"""ggml's type numbers: name, elements of a block, its bytes."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as the header describes it; `end` is where its bytes end in its file, if known."""

    name: str
    type: int
    elements: int
    start: int
    end: int | None

    @property
    def type_name(self) -> str:
        known = TYPES.get(self.type)
        return known[0] if known else f"type {self.type}"


class Array(NamedTuple):
    """How an array is described: the kind of its items, by GGUF's number, and how many."""

    kind: int
    length: int


@dataclass(frozen=True, slots=True)
class Header:
    """A model's header, all parts of a split one together.

    `fingerprint` tells models apart: it covers the headers and the first bytes of every tensor.
    """

    path: Path
    metadata: Mapping[str, Any]
    arrays: Mapping[str, Array]
    tensors: tuple[Tensor, ...]
    size: int
    fingerprint: bytes

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def own(self, key: str, default: Any = None) -> Any:
        """A key of the architecture's own: `own("context_length")`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: int = 0) -> int:
        """`own` where a whole number is wanted. Raises `ModelDamaged` for anything else."""
        value = self.own(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST:
            raise ModelDamaged(
                f"{self.path}: {self.architecture}.{key} is {str(value)[:40]!r}, a whole number "
                "was wanted"
            )
        return int(value)


def read_header(path: Path) -> Header:
    """Read the model `path`, and its other parts when it is the first of several.

    Raises `ModelNotFound`, `ModelDamaged`, `UnsupportedType`.
    """
    hasher = hashlib.blake2b(digest_size=16)
    first = _read_part(path, hasher.update)
    parts = [first]
    count = first.metadata.get("split.count", 1)
    if isinstance(count, int) and count > 1:
        parts += [_read_part(one, hasher.update) for one in _others(path, count)]
    architecture = first.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise ModelDamaged(f"{path}: general.architecture names no architecture")
    return Header(
        path=path,
        metadata=first.metadata,
        arrays=first.arrays,
        tensors=tuple(tensor for part in parts for tensor in part.tensors),
        size=sum(part.size for part in parts),
        fingerprint=hasher.digest(),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    metadata: dict[str, Any]
    arrays: dict[str, Array]
    tensors: list[Tensor]
    size: int


def _others(path: Path, count: int) -> list[Path]:
    name = _PART.fullmatch(path.name)
    if name is None or int(name["count"]) != count or int(name["number"]) != 1:
        raise ModelDamaged(
            f"{path}: says it has {count} parts, the name of the first, which ends in "
            f"-00001-of-{count:05}.gguf, was wanted",
            fix="name the first part, under the names they were published under",
        )
    numbers = range(2, count + 1)
    return [path.with_name(f"{name['stem']}-{it:05}-of-{count:05}.gguf") for it in numbers]


def _read_part(path: Path, absorb: Callable[[bytes], object]) -> _Part:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelNotFound(f"{path} is no regular file, a GGUF file was wanted")
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise ModelDamaged(f"{path} is empty, a GGUF file was wanted")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).read(absorb)
    except FileNotFoundError as error:
        raise ModelNotFound(f"no model at {path}", fix="give the path of a model") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error


class _Reader:
    """A walk over one file; every step is checked against its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0
        self._arrays: dict[str, Array] = {}

    def read(self, absorb: Callable[[bytes], object]) -> _Part:
        magic, version, tensors, keys = self._take(_HEAD)
        if magic != b"GGUF":
            self._damaged(f"begins with {magic!r}, b'GGUF' was wanted")
        if version in (2 << 24, 3 << 24):
            raise UnsupportedType(f"{self._path} is big-endian, a little-endian file was wanted")
        if version not in (2, 3):
            raise UnsupportedType(f"{self._path}: GGUF version {version}, 2 or 3 was wanted")
        if keys > _MAX_KEYS or tensors > _MAX_TENSORS:
            self._damaged(f"counts {keys} keys and {tensors} tensors")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._text(_MAX_NAME_BYTES)
            metadata[key] = self._value(key, self._take(_U32)[0])
        described = [self._tensor() for _ in range(tensors)]
        absorb(self._data[: self._at])
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            self._damaged("general.alignment is no positive number")
        start = -(-self._at // alignment) * alignment
        placed = [self._place(start, *one) for one in described]
        for tensor in placed:
            absorb(self._data[tensor.start : tensor.start + _SAMPLE_BYTES])
        return _Part(metadata, self._arrays, placed, len(self._data))

    def _take(self, layout: struct.Struct) -> tuple[Any, ...]:
        end = self._at + layout.size
        if end > len(self._data):
            self._damaged("ends within its header")
        found = layout.unpack_from(self._data, self._at)
        self._at = end
        return found

    def _skip(self, count: int) -> int:
        """The position before `count` bytes, which are passed over."""
        start = self._at
        if start + count > len(self._data):
            self._damaged("ends within its header")
        self._at = start + count
        return start

    def _text(self, most: int = 1 << 26) -> str:
        (length,) = self._take(_U64)
        if length > most:
            self._damaged(f"has a text of {length} bytes in its header")
        start = self._skip(length)
        return self._data[start : self._at].decode(errors="replace")

    def _value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(key)
        return self._take(self._scalar(kind))[0]

    def _scalar(self, kind: int) -> struct.Struct:
        if kind not in _CODES:
            self._damaged(f"has a value of unknown kind {kind} in its header")
        return struct.Struct("<" + _CODES[kind])

    def _array(self, key: str) -> list[Any] | None:
        """Its items, or None for a long or textual one, which is only counted."""
        (kind,), (count,) = self._take(_U32), self._take(_U64)
        self._arrays[key] = Array(kind, count)
        if kind == STRING:
            for _ in range(count):
                self._skip(self._take(_U64)[0])
            return None
        width = self._scalar(kind).size
        start = self._skip(count * width)
        if count > _KEPT_ITEMS:
            return None
        return list(struct.unpack_from(f"<{count}{_CODES[kind]}", self._data, start))

    def _tensor(self) -> tuple[str, int, int, int]:
        name = self._text(_MAX_NAME_BYTES)
        (rank,) = self._take(_U32)
        if rank > _MAX_RANK:
            self._damaged(f"tensor {name[:40]!r} has {rank} dimensions")
        shape = [self._take(_U64)[0] for _ in range(rank)]
        (kind,), (offset,) = self._take(_U32), self._take(_U64)
        return name, kind, math.prod(shape), offset

    def _place(self, start: int, name: str, kind: int, elements: int, offset: int) -> Tensor:
        begin = start + offset
        known = TYPES.get(kind)
        end = begin + elements // known[1] * known[2] if known else None
        if (end or begin) > len(self._data):
            self._damaged(
                f"holds {len(self._data)} bytes, tensor {name[:40]!r} ends at {end or begin}"
            )
        return Tensor(name, kind, elements, begin, end)

    def _damaged(self, what: str) -> NoReturn:
        raise ModelDamaged(f"{self._path}: {what}")


def tensor_types(tensors: tuple[Tensor, ...]) -> dict[str, int]:
    """Tensors by the name of their type."""
    found: dict[str, int] = {}
    for name in _names(tensors):
        found[name] = found.get(name, 0) + 1
    return found


def _names(tensors: tuple[Tensor, ...]) -> Iterator[str]:
    return (tensor.type_name for tensor in tensors)
