"""A stream as its client sees it, and what it keeps for a restart."""

from __future__ import annotations

import asyncio

import pytest

from superfluid.supervisor.streams import LiveStream
from superfluid_compat.errors import WorkerDied
from superfluid_workerd.link.frames import Channel, Delta, Finish, GenerationRequest, Prompted, Text


def stream(cancelled: list[str] | None = None) -> LiveStream:
    request = GenerationRequest(prompt=Text(text="t"))
    notes = [] if cancelled is None else cancelled
    return LiveStream(request, lambda _: notes.append("cancelled"))


def delta(text: str, tokens: list[int], channel: Channel = "text", *, end: bool = False) -> Delta:
    finish: Finish | None = "stop" if end else None
    return Delta(stream=1, tokens=tokens, text=text, channel=channel, finish=finish)


async def test_it_keeps_what_a_restart_needs() -> None:
    live = stream()
    live.prompted(Prompted(stream=1, tokens=[1, 2, 3], cached=2))
    live.gained(delta("héł", [4, 5]))
    live.gained(delta("why", [6], "reasoning"))
    live.gained(delta("o", [], end=True))
    assert [each.text async for each in live] == ["héł", "why", "o"]
    assert (list(live.prompt), live.cached, live.committed) == ([1, 2, 3], 2, [4, 5, 6])
    assert live.sent == {"text": 4, "reasoning": 3}


async def test_what_came_before_a_failure_is_delivered_first() -> None:
    live = stream()
    live.gained(delta("a", [1]))
    live.fail(WorkerDied("gone", dossier="d1"))
    seen: list[str] = []
    with pytest.raises(WorkerDied) as caught:
        await _read(live, seen)
    assert (seen, caught.value.dossier) == (["a"], "d1")
    with pytest.raises(WorkerDied):
        await live.accepted


async def test_a_slow_reader_holds_nobody_up_and_loses_nothing() -> None:
    live = stream()
    for number in range(5000):
        live.gained(delta(f"{number} ", [number]))
    live.gained(delta("", [], "reasoning", end=True))
    seen = [each async for each in live]
    assert len(seen) < 300
    assert "".join(each.text for each in seen) == "".join(f"{n} " for n in range(5000))
    assert [token for each in seen for token in each.tokens] == list(range(5000))
    assert seen[-1].channel == "reasoning"


async def test_closing_tells_the_worker_once_and_ends_the_reader() -> None:
    cancelled: list[str] = []
    live = stream(cancelled)
    live.gained(delta("a", [1]))
    seen: list[str] = []
    reader = asyncio.ensure_future(_read(live, seen))
    await asyncio.sleep(0)
    await live.close()
    await live.close()
    live.gained(delta("late", [2], end=True))
    live.fail(WorkerDied("late"))
    await reader
    assert seen == ["a"]
    assert cancelled == ["cancelled"]


async def test_closing_what_has_ended_tells_nobody() -> None:
    cancelled: list[str] = []
    live = stream(cancelled)
    live.gained(delta("a", [1], end=True))
    await live.close()
    assert cancelled == []


async def _read(live: LiveStream, seen: list[str]) -> None:
    async for each in live:
        seen.append(each.text)
