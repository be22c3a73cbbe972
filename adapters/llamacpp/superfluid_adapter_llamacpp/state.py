"""A sequence's state as bytes: an envelope that only the same library, model and settings open.

llama.cpp checks none of this: a state of another model loads and answers nonsense, and damaged
bytes have crashed some builds.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import Final

from superfluid_compat.errors import Unsupported

VERSION: Final = 2
_MAGIC: Final = b"SFLLAMA\0"
_HEAD: Final = struct.Struct("<8sI16sQQI")
"""Magic, version, key, tokens, payload length, payload's CRC-32 (as fast as what it checks is
copied)."""


def state_key(*parts: object) -> bytes:
    """16 bytes that tell apart what must be equal for a state to mean the same."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def seal(key: bytes, tokens: int, payload: bytes | memoryview) -> bytes:
    """The envelope around a sequence's state of `tokens` tokens."""
    head = _HEAD.pack(_MAGIC, VERSION, key, tokens, len(payload), zlib.crc32(payload))
    return b"".join((head, payload))


def unseal(key: bytes, envelope: bytes) -> tuple[int, memoryview]:
    """Tokens and state. Raises `Unsupported` for what `seal` did not make for this `key`."""
    if len(envelope) < _HEAD.size:
        raise Unsupported(f"{len(envelope)} bytes are no exported sequence")
    magic, version, theirs, tokens, length, checksum = _HEAD.unpack_from(envelope)
    payload = memoryview(envelope)[_HEAD.size :]
    if magic != _MAGIC:
        raise Unsupported("these bytes are no exported sequence of the llama.cpp runtime")
    if version != VERSION:
        raise Unsupported(f"the exported sequence has version {version}, wanted {VERSION}")
    if theirs != key:
        raise Unsupported("the exported sequence is of another library, model or other settings")
    if len(payload) != length or zlib.crc32(payload) != checksum:
        raise Unsupported("the exported sequence is damaged")
    return tokens, payload
