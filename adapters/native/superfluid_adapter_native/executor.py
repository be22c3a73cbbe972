"""One walk over the layers for all the rows of a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from superfluid_adapter_native.kv_cache import KVCache
from superfluid_adapter_native.scheduler import LayerHandles, LayerScheduler
from superfluid_compat.errors import OutOfBoundary

Array: TypeAlias = NDArray[np.float32]
Indices: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Seat:
    """Rows `first` to `first + count` of a pass: one sequence's tokens from position `start`."""

    cache: KVCache
    first: int
    count: int
    start: int


@dataclass(slots=True)
class Pass:
    """All rows that go through the layers together, ragged sequences one after another.

    `hidden` is what the last layer left, shape (rows, width), before that what the next one
    takes. `output` are logits of the rows in `wanted`, shape (len(wanted), vocabulary); where it
    is given, they are written there.
    """

    tokens: Indices
    positions: Indices
    seats: tuple[Seat, ...]
    wanted: Indices
    hidden: Array = field(default_factory=lambda: np.empty((0, 0), np.float32))
    output: Array | None = None


ForwardFn: TypeAlias = Callable[[LayerHandles, Pass], None]
"""Computes one layer in place: on the first it embeds, on the last it applies norm and head."""


def make_pass(
    parts: Sequence[tuple[KVCache, Sequence[int], int]],
    wanted: Sequence[int],
    output: Array | None = None,
) -> Pass:
    """A pass over parts of (cache, tokens, start), logits for the rows in `wanted`, in `output`
    if that is given."""
    seats: list[Seat] = []
    first = 0
    for cache, tokens, start in parts:
        seats.append(Seat(cache, first, len(tokens), start))
        first += len(tokens)
    flat = np.fromiter((token for _, tokens, _ in parts for token in tokens), np.int64, first)
    spans = [np.arange(seat.start, seat.start + seat.count) for seat in seats]
    indices = np.array(wanted, np.int64)
    return Pass(flat, np.concatenate(spans), tuple(seats), indices, output=output)


@dataclass(frozen=True, slots=True)
class TokenStep:
    """What `StreamingExecutor.step` found. `last_hidden` is float32 of shape (vocabulary,): the
    last token's logits; where no head was applied, its hidden state, of shape (width,)."""

    position: int
    last_hidden: Array


class StreamingExecutor:
    """Feeds tokens through the scheduler's layers.

    `step` serves one sequence, whose keys and values are in `cache`; `run` takes a pass over
    several, each with a cache of its own, and walks the layers once for all of them.
    """

    def __init__(
        self, scheduler: LayerScheduler, forward: ForwardFn, cache: KVCache | None = None
    ) -> None:
        self._scheduler = scheduler
        self._forward = forward
        self._cache = cache

    @property
    def scheduler(self) -> LayerScheduler:
        return self._scheduler

    def step(self, tokens: Sequence[int]) -> TokenStep:
        """Append `tokens` to the sequence; what follows the last of them.

        Raises `OutOfBoundary` without a token."""
        if not tokens:
            raise OutOfBoundary("no token was given, wanted at least one")
        if self._cache is None:
            raise ValueError("step needs the executor to have a cache of its own")
        start = self._cache.length(0)
        work = make_pass([(self._cache, tokens, start)], [len(tokens) - 1])
        self.run(work)
        last = work.hidden[-1].copy() if work.output is None else work.output[-1]
        return TokenStep(start + len(tokens) - 1, last)

    def run(self, work: Pass, tick: Callable[[], None] = lambda: None) -> None:
        """One walk for every row of `work`; `tick` before each layer, which may raise."""

        def compute(handles: LayerHandles) -> None:
            tick()
            self._forward(handles, work)

        self._scheduler.walk(compute)
