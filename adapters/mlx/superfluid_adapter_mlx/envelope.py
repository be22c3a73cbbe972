"""Exported sequences: our own envelope, versioned and checksummed, independent of mlx-lm's files.

Layout: magic (8), header length (4, little-endian), BLAKE2b-16 of all that follows (16), a header
in JSON, the arrays' bytes one after the other in its order.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from superfluid_compat.errors import Unsupported

VERSION: Final = 1
_MAGIC: Final = b"SFMLXSEQ"
_HEAD: Final = struct.Struct("<8sI16s")
_ITEM_BYTES: Final = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "uint32": 4, "int32": 4, "float32": 4, "uint64": 8, "int64": 8,
}  # fmt: skip


class StoredArray(msgspec.Struct, frozen=True):
    """An array's type by MLX's name and its shape; the bytes stand after the header."""

    type: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """In bytes. Raises `Unsupported` for a type or shape that no array has."""
        if self.type not in _ITEM_BYTES or any(side < 0 for side in self.shape):
            raise Unsupported(f"an exported array of {self.type} {self.shape} is none of ours")
        return math.prod(self.shape) * _ITEM_BYTES[self.type]


class StoredPart(msgspec.Struct, frozen=True):
    """One cache, as `caches.Part`."""

    form: str
    numbers: dict[str, int] = {}
    arrays: tuple[StoredArray | None, ...] = ()
    members: tuple[StoredPart, ...] = ()

    def stored(self) -> Iterator[StoredArray]:
        """The arrays that are there, in the order of their bytes."""
        yield from (array for array in self.arrays if array is not None)
        for member in self.members:
            yield from member.stored()


class Key(msgspec.Struct, frozen=True):
    """Whose state it is: the model by its files, the versions that computed it."""

    model: str
    engine: str


class Header(msgspec.Struct, frozen=True):
    """Everything but the arrays' bytes."""

    version: int
    key: Key
    tokens: int
    parts: tuple[StoredPart, ...]


def seal(header: Header, blocks: Sequence[bytes]) -> bytes:
    """The envelope around `blocks`, the arrays' bytes in the header's order."""
    told = msgspec.json.encode(header)
    content = told + b"".join(blocks)
    return _HEAD.pack(_MAGIC, len(told), _checksum(content)) + content


def unseal(payload: bytes, key: Key, *, foreign: bool = False) -> tuple[Header, list[bytes]]:
    """The header and the arrays' bytes. Raises `Unsupported` for what is damaged or another's.

    `foreign` takes the state of another version of the engine, of the same model."""
    if len(payload) < _HEAD.size:
        raise Unsupported(f"{len(payload)} bytes are no exported sequence")
    magic, length, checksum = _HEAD.unpack_from(payload)
    content = payload[_HEAD.size :]
    if magic != _MAGIC:
        raise Unsupported("these bytes are no exported sequence of the mlx runtime")
    if length > len(content) or _checksum(content) != checksum:
        raise Unsupported("the exported sequence is damaged")
    header = _header(content[:length])
    _check_key(header.key, key, foreign=foreign)
    return header, _blocks(header, content[length:])


def _header(told: bytes) -> Header:
    try:
        header = msgspec.json.decode(told, type=Header)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Unsupported(f"the exported sequence's header does not read: {error}") from error
    if header.version != VERSION:
        raise Unsupported(f"the exported sequence has version {header.version}, wanted {VERSION}")
    return header


def _check_key(found: Key, wanted: Key, *, foreign: bool) -> None:
    if found.model != wanted.model:
        raise Unsupported("the exported sequence is of another model")
    if found.engine != wanted.engine and not foreign:
        raise Unsupported(
            f"the exported sequence was computed by {found.engine}, this is {wanted.engine}",
            fix="start from the text, or give --mlx-foreign-state for models known to agree",
        )


def _blocks(header: Header, content: bytes) -> list[bytes]:
    blocks, at = [], 0
    for array in (array for part in header.parts for array in part.stored()):
        blocks.append(content[at : at + array.size])
        at += array.size
    if at != len(content):
        raise Unsupported(f"the exported sequence holds {len(content)} bytes, wanted {at}")
    return blocks


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
