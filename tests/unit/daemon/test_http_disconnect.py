"""A client that goes away closes its streams at once, whatever it was waiting for."""

from __future__ import annotations

import asyncio
import json

import pytest

from superfluid.http.app import build
from superfluid.http.settings import HttpSettings
from superfluid_workerd.link.frames import Text
from support.http import serving
from support.service import ScriptedService, says

SETTINGS = HttpSettings(host="127.0.0.1", port=0, keep_alive_s=0.02)


def request(path: str, body: dict[str, object], port: int) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def closed(service: ScriptedService, count: int) -> None:
    while len(service.streams) < count:
        await asyncio.sleep(0)
    await asyncio.gather(*(stream.closed.wait() for stream in service.streams))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("spoken", [(), ("a", "b")])
async def test_gone_before_or_after_the_first_token(stream: bool, spoken: tuple[str, ...]) -> None:
    service = ScriptedService(says(*spoken, finish=None))
    async with serving(build(service, SETTINGS)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/v1/completions", {"prompt": "x", "stream": stream}, port))
        if stream:
            await reader.readuntil(b'"text":"b"' if spoken else b": still working\n\n")
        while not service.streams:
            await asyncio.sleep(0)
        writer.close()
        async with asyncio.timeout(120):
            await closed(service, 1)


async def test_what_is_being_embedded_is_given_up() -> None:
    service = ScriptedService(says("a"))
    service.hold = Text(text="x")
    async with serving(build(service, SETTINGS)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/v1/embeddings", {"input": "x"}, port))
        while not service.embeds:
            await asyncio.sleep(0)
        writer.close()
        async with asyncio.timeout(120):
            await service.released.wait()


async def test_every_choice_is_closed() -> None:
    service = ScriptedService(says("a", finish=None))
    async with serving(build(service, SETTINGS)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/v1/completions", {"prompt": "x", "n": 3}, port))
        while len(service.streams) < 3:
            await asyncio.sleep(0)
        writer.close()
        async with asyncio.timeout(120):
            await closed(service, 3)


async def test_a_failing_choice_closes_the_others() -> None:
    service = ScriptedService(says("a", finish=None), says("b"))
    async with serving(build(service, SETTINGS)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/v1/completions", {"prompt": "x", "n": 2}, port))
        while len(service.streams) < 2:
            await asyncio.sleep(0)
        assert not service.streams[0].closed.is_set()
        writer.close()
        async with asyncio.timeout(120):
            await closed(service, 2)
