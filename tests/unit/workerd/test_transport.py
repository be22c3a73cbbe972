from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

from superfluid_compat.errors import BadFrame, FrameTooLarge, LinkClosed
from superfluid_workerd.link import framing
from superfluid_workerd.link.frames import (
    Cancel,
    Detokenized,
    Hello,
    Ping,
    Pong,
    ToDaemon,
    Tokenized,
    ToWorker,
    TurnStats,
)
from superfluid_workerd.link.transport import AsyncLink, Link


@pytest.fixture
def ends() -> Iterator[tuple[Link, socket.socket]]:
    ours, theirs = socket.socketpair()
    link = Link.adopt(ours.detach())
    with theirs:
        yield link, theirs
        link.close()


def test_a_descriptor_that_is_no_socket_is_refused() -> None:
    with open("/dev/null") as nothing, pytest.raises(LinkClosed, match="is no link"):
        Link.adopt(nothing.fileno())


def test_messages_arrive_in_order_however_they_were_cut(ends: tuple[Link, socket.socket]) -> None:
    link, daemon = ends
    sent: list[ToWorker] = [Hello(version="1"), *(Ping(number=n) for n in range(50))]
    data = b"".join(framing.encode(message) for message in sent)

    def trickle() -> None:
        for index in range(0, len(data), 3):
            daemon.sendall(data[index : index + 3])
        daemon.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=trickle)
    sender.start()
    assert list(link.receive()) == sent
    sender.join()


def test_frames_of_many_threads_never_interleave(ends: tuple[Link, socket.socket]) -> None:
    link, daemon = ends
    texts = [chr(97 + index) * 200_000 for index in range(6)]

    def send(index: int) -> None:
        for _ in range(5):
            link.send(Detokenized(request=index, text=texts[index]))

    senders = [threading.Thread(target=send, args=(index,)) for index in range(6)]
    for sender in senders:
        sender.start()
    frames = framing.to_daemon()
    got: list[ToDaemon] = []
    while len(got) < 30:
        got += list(frames.feed(daemon.recv(65536)))
    for sender in senders:
        sender.join()
    assert all(isinstance(it, Detokenized) and it.text == texts[it.request] for it in got)


def test_an_end_within_a_frame_is_told(ends: tuple[Link, socket.socket]) -> None:
    link, daemon = ends
    daemon.sendall(framing.encode(Cancel(stream=1)) + b"\0\0\0\x09half")
    daemon.close()
    messages = link.receive()
    assert next(messages) == Cancel(stream=1)
    with pytest.raises(LinkClosed, match="8 bytes into a frame"):
        next(messages)


def test_sending_to_nobody_is_a_closed_link(ends: tuple[Link, socket.socket]) -> None:
    link, daemon = ends
    daemon.close()
    with pytest.raises(LinkClosed):
        link.send(Hello())


async def test_both_ends_understand_each_other() -> None:
    ours, theirs = socket.socketpair()
    worker = Link.adopt(theirs.detach())
    daemon = await AsyncLink.over(ours)
    await daemon.send(Ping(number=7))
    assert await asyncio.to_thread(next, worker.receive()) == Ping(number=7)
    answer = Pong(number=7, ticks=1, stats=TurnStats())
    large = Tokenized(request=1, tokens=list(range(100_000)), pieces=[])
    sending = asyncio.create_task(asyncio.to_thread(_send_all, worker, [answer, large]))
    assert [message async for message in daemon.receive()] == [answer, large]
    await sending
    await daemon.close()
    await daemon.close()


def _send_all(link: Link, messages: list[ToDaemon]) -> None:
    for message in messages:
        link.send(message)
    link.close()


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\xff\xff\xff\xff", FrameTooLarge),
        (b"\0\0\0\x02\x00\x00", BadFrame),
        (b"\0\0\0\x09half", LinkClosed),
    ],
)
async def test_the_daemon_is_told_what_a_worker_got_wrong(
    data: bytes, error: type[Exception]
) -> None:
    ours, theirs = socket.socketpair()
    daemon = await AsyncLink.over(ours)
    theirs.sendall(data)
    theirs.close()
    with pytest.raises(error):
        async for _ in daemon.receive():
            pass
    await daemon.close()


async def test_sending_to_a_dead_worker_is_a_closed_link() -> None:
    ours, theirs = socket.socketpair()
    daemon = await AsyncLink.over(ours)
    theirs.close()

    async def insist() -> None:
        while True:
            await daemon.send(Ping(number=1))

    with pytest.raises(LinkClosed):
        await insist()
    await daemon.close()
