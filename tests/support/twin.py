"""A GGUF file's twin whose every tensor is F32, decoded by our own NumPy decoder."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from superfluid_adapter_native.formats.gguf import read_gguf
from superfluid_adapter_native.formats.source import Tensor
from superfluid_adapter_native.quants.decode import decode
from support.gguf_writer import CODES, Kind

ALIGNMENT: Final = 32
TILE_BYTES: Final = 16 << 20
_HEAD: Final = struct.Struct("<4sIQQ")


def write_twin(model: Path, path: Path) -> Path:
    """Write `path`, with `model`'s metadata byte for byte; a tile at a time is in memory."""
    source = read_gguf(model)
    raw = np.memmap(model, np.uint8, "r")
    magic, version, _, keys = _HEAD.unpack_from(raw.data)
    with path.open("wb") as file:
        file.write(_HEAD.pack(magic, version, len(source.tensors), keys))
        file.write(raw[_HEAD.size : _metadata_end(raw.data, keys)].data)
        offset = 0
        for tensor in source.tensors.values():
            name, shape = tensor.name.encode(), tensor.shape[::-1]
            file.write(struct.pack(f"<Q{len(name)}sI", len(name), name, len(shape)))
            file.write(struct.pack(f"<{len(shape)}QIQ", *shape, 0, offset))
            offset += -(-4 * int(np.prod(shape)) // ALIGNMENT) * ALIGNMENT
        for tensor in source.tensors.values():
            _pad(file)
            for tile in _tiles(tensor):
                count = tile.stop - tile.start
                packed = raw[_bytes_at(tensor, tile.start) : _bytes_at(tensor, tile.stop)]
                file.write(decode(tensor.type, np.array(packed), count).astype("<f4").tobytes())
    return path


def _pad(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % ALIGNMENT))


def _bytes_at(tensor: Tensor, element: int) -> int:
    return tensor.offset + element // tensor.type.elements * tensor.type.bytes


def _tiles(tensor: Tensor) -> list[slice]:
    """Elements in runs of whole blocks."""
    count = int(np.prod(tensor.shape))
    step = TILE_BYTES // 4 // tensor.type.elements * tensor.type.elements
    return [slice(first, min(first + step, count)) for first in range(0, count, step)]


def _metadata_end(raw: memoryview, keys: int) -> int:
    at = _HEAD.size
    for _ in range(keys):
        at = _after_string(raw, at)
        (kind,) = struct.unpack_from("<I", raw, at)
        at = _after(raw, at + 4, Kind(kind))
    return at


def _after_string(raw: memoryview, at: int) -> int:
    length: int = struct.unpack_from("<Q", raw, at)[0]
    return at + 8 + length


def _after(raw: memoryview, at: int, kind: Kind) -> int:
    if kind == Kind.STRING:
        return _after_string(raw, at)
    if kind != Kind.ARRAY:
        return at + struct.calcsize(CODES[kind])
    element, count = struct.unpack_from("<IQ", raw, at)
    at += 12
    if element not in (Kind.STRING, Kind.ARRAY):
        size: int = count * struct.calcsize(CODES[Kind(element)])
        return at + size
    for _ in range(count):
        at = _after(raw, at, Kind(element))
    return at
