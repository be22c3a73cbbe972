"""Connections as far as there are descriptors for them; who comes then waits in the queue.

An event loop's own server logs a traceback for each connection that it cannot take, hundreds a
second, and takes the last descriptors from what starts the next worker.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Final

_LOG = logging.getLogger(__name__)
_RESERVE: Final = 48
"""Descriptors for a worker's start, records, the control socket and reading a model again."""
_FEWEST: Final = 8
_MOST: Final = 1 << 16
_AT_ONCE: Final = 64
"""Connections that are taken before the loop does something else."""
_RETRY_S: Final = 1.0
_SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def most() -> int:
    """How many connections there are descriptors for, beside what is open and the reserve."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MOST
    return max(_FEWEST, min(_MOST, limit - sum(1 for _ in Path("/dev/fd").iterdir()) - _RESERVE))


class Acceptor:
    """Takes connections of `listener`, each for a protocol that `make` makes. `connections` holds
    those that are open: a protocol enters and leaves it, and tells `freed` afterwards."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], asyncio.Protocol],
        connections: Sized,
        most: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make = make
        self._connections = connections
        self._most = most
        self._coming = set[asyncio.Task[None]]()
        self._retry: asyncio.TimerHandle | None = None
        self._reading = False
        self._closed = False
        self._short_at: int | None = None
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Take no more."""
        self._closed = True
        self._pause()
        if self._retry is not None:
            self._retry.cancel()

    def freed(self) -> None:
        """A connection is closed, its descriptor with the next turn of the loop."""
        self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        if self._closed:
            return
        if not self._reading:
            self._reading = True
            self._loop.add_reader(self._listener, self._take)
        self._take()

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._listener)

    def _take(self) -> None:
        for _ in range(_AT_ONCE):
            if self._open() >= self._most:
                self._refrain(f"{self._most} are open, for which there are descriptors")
                return
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                self._calm()
                return
            except OSError as error:  # what is none of these tells of somebody who left
                if error.errno in _SHORT:
                    self._refrain(os.strerror(error.errno).lower())
                    self._retry = self._loop.call_later(_RETRY_S, self._resume)
                return
            coming = self._loop.create_task(self._connect(connection))
            self._coming.add(coming)
            coming.add_done_callback(self._coming.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, connection)
        except OSError:  # it is gone
            connection.close()

    def _open(self) -> int:
        return len(self._connections) + len(self._coming)

    def _refrain(self, reason: str) -> None:
        self._pause()
        if self._short_at is None:
            _LOG.warning("connections wait to be taken: %s", reason)
            self._short_at = self._open()

    def _calm(self) -> None:
        """Nobody waits: say so, once there is room enough for it not to begin again at once."""
        if self._short_at is not None and self._open() <= self._short_at * 7 // 8:
            self._short_at = None
            _LOG.warning("connections are taken again")
