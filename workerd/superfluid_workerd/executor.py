"""The turn loop: one thread that makes every call of the runtime.

Block for work, take what arrived, admit, linger, plan, step once, draw for each seat, commit, one
frame; then one call for what waits to be embedded.
"""

from __future__ import annotations

import queue
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from superfluid_compat.errors import (
    Cancelled,
    Capacity,
    Fatal,
    Fault,
    StepError,
    SuperfluidError,
)
from superfluid_workerd.adapter import Feed, Runtime
from superfluid_workerd.admission import Waiting, gives_way
from superfluid_workerd.counters import Counters
from superfluid_workerd.embedding import Embeddings, EmbedJob, EmbedRejected
from superfluid_workerd.lanes import LaneTable
from superfluid_workerd.link.frames import (
    Cancel,
    Choices,
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
from superfluid_workerd.options import SERVICE_CLASSES
from superfluid_workerd.pace import Pace
from superfluid_workerd.places import Places
from superfluid_workerd.rows import checked
from superfluid_workerd.sequences import Sequences
from superfluid_workerd.stream import Stream
from superfluid_workerd.turns import Policy, Ready, linger_s, plan

if TYPE_CHECKING:
    from superfluid_workerd.adapter import Logits


@dataclass(frozen=True, slots=True)
class Rejected:
    """A stream that its intake refused."""

    number: int
    error: SuperfluidError


Item: TypeAlias = Stream | Rejected | EmbedJob | EmbedRejected | Cancel | Ping | Shutdown
Send: TypeAlias = Callable[[ToDaemon], None]
_PATIENCE: Final = 10
"""By how much a turn may be longer when no stream waits for its next token."""

_Seated: TypeAlias = list[tuple[Stream, Feed]]


class _Abandoned(Exception):
    """Nobody waits for the step that runs."""


class Executor:
    """Streams on lanes over one runtime. `run` and the constructor belong to the owner thread.

    All lanes are created and cleared here, so that a runtime that cannot serve that many streams
    raises `DoesNotFit` before the first one arrives. Embedding requests need no lane; they take
    turns with the streams.
    """

    def __init__(
        self,
        runtime: Runtime,
        lanes: int,
        policy: Policy,
        send: Send,
        name: str = "the runtime",
    ) -> None:
        self._runtime = runtime
        self._policy = policy
        self._send = send
        described = runtime.describe()
        self._step_tokens: Final = described.step_tokens
        self._decoders: Final = min(policy.max_seats, policy.turn_tokens, described.step_tokens)
        self._vocabulary: Final = described.vocabulary
        self._embed_tokens: Final = described.embedding.batch_tokens if described.embedding else 0
        self._retries: Final = 1 if described.retry else 0
        self._lanes = LaneTable(lanes)
        self.sequences = Sequences(
            runtime,
            lanes if described.generates else 0,
            name,
            cache_bytes=policy.prefix_cache_bytes,
            parked_bytes=policy.parked_bytes,
        )
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._live = Places(lanes, policy.max_waiting)
        self._forsaken: set[int] = set()
        self._waiting = Waiting(lanes, policy, described.tokens)
        self._running: dict[int, Stream] = {}
        self._admitted = 0
        self._ticks = 0
        self._counters = Counters()
        self._pace = Pace()
        self._embed_pace = Pace()
        self.embeddings = Embeddings(
            runtime,
            lanes + policy.max_waiting,
            send,
            self._counters,
            beat=self._beat,
            relieve=self.sequences.relieve,
        )
        self._seated: Sequence[Stream] = ()
        self._crowded = False
        self._abandoned = False
        self._closing = False

    def expect(self, number: int, choices: Choices | None = None) -> None:
        """Count stream `number` in, before its intake; for the thread that reads the link.

        Raises `Overloaded` when too many wait already, `InvalidField` when its `choices` never
        fit, `BadFrame` when the number is in use.
        """
        self._live.take(number, choices)

    def post(self, item: Item) -> None:
        """Hand something to the turn loop; any thread."""
        self._inbox.put(item)

    def run(self) -> None:
        """Serve until `Shutdown`. Raises `Fatal` when the runtime's state is lost."""
        while not self._closing:
            self._receive(wait=not (self._running or self._waiting or self.embeddings))
            self._turn()
            self._embed()
        self._cancel_all()
        self.embeddings.close()
        self._runtime.close()

    def stats(self) -> TurnStats:
        """Counters since the load, gauges of now."""
        return self._counters.stats(
            lanes=len(self._lanes),
            free_lanes=self._lanes.free,
            waiting=len(self._waiting),
            parked=sum(stream.parked is not None for stream in self._waiting),
            parked_bytes=self.sequences.parked_bytes,
            stored=self.sequences.stored,
            stored_tokens=self.sequences.stored_tokens,
            swapped_bytes=self.sequences.swapped_bytes,
            embeds_waiting=len(self.embeddings),
        )

    def _embed(self) -> None:
        """One call for what waits to be embedded; beside streams it takes no longer than a turn."""
        if self._closing or not self.embeddings:
            return
        started = time.monotonic()
        beside = bool(self._running or self._waiting)
        within = self._embed_pace.tokens_within(self._policy.turn_target_ms / 1000)
        most = self._embed_tokens if within is None or not beside else within
        tokens = self.embeddings.call(min(most, self._embed_tokens), patient=bool(self._running))
        elapsed_s = time.monotonic() - started
        self._counters.busy_s += elapsed_s
        if tokens:
            self._embed_pace.add(tokens, elapsed_s)

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
            case EmbedJob():
                self.embeddings.add(item)
            case EmbedRejected():
                self.embeddings.fail(item.number, item.error)
            case Cancel():
                self._cancel(item.stream)
                self.embeddings.cancel(item.stream)
            case Ping():
                self._send(Pong(number=item.number, ticks=self._ticks, stats=self.stats()))
            case Shutdown():
                self._closing = True

    def _arrive(self, stream: Stream) -> None:
        stream.cancelled = stream.number in self._forsaken
        stream.queued = stream.arrived
        self._waiting.add(stream)
        if self._seated:
            self._announce(stream)

    def _announce(self, stream: Stream) -> None:
        stream.announced = True
        prompt = stream.history[: stream.prompt_tokens]
        self._send(Prompted(stream=stream.number, tokens=prompt, cached=stream.cached))

    def _cancel(self, number: int) -> None:
        for stream in (*self._running.values(), *self._waiting):
            if stream.number == number:
                stream.cancelled = True
                return
        if number in self._live:
            self._forsaken.add(number)

    def _forget(self, number: int) -> None:
        self._live.give_back(number)
        self._forsaken.discard(number)

    def _fail(self, number: int, error: SuperfluidError) -> None:
        self._forget(number)
        self._send(StreamFailed(stream=number, error=refusal(error)))

    # One turn.

    def _turn(self) -> None:
        self._ticks += 1
        self._report(self._sweep())
        self._admit()
        self._linger()
        if self._running and not self._closing:
            deltas = self._step(self._plan())
            prefilled = self._prefilled()
            self._report(deltas + self._sweep(), prefilled)

    def _linger(self) -> None:
        """Wait for streams that are arriving, as long as there is a lane for one more."""
        started = time.monotonic()
        while not self._closing:
            running = len(self._running)
            coming = min(len(self._live) - running - len(self._waiting), self._lanes.free)
            wait_s = linger_s(running, running + coming, self._policy) if running else 0.0
            left_s = started + wait_s - time.monotonic()
            if left_s <= 0:
                break
            self._receive(wait=True, timeout_s=left_s)
            self._report(self._sweep())
            self._admit()
        self._counters.lingered_s += time.monotonic() - started

    def _report(self, deltas: list[Delta], prefilled: dict[int, int] | None = None) -> None:
        if deltas or prefilled:
            self._send(Turn(deltas=deltas, stats=self.stats(), prefilled=prefilled or {}))

    def _prefilled(self) -> dict[int, int]:
        """How far those have come that the last turn seated and that wait for a token still."""
        turn = self._counters.turns
        running = self._running.values()
        return {it.number: it.fed for it in running if it.seated == turn and not it.decodes}

    def _sweep(self) -> list[Delta]:
        """End every stream that is finished or that nobody waits for."""
        now = time.monotonic()
        gone = [it for it in self._waiting if it.finish or it.over(now)]
        leaving = [it for it in self._running.values() if it.over(now)]
        for stream in gone:
            if not stream.announced:
                self._announce(stream)
            self._waiting.remove(stream)
        for stream in (*gone, *leaving):
            self._leave(stream)
        return [stream.ended() for stream in (*gone, *leaving)]

    def _admit(self) -> None:
        """Lanes for those whose turn it is; an interactive stream may take one from another."""
        while not (self._crowded and self._running):
            running = self._running.values()
            stream = self._waiting.next(running, self._follows)
            if stream is not None:
                self._seat_down(stream)
            elif found := self._waiting.preemption(running, self._follows):
                arrival, victims = found
                for victim in victims:
                    self._park(victim)
                self._seat_down(arrival)
            else:
                break
        for stream in self._waiting:
            if not stream.announced:
                self._announce(stream)

    def _follows(self, stream: Stream) -> bool:
        """Whether it is better off waiting for a prefill that another does."""
        if stream.follows is not None:
            leader, shared = stream.follows
            if self._running.get(leader.order) is leader and leader.fed < shared:
                return True
        stream.follows = self.sequences.leader(stream)
        return stream.follows is not None

    def _seat_down(self, stream: Stream) -> None:
        lane = self._lanes.take()
        if lane is None:
            raise Fatal(f"stream {stream.number} was admitted without a lane")
        self._waiting.remove(stream)
        stream.lane, stream.order, stream.follows = lane, self._admitted, None
        stream.began = time.monotonic()
        stream.waited += stream.began - stream.queued
        self._admitted += 1
        self._running[stream.order] = stream
        before = stream.fed
        self.sequences.begin(stream)
        self._count_begun(stream, before)
        if stream.cached is None or not stream.announced:
            stream.cached = min(stream.fed, stream.prompt_tokens)
            self._announce(stream)

    def _count_begun(self, stream: Stream, before: int) -> None:
        counters = self._counters
        counters.admitted += 1
        counters.queued_s += stream.began - stream.queued
        if stream.cached is None:
            counters.shared_tokens += stream.fed
        else:
            counters.refed_tokens += max(0, before - stream.fed)

    def _park(self, stream: Stream) -> None:
        """Back into line, with what was computed for it kept where there is room."""
        self._counters.preempted += 1
        self.sequences.park(stream)
        self._give_back(stream)
        stream.queued = time.monotonic()
        stream.parkings += 1
        self._waiting.add(stream)

    def _leave(self, stream: Stream, *, keep: bool = True) -> None:
        self._forget(stream.number)
        self.sequences.forget(stream)
        if stream.lane is not None:
            self.sequences.end(stream, keep=keep)
            self._give_back(stream)
            self._crowded = False

    def _give_back(self, stream: Stream) -> None:
        if stream.lane is not None:
            del self._running[stream.order]
            self._lanes.give_back(stream.lane)
            stream.lane = None

    def _plan(self) -> _Seated:
        running = self._running.values()
        if len(running) <= self._decoders and all(it.decodes for it in running):
            return [self._seat(it, 1) for it in running]
        ready = [Ready(it.order, it.pending, it.decodes, it.seated, it.due) for it in running]
        seats = plan(ready, self._policy, min(self._step_tokens, self._bound(running)))
        return [self._seat(self._running[seat.order], seat.tokens) for seat in seats]

    def _bound(self, running: Collection[Stream]) -> int:
        """The most tokens of a turn, so that streams that decode, and interactive ones that will,
        get theirs soon, and who comes next need not wait long for the turn to end."""
        decoding = sum(it.decodes for it in running)
        urgent = decoding or any(it.service_class == SERVICE_CLASSES[0] for it in running)
        target_s = self._policy.turn_target_ms / 1000
        prompts = self._pace.tokens_within(target_s if urgent else _PATIENCE * target_s)
        return self._step_tokens if prompts is None else decoding + prompts

    def _seat(self, stream: Stream, tokens: int) -> tuple[Stream, Feed]:
        feed = Feed(
            sequence=self.sequences.of(stream),
            tokens=stream.history[stream.fed : stream.fed + tokens],
            start=stream.fed,
            logits="last" if tokens == stream.pending else "none",
        )
        return stream, feed

    def _step(self, seated: _Seated) -> list[Delta]:
        """One pass of the runtime; what it gave the streams that are still wanted."""
        started = time.monotonic()
        ready = len(self._running)
        self._abandoned = False
        try:
            self.sequences.compute(sum(len(feed.tokens) for _, feed in seated))
            seated, rows = self._pass(seated)
        except Fatal:
            raise
        except Exception as error:  # noqa: BLE001  # recorded; costs the seats an error each
            self._fail_step(error, ready)
            return []
        finally:
            self._seated = ()
            self._counters.busy_s += time.monotonic() - started
        self._pace.add(sum(len(feed.tokens) for _, feed in seated), time.monotonic() - started)
        self._count(seated, ready)
        self._receive()
        return self._commit(seated, rows)

    def _pass(self, seated: _Seated) -> tuple[_Seated, list[Logits | None]]:
        """Step `seated`; those that were, and their rows. While there is no room for all, the
        cache goes, then the last seats, then the lane of another stream."""
        while True:
            self._seated = [stream for stream, _ in seated]
            self._lanes.seat([it.lane for it in self._seated if it.lane is not None])
            feeds = [feed for _, feed in seated]
            try:
                answer = self._runtime.step(feeds, self._tick)
                return seated, checked(answer, feeds, self._vocabulary)
            except Capacity:
                if self.sequences.relieve():
                    continue
                if len(seated) > 1:
                    seated = seated[:-1]
                elif not self._crowd_out(seated[0][0]):
                    raise

    def _crowd_out(self, wanted: Stream) -> bool:
        """Park the last in line that runs beside `wanted`, and admit nobody until one leaves."""
        others = [it for it in self._running.values() if it is not wanted]
        if not others:
            return False
        self._park(max(others, key=gives_way))
        self._crowded = True
        return True

    def _tick(self) -> None:
        going, now = self._beat(), time.monotonic()
        if not going or all(stream.over(now) for stream in self._seated):
            self._abandoned = True
            raise _Abandoned

    def _beat(self) -> bool:
        """A sign of life within a call, and what arrived meanwhile; False when the loop ends."""
        self._ticks += 1
        if not self._inbox.empty():
            self._receive()
        return not self._closing

    def _fail_step(self, error: Exception, ready: int) -> None:
        """A failed step costs its seats an error each, or where the runtime may be asked again a
        second try; one that nobody wanted costs nothing: its streams leave with the next sweep."""
        seated = self._seated
        again = self._abandoned or isinstance(error, Fault)
        if not self._abandoned:
            self._counters.turn(len(seated), ready)
            self._counters.failed_turns += 1
            if not isinstance(error, StepError):
                traceback.print_exception(error)
                error = Fault(f"the step failed with {in_words(error)}")
        for stream in seated:
            stream.faults += not self._abandoned
            if again and stream.faults <= self._retries:
                before = stream.fed
                self.sequences.rewind(stream)
                self._counters.refed_tokens += before - stream.fed
            else:
                self._end_badly(stream, error)

    def _end_badly(self, stream: Stream, error: Exception) -> None:
        self._leave(stream, keep=False)
        found = error if isinstance(error, SuperfluidError) else Fault(in_words(error))
        self._fail(stream.number, found)

    def _count(self, seated: _Seated, ready: int) -> None:
        counters = self._counters
        counters.turn(len(seated), ready)
        for stream, feed in seated:
            if stream.decodes:
                counters.decode_tokens += 1
            else:
                counters.prefill_tokens += len(feed.tokens)

    def _commit(self, seated: _Seated, rows: Sequence[Logits | None]) -> list[Delta]:
        """Draw for all before any leaves: rows hold until the runtime is called again."""
        now = time.monotonic()
        deltas, failed = list[Delta](), list[tuple[Stream, Fault]]()
        for (stream, feed), row in zip(seated, rows, strict=True):
            stream.fed += len(feed.tokens)
            stream.seated, stream.faults = self._counters.turns, 0
            if row is None or stream.over(now):
                continue
            try:
                deltas.append(stream.draw(row[-1]))
            except Fault as error:
                failed.append((stream, error))
        for stream, fault in failed:
            self._end_badly(stream, fault)
        for stream, _ in seated:
            if stream.finish:
                self._leave(stream)
        return deltas

    def _cancel_all(self) -> None:
        for stream in (*self._running.values(), *self._waiting):
            stream.cancelled = True
        self._report(self._sweep())
        for number in self._live.numbers():
            self._fail(number, Cancelled("the worker is shutting down"))


__all__ = ["Executor", "Item", "Rejected"]
