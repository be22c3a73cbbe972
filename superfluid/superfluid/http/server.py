"""The HTTP face as a server, over a socket that listens already."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from superfluid.http.accepting import Acceptor, most
from superfluid.http.app import build
from superfluid.http.settings import HttpSettings
from superfluid.supervisor.service import Service
from superfluid_workerd.link.frames import Class

_GRACE_S = 5


class Server(uvicorn.Server):
    """Takes connections by its own acceptor, and leaves signals to the daemon."""

    def __init__(self, service: Service, listener: socket.socket, service_class: Class) -> None:
        host, port = listener.getsockname()[:2]
        settings = HttpSettings(host=host, port=port, service_class=service_class)
        super().__init__(
            uvicorn.Config(
                build(service, settings),
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._listener = listener
        self._acceptor: Acceptor | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        connections = self.server_state.connections
        self._acceptor = Acceptor(self._listener, self._protocol, connections, most())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        await super().shutdown([self._listener])

    def _protocol(self) -> asyncio.Protocol:
        connection = _Connection(self.config, self.server_state, self.lifespan.state)
        connection.lost = self._freed
        return connection

    def _freed(self) -> None:
        if self._acceptor is not None:
            self._acceptor.freed()


class _Connection(H11Protocol):
    """Tells of its end."""

    lost: Callable[[], None]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lost()
