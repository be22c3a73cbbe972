"""Drives an executor over the fake runtime by a schedule, in one thread, with an oracle beside."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from superfluid_adapter_fake.orders import Orders
from superfluid_adapter_fake.runtime import STATE_BYTES, FakeRuntime, extend, logits_of, root
from superfluid_adapter_fake.tokenizer import VOCABULARY, ByteTokenizer

from superfluid_compat.errors import SuperfluidError
from superfluid_workerd.adapter import Feed, Tick
from superfluid_workerd.codec.chat import ChatCodec
from superfluid_workerd.executor import Executor, Rejected
from superfluid_workerd.intake import Intake
from superfluid_workerd.link.frames import (
    Cancel,
    Class,
    Delta,
    Finish,
    Generate,
    GenerationRequest,
    Ping,
    Pong,
    Prompted,
    Replay,
    Sampling,
    Shutdown,
    StreamFailed,
    ToDaemon,
    Tokens,
    Turn,
    TurnStats,
)
from superfluid_workerd.sampling import Sampler
from superfluid_workerd.turns import Policy

if TYPE_CHECKING:
    from superfluid_workerd.adapter import Logits

Hook = Callable[[int], None]


class Stage(FakeRuntime):
    """The fake, which calls `before(n)` at the start of its n-th step and `within(n)` in ticks."""

    def __init__(self, orders: Orders, sequences: int) -> None:
        super().__init__(orders, sequences)
        self.before: Hook = lambda number: None
        self.within: Hook = lambda number: None
        self.number = 0
        self.attempts: list[list[Feed]] = []

    def step(self, feeds: Sequence[Feed], tick: Tick) -> Sequence[Logits | None]:
        self.number += 1
        self.attempts.append(list(feeds))
        self.before(self.number)

        def ticking() -> None:
            self.within(self.number)
            tick()

        return super().step(feeds, ticking)


@dataclass
class Heard:
    """What one stream's client got."""

    prompt: list[int] = field(default_factory=list)
    cached: int | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None
    stopped_by: str | None = None
    error: str | None = None
    deltas: list[Delta] = field(default_factory=list)
    first_turn: int = 0

    @property
    def over(self) -> bool:
        return self.finish is not None or self.error is not None


class Loop:
    """One executor, and everything it said. `idle` is called whenever no stream is left."""

    def __init__(
        self,
        orders: Orders | None = None,
        *,
        lanes: int = 4,
        policy: Policy | None = None,
        stage: type[Stage] = Stage,
    ) -> None:
        self.orders = orders or Orders()
        self.runtime = stage(self.orders, lanes)
        self.policy = policy or Policy()
        self.executor = Executor(self.runtime, lanes, self.policy, self._hear)
        self.lanes = lanes
        tokenizer = ByteTokenizer()
        codec = ChatCodec(tokenizer, None)
        context = min(self.orders.context, self.orders.tokens or self.orders.context)
        self.intake = Intake(tokenizer, codec, context, VOCABULARY)
        self.heard: dict[int, Heard] = {}
        self.turns: list[Turn] = []
        self.pongs: list[Pong] = []
        self.prompted = threading.Event()
        self._ended = threading.Condition()
        self.idle: Callable[[], None] = self.stop
        self.bytes_at_end = -1
        self.leaked = -1
        self.stats_at_end = TurnStats()

    def join(
        self,
        number: int,
        request: GenerationRequest,
        replay: Replay | None = None,
        deadline: float | None = None,
    ) -> None:
        self.heard[number] = Heard()
        self.executor.expect(number)
        try:
            generate = Generate(stream=number, request=request, replay=replay)
            self.executor.post(self.intake.stream(generate, deadline))
        except SuperfluidError as error:
            self.executor.post(Rejected(number, error))

    def cancel(self, number: int) -> None:
        self.executor.post(Cancel(stream=number))

    def ping(self, number: int) -> None:
        self.executor.post(Ping(number=number))

    def stop(self) -> None:
        """At idle: nothing is held but what the cache keeps, and the loop is told to end."""
        self.bytes_at_end = self.runtime.memory().sequences
        self.stats_at_end = stats = self.executor.stats()
        assert (stats.free_lanes, stats.waiting) == (self.lanes, 0)
        assert (stats.parked, stats.parked_bytes) == (0, 0)
        self.leaked = self.bytes_at_end - STATE_BYTES * self.executor.sequences.inside_tokens
        assert self.runtime.count == self.executor.sequences.count
        self.executor.post(Shutdown())

    def run(self) -> None:
        self.executor.run()

    def wait(self, number: int) -> bool:
        """Until the stream is over, for a thread that is not the loop's."""
        with self._ended:
            return self._ended.wait_for(lambda: self.heard[number].over, 30)

    def _hear(self, message: ToDaemon) -> None:
        match message:
            case Prompted():
                self.heard[message.stream].prompt = message.tokens
                self.heard[message.stream].cached = message.cached
                self.prompted.set()
            case Turn():
                self.turns.append(message)
                for delta in message.deltas:
                    self._gain(delta)
            case StreamFailed():
                heard = self.heard[message.stream]
                assert not heard.over
                heard.error = message.error.code
            case Pong():
                self.pongs.append(message)
        with self._ended:
            self._ended.notify_all()
        if self.heard and all(heard.over for heard in list(self.heard.values())):
            idle, self.idle = self.idle, lambda: None
            idle()

    def _gain(self, delta: Delta) -> None:
        heard = self.heard[delta.stream]
        assert not heard.over, "a stream that ended gained more"
        heard.deltas.append(delta)
        heard.first_turn = heard.first_turn or self.runtime.number
        heard.tokens += delta.tokens
        heard.text += delta.text
        heard.finish, heard.stopped_by = delta.finish, delta.stopped_by


def request(
    prompt: str | Sequence[int],
    max_tokens: int | None = 8,
    service_class: Class = "agent",
    **sampling: float,
) -> GenerationRequest:
    """A request with the prompt's bytes as its tokens."""
    tokens = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
    seed = int(sampling.pop("seed", 1))
    return GenerationRequest(
        prompt=Tokens(tokens=tokens),
        max_tokens=max_tokens,
        sampling=Sampling(seed=seed, temperature=sampling.pop("temperature", 1.0)),
        ignore_eos=True,
        service_class=service_class,
    )


def alone(wanted: GenerationRequest, orders: Orders, context: int = 256) -> list[int]:
    """The tokens that the request yields when nothing else runs, from the hash chain itself."""
    assert isinstance(wanted.prompt, Tokens)
    history = list(wanted.prompt.tokens)
    state = root()
    for token in history:
        state = extend(state, token)
    sampler = Sampler(wanted.sampling, VOCABULARY, ByteTokenizer().stops)
    limit = context - len(history) if wanted.max_tokens is None else wanted.max_tokens
    answer: list[int] = []
    for position in range(min(limit, context - len(history))):
        drawn = sampler.draw(logits_of(state, len(history), orders), position, history)
        answer.append(drawn.token)
        history.append(drawn.token)
        state = extend(state, drawn.token)
    return answer
