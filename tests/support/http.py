"""A real HTTP server on loopback around an application, for tests in the same event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import uvicorn
from starlette.types import ASGIApp


@contextlib.asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[int]:
    """Serves `app` for the block; yields the port."""
    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    running = asyncio.create_task(server._serve(sockets=[bound]))
    try:
        yield int(bound.getsockname()[1])
    finally:
        server.should_exit = True
        await running
        bound.close()
