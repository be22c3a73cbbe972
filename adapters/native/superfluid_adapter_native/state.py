"""A sequence's state as bytes: an envelope that only the same model and settings open."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Final

from superfluid_adapter_native.config import ModelConfig
from superfluid_adapter_native.formats.source import ModelSource
from superfluid_adapter_native.memory import MemoryManager
from superfluid_compat.errors import Unsupported

VERSION: Final = 1
_MAGIC: Final = b"SFNATKV\0"
_HEAD: Final = struct.Struct("<8sI16sQQ16s")
"""Magic, version, model key, rows, payload length, payload checksum."""

_SAMPLE_BYTES: Final = 64


def model_key(
    source: ModelSource, config: ModelConfig, manager: MemoryManager, settings: Iterable[object]
) -> bytes:
    """16 bytes that tell models and settings apart: the configuration, the tensors' layout, and
    the first bytes of each tensor, so that two fine-tunes of one model differ."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((config, list(settings), source.total_bytes)).encode())
    for name, tensor in source.tensors.items():
        digest.update(f"{name} {tensor.type.name} {tensor.shape}".encode())
        digest.update(manager.read(name, 0, _SAMPLE_BYTES).tobytes())
    return digest.digest()


def seal(key: bytes, rows: int, parts: Iterable[bytes]) -> bytes:
    """The envelope around a cache's `dump` of `rows` tokens."""
    payload = b"".join(parts)
    return _HEAD.pack(_MAGIC, VERSION, key, rows, len(payload), _checksum(payload)) + payload


def unseal(key: bytes, envelope: bytes) -> tuple[int, memoryview]:
    """Rows and payload. Raises `Unsupported` for what `seal` did not make for this `key`."""
    if len(envelope) < _HEAD.size:
        raise Unsupported(f"{len(envelope)} bytes are no exported sequence")
    magic, version, theirs, rows, length, checksum = _HEAD.unpack_from(envelope)
    payload = memoryview(envelope)[_HEAD.size :]
    if magic != _MAGIC:
        raise Unsupported("these bytes are no exported sequence of the native runtime")
    if version != VERSION:
        raise Unsupported(f"the exported sequence has version {version}, wanted {VERSION}")
    if theirs != key:
        raise Unsupported("the exported sequence is of another model or other settings")
    if len(payload) != length or _checksum(payload) != checksum:
        raise Unsupported("the exported sequence is damaged")
    return rows, payload


def _checksum(payload: bytes | memoryview) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()
