"""The link over a socket: blocking for the worker, on the event loop for the daemon."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Final

from superfluid_compat.errors import LinkClosed
from superfluid_workerd.link import framing
from superfluid_workerd.link.frames import ToDaemon, ToWorker

if TYPE_CHECKING:
    import asyncio

_READ_BYTES: Final = 1 << 16


class Link:
    """The worker's end. Any thread may send; one thread receives."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._frames = framing.to_worker()
        self._sending = threading.Lock()

    @classmethod
    def adopt(cls, descriptor: int) -> Link:
        """The link over an inherited socket. Raises `LinkClosed` when it is none."""
        try:
            channel = socket.socket(fileno=descriptor)
        except OSError as error:
            raise LinkClosed(f"descriptor {descriptor} is no link: {error}") from error
        channel.setblocking(True)
        channel.set_inheritable(False)
        return cls(channel)

    def send(self, message: ToDaemon) -> None:
        """One whole frame, never interleaved with another's. Raises `LinkClosed`,
        `FrameTooLarge`."""
        frame = framing.encode(message)
        with self._sending:
            try:
                self._channel.sendall(frame)
            except OSError as error:
                raise LinkClosed(f"the daemon no longer reads the link: {error}") from error

    def receive(self) -> Iterator[ToWorker]:
        """Messages until the daemon closes the link. Raises as `Frames` does."""
        while data := self._read():
            yield from self._frames.feed(data)
        self._frames.close()

    def _read(self) -> bytes:
        try:
            return self._channel.recv(_READ_BYTES)
        except ConnectionError:
            return b""

    def close(self) -> None:
        self._channel.close()


class AsyncLink:
    """The daemon's end of one worker's link."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = framing.to_daemon()

    @classmethod
    async def over(cls, channel: socket.socket) -> AsyncLink:
        """The link over a connected socket, which it owns from then on."""
        import asyncio  # A worker has no event loop, and starts sooner without.

        reader, writer = await asyncio.open_connection(sock=channel)
        return cls(reader, writer)

    async def send(self, message: ToWorker) -> None:
        """One whole frame; returns when the worker keeps up. Raises `LinkClosed`,
        `FrameTooLarge`."""
        frame = framing.encode(message)
        try:
            self._writer.write(frame)
            await self._writer.drain()
        except OSError as error:
            raise LinkClosed(f"the worker no longer reads the link: {error}") from error

    async def receive(self) -> AsyncIterator[ToDaemon]:
        """Messages until the worker closes the link. Raises as `Frames` does."""
        while data := await self._read():
            for message in self._frames.feed(data):
                yield message
        self._frames.close()

    async def _read(self) -> bytes:
        try:
            return await self._reader.read(_READ_BYTES)
        except ConnectionError:
            return b""

    async def close(self) -> None:
        """Idempotent; the worker exits when it notices."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return
