"""The turn loop: one thread that makes every call of the runtime.

Block for work, linger, take what arrived, plan, step once, draw for each seat, commit, one frame.
"""

from __future__ import annotations

import queue
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from superfluid_compat.errors import (
    BadFrame,
    Cancelled,
    Capacity,
    DoesNotFit,
    Fatal,
    Fault,
    Overloaded,
    StepError,
    SuperfluidError,
)
from superfluid_workerd.adapter import Feed, Runtime, SequenceId
from superfluid_workerd.lanes import LaneTable
from superfluid_workerd.link.frames import (
    Cancel,
    Delta,
    Ping,
    Pong,
    Prompted,
    Shutdown,
    StreamFailed,
    ToDaemon,
    Turn,
    TurnStats,
)
from superfluid_workerd.link.refusals import in_words, refusal
from superfluid_workerd.stream import Stream
from superfluid_workerd.turns import Policy, Ready, linger_s, plan

if TYPE_CHECKING:
    from superfluid_workerd.adapter import Logits


@dataclass(frozen=True, slots=True)
class Rejected:
    """A stream that its intake refused."""

    number: int
    error: SuperfluidError


Item: TypeAlias = Stream | Rejected | Cancel | Ping | Shutdown
Send: TypeAlias = Callable[[ToDaemon], None]
_Seated: TypeAlias = list[tuple[Stream, Feed]]


class _Abandoned(Exception):
    """Nobody waits for the step that runs."""


@dataclass(slots=True)
class _Counts:
    turns: int = 0
    failed_turns: int = 0
    seats: int = 0
    ready: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    busy_s: float = 0.0


class Executor:
    """Streams on lanes over one runtime. `run` and the constructor belong to the owner thread.

    All lanes are created and cleared here, so that a runtime that cannot serve that many streams
    raises `DoesNotFit` before the first one arrives.
    """

    def __init__(self, runtime: Runtime, lanes: int, policy: Policy, send: Send) -> None:
        self._runtime = runtime
        self._policy = policy
        self._send = send
        self._step_tokens: Final = runtime.describe().step_tokens
        self._lanes = LaneTable(lanes)
        self._sequences = _create(runtime, lanes)
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._live: set[int] = set()
        self._forsaken: set[int] = set()
        self._waiting: deque[Stream] = deque()
        self._running: dict[int, Stream] = {}
        self._admitted = 0
        self._ticks = 0
        self._counts = _Counts()
        self._seated: Sequence[Stream] = ()
        self._abandoned = False
        self._closing = False

    def expect(self, number: int) -> None:
        """Count stream `number` in, before its intake; for the thread that reads the link.

        Raises `Overloaded` when too many wait already, `BadFrame` when the number is in use.
        """
        if number in self._live:
            raise BadFrame(f"stream {number} was started while it runs")
        if len(self._live) >= len(self._lanes) + self._policy.max_waiting:
            raise Overloaded(
                f"{len(self._lanes)} streams run and {self._policy.max_waiting} wait, no more "
                "are taken"
            )
        self._live.add(number)

    def post(self, item: Item) -> None:
        """Hand something to the turn loop; any thread."""
        self._inbox.put(item)

    def run(self) -> None:
        """Serve until `Shutdown`. Raises `Fatal` when the runtime's state is lost."""
        while not self._closing:
            self._receive(wait=not (self._running or self._waiting))
            self._linger()
            self._turn()
        self._cancel_all()
        self._runtime.close()

    def stats(self) -> TurnStats:
        """Counters since the load."""
        counts = self._counts
        return TurnStats(
            turns=counts.turns,
            failed_turns=counts.failed_turns,
            seats=counts.seats,
            ready=counts.ready,
            prefill_tokens=counts.prefill_tokens,
            decode_tokens=counts.decode_tokens,
            busy_s=counts.busy_s,
            free_lanes=self._lanes.free,
            waiting=len(self._waiting),
        )

    # What arrives.

    def _receive(self, *, wait: bool = False, timeout_s: float | None = None) -> None:
        try:
            self._handle(self._inbox.get(wait, timeout_s))
            while True:
                self._handle(self._inbox.get_nowait())
        except queue.Empty:
            return

    def _handle(self, item: Item) -> None:
        match item:
            case Stream():
                self._arrive(item)
            case Rejected():
                self._fail(item.number, item.error)
            case Cancel():
                self._cancel(item.stream)
            case Ping():
                self._send(Pong(number=item.number, ticks=self._ticks, stats=self.stats()))
            case Shutdown():
                self._closing = True

    def _arrive(self, stream: Stream) -> None:
        stream.cancelled = stream.number in self._forsaken
        self._waiting.append(stream)
        prompt = stream.history[: stream.prompt_tokens]
        self._send(Prompted(stream=stream.number, tokens=prompt))

    def _cancel(self, number: int) -> None:
        for stream in (*self._running.values(), *self._waiting):
            if stream.number == number:
                stream.cancelled = True
                return
        if number in self._live:
            self._forsaken.add(number)

    def _forget(self, number: int) -> None:
        self._live.discard(number)
        self._forsaken.discard(number)

    def _fail(self, number: int, error: SuperfluidError) -> None:
        self._forget(number)
        self._send(StreamFailed(stream=number, error=refusal(error)))

    # One turn.

    def _linger(self) -> None:
        end = time.monotonic() + self._policy.turn_linger_us / 1_000_000
        while not self._closing and linger_s(self._ready(), self._active(), self._policy):
            left_s = end - time.monotonic()
            if left_s <= 0:
                return
            self._receive(wait=True, timeout_s=left_s)

    def _ready(self) -> int:
        return len(self._running) + min(len(self._waiting), self._lanes.free)

    def _active(self) -> int:
        """Lanes that are ready or will be once the intake is done with their streams."""
        return min(len(self._live), len(self._lanes))

    def _turn(self) -> None:
        self._ticks += 1
        self._report(self._sweep())
        self._admit()
        if self._running and not self._closing:
            deltas = self._step(self._plan())
            self._report(deltas + self._sweep())

    def _report(self, deltas: list[Delta]) -> None:
        if deltas:
            self._send(Turn(deltas=deltas, stats=self.stats()))

    def _sweep(self) -> list[Delta]:
        """End every stream that is finished or that nobody waits for."""
        now = time.monotonic()
        gone = [it for it in self._waiting if it.finish or it.over(now)]
        leaving = [it for it in self._running.values() if it.over(now)]
        for stream in gone:
            self._waiting.remove(stream)
        for stream in (*gone, *leaving):
            self._leave(stream)
        return [stream.ended() for stream in (*gone, *leaving)]

    def _admit(self) -> None:
        while self._waiting and (lane := self._lanes.take()) is not None:
            stream = self._waiting.popleft()
            stream.lane, stream.order = lane, self._admitted
            self._admitted += 1
            self._running[stream.order] = stream
            self._clear(lane.index)

    def _leave(self, stream: Stream) -> None:
        self._forget(stream.number)
        if stream.lane is not None:
            del self._running[stream.order]
            self._lanes.give_back(stream.lane)
            self._clear(stream.lane.index)
            stream.lane = None

    def _plan(self) -> _Seated:
        ready = [
            Ready(it.order, it.pending, it.decodes, it.seated) for it in self._running.values()
        ]
        self._counts.ready += len(ready)
        seats = plan(ready, self._policy, self._step_tokens)
        return [self._seat(self._running[seat.order], seat.tokens) for seat in seats]

    def _seat(self, stream: Stream, tokens: int) -> tuple[Stream, Feed]:
        if stream.lane is None:
            raise Fatal(f"stream {stream.number} was seated without a lane")
        feed = Feed(
            sequence=self._sequences[stream.lane.index],
            tokens=stream.history[stream.fed : stream.fed + tokens],
            start=stream.fed,
            logits="last" if tokens == stream.pending else "none",
        )
        return stream, feed

    def _step(self, seated: _Seated) -> list[Delta]:
        """One pass of the runtime; what it gave the streams that are still wanted."""
        started = time.monotonic()
        self._abandoned = False
        try:
            rows = self._pass(seated)
        except Fatal:
            raise
        except Exception as error:  # noqa: BLE001  # recorded; costs the seats an error each
            self._stop_seated(error)
            return []
        finally:
            self._seated = ()
            self._counts.busy_s += time.monotonic() - started
        self._count(seated)
        self._receive()
        return self._commit(seated, rows)

    def _pass(self, seated: _Seated) -> Sequence[Logits | None]:
        """Step `seated`, without its last seats as long as there is no room for all."""
        while True:
            self._seated = [stream for stream, _ in seated]
            self._lanes.seat([it.lane for it in self._seated if it.lane is not None])
            try:
                return self._runtime.step([feed for _, feed in seated], self._tick)
            except Capacity:
                if len(seated) == 1:
                    raise
                seated.pop()

    def _tick(self) -> None:
        self._ticks += 1
        if not self._inbox.empty():
            self._receive()
        now = time.monotonic()
        if self._closing or all(stream.over(now) for stream in self._seated):
            self._abandoned = True
            raise _Abandoned

    def _stop_seated(self, error: Exception) -> None:
        """A step that failed costs its seats an error each; one that nobody wanted costs nothing:
        its streams are over and leave with the next sweep."""
        if self._abandoned:
            return
        self._counts.turns += 1
        self._counts.failed_turns += 1
        if not isinstance(error, StepError):
            traceback.print_exception(error)
            error = Fault(f"the step failed with {in_words(error)}")
        for stream in self._seated:
            self._leave(stream)
            self._fail(stream.number, error)

    def _count(self, seated: _Seated) -> None:
        counts = self._counts
        counts.turns += 1
        counts.seats += len(seated)
        for stream, feed in seated:
            if stream.decodes:
                counts.decode_tokens += 1
            else:
                counts.prefill_tokens += len(feed.tokens)

    def _commit(self, seated: _Seated, rows: Sequence[Logits | None]) -> list[Delta]:
        now = time.monotonic()
        deltas = []
        for (stream, feed), row in zip(seated, rows, strict=True):
            stream.fed += len(feed.tokens)
            stream.seated = self._counts.turns
            if row is None or stream.over(now):
                continue
            try:
                delta = stream.draw(row[-1])
            except Fault as error:
                self._leave(stream)
                self._fail(stream.number, error)
                continue
            deltas.append(delta)
            if stream.finish:
                self._leave(stream)
        return deltas

    # The runtime's state.

    def _clear(self, index: int) -> None:
        """Empty a lane's sequence, or replace it. Raises `Fatal` when neither works."""
        sequence = self._sequences[index]
        try:
            self._runtime.seq_truncate(sequence, 0)
        except Fatal:
            raise
        except StepError as error:
            print(f"lane {index} is made anew: {error.line()}", file=sys.stderr)
            self._sequences[index] = self._replace(sequence)
        if self._runtime.seq_length(self._sequences[index]) != 0:
            raise Fatal(f"the runtime did not empty the sequence of lane {index}")

    def _replace(self, sequence: SequenceId) -> SequenceId:
        try:
            self._runtime.seq_free(sequence)
            return self._runtime.seq_create()
        except StepError as error:
            raise Fatal(f"a sequence could not be replaced: {error.message}") from error

    def _cancel_all(self) -> None:
        for stream in (*self._running.values(), *self._waiting):
            stream.cancelled = True
        self._report(self._sweep())
        for number in list(self._live):
            self._fail(number, Cancelled("the worker is shutting down"))


def _create(runtime: Runtime, lanes: int) -> list[SequenceId]:
    most = runtime.describe().sequences
    fix = f"serve with --lanes {max(1, most)}"
    if most < lanes:
        raise DoesNotFit(
            f"{lanes} lanes were asked for, the runtime holds {most} sequences", fix=fix
        )
    sequences: list[SequenceId] = []
    try:
        for _ in range(lanes):
            sequences.append(runtime.seq_create())
            runtime.seq_truncate(sequences[-1], 0)
    except StepError as error:
        raise DoesNotFit(
            f"lane {len(sequences)} of {lanes} could not be set up: {error.message}",
            fix="serve with --lanes 1",
        ) from error
    return sequences


__all__ = ["Executor", "Item", "Rejected"]
