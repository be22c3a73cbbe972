"""What a running server tells and does for its own user: a Unix socket that is private to them.

One request and one reply, each a line of JSON, for each connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from superfluid.paths import FILE_MODE
from superfluid_compat.errors import NotRunning

SOCKET: Final = "control"
_LINE_BYTES: Final = 1 << 20
_PATIENCE_S: Final = 10.0
_NOBODY: Final = (FileNotFoundError, NotADirectoryError, ConnectionError)
_LOG = logging.getLogger(__name__)


class Request(msgspec.Struct, frozen=True):
    """`drain` takes no new streams for `model`, or any, and ends when those that run have."""

    ask: Literal["status", "drain"]
    model: str | None = None


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One model and the worker that serves it now; `pid` 0 while there is none."""

    model: str
    runtime: str
    state: str
    pid: int
    rss_bytes: int
    uptime_s: float
    workers: int
    streams: int
    lanes: int
    sandbox: dict[str, Any]
    problem: str = ""


class ServerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A running server. Where it has a `problem` with answering, only its name is known."""

    name: str
    pid: int = 0
    url: str = ""
    models: list[WorkerReport] = []
    problem: str = ""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    server: ServerReport | None = None
    problem: str = ""


Answer = Callable[[Request], Reply]


@contextlib.asynccontextmanager
async def listening(folder: Path, answer: Answer) -> AsyncIterator[None]:
    """Answer in `folder`, which belongs to this server alone, while the block runs."""
    path = folder / SOCKET
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as bound:
        before = os.umask(0o777 & ~FILE_MODE)
        try:
            with _reachable(folder) as short:
                bound.bind(short)
        finally:
            os.umask(before)

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, ValueError):
                async with asyncio.timeout(_PATIENCE_S):
                    writer.write(_answered(await reader.readline(), answer))
                    await writer.drain()
            writer.close()

        server = await asyncio.start_unix_server(talk, sock=bound, limit=_LINE_BYTES)
        try:
            yield
        finally:
            server.close()
            path.unlink(missing_ok=True)


def _answered(line: bytes, answer: Answer) -> bytes:
    try:
        request = msgspec.json.decode(line, type=Request)
    except msgspec.MsgspecError as error:
        return _line(Reply(problem=f"the request does not read: {error}"))
    try:
        return _line(answer(request))
    except Exception as error:  # noqa: BLE001  # recorded; who asked has nobody else to ask
        _LOG.exception("%s cannot be answered", request.ask)
        return _line(Reply(problem=f"{type(error).__name__} in the server"))


def _line(reply: Reply) -> bytes:
    return msgspec.json.encode(reply) + b"\n"


@contextlib.contextmanager
def _reachable(folder: Path) -> Iterator[str]:
    """The socket's path, short enough for the system's address however deep the home lies."""
    if sys.platform != "linux":
        yield str(folder / SOCKET)
        return
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


def ask(folder: Path, request: Request) -> ServerReport:
    """The report of the server that `folder` belongs to, after what was asked is done.

    Raises `NotRunning`.
    """
    try:
        reply = _asked(folder, request)
    except _NOBODY as error:
        raise NotRunning(f"no server called {folder.name} answers on this home") from error
    except (OSError, msgspec.MsgspecError) as error:
        found = f"the server called {folder.name} gives no answer: {_in_words(error)}"
        raise NotRunning(found, fix="ask again, or end it by its process id") from error
    if reply.server is None:
        raise NotRunning(f"the server called {folder.name} refused: {reply.problem}", fix="")
    return reply.server


def running(servers: Path) -> list[ServerReport]:
    """Every server of a home, by name; one that gives no answer hides no other."""
    found = []
    for folder in sorted(servers.iterdir()) if servers.is_dir() else ():
        try:
            reply = _asked(folder, Request("status"))
        except _NOBODY:
            continue
        except (OSError, msgspec.MsgspecError) as error:
            reply = Reply(problem=_in_words(error))
        found.append(reply.server or ServerReport(name=folder.name, problem=reply.problem))
    return found


def _asked(folder: Path, request: Request) -> Reply:
    with socket.socket(socket.AF_UNIX) as channel, _reachable(folder) as short:
        channel.settimeout(_PATIENCE_S)
        channel.connect(short)
        channel.sendall(msgspec.json.encode(request) + b"\n")
        with channel.makefile("rb") as stream:
            line = stream.readline(_LINE_BYTES)
    if not line:
        raise ConnectionResetError("closed without an answer")
    return msgspec.json.decode(line, type=Reply)


def _in_words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"it is silent for {_PATIENCE_S:g} s"
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    return f"what it says does not read, {error}"
