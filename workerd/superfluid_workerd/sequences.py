"""The runtime's sequences: one for each lane that is taken, the rest kept of streams that ended.

Every call that makes, moves or frees a sequence is made here. A kept sequence is what a lane would
otherwise have cleared: it costs nothing until something else needs its room, and then the one that
was used least recently goes. Where it does cost, since every token looks at all that the runtime
holds, it is swapped out: exported, and imported again for the prompt that begins like it.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from superfluid_compat.errors import Capacity, DoesNotFit, Fatal, StepError, Unsupported
from superfluid_workerd.adapter import Runtime, SequenceId
from superfluid_workerd.prefix import BLOCK, PrefixIndex, common, extend
from superfluid_workerd.stream import Stream

_REST: Final = 64
"""Tokens computed beside a kept sequence until it is swapped out: looking past it has cost them
about as much by then as moving it does."""


@dataclass(slots=True, eq=False)
class Stored:
    """What is kept of a stream that ended; `chain` are its tokens' hashes. It has a sequence, or
    once it is swapped out none and its `payload`. It rests `since` so many tokens were computed."""

    sequence: SequenceId | None
    tokens: list[int]
    chain: list[bytes]
    since: int
    payload: bytes = b""


Holder: TypeAlias = Stream | Stored
_Make: TypeAlias = Callable[[], SequenceId]


class Sequences:
    """Gives streams that take a lane their sequence, with as much in it as can be had for nothing.

    All sequences of the lanes are made and emptied here, so that a runtime that cannot serve that
    many streams raises `DoesNotFit` at once, with its `name`. `cache_bytes` bounds what is kept of
    ended streams, `parked_bytes` what preempted ones hold outside of the runtime. What is kept
    belongs to this runtime and goes with it: no other model, install, version or setting can ever
    find it.
    """

    def __init__(
        self, runtime: Runtime, lanes: int, name: str, *, cache_bytes: int, parked_bytes: int
    ) -> None:
        self._runtime = runtime
        self._describe = runtime.describe()
        self._cache_bytes = cache_bytes
        self._most_parked = parked_bytes
        self._spare = [_set_up(runtime, lane, lanes, name) for lane in range(lanes)]
        self._lanes: dict[Stream, SequenceId] = {}
        self._stored: dict[Stored, None] = {}
        self._inside: dict[Stored, None] = {}
        self._index: PrefixIndex[Holder] = PrefixIndex()
        self._computed = 0
        self._most_swapped = min(self._describe.swap_bytes, cache_bytes)
        self.swapped_bytes = 0
        self.stored_tokens = 0
        self.parked_bytes = 0

    @property
    def count(self) -> int:
        """All that the runtime should have."""
        return len(self._lanes) + len(self._inside) + len(self._spare)

    @property
    def stored(self) -> int:
        """Sequences of ended streams."""
        return len(self._stored)

    @property
    def inside_tokens(self) -> int:
        """Tokens of ended streams that the runtime holds."""
        return sum(len(it.tokens) for it in self._inside)

    @property
    def followed(self) -> bool:
        """Whether a stream can take over what another that runs has of its prompt."""
        return (self._describe.copy or self._describe.export) and self._describe.truncate == "any"

    def of(self, stream: Stream) -> SequenceId:
        """The sequence of a stream that has a lane."""
        return self._lanes[stream]

    # A stream's way.

    def begin(self, stream: Stream) -> None:
        """Give `stream` a sequence and set what of its history is `fed`.

        At least one token is left to feed. Raises `Fatal` when no sequence can be had.
        """
        extend(stream.chain, stream.history)
        found = self._imported(stream)
        if found is None:
            found = self._shared(stream)
        if found is None:
            found = self._fresh(), 0
        sequence, stream.fed = found
        self._lanes[stream] = sequence
        self._index.add(stream, stream.chain)

    def end(self, stream: Stream, *, keep: bool) -> None:
        """Take its sequence back, and with `keep` hold on to it for prompts that begin alike."""
        sequence = self._release(stream)
        tokens = stream.history[: stream.fed]
        if keep and self._cache_bytes and len(tokens) >= BLOCK and self._is_at(sequence, stream):
            chain = stream.chain[: len(tokens) // BLOCK]
            extend(chain, tokens)
            self._store(Stored(sequence, tokens, chain, self._computed))
            self._trim()
        else:
            self._recycle(sequence)

    def park(self, stream: Stream) -> None:
        """Take its sequence back and keep the state within the budget, else in the cache."""
        stream.parked = self._exported(stream)
        self.parked_bytes += len(stream.parked or b"")
        self.end(stream, keep=stream.parked is None)

    def forget(self, stream: Stream) -> None:
        """Drop the state that `stream` is parked with."""
        self.parked_bytes -= len(stream.parked or b"")
        stream.parked = None

    def rewind(self, stream: Stream) -> None:
        """After a failed step: back to what was committed, or where that is refused to nothing."""
        if not self._is_at(self._lanes[stream], stream):
            self._lanes[stream] = self._empty(self._lanes[stream])
            stream.fed = 0

    def relieve(self) -> bool:
        """Take out of the runtime what of the cache was used least recently; False when it holds
        nothing of it."""
        return self._make_room()

    def compute(self, tokens: int) -> None:
        """Before a step of so many tokens: swap out what has rested for long enough."""
        self._computed += tokens
        if self._most_swapped:
            for stored in [it for it in self._inside if self._computed - it.since >= _REST]:
                self._swap_out(stored)

    def leader(self, stream: Stream) -> tuple[Stream, int] | None:
        """A running stream that prefills so much of what `stream` begins with that waiting for it
        saves a block or more, and how many tokens they share."""
        extend(stream.chain, stream.history)
        if not self.followed:
            return None
        most = len(stream.history) - 1
        ready, leader, wanted = 0, None, 0
        for blocks, holder in self._index.sharing(stream.chain):
            if max(ready, wanted) >= (blocks + 1) * BLOCK:
                break
            shared = min(common(stream.history, _tokens(holder)), most)
            ready = max(ready, min(shared, _length(holder)))
            if isinstance(holder, Stream) and not holder.cancelled and shared > wanted:
                leader, wanted = holder, shared
        if leader is None or wanted - ready < BLOCK or leader.fed >= wanted:
            return None
        return leader, wanted

    # Where a sequence comes from.

    def _imported(self, stream: Stream) -> tuple[SequenceId, int] | None:
        payload = stream.parked
        if payload is None:
            return None
        self.forget(stream)
        try:
            sequence = self._made(lambda: self._runtime.seq_import(payload))
        except (Capacity, Unsupported):
            return None
        return sequence, self._runtime.seq_length(sequence)

    def _shared(self, stream: Stream) -> tuple[SequenceId, int] | None:
        """The longest beginning that some sequence has of the stream's history."""
        most = len(stream.history) - 1
        best: Holder | None = None
        length = BLOCK - 1
        for blocks, holder in self._index.sharing(stream.chain):
            if length >= (blocks + 1) * BLOCK:
                break
            shared = min(common(stream.history, _tokens(holder)), _length(holder), most)
            if shared > length:
                best, length = holder, shared
        if best is None:
            return None
        sequence = self._taken(best, length)
        return None if sequence is None else (sequence, length)

    def _taken(self, holder: Holder, length: int) -> SequenceId | None:
        """A sequence with the first `length` tokens of `holder`: a copy, unless it is one of the
        cache that loses nothing by it or cannot be copied."""
        if isinstance(holder, Stream):
            return self._copied(self._lanes[holder], length)
        self._use(holder)
        if holder.sequence is None:
            return self._swapped_in(holder, length)
        if length < len(holder.tokens):
            copy = self._copied(holder.sequence, length, holder)
            if copy is not None:
                return copy
        return self._moved(holder, holder.sequence, length)

    def _moved(self, stored: Stored, sequence: SequenceId, length: int) -> SequenceId | None:
        try:
            self._runtime.seq_truncate(sequence, length)
        except Unsupported:
            return None
        self._unstore(stored)
        return sequence

    def _swapped_in(self, stored: Stored, length: int) -> SequenceId | None:
        """Its first `length` tokens; who takes all of them leaves nothing behind."""
        try:
            sequence = self._made(lambda: self._runtime.seq_import(stored.payload))
        except Capacity:
            return None
        except Unsupported:
            sequence, length = None, len(stored.tokens)
        if length == len(stored.tokens) and stored in self._stored:
            self._drop(stored)
        return None if sequence is None else self._cut(sequence, length)

    def _copied(
        self, sequence: SequenceId, length: int, source: Stored | None = None
    ) -> SequenceId | None:
        try:
            if self._describe.copy:
                return self._made(lambda: self._runtime.seq_copy(sequence, length), source)
            if not self._describe.export:
                return None
            payload = self._runtime.seq_export(sequence)
            copy = self._made(lambda: self._runtime.seq_import(payload), source)
        except (Capacity, Unsupported):
            return None
        return self._cut(copy, length)

    def _cut(self, copy: SequenceId, length: int) -> SequenceId | None:
        try:
            self._runtime.seq_truncate(copy, length)
        except StepError as error:
            self._recycle(copy)
            if isinstance(error, Unsupported):
                return None
            raise
        return copy

    def _fresh(self) -> SequenceId:
        if not self._spare and self.count >= self._describe.sequences:
            self._make_room()
        if self._spare:
            return self._empty(self._spare.pop(0))
        try:
            return self._made(self._runtime.seq_create)
        except StepError as error:
            raise Fatal(f"a lane got no sequence: {error.message}") from error

    def _made(self, make: _Make, source: Stored | None = None) -> SequenceId:
        """What `make` makes, with room made for it: spare sequences go first, then the cache,
        but for `source`. Raises as `make`, and `Capacity`."""
        while True:
            full = self.count >= self._describe.sequences
            if full and self._spare:
                self._runtime.seq_free(self._spare.pop())
                full = False
            try:
                if full:
                    raise Capacity(f"{self.count} sequences are in use")
                return make()
            except Capacity:
                if not self._make_room(source):
                    raise

    def _exported(self, stream: Stream) -> bytes | None:
        left = self._most_parked - self.parked_bytes
        if not self._describe.export or stream.fed * self._token_bytes() > left:
            return None
        try:
            payload = self._runtime.seq_export(self._lanes[stream])
        except (Capacity, Unsupported):
            return None
        return payload if len(payload) <= left else None

    # Where it goes.

    def _release(self, stream: Stream) -> SequenceId:
        self._index.remove(stream, stream.chain)
        return self._lanes.pop(stream)

    def _is_at(self, sequence: SequenceId, stream: Stream) -> bool:
        """Whether the sequence holds what was committed, if need be by going back to it."""
        try:
            if self._runtime.seq_length(sequence) != stream.fed:
                self._runtime.seq_truncate(sequence, stream.fed)
        except Fatal:
            raise
        except StepError:
            return False
        return True

    def _store(self, stored: Stored) -> None:
        self._stored[stored] = self._inside[stored] = None
        self.stored_tokens += len(stored.tokens)
        self._index.add(stored, stored.chain)

    def _use(self, stored: Stored) -> None:
        """It was used last of all."""
        stored.since = self._computed
        for order in (self._stored, self._inside):
            if stored in order:
                order[stored] = order.pop(stored)

    def _unstore(self, stored: Stored) -> None:
        """It is kept no longer; its sequence, if it has one, is the caller's."""
        del self._stored[stored]
        self._inside.pop(stored, None)
        self.stored_tokens -= len(stored.tokens)
        self.swapped_bytes -= len(stored.payload)
        self._index.remove(stored, stored.chain)

    def _drop(self, stored: Stored) -> None:
        self._unstore(stored)
        if stored.sequence is not None:
            self._recycle(stored.sequence)

    def _trim(self) -> None:
        while self.swapped_bytes > self._most_swapped:
            self._drop(next(it for it in self._stored if it not in self._inside))
        while self._stored and self._kept_bytes() > self._cache_bytes:
            self._drop(next(iter(self._stored)))

    def _make_room(self, besides: Stored | None = None) -> bool:
        """In the runtime, by what was used least recently; False when nothing can go."""
        stored = next((it for it in self._inside if it is not besides), None)
        if stored is None:
            return False
        if not self._swap_out(stored):
            self._drop(stored)
        return True

    def _swap_out(self, stored: Stored) -> bool:
        """Whether it was; not where a running stream holds most of it anyway."""
        stored.since = self._computed
        sequence = stored.sequence
        if sequence is None or not self._fits_swap(stored) or self._runs(stored):
            return False
        try:
            payload = self._runtime.seq_export(sequence)
        except (Capacity, Unsupported):
            return False
        stored.sequence, stored.payload = None, payload
        del self._inside[stored]
        self.swapped_bytes += len(payload)
        self._recycle(sequence)
        self._trim()
        return True

    def _fits_swap(self, stored: Stored) -> bool:
        room = self._most_swapped
        return room > 0 and len(stored.tokens) * self._token_bytes() <= room

    def _runs(self, stored: Stored) -> bool:
        most = len(stored.chain)
        holders = self._index.sharing(stored.chain)
        return any(isinstance(it, Stream) and 2 * blocks >= most for blocks, it in holders)

    def _recycle(self, sequence: SequenceId) -> None:
        bisect.insort(self._spare, self._empty(sequence))

    def _empty(self, sequence: SequenceId) -> SequenceId:
        """The sequence without its tokens, or another. Raises `Fatal` when neither can be had."""
        try:
            self._runtime.seq_truncate(sequence, 0)
        except Fatal:
            raise
        except StepError as error:
            print(f"sequence {sequence} is made anew: {error.line()}", file=sys.stderr)
            sequence = self._replaced(sequence)
        if self._runtime.seq_length(sequence) != 0:
            raise Fatal(f"the runtime did not empty sequence {sequence}")
        return sequence

    def _replaced(self, sequence: SequenceId) -> SequenceId:
        try:
            self._runtime.seq_free(sequence)
            return self._runtime.seq_create()
        except StepError as error:
            raise Fatal(f"a sequence could not be replaced: {error.message}") from error

    def _kept_bytes(self) -> float:
        return self.inside_tokens * self._token_bytes() + self.swapped_bytes

    def _token_bytes(self) -> float:
        """What a token of state takes, by what all of them take now."""
        held = self.inside_tokens + sum(it.fed for it in self._lanes)
        return self._runtime.memory().sequences / max(1, held)


def _tokens(holder: Holder) -> Sequence[int]:
    return holder.history if isinstance(holder, Stream) else holder.tokens


def _length(holder: Holder) -> int:
    return holder.fed if isinstance(holder, Stream) else len(holder.tokens)


def _set_up(runtime: Runtime, lane: int, lanes: int, name: str) -> SequenceId:
    try:
        sequence = runtime.seq_create()
        runtime.seq_truncate(sequence, 0)
        if held := runtime.seq_length(sequence):
            raise Capacity(f"a new sequence holds {held} tokens")
    except StepError as error:
        raise DoesNotFit(
            f"{name} could not set up lane {lane} of {lanes}: {error.message}",
            fix=f"serve with --lanes {max(1, lane)}",
            param="lanes",
        ) from error
    return sequence


__all__ = ["Sequences"]
