"""Aggregate tokens a second of one worker with 1 to 16 streams, and how full its turns are."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import files
from bench.engines import Order, prepare, prompt_of
from bench.rows import MIB, Bench, Row
from superfluid_workerd.link.frames import (
    Class,
    Generate,
    GenerationRequest,
    Hello,
    Load,
    LoadFailed,
    Ready,
    Sampling,
    StreamFailed,
    Tokens,
    Turn,
    TurnStats,
)
from support.worker import Worker

STREAMS: Final = (1, 2, 4, 8, 16)
_VOCABULARY: Final = 32_000
_CONTEXT: Final = 512
_SHORT: Final = 16
_LONG: Final = 400
_ALIKE: Final = 32


def rows(bench: Bench) -> Iterator[Row]:
    """Resident, and streaming from a file four times the cap; a chat behind long prompts in each;
    then prompts that begin alike."""
    model = files.model(bench.place("models"), "125M", "Q4_K")
    shared = str(bench.place("kernels"))
    prepare(Order(engine="native", model=str(model), shared=shared))
    size = model.stat().st_size
    for mode, cap in (("resident", size), ("streaming", size // 4)):
        conditions = {"file": model.name, "cap_mib": cap // MIB, "threads": 2}
        with tempfile.TemporaryDirectory() as folder, Worker(Path(folder), "native") as worker:
            streams = _Streams(worker)
            streams.load(model, shared, cap)
            streams.together(1, 2)
            yield from _aggregate(bench, streams, mode, conditions)
            yield from _behind(bench, streams, mode, conditions)
    yield from _alike(bench)


@dataclass(frozen=True, slots=True)
class _Run:
    """What several streams got, their prompts counted as time and not as tokens."""

    rate: float
    occupancy: float
    prefilled: int
    seconds: float


class _Streams:
    """A worker that holds a model, and streams on it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._numbers = itertools.count(1)
        self._stats = TurnStats()

    def load(
        self, model: Path, shared: str, cap: int, context: int = _CONTEXT, lanes: int = max(STREAMS)
    ) -> None:
        """Raises `RuntimeError` when the model does not load."""
        self._worker.send(
            Hello(),
            Load(
                model=str(model), name="m", scratch=str(self._worker.folder), shared=shared,
                context=context, lanes=lanes, threads=2, options={"cache-bytes": cap},
            ),
        )  # fmt: skip
        for message in self._worker.messages():
            if isinstance(message, LoadFailed):
                raise RuntimeError(message.error.message)
            if isinstance(message, Ready):
                return
        raise RuntimeError(f"the worker left: {self._worker.log.read_text()[-500:]}")

    def start(
        self, prompt: int, tokens: int, head: Sequence[int] = (), service_class: Class = "agent"
    ) -> int:
        """Start a stream whose prompt is `head` and `prompt` tokens of its own; its number."""
        number = next(self._numbers)
        request = GenerationRequest(
            prompt=Tokens(tokens=[*head, *prompt_of(prompt, _VOCABULARY, number)]),
            sampling=Sampling(temperature=0),
            max_tokens=tokens,
            ignore_eos=True,
            service_class=service_class,
        )
        self._worker.send(Generate(stream=number, request=request))
        return number

    def turns(self) -> Iterator[tuple[float, Turn]]:
        """Each turn with the time it arrived."""
        for message in self._worker.messages():
            if isinstance(message, StreamFailed):
                raise RuntimeError(message.error.message)
            if isinstance(message, Turn):
                self._stats = message.stats
                yield time.perf_counter(), message

    def together(self, count: int, tokens: int, head: Sequence[int] = ()) -> _Run:
        """`count` streams of `tokens` each, from the first one's sending to the last one's end."""
        before, start = self._stats, time.perf_counter()
        running = {self.start(_SHORT, tokens, head) for _ in range(count)}
        for now, turn in self.turns():
            running -= {delta.stream for delta in turn.deltas if delta.finish}
            if not running:
                turns, seats = turn.stats.turns - before.turns, turn.stats.seats - before.seats
                fed = turn.stats.prefill_tokens - before.prefill_tokens
                return _Run(count * tokens / (now - start), seats / turns, fed, now - start)
        raise RuntimeError(f"the worker left: {self._worker.log.read_text()[-500:]}")

    def first_token(self, before: int) -> tuple[float, float]:
        """Seconds to the first token of an interactive chat that comes after `before` long
        prompts, and the mean occupancy until all have ended."""
        was = self._stats
        running = {self.start(_LONG, 2) for _ in range(before)}
        start = time.perf_counter()
        chat = self.start(_SHORT, 2, service_class="interactive")
        running.add(chat)
        first = 0.0
        for now, turn in self.turns():
            if not first and any(delta.stream == chat and delta.tokens for delta in turn.deltas):
                first = now - start
            running -= {delta.stream for delta in turn.deltas if delta.finish}
            if not running:
                seats = turn.stats.seats - was.seats
                return first, seats / (turn.stats.turns - was.turns)
        raise RuntimeError(f"the worker left: {self._worker.log.read_text()[-500:]}")


def _aggregate(
    bench: Bench, streams: _Streams, mode: str, conditions: dict[str, Any]
) -> Iterator[Row]:
    alone = 0.0
    for count in STREAMS:
        tokens = 12 if bench.quick else 48
        runs = [streams.together(count, tokens) for _ in range(2 * bench.rounds)]
        row = Row(
            name=f"{mode}, {count} streams",
            unit="tok/s",
            samples=[run.rate for run in runs],
            conditions=conditions,
        )
        alone = alone or statistics.median(row.samples)
        yield row
        yield Row(
            name=f"{mode}, {count} streams: gain over one",
            unit="x",
            samples=[run.rate / alone for run in runs],
            conditions=conditions,
        )
        yield Row(
            name=f"{mode}, {count} streams: mean occupancy",
            unit="seats",
            samples=[run.occupancy for run in runs],
            conditions=conditions,
        )


def _behind(
    bench: Bench, streams: _Streams, mode: str, conditions: dict[str, Any]
) -> Iterator[Row]:
    for before in (0, 8):
        runs = [streams.first_token(before) for _ in range(bench.rounds)]
        yield Row(
            name=f"{mode}, chat behind {before} prompts of {_LONG}: first token",
            unit="s",
            samples=[run[0] for run in runs],
            conditions=conditions,
        )
        yield Row(
            name=f"{mode}, chat behind {before} prompts of {_LONG}: mean occupancy",
            unit="seats",
            samples=[run[1] for run in runs],
            conditions=conditions,
        )


def _alike(bench: Bench) -> Iterator[Row]:
    """What 32 requests with one beginning prefill. The default model: its context is long."""
    model, shared = files.default_model(), str(bench.place("kernels"))
    prepare(Order(engine="native", model=str(model), shared=shared))
    length = 500 if bench.quick else 5000
    conditions = {"file": model.name, "lanes": 8, "threads": 2}
    with tempfile.TemporaryDirectory() as folder, Worker(Path(folder), "native") as worker:
        streams = _Streams(worker)
        streams.load(model, shared, model.stat().st_size, context=length + 64, lanes=8)
        run = streams.together(_ALIKE, 4, prompt_of(length, _VOCABULARY))
    name = f"{_ALIKE} requests with {length} tokens in common"
    own = length + _ALIKE * _SHORT
    for what, unit, sample, wanted in (
        (
            "prefilled",
            "tokens",
            float(run.prefilled),
            f"{own}, once what is shared and each its own",
        ),
        ("all answered", "s", run.seconds, ""),
        ("mean occupancy", "seats", run.occupancy, ""),
    ):
        yield Row(
            name=f"{name}: {what}", unit=unit, samples=[sample], wanted=wanted,
            conditions=conditions,
        )  # fmt: skip
