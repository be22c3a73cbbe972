"""GGUF, versions 2 and 3, little endian; single files and split ones.

Layout: the GGUF specification (docs/gguf.md of the ggml project). A file is a header (magic,
version, counts, metadata, tensor descriptions), padding, and the tensors' bytes, each at a multiple
of `general.alignment`. The file is mapped while its header is walked; what is kept are copies of
the header's parts, and no weight is touched.
"""

from __future__ import annotations

import itertools
import math
import mmap
import re
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from superfluid_adapter_native.formats.arrays import StringArray
from superfluid_adapter_native.formats.files import mapped
from superfluid_adapter_native.formats.source import ModelSource, Tensor
from superfluid_adapter_native.quants.types import BY_GGML, TYPES
from superfluid_compat.errors import ModelDamaged, UnsupportedType

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)

_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING: Final = 8
_ARRAY: Final = 9
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_HEAD: Final = struct.Struct("<4sIQQ")

_MAX_KEY_BYTES: Final = 65_535
_MAX_HEADER_BYTES: Final = 1 << 28
_MAX_TENSORS: Final = 1 << 17
_MAX_KEYS: Final = 1 << 14
_MAX_RANK: Final = 4
_MAX_STRINGS: Final = 1 << 22
"""In all arrays of a file: the largest vocabularies, merges included, stay under a fifth of it."""

_PART: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_PAIRS: Final = frozenset({"llama"})
"""Architectures whose query and key rows GGUF holds reordered for RoPE over neighbours."""

_OTHERS: Final = {
    b"ggjt": "a GGJT file, GGUF's predecessor",
    b"ggml": "a GGML file, GGUF's predecessor",
    b"ggmf": "a GGMF file, GGUF's predecessor",
    b"tjgg": "a GGJT file, GGUF's predecessor",
    b"lmgg": "a GGML file, GGUF's predecessor",
    b"fmgg": "a GGMF file, GGUF's predecessor",
    b"PK\x03\x04": "a zip archive (PyTorch's checkpoints are such)",
}
_CONVERT: Final = "convert it to GGUF version 3, or choose another file of the model"


def read_gguf(path: Path) -> ModelSource:
    """The header of the GGUF model `path`; of a split one, whichever of its parts is named.

    Raises `ModelNotFound` (not there, not a regular file, a part missing), `ModelDamaged`, and
    `UnsupportedType` for tensor types, versions and byte orders that we do not read.
    """
    first = _read_part(path, 0)
    count = _split_number(path, first.metadata, "split.count", 1)
    parts, paths = [first], [path]
    if count > 1:
        paths = _part_paths(path, count)
        parts = [_read_part(part, number) for number, part in enumerate(paths)]
        _check_split(paths, parts, count)
    metadata = parts[0].metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise ModelDamaged(
            f"{paths[0]}: general.architecture is {_short(architecture)}, a name was wanted"
        )
    tensors: dict[str, Tensor] = {}
    for part_path, part in zip(paths, parts, strict=True):
        for tensor in part.tensors:
            if tensor.name in tensors:
                raise ModelDamaged(f"{part_path}: tensor {tensor.name!r} is there twice")
            tensors[tensor.name] = tensor
    return ModelSource(
        path=path,
        format="gguf",
        files=tuple(paths),
        architecture=architecture,
        metadata=metadata,
        tensors=tensors,
        rotated="pairs" if architecture in _PAIRS else "halves",
        total_bytes=sum(part.size for part in parts),
    )


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of the GGUF model `path`, of a split one from its first part; its tensors may be
    of any types. Raises as `read_gguf` does."""
    metadata = _read_metadata(path)
    count = _split_number(path, metadata, "split.count", 1)
    if count > 1 and _split_number(path, metadata, "split.no", -1) != 0:
        return _read_metadata(_part_paths(path, count)[0])
    return metadata


@dataclass(frozen=True, slots=True)
class _Part:
    metadata: dict[str, Any]
    tensors: list[Tensor]
    size: int


def _read_part(path: Path, file: int) -> _Part:
    with mapped(path) as data:
        return _Header(path, data).read(file)


def _read_metadata(path: Path) -> dict[str, Any]:
    with mapped(path) as data:
        return _Header(path, data).metadata()


def _part_paths(path: Path, count: int) -> list[Path]:
    """The paths of all parts, by the name of one."""
    name = _PART.fullmatch(path.name)
    if name is None or int(name["count"]) != count:
        raise ModelDamaged(
            f"{path}: says it is one of {count} parts, a name that ends in "
            f"-00001-of-{count:05}.gguf was wanted",
            fix="give the parts the names they were published under",
        )
    return [
        path.with_name(f"{name['stem']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]


def _check_split(paths: Sequence[Path], parts: Sequence[_Part], count: int) -> None:
    for number, (path, part) in enumerate(zip(paths, parts, strict=True)):
        said = part.metadata
        found = _split_number(path, said, "split.no", -1), _split_number(path, said, "split.count")
        if found != (number, count):
            raise ModelDamaged(
                f"{path}: says it is part {found[0] + 1} of {found[1]}, {number + 1} of {count} "
                "was wanted"
            )
    total = sum(len(part.tensors) for part in parts)
    wanted = _split_number(paths[0], parts[0].metadata, "split.tensors.count", total)
    if total != wanted:
        raise ModelDamaged(f"{paths[0]}: {count} parts hold {total} tensors, not {wanted}")


def _split_number(path: Path, metadata: dict[str, Any], key: str, default: int = 0) -> int:
    value = metadata.get(key, default)
    if not isinstance(value, int):
        raise ModelDamaged(f"{path}: {key} is {_short(value)}, a number was wanted")
    return value


class _Header:
    """A walk over one mapped file; every step is checked against the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0
        self._strings = 0

    def read(self, file: int) -> _Part:
        tensor_count, key_count = self._counts()
        metadata = self._keys(key_count)
        described = [self._description() for _ in range(tensor_count)]
        return _Part(metadata, self._placed(described, self._alignment(metadata), file), self._size)

    def metadata(self) -> dict[str, Any]:
        return self._keys(self._counts()[1])

    def _keys(self, key_count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._text("a key", _MAX_KEY_BYTES)
            if key in metadata:
                self._damaged(f"key {_short(key)} is there twice")
            metadata[key] = self._value(key, self._take(_U32, key))
        return metadata

    def _counts(self) -> tuple[int, int]:
        magic = self._data[:4]
        if magic != MAGIC:
            self._foreign(magic)
        if self._size < _HEAD.size:
            self._damaged(f"ends after {self._size} bytes, within its first {_HEAD.size}")
        _, version, tensors, keys = _HEAD.unpack_from(self._data)
        if version not in VERSIONS:
            swapped = int.from_bytes(struct.pack(">I", version), "little")
            found = (
                f"big-endian GGUF version {swapped}, little-endian"
                if swapped in VERSIONS
                else f"GGUF version {version}, version 2 or 3"
            )
            raise UnsupportedType(f"{self._path}: is {found} was wanted", fix=_CONVERT)
        self._at = _HEAD.size
        for count, limit, what in ((tensors, _MAX_TENSORS, "tensors"), (keys, _MAX_KEYS, "keys")):
            if count > limit:
                self._damaged(f"promises {count} {what}, at most {limit} were wanted")
        return tensors, keys

    def _foreign(self, magic: bytes) -> NoReturn:
        known = _OTHERS.get(magic)
        if known:
            raise UnsupportedType(f"{self._path}: is {known}, GGUF was wanted", fix=_CONVERT)
        self._damaged(f"begins with {magic!r}, a model file begins with {MAGIC!r}")

    def _damaged(self, problem: str) -> NoReturn:
        raise ModelDamaged(f"{self._path}: {problem}")

    def _advance(self, count: int, what: str) -> int:
        """Step over `count` bytes and return where they begin."""
        start = self._at
        if count > self._size - start:
            self._damaged(
                f"{_short(what)} at byte {start} takes {count} bytes, {self._size - start} are left"
            )
        if start + count > _MAX_HEADER_BYTES:
            self._damaged(f"has a header of more than {_MAX_HEADER_BYTES} bytes")
        self._at = start + count
        return start

    def _take(self, layout: struct.Struct, what: str) -> Any:
        return layout.unpack_from(self._data, self._advance(layout.size, what))[0]

    def _text(self, what: str, limit_bytes: int | None = None) -> str:
        length = self._take(_U64, what)
        if limit_bytes is not None and length > limit_bytes:
            self._damaged(f"{what} of {length} bytes, at most {limit_bytes} were wanted")
        start = self._advance(length, what)
        try:
            return self._data[start : self._at].decode()
        except UnicodeDecodeError as error:
            self._damaged(f"{_short(what)} at byte {start} is not UTF-8 ({error.reason})")

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind == _ARRAY:
            return self._array(key)
        layout = _SCALARS.get(kind)
        if layout is None:
            self._damaged(f"{_short(key)} has value type {kind}, 0 to 12 were wanted")
        return self._take(layout, key)

    def _array(self, key: str) -> Sequence[Any]:
        kind, count = self._take(_U32, key), self._take(_U64, key)
        if kind == _STRING:
            return self._string_array(key, count)
        layout = _SCALARS.get(kind)
        if layout is None:
            found = "arrays" if kind == _ARRAY else f"value type {kind}"
            self._damaged(f"{_short(key)} is an array of {found}, of numbers or strings was wanted")
        start = self._advance(count * layout.size, key)
        # A view's elements are Python's own numbers; every platform we run on is little-endian.
        code: Any = layout.format[1:]
        view: memoryview[Any] = memoryview(self._data[start : self._at]).cast(code)
        return view

    def _string_array(self, key: str, count: int) -> StringArray:
        self._strings += count
        if self._strings > _MAX_STRINGS:
            self._damaged(
                f"{_short(key)} brings the strings in arrays to {self._strings}, at most "
                f"{_MAX_STRINGS} were wanted"
            )
        data, base, at = self._data, self._at, 0
        unpack = _U64.unpack_from
        starts = array("Q")
        append = starts.append
        try:
            # The one loop that runs per vocabulary entry.
            for _ in range(count):
                append(at)
                at += 8 + unpack(data, base + at)[0]
            append(at)
        except (struct.error, OverflowError):
            self._damaged(f"{_short(key)}[{len(starts) - 1}] lies past the end of the file")
        self._advance(at, key)
        return StringArray(data[base : self._at], starts, f"{self._path}: {key}")

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment & alignment - 1:
            self._damaged(f"general.alignment is {_short(alignment)}, a power of two was wanted")
        return alignment

    def _description(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text("a tensor's name", _MAX_KEY_BYTES)
        rank = self._take(_U32, name)
        if not 1 <= rank <= _MAX_RANK:
            self._damaged(f"tensor {_short(name)} has {rank} dimensions, 1 to 4 were wanted")
        shape = tuple(self._take(_U64, name) for _ in range(rank))[::-1]
        return name, shape, self._take(_U32, name), self._take(_U64, name)

    def _placed(
        self, described: list[tuple[str, tuple[int, ...], int, int]], alignment: int, file: int
    ) -> list[Tensor]:
        """The tensors with their bytes in the file, proven to lie in it and apart."""
        base = -(-self._at // alignment) * alignment
        tensors = []
        for name, shape, type_id, offset in described:
            kind = BY_GGML.get(type_id)
            if kind is None:
                known = ", ".join(one.name for one in TYPES)
                raise UnsupportedType(
                    f"{self._path}: tensor {_short(name)} is of type "
                    f"{GGML_NAMES.get(type_id, f'number {type_id}')}, one of {known} was wanted"
                )
            if 0 in shape or shape[-1] % kind.elements:
                self._damaged(
                    f"tensor {_short(name)} has shape {shape}, rows of whole {kind.elements} "
                    f"weights were wanted for {kind.name}"
                )
            length = math.prod(shape) // kind.elements * kind.bytes
            if offset % alignment:
                self._damaged(
                    f"tensor {_short(name)} begins at {offset}, a multiple of {alignment} was "
                    "wanted"
                )
            if base + offset + length > self._size:
                self._damaged(
                    f"tensor {_short(name)} ends at byte {base + offset + length}, the file at "
                    f"{self._size}"
                )
            tensors.append(Tensor(name, kind, shape, file, base + offset, length))
        self._apart(tensors)
        return tensors

    def _apart(self, tensors: list[Tensor]) -> None:
        ordered = sorted(tensors, key=lambda tensor: tensor.offset)
        for one, following in itertools.pairwise(ordered):
            if one.offset + one.bytes > following.offset:
                self._damaged(
                    f"tensors {_short(one.name)} and {_short(following.name)} overlap at byte "
                    f"{following.offset}"
                )


GGML_NAMES: Final = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
}
"""Names of the types we do not read, so that a refusal can say which it was (ggml.h)."""


def _short(value: object) -> str:
    """`value` for a message: whatever the file holds, within 60 characters on one line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
