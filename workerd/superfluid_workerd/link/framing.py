"""Length-prefixed frames: four bytes, big-endian, then that many bytes of msgpack.

Sans-I/O, so that the worker's blocking socket and the daemon's event loop share it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final, Generic, TypeVar

import msgspec

from superfluid_compat.errors import BadFrame, FrameTooLarge, LinkClosed, MalformedRequest
from superfluid_workerd.link.frames import ToDaemon, ToWorker

CAP: Final = 64 << 20
"""Most bytes in one frame; a longer one ends the worker that sent it."""

_HEAD: Final = struct.Struct(">I")
_ENCODER: Final = msgspec.msgpack.Encoder()
M = TypeVar("M")


def encode(message: ToWorker | ToDaemon) -> bytes:
    """One frame, ready to send.

    Raises `FrameTooLarge`, and `MalformedRequest` for a client's JSON that no frame can hold: a
    lone surrogate, an integer past 64 bits, nesting too deep.
    """
    try:
        body = _ENCODER.encode(message)
    except (UnicodeEncodeError, OverflowError, RecursionError) as error:
        raise MalformedRequest(
            f"the request holds a value that cannot be passed on: {error}",
            fix="send Unicode text, integers of 64 bits and less nesting",
        ) from error
    if len(body) > CAP:
        raise FrameTooLarge(f"a frame of {len(body)} bytes, at most {CAP} are sent")
    return _HEAD.pack(len(body)) + body


class Frames(Generic[M]):
    """Turns received bytes into messages of one direction.

    `feed` takes what arrived and yields each message that is complete; `close` is to be called at
    the end of the stream. Raises `FrameTooLarge`, `BadFrame` (unknown type, wrong shape) and, when
    bytes of an unfinished frame are left, `LinkClosed`.
    """

    def __init__(self, messages: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        self._buffer += data
        while (body := self._take()) is not None:
            try:
                message = self._decoder.decode(body)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise BadFrame(
                    f"a frame of {len(body)} bytes could not be read: {error}"
                ) from error
            yield message

    def _take(self) -> bytes | None:
        if len(self._buffer) < _HEAD.size:
            return None
        (length,) = _HEAD.unpack_from(self._buffer)
        if length > CAP:
            raise FrameTooLarge(f"a frame of {length} bytes was announced, at most {CAP} are read")
        end = _HEAD.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_HEAD.size : end])
        del self._buffer[:end]
        return body

    def close(self) -> None:
        if self._buffer:
            raise LinkClosed(f"the link closed {len(self._buffer)} bytes into a frame")


def to_worker() -> Frames[ToWorker]:
    """A reader of the daemon's messages."""
    return Frames(ToWorker)


def to_daemon() -> Frames[ToDaemon]:
    """A reader of a worker's messages."""
    return Frames(ToDaemon)
