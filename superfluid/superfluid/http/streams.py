"""Streams of one HTTP request: started together, merged, closed with the request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from superfluid.supervisor.service import Service, Stream
from superfluid_compat.errors import Cancelled
from superfluid_workerd.link.frames import Delta, GenerationRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Event:
    """What one of the streams gained; None where nothing came for a while."""

    index: int
    delta: Delta | None


@contextlib.asynccontextmanager
async def started(
    service: Service, model: str, requests: Iterable[GenerationRequest]
) -> AsyncIterator[Sequence[Stream]]:
    """All requests as streams, in order; however the block ends, each is closed. They are sent
    together, so that nothing comes between them and a worker takes all or none."""
    tasks = [asyncio.ensure_future(service.generate(model, request)) for request in requests]
    try:
        yield await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(found, BaseException):
                await found.close()


async def merged(streams: Sequence[Stream], silence_s: float) -> AsyncGenerator[Event, None]:
    """Deltas of all streams as they come; an event without one after `silence_s` of silence.

    Raises what the first failing stream raises.
    """
    queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue(maxsize=1)

    async def forward(index: int, stream: Stream) -> None:
        try:
            async for delta in stream:
                await queue.put(Event(index, delta))
            await queue.put(None)
        except Exception as error:  # noqa: BLE001  # raised again by the reader of the queue
            await queue.put(error)

    tasks = [asyncio.ensure_future(forward(i, s)) for i, s in enumerate(streams)]
    running = len(streams)
    try:
        while running:
            try:
                async with asyncio.timeout(silence_s):
                    event = await queue.get()
            except TimeoutError:
                yield Event(0, None)
                continue
            if isinstance(event, Exception):
                raise event
            if event is None:
                running -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, given up with `Cancelled` as soon as the client is gone.

    The request's body must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("the client is gone")
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
