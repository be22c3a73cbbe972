"""Workers killed at random under load, and what each client has to have heard all the same."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from superfluid.catalog.catalog import Catalog
from superfluid.catalog.standing import Wanted
from superfluid.config import SERVE, settle
from superfluid.daemon import Choosing, ServeSettings
from superfluid.supervisor.dossiers import MOST
from superfluid.supervisor.host import ModelSpec
from superfluid.supervisor.life import Limits
from superfluid.supervisor.states import LOADING, WorkerState
from superfluid.supervisor.streams import LiveStream
from superfluid_workerd.link.frames import (
    Delta,
    GenerationRequest,
    Prompted,
    Sampling,
    Text,
)
from superfluid_workerd.options import COMMON
from support.house import House, reaches

STREAMS: Final = 8
KILLS: Final = (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGABRT)
PATIENT: Final = Limits(backoff_s=0.01, backoff_most_s=0.05, failures=20)
SOAK: Final = tuple(
    pytest.param(125, seed, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])
    for seed in range(9, 17)
)
"""A thousand kills, in pieces of so many that one can be repeated by its seed."""

_AT_LOAD: Final = 8
"""One kill in so many comes while the model loads."""


@dataclass
class Heard:
    """All that reached one client, and the prompt as its worker read it."""

    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    told: list[object] = field(default_factory=list)
    ends: list[object] = field(default_factory=list)

    def hear(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        self.text += delta.text
        self.told += delta.logprobs
        if delta.finish is not None:
            self.ends.append((delta.finish, delta.stopped_by))


async def listen(
    served: House, wanted: GenerationRequest, gained: Callable[[int], None] = lambda tokens: None
) -> Heard:
    """One client, from its request to the end of its answer; `gained` is told of its tokens."""
    stream = await served.supervisor.generate("m", wanted)
    heard = Heard(prompt=list(stream.prompt))
    async for delta in stream:
        heard.hear(delta)
        gained(len(delta.tokens))
    return heard


def requests(count: int = STREAMS, tokens: int = 60) -> list[GenerationRequest]:
    """Streams that share nothing but beginnings of prompts: lengths, seeds, temperatures."""
    return [
        GenerationRequest(
            prompt=Text(text="hello the river " * (1 + number % 3) + f"{number} words"),
            sampling=Sampling(temperature=0.5 + 0.1 * number, seed=number),
            max_tokens=tokens + 7 * number,
            ignore_eos=True,
        )
        for number in range(count)
    ]


async def spec_of(
    home: Path,
    model: Path,
    runtime: str,
    options: Mapping[str, object] | None = None,
    **common: object,
) -> ModelSpec:
    """What `superfluid serve` on `home` would have its supervisor serve."""
    settled = settle(SERVE, common, environment={})
    settings = ServeSettings(
        model=model,
        model_name="m",
        common={option.name: settled[option.name] for option in COMMON},
        state=home / "state",
        cache=home / "cache",
        runtimes=home / "data" / "runtimes",
        wanted=Wanted.parse(runtime),
        adapter_options={runtime.partition("@")[0]: (("flag", dict(options or {})),)},
    )
    return await Choosing(settings, Catalog(), lambda line: None).spec()


class Killer:
    """Clients of one house that ask for the same answers again and again, and kills meanwhile.

    `answers` holds what each of `requests` heard, one entry a round.
    """

    def __init__(self, served: House, requests: Sequence[GenerationRequest], seed: int) -> None:
        self.answers: list[list[Heard]] = [[] for _ in requests]
        self._served = served
        self._requests = requests
        self._chance = random.Random(seed)
        self._gained = 0
        self._ended = False

    async def run(self, kills: int) -> None:
        """Returns when so many workers are dead and every answer that was begun is complete.

        A client that hears an error ends all with it.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._kill(kills))
            for number in range(len(self._requests)):
                tasks.create_task(self._ask(number))
        assert min(map(len, self.answers)) >= 1
        assert self._served.dossiers() == min(kills, MOST)

    async def _ask(self, number: int) -> None:
        def gain(tokens: int) -> None:
            self._gained += tokens

        while not self._ended:
            heard = await listen(self._served, self._requests[number], gain)
            self.answers[number].append(heard)

    async def _kill(self, kills: int) -> None:
        host = self._served.host
        for _ in range(kills):
            if self._chance.randrange(_AT_LOAD):
                await self._until_gained(self._chance.randrange(1, 150))
            else:
                await reaches(self._served, *LOADING, WorkerState.SERVING)
                await asyncio.sleep(self._chance.random() * 0.3)
            while host.pid is None:
                await asyncio.sleep(0.001)
            victim = self._served.note()
            os.kill(victim, self._chance.choice(KILLS))
            while host.pid == victim:
                await asyncio.sleep(0.001)
        self._ended = True

    async def _until_gained(self, more: int) -> None:
        """Return when the worker of now has given `more` tokens, all streams together."""
        while True:
            await reaches(self._served, WorkerState.SERVING)
            worker, goal = self._served.host.pid, self._gained + more
            while self._served.host.pid == worker and self._gained < goal:
                await asyncio.sleep(0.001)
            if self._served.host.pid == worker:
                return


async def undisturbed(served: House, requests: Sequence[GenerationRequest]) -> list[Heard]:
    """What each hears when it is alone and nothing happens."""
    return [await listen(served, each) for each in requests]


async def turns_of(served: House, request: GenerationRequest, heard: Heard, alone: Heard) -> int:
    """How often the engine, undisturbed, goes another way than `heard` did; 0 when that is what
    it says `alone`.

    At each such place the stream is begun again there, by what the daemon knows of a stream, and
    has to go on as heard: same tokens, same draws, each character once.
    """
    turns = 0
    while heard.tokens != alone.tokens:
        pairs = zip(heard.tokens, alone.tokens, strict=True)
        place = next(index for index, (one, other) in enumerate(pairs) if one != other)
        turns += 1
        alone = await _from(served, request, heard, place + 1)
    assert heard == alone
    return turns


async def _from(served: House, request: GenerationRequest, heard: Heard, kept: int) -> Heard:
    """The whole answer that begins with the first `kept` tokens heard and goes on from there."""
    stream = LiveStream(request, lambda _: None)
    stream.prompted(Prompted(stream=0, tokens=heard.prompt))
    stream.committed += heard.tokens[:kept]
    # To the supervisor, a stream of a worker that died before a character of it went out.
    served.host._streams.add(stream)
    found = Heard(prompt=heard.prompt, tokens=heard.tokens[:kept])
    async for delta in stream:
        found.hear(delta)
    return found
