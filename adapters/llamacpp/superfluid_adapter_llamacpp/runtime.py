"""A loaded model that serves: our sequences on llama.cpp's, and steps over several of them.

A step is cut into calls of at most a micro-batch, with a tick before each, so that a cancel is
heard without any callback from the engine. Sequences that decode go through together or one by
one, whichever this build is quicker at.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from superfluid_adapter_llamacpp.batching import Batching
from superfluid_adapter_llamacpp.context import Context, Piece
from superfluid_adapter_llamacpp.model import Model
from superfluid_adapter_llamacpp.plan import Plan
from superfluid_adapter_llamacpp.state import seal, unseal
from superfluid_compat.errors import (
    Capacity,
    Fault,
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

Kind: TypeAlias = Literal["plain", "window", "recurrent"]
"""What a sequence can go back to: any length; as far as its window is held; nothing but 0."""

_NO_ROOM: Final = 1


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a runtime is made of. `cell_bytes` is what one position takes, `window` what is kept."""

    model: Model
    context: Context
    plan: Plan
    kind: Kind
    window: int
    key: bytes
    weights: int
    cell_bytes: int
    devices: tuple[Device, ...]


class LlamaRuntime(Runtime):
    """One context. Ids are llama.cpp's own, 0 to sequences - 1, checked before every use."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded, self._context = loaded, loaded.context
        self._lengths: dict[SequenceId, int] = {}
        self._batching = Batching()
        plan = loaded.plan
        self._description = RuntimeDescription(
            context=plan.context,
            sequences=self._context.sequences,
            vocabulary=self._context.vocabulary,
            step_tokens=plan.batch,
            truncate="any" if loaded.kind == "plain" else "zero",
            copy=True,
            export=True,
            tokens=self._context.cells,
            swap_bytes=plan.spare,
            devices=loaded.devices,
        )

    def describe(self) -> RuntimeDescription:
        return self._description

    def seq_create(self) -> SequenceId:
        for sequence in range(self._description.sequences):
            if sequence not in self._lengths:
                self._lengths[sequence] = 0
                return sequence
        raise Capacity(f"{len(self._lengths)} sequences exist, no more may")

    def seq_free(self, sequence: SequenceId) -> None:
        self.seq_length(sequence)
        self._clear(sequence)
        del self._lengths[sequence]

    def seq_length(self, sequence: SequenceId) -> int:
        try:
            return self._lengths[sequence]
        except KeyError:
            raise UnknownSequence(f"there is no sequence {sequence}") from None

    def seq_truncate(self, sequence: SequenceId, length: int) -> None:
        self._check_length(sequence, length)
        if length == 0:
            self._clear(sequence)
        elif length < self._lengths[sequence]:
            self._check_back(sequence, length)
            if not self._context.remove(sequence, length):
                raise Unsupported(f"llama.cpp does not go back to {length} tokens")
            self._lengths[sequence] = length

    def seq_copy(self, sequence: SequenceId, length: int) -> SequenceId:
        self._check_length(sequence, length)
        if 0 < length < self._lengths[sequence]:
            self._check_back(sequence, length)
        self._check_cells(length)
        with self._making() as copy:
            if length and self._loaded.kind == "plain":
                self._context.share(sequence, copy, length)
                self._lengths[copy] = length
            elif length:
                self._put(copy, self._state_at(sequence, copy, length), length)
        return copy

    def seq_export(self, sequence: SequenceId) -> bytes:
        length = self.seq_length(sequence)
        return seal(self._loaded.key, length, self._context.export(sequence) if length else b"")

    def seq_import(self, payload: bytes) -> SequenceId:
        length, state = unseal(self._loaded.key, payload)
        if length > self._description.context:
            raise Unsupported(
                f"the exported sequence has {length} tokens, the context is "
                f"{self._description.context}"
            )
        self._check_cells(length)
        with self._making() as sequence:
            if length:
                self._put(sequence, state, length)
        return sequence

    def step(self, feeds: Sequence[Feed], tick: Tick) -> Sequence[Logits | None]:
        self._check(feeds)
        rows: list[list[Logits]] = [[] for _ in feeds]
        decoding = all(len(feed.tokens) == 1 for feed in feeds)
        sizes = self._batching.sizes(len(feeds)) if decoding else [len(feeds)]
        left = iter(enumerate(feeds))
        calls = [call for size in sizes for call in self._calls(islice(left, size))]
        seconds = list[float]()
        for number, pieces in enumerate(calls, 1):
            tick()
            began = time.perf_counter()
            self._decode(pieces, first=number == 1)
            self._collect(pieces, rows, last=number == len(calls))
            seconds.append(time.perf_counter() - began)
        if decoding:
            self._batching.took(sizes, seconds)
        return [_joined(found) for found in rows]

    def memory(self) -> MemoryUse:
        held = sum(self._lengths.values())
        return MemoryUse(weights=self._loaded.weights, sequences=held * self._loaded.cell_bytes)

    def close(self) -> None:
        self._lengths.clear()
        self._context.close()

    # Sequences.

    @contextlib.contextmanager
    def _making(self) -> Iterator[SequenceId]:
        """A new sequence, gone again when the block fails."""
        sequence = self.seq_create()
        try:
            yield sequence
        except BaseException:
            self.seq_free(sequence)
            raise

    def _state_at(self, sequence: SequenceId, copy: SequenceId, length: int) -> memoryview:
        """The state of the first `length` tokens, with the window before them. `copy` is empty
        before and after.

        A window's cells are given up when no sequence looks at them any more, but only by the one
        that holds them alone: shared for good they would fill the cache. What a whole sequence
        exports holds its last window alone, so a shorter one is shared for as long as that
        takes."""
        if length == self._lengths[sequence]:
            return self._context.export(sequence)
        self._context.share(sequence, copy, length)
        try:
            return self._context.export(copy)
        finally:
            self._context.remove(copy, 0)

    def _clear(self, sequence: SequenceId) -> None:
        self._context.remove(sequence, 0)
        self._lengths[sequence] = 0

    def _put(self, sequence: SequenceId, state: memoryview, length: int) -> None:
        restored = self._context.restore(sequence, state)
        if not restored or self._context.length(sequence) != length:
            raise Unsupported("llama.cpp does not take this state")
        self._lengths[sequence] = length

    def _check_length(self, sequence: SequenceId, length: int) -> None:
        held = self.seq_length(sequence)
        if not 0 <= length <= held:
            raise OutOfBoundary(f"length {length} was wanted, the sequence has {held} tokens")

    def _check_back(self, sequence: SequenceId, length: int) -> None:
        """Refuse a length that llama.cpp would go back to without a word, and answer wrong."""
        loaded = self._loaded
        if loaded.kind == "recurrent":
            raise Unsupported("a recurrent state does not go back")
        if loaded.kind == "window":
            first = self._context.first(sequence)
            if first > max(0, length - loaded.window):
                raise Unsupported(
                    f"the window before {length} tokens is gone, positions from {first} are held"
                )

    def _check_cells(self, more: int) -> None:
        held, cells = sum(self._lengths.values()), self._context.cells
        if held + more > cells:
            raise Capacity(f"{held} tokens are held and {more} more were wanted, {cells} fit")

    # Steps.

    def _check(self, feeds: Sequence[Feed]) -> None:
        lengths = [self.seq_length(feed.sequence) for feed in feeds]
        if len({feed.sequence for feed in feeds}) != len(feeds):
            raise OutOfBoundary("a sequence is fed twice in one step")
        for feed, length in zip(feeds, lengths, strict=True):
            if feed.start != length:
                raise OutOfBoundary(
                    f"start {feed.start} was given, sequence {feed.sequence} has {length} tokens"
                )
            self._check_tokens(feed.tokens, self._description.context - length)
        total = sum(len(feed.tokens) for feed in feeds)
        if total > self._description.step_tokens:
            raise Capacity(f"{total} tokens in a step, {self._description.step_tokens} may be")
        self._check_cells(total)

    def _check_tokens(self, tokens: Sequence[int], most: int) -> None:
        if not len(tokens):
            raise OutOfBoundary("no tokens were given")
        if len(tokens) > most:
            raise OutOfBoundary(f"{len(tokens)} tokens were given, {most} more fit the context")
        if not 0 <= min(tokens) <= max(tokens) < self._context.vocabulary:
            raise OutOfBoundary(
                f"tokens {min(tokens)} to {max(tokens)} were given, the vocabulary has 0 to "
                f"{self._context.vocabulary - 1}"
            )

    def _calls(self, feeds: Iterable[tuple[int, Feed]]) -> Iterator[list[Piece]]:
        """The feeds, each with its place in the step, cut into calls, in order: a micro-batch of
        tokens and the rows there is room for at the most."""
        ubatch, outputs = self._context.ubatch, self._loaded.plan.outputs
        pieces: list[Piece] = []
        room, rows = ubatch, outputs
        for index, feed in feeds:
            at, count = 0, len(feed.tokens)
            silent = count - _wanted(feed)
            while at < count:
                if not room or not rows:
                    yield pieces
                    pieces, room, rows = [], ubatch, outputs
                end = min(count, at + room, max(at, silent) + rows)
                wanted = max(0, end - max(at, silent))
                tokens = feed.tokens[at:end]
                pieces.append(Piece(index, feed.sequence, tokens, feed.start + at, wanted))
                room, rows, at = room - (end - at), rows - wanted, end
        if pieces:
            yield pieces

    def _decode(self, pieces: Sequence[Piece], *, first: bool) -> None:
        """One call. When it fails the lengths are what the cache says: some may have gone in."""
        code = self._context.decode(pieces)
        if code == 0:
            for piece in pieces:
                self._lengths[piece.sequence] = piece.start + len(piece.tokens)
            return
        for piece in pieces:
            self._lengths[piece.sequence] = self._context.length(piece.sequence)
        unchanged = all(self._lengths[it.sequence] == it.start for it in pieces)
        if code == _NO_ROOM and first and unchanged:
            raise Capacity("llama.cpp finds no room in its cache")
        reason = self._loaded.model.library.log.reason("it gives no reason")
        raise Fault(f"llama_decode returned {code}: {reason}")

    def _collect(
        self, pieces: Sequence[Piece], rows: Sequence[list[Logits]], *, last: bool
    ) -> None:
        """Add each feed's rows; copies, before another call of this step writes over them."""
        end = 0
        for piece in pieces:
            end += len(piece.tokens)
            for index in range(end - piece.wanted, end):
                row = self._context.row(index)
                if row is None:
                    raise Fault(f"llama.cpp gives no logits for token {index} of its batch")
                rows[piece.feed].append(row if last else row.copy())


def _wanted(feed: Feed) -> int:
    match feed.logits:
        case "none":
            return 0
        case "last":
            return 1
        case "all":
            return len(feed.tokens)


def _joined(rows: Sequence[Logits]) -> Logits | None:
    if len(rows) < 2:
        return rows[0] if rows else None
    return np.concatenate(rows)
