"""A loaded model that serves: sequences, and steps over several of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from superfluid_adapter_native.executor import StreamingExecutor, make_pass
from superfluid_adapter_native.kv_cache import KVCache, KVType, LayerShape
from superfluid_adapter_native.memory import MemoryManager
from superfluid_adapter_native.plan import MemoryPlan
from superfluid_adapter_native.state import seal, unseal
from superfluid_compat.errors import (
    Capacity,
    Fault,
    ModelError,
    OutOfBoundary,
    UnknownSequence,
    Unsupported,
)
from superfluid_workerd.adapter import (
    Device,
    Feed,
    MemoryUse,
    Runtime,
    RuntimeDescription,
    SequenceId,
    Tick,
)

if TYPE_CHECKING:
    from superfluid_workerd.adapter import Logits

Floats: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of one feed that go into one pass; `wanted` of them, the last ones, have logits."""

    feed: int
    tokens: Sequence[int]
    start: int
    wanted: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a runtime is made of, once everything is loaded by `plan`."""

    executor: StreamingExecutor
    manager: MemoryManager
    plan: MemoryPlan
    shapes: tuple[LayerShape, ...]
    kv_type: KVType
    vocabulary: int
    lanes: int
    key: bytes
    close: Callable[[], None]


class NativeRuntime(Runtime):
    """Serves a model through a `StreamingExecutor`; each sequence has a KV cache of its own.

    KV rows are counted as they are allocated, over all sequences, against what the plan holds.
    A step that fails, or that `tick` abandons, leaves every sequence as long as it was.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._sequences: dict[SequenceId, KVCache] = {}
        self._description = RuntimeDescription(
            context=loaded.plan.context,
            sequences=2 * loaded.lanes + 2,
            vocabulary=loaded.vocabulary,
            step_tokens=max(loaded.plan.context, loaded.plan.pass_rows),
            truncate="any",
            copy=True,
            export=True,
            row_invariant=True,
            retry=True,
            devices=(Device(name="cpu"),),
        )

    def describe(self) -> RuntimeDescription:
        return self._description

    def seq_create(self) -> SequenceId:
        return self._place(
            KVCache(self._loaded.shapes, limit=self._description.context, kind=self._loaded.kv_type)
        )

    def seq_free(self, sequence: SequenceId) -> None:
        self._cache(sequence)
        del self._sequences[sequence]

    def seq_length(self, sequence: SequenceId) -> int:
        return self._cache(sequence).length(0)

    def seq_truncate(self, sequence: SequenceId, length: int) -> None:
        cache = self._within(sequence, length)
        if length:
            cache.truncate(length)
        else:
            cache.reset()

    def seq_copy(self, sequence: SequenceId, length: int) -> SequenceId:
        cache = self._within(sequence, length)
        self._room_for_one()
        self._room(cache.capacity_for(length, fresh=True))
        return self._place(cache.copy(length))

    def seq_export(self, sequence: SequenceId) -> bytes:
        cache = self._cache(sequence)
        rows = cache.length(0)
        return seal(self._loaded.key, rows, cache.dump(rows))

    def seq_import(self, payload: bytes) -> SequenceId:
        rows, state = unseal(self._loaded.key, payload)
        self._room_for_one()
        cache = KVCache(
            self._loaded.shapes, limit=self._description.context, kind=self._loaded.kv_type
        )
        if rows > self._description.context:
            raise Unsupported(
                f"the exported sequence has {rows} tokens, the context is "
                f"{self._description.context}"
            )
        self._room(cache.capacity_for(rows))
        try:
            cache.load(rows, state)
        except OutOfBoundary as error:
            raise Unsupported(f"the exported sequence is damaged: {error.message}") from None
        return self._place(cache)

    def step(self, feeds: Sequence[Feed], tick: Tick) -> Sequence[Logits | None]:
        caches = self._check(feeds)
        self._reserve(feeds, caches)
        ends = np.cumsum([_wanted(feed) for feed in feeds])
        # One array, which passes fill in order, is the logits of every feed in turn.
        logits = np.empty((ends[-1] if feeds else 0, self._loaded.vocabulary), np.float32)
        done = 0
        try:
            # Weights that are no numbers give logits that are none; that is no news to a log.
            with np.errstate(all="ignore"):
                for parts in self._passes(feeds):
                    rows = sum(part.wanted for part in parts)
                    self._run(parts, caches, logits[done : done + rows], tick)
                    done += rows
        except BaseException as error:
            for feed, cache in zip(feeds, caches, strict=True):
                cache.truncate(feed.start)
            if isinstance(error, ModelError | OSError | MemoryError | ArithmeticError):
                raise Fault(f"the step failed: {type(error).__name__}: {error}") from error
            raise
        return [
            logits[end - _wanted(feed) : end] if _wanted(feed) else None
            for feed, end in zip(feeds, ends, strict=True)
        ]

    def memory(self) -> MemoryUse:
        return MemoryUse(
            weights=self._loaded.manager.resident_bytes,
            sequences=sum(cache.nbytes for cache in self._sequences.values()),
            releasable=self._loaded.manager.idle_bytes,
        )

    def release(self) -> None:
        self._loaded.manager.drop(self._loaded.manager.mapped)

    def close(self) -> None:
        self._sequences.clear()
        self._loaded.close()

    def _cache(self, sequence: SequenceId) -> KVCache:
        try:
            return self._sequences[sequence]
        except KeyError:
            raise UnknownSequence(f"there is no sequence {sequence}") from None

    def _within(self, sequence: SequenceId, length: int) -> KVCache:
        cache = self._cache(sequence)
        if not 0 <= length <= cache.length(0):
            raise OutOfBoundary(
                f"length {length} was wanted, sequence {sequence} has {cache.length(0)} tokens"
            )
        return cache

    def _place(self, cache: KVCache) -> SequenceId:
        self._room_for_one()
        free = next(i for i in range(len(self._sequences) + 1) if i not in self._sequences)
        self._sequences[free] = cache
        return free

    def _room_for_one(self) -> None:
        if len(self._sequences) >= self._description.sequences:
            raise Capacity(f"{len(self._sequences)} sequences exist, no more may")

    def _room(self, more_rows: int) -> None:
        """Raise `Capacity` unless the plan holds `more_rows` KV rows beside those allocated."""
        held = sum(cache.capacity for cache in self._sequences.values())
        if held + more_rows > self._loaded.plan.kv_rows:
            raise Capacity(
                f"{held} KV rows are held and {more_rows} more were wanted, the plan has "
                f"{self._loaded.plan.kv_rows}"
            )

    def _check(self, feeds: Sequence[Feed]) -> list[KVCache]:
        caches = [self._cache(feed.sequence) for feed in feeds]
        if len({feed.sequence for feed in feeds}) != len(feeds):
            raise OutOfBoundary("a sequence is fed twice in one step")
        for feed, cache in zip(feeds, caches, strict=True):
            self._check_feed(feed, cache.length(0))
        total = sum(len(feed.tokens) for feed in feeds)
        if total > self._description.step_tokens:
            raise Capacity(f"{total} tokens in a step, {self._description.step_tokens} may be")
        rows = sum(_wanted(feed) for feed in feeds)
        if rows > self._loaded.plan.logit_rows:
            raise Capacity(
                f"{rows} rows of logits in a step, the plan has {self._loaded.plan.logit_rows}"
            )
        return caches

    def _check_feed(self, feed: Feed, length: int) -> None:
        if not len(feed.tokens):
            raise OutOfBoundary(f"no tokens for sequence {feed.sequence}")
        if feed.start != length:
            raise OutOfBoundary(
                f"start {feed.start} was given, sequence {feed.sequence} has {length} tokens"
            )
        end = feed.start + len(feed.tokens)
        if end > self._description.context:
            raise OutOfBoundary(f"{end} tokens, the context is {self._description.context}")
        for token in feed.tokens:
            if not 0 <= token < self._loaded.vocabulary:
                raise OutOfBoundary(
                    f"token {token}, the vocabulary has 0 to {self._loaded.vocabulary - 1}"
                )

    def _reserve(self, feeds: Sequence[Feed], caches: Sequence[KVCache]) -> None:
        ends = [feed.start + len(feed.tokens) for feed in feeds]
        more = [
            cache.capacity_for(end) - cache.capacity
            for cache, end in zip(caches, ends, strict=True)
        ]
        if any(more):
            self._room(sum(more))
            for cache, end in zip(caches, ends, strict=True):
                cache.reserve(end)

    def _passes(self, feeds: Sequence[Feed]) -> Iterator[list[Part]]:
        """The feeds cut into passes of at most `pass_rows` rows, in order."""
        parts: list[Part] = []
        room = self._loaded.plan.pass_rows
        for index, feed in enumerate(feeds):
            at, count = 0, len(feed.tokens)
            unwanted = count - _wanted(feed)
            while at < count:
                taken = min(room, count - at)
                wanted = max(0, at + taken - max(at, unwanted))
                tokens = feed.tokens[at : at + taken]
                parts.append(Part(index, tokens, feed.start + at, wanted))
                at, room = at + taken, room - taken
                if not room:
                    yield parts
                    parts, room = [], self._loaded.plan.pass_rows
        if parts:
            yield parts

    def _run(
        self,
        parts: Sequence[Part],
        caches: Sequence[KVCache],
        output: Floats,
        tick: Tick,
    ) -> None:
        wanted: list[int] = []
        end = 0
        for part in parts:
            end += len(part.tokens)
            wanted += range(end - part.wanted, end)
        work = make_pass(
            [(caches[part.feed], part.tokens, part.start) for part in parts], wanted, output
        )
        self._loaded.executor.run(work, tick)


def _wanted(feed: Feed) -> int:
    match feed.logits:
        case "none":
            return 0
        case "last":
            return 1
        case "all":
            return len(feed.tokens)
