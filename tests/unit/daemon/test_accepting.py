"""Connections beyond what there are descriptors for wait, and are taken when there are again."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from superfluid.http import accepting
from superfluid.http.accepting import Acceptor


class Short(socket.socket):
    """Has no descriptor for the next connections, or nobody is there any more."""

    errors: list[int]

    def accept(self) -> tuple[socket.socket, Any]:
        if self.errors:
            number = self.errors.pop(0)
            raise OSError(number, os.strerror(number))
        return super().accept()


class Greeting(asyncio.Protocol):
    """Says hello and stays."""

    def __init__(self, hall: Hall) -> None:
        self.hall = hall

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.hall.inside.add(self)
        transport.write(b"hello")

    def connection_lost(self, exc: Exception | None) -> None:
        self.hall.inside.discard(self)
        self.hall.acceptor.freed()


class Hall:
    def __init__(self, listener: socket.socket, most: int) -> None:
        self.inside = set[Greeting]()
        self.acceptor = Acceptor(listener, lambda: Greeting(self), self.inside, most)


class Guest:
    """Comes at once, whether it is taken or waits."""

    def __init__(self, listener: socket.socket) -> None:
        self._socket = socket.create_connection(listener.getsockname())
        self._socket.setblocking(False)

    async def greeted(self) -> None:
        assert await asyncio.get_running_loop().sock_recv(self._socket, 5) == b"hello"

    def leave(self) -> None:
        self._socket.close()


async def emptied(hall: Hall) -> None:
    while hall.inside:
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # the turn of the loop after which descriptors are free
    await asyncio.sleep(0)
    hall.acceptor.close()


@pytest.fixture
def listener() -> Iterator[Short]:
    with Short() as found:
        found.errors = []
        found.bind(("127.0.0.1", 0))
        found.listen(64)
        yield found


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "connections" in record.message]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(logging.getLogger("superfluid"), "propagate", True)
    caplog.set_level(logging.INFO, "superfluid")
    return caplog


async def test_as_many_as_may_are_served_and_the_others_wait(
    listener: Short, log: pytest.LogCaptureFixture
) -> None:
    hall = Hall(listener, most=4)
    guests = [Guest(listener) for _ in range(20)]
    for guest in guests[:4]:
        await guest.greeted()
    while not said(log):
        await asyncio.sleep(0)
    assert len(hall.inside) == 4
    for index, guest in enumerate(guests):
        if index >= 4:
            await guest.greeted()
        guest.leave()
    await emptied(hall)
    assert said(log) == [
        "connections wait to be taken: 4 are open, for which there are descriptors",
        "connections are taken again",
    ]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS])
async def test_what_is_short_is_waited_for(
    listener: Short, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(accepting, "_RETRY_S", 0.001)
    listener.errors = [number] * 50
    hall, guest = Hall(listener, most=4), Guest(listener)
    await guest.greeted()
    guest.leave()
    await emptied(hall)
    reason = os.strerror(number).lower()
    assert said(log) == [
        f"connections wait to be taken: {reason}",
        "connections are taken again",
    ]


async def test_who_left_while_waiting_costs_nothing(
    listener: Short, log: pytest.LogCaptureFixture
) -> None:
    listener.errors = [errno.ECONNABORTED, errno.EPROTO, errno.EPERM]
    hall, guest = Hall(listener, most=4), Guest(listener)
    await guest.greeted()
    guest.leave()
    await emptied(hall)
    assert said(log) == []
