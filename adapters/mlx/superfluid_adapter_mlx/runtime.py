"""A loaded model that serves. Everything here runs on the thread that owns MLX, and what it
leaves behind is computed: nothing lazy outlives a call."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from superfluid_adapter_mlx.batch import Batch
from superfluid_adapter_mlx.caches import (
    Cache,
    Part,
    Trims,
    compactable,
    copied,
    cut,
    cuts,
    held_bytes,
)
from superfluid_adapter_mlx.engine import mx
from superfluid_adapter_mlx.envelope import Key
from superfluid_adapter_mlx.model import Model
from superfluid_adapter_mlx.moves import export, imported
from superfluid_compat.errors import (
    Capacity,
    Fault,
    OutOfBoundary,
    StepError,
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

_ROWS_BYTES: Final = 64 << 20
"""Most logits computed at once where every token's are wanted."""


_NO_KERNEL: Final = "Failed to compile"
"""What MLX says when its compiler does not start, as in a sandbox once the model is loaded. It
computes the same without."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a runtime is made of. `template` is None where sequences cannot be copied or moved.

    `tokens` bounds all sequences together, `chunk` is how much of a prompt goes in at once."""

    model: Model
    key: Key
    context: int
    lanes: int
    tokens: int
    chunk: int
    step_tokens: int
    token_bytes: int
    weights: int
    batching: bool
    foreign: bool = False
    template: Sequence[Part] | None = None
    devices: tuple[Device, ...] = ()


@dataclass(slots=True)
class _Sequence:
    """`caches` is None while the sequence's state is a row of the batch. A spoilt one lost its
    state in a step that failed."""

    caches: list[Cache] | None
    length: int = 0
    spoilt: bool = False


@dataclass(slots=True)
class _One:
    """A single token to decode, and where its row goes."""

    index: int
    sequence: SequenceId
    token: int
    rows: list[Logits | None] = field(repr=False)


class MlxRuntime(Runtime):
    """Sequences with caches of their own, or with a row each in one batch."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded, self._model = loaded, loaded.model
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._next = 0
        self._batch: Batch | None = None
        self._cuts: Trims = cuts(self._model.fresh())
        moves = loaded.template is not None
        self._description = RuntimeDescription(
            context=loaded.context,
            sequences=2 * loaded.lanes if moves else loaded.lanes,
            vocabulary=self._model.vocabulary,
            step_tokens=loaded.step_tokens,
            truncate="any" if self._cuts == "always" and moves else "zero",
            copy=moves,
            export=moves,
            tokens=loaded.tokens,
            retry=True,
            devices=loaded.devices,
        )

    def describe(self) -> RuntimeDescription:
        return self._description

    # Sequences.

    def seq_create(self) -> SequenceId:
        return self._add(_Sequence(self._model.fresh()))

    def seq_free(self, sequence: SequenceId) -> None:
        self._get(sequence)
        self._leave(sequence)
        del self._sequences[sequence]

    def seq_length(self, sequence: SequenceId) -> int:
        return self._get(sequence).length

    def seq_truncate(self, sequence: SequenceId, length: int) -> None:
        held = self._checked(sequence, length)
        if length == 0:
            self._leave(sequence)
            held.caches, held.length, held.spoilt = self._model.fresh(), 0, False
        elif length < held.length or held.spoilt:
            self._check_back(held)
            caches = self._own(sequence)
            with self._engine([held]):
                cut(caches, held.length - length)
                held.length = length
                if compactable(caches, self._loaded.token_bytes):
                    held.caches = copied(caches)

    def seq_copy(self, sequence: SequenceId, length: int) -> SequenceId:
        held = self._checked(sequence, length)
        self._check_moves()
        if held.spoilt or 0 < length < held.length:
            self._check_back(held)
        self._check_room(length)
        copy = _Sequence(self._model.fresh())
        if length:
            with self._engine([]):
                caches = self._taken(sequence)
                if length < held.length:
                    cut(caches, held.length - length)
                    if compactable(caches, self._loaded.token_bytes):
                        caches = copied(caches)
            copy = _Sequence(caches, length)
        return self._add(copy)

    def seq_export(self, sequence: SequenceId) -> bytes:
        held = self._get(sequence)
        self._check_moves()
        if held.spoilt:
            raise Unsupported("the sequence lost its state in a step that failed")
        with self._engine([]):
            return export(self._own(sequence), held.length, self._loaded.key)

    def seq_import(self, payload: bytes) -> SequenceId:
        self._check_moves()
        with self._engine([]):
            length, caches = imported(
                payload,
                self._loaded.template or (),
                self._loaded.key,
                foreign=self._loaded.foreign,
            )
        if length > self._loaded.context:
            raise Unsupported(
                f"the exported sequence has {length} tokens, the context is {self._loaded.context}"
            )
        self._check_room(length)
        return self._add(_Sequence(caches if length else self._model.fresh(), length))

    # Steps.

    def step(self, feeds: Sequence[Feed], tick: Tick) -> Sequence[Logits | None]:
        self._check(feeds)
        self._check_states(feeds)
        results: list[Logits | None] = [None] * len(feeds)
        ones: list[_One] = []
        for index, feed in enumerate(feeds):
            tokens = feed.tokens
            if feed.logits == "all" and len(tokens) > 1:
                results[index] = self._every_row(feed, tick)
                continue
            before = len(tokens) if feed.logits == "none" else len(tokens) - 1
            self._absorb(feed.sequence, tokens[:before], tick)
            if before < len(tokens):
                ones.append(_One(index, feed.sequence, tokens[-1], results))
        self._decode(ones, tick)
        return results

    def memory(self) -> MemoryUse:
        alone = sum(held_bytes(it.caches) for it in self._sequences.values() if it.caches)
        batched = self._batch.bytes if self._batch else 0
        return MemoryUse(
            weights=self._loaded.weights,
            sequences=alone + batched,
            releasable=int(mx.get_cache_memory()),
        )

    def release(self) -> None:
        mx.clear_cache()

    def close(self) -> None:
        self._sequences.clear()
        self._batch = None
        mx.clear_cache()

    # Prompts: each on its own, in chunks.

    def _absorb(self, sequence: SequenceId, tokens: Sequence[int], tick: Tick) -> None:
        for start in range(0, len(tokens), self._loaded.chunk):
            tick()
            chunk = tokens[start : start + self._loaded.chunk]
            held = self._sequences[sequence]
            with self._engine([held], grown=len(chunk)):
                self._model.absorb(chunk, self._own(sequence))
            held.length += len(chunk)

    def _every_row(self, feed: Feed, tick: Tick) -> Logits:
        held, found = self._sequences[feed.sequence], []
        most = max(1, min(self._loaded.chunk, _ROWS_BYTES // (4 * self._model.vocabulary)))
        for start in range(0, len(feed.tokens), most):
            tick()
            chunk = feed.tokens[start : start + most]
            with self._engine([held], grown=len(chunk)):
                found.append(self._model.rows(chunk, self._own(feed.sequence)))
            held.length += len(chunk)
        return np.concatenate(found)

    # Decoding: together where that is right.

    def _decode(self, ones: Sequence[_One], tick: Tick) -> None:
        together = [one for one in ones if self._sequences[one.sequence].length > 0]
        if not self._loaded.batching or len(together) < 2:
            together = []
        # A batch of empty caches changes the type of fp16 ones in 0.31, so a first token is alone.
        for one in (one for one in ones if one not in together):
            tick()
            held = self._sequences[one.sequence]
            with self._engine([held], grown=1):
                one.rows[one.index] = self._model.rows([one.token], self._own(one.sequence))
            held.length += 1
        if together:
            tick()
            self._decode_together(together)

    def _decode_together(self, ones: Sequence[_One]) -> None:
        held = [self._sequences[one.sequence] for one in ones]
        with self._engine(held, grown=1):
            batch = self._seated([one.sequence for one in ones])
            by_sequence = {one.sequence: one for one in ones}
            tokens = [by_sequence[sequence].token for sequence in batch.rows]
            rows = self._model.together(tokens, batch)
        for row, sequence in zip(rows, batch.rows, strict=True):
            one = by_sequence[sequence]
            one.rows[one.index] = row[np.newaxis]
            self._sequences[sequence].length += 1

    def _seated(self, wanted: Sequence[SequenceId]) -> Batch:
        """The batch of exactly these sequences."""
        if self._batch is not None and not set(wanted) & set(self._batch.rows):
            self._dissolve()
        if self._batch is not None:
            for sequence in set(self._batch.rows) - set(wanted):
                self._own(sequence)
        alone = {
            sequence: caches
            for sequence in wanted
            if (caches := self._sequences[sequence].caches) is not None
        }
        if self._batch is None:
            self._batch = Batch(alone)
        elif alone:
            self._batch.join(alone)
        for sequence in alone:
            self._sequences[sequence].caches = None
        return self._batch

    # Where a sequence's state is.

    def _own(self, sequence: SequenceId) -> list[Cache]:
        """Its caches, taken out of the batch for good if they are there."""
        held = self._sequences[sequence]
        if held.caches is None:
            held.caches = self._taken(sequence)
            self._drop_row(sequence)
        return held.caches

    def _taken(self, sequence: SequenceId) -> list[Cache]:
        """Caches of their own with the sequence's state."""
        caches = self._sequences[sequence].caches
        if caches is not None:
            return copied(caches)
        if self._batch is None:
            raise Fault(f"sequence {sequence} has lost its state")
        return self._batch.take(sequence)

    def _leave(self, sequence: SequenceId) -> None:
        """Give up what the sequence holds."""
        if self._sequences[sequence].caches is None:
            self._drop_row(sequence)
        self._sequences[sequence].caches = []

    def _drop_row(self, sequence: SequenceId) -> None:
        batch = self._batch
        if batch is None or sequence not in batch.rows:
            return
        others = [row for row in batch.rows if row != sequence]
        if others:
            batch.keep(others)
        else:
            self._batch = None

    def _dissolve(self) -> None:
        for sequence in list(self._batch.rows if self._batch else ()):
            self._own(sequence)

    @contextlib.contextmanager
    def _engine(self, held: Sequence[_Sequence], grown: int = 0) -> Iterator[None]:
        """Calls into MLX: what they raise is this step's fault and costs these sequences' state.

        A spoilt sequence counts the tokens it was given, so that its owner takes it back."""
        try:
            yield
        except StepError:
            raise
        except Exception as error:
            self._spoil(held, grown)
            told = " ".join(str(error).split())[:300]
            if _NO_KERNEL in told:
                mx.disable_compile()
                print(f"mlx goes on without compiling kernels: {told}", file=sys.stderr)
            raise Fault(f"mlx failed with {type(error).__name__}: {told}") from error

    def _spoil(self, held: Sequence[_Sequence], grown: int) -> None:
        # A batch that failed half way has no row that can be trusted.
        if any(each.caches is None for each in held):
            self._batch = None
            for other in self._sequences.values():
                if other.caches is None:
                    other.spoilt, other.caches = True, []
        for each in held:
            each.spoilt, each.caches, each.length = True, [], each.length + grown

    # Checks that change nothing.

    def _add(self, sequence: _Sequence) -> SequenceId:
        if len(self._sequences) >= self._description.sequences:
            raise Capacity(f"{len(self._sequences)} sequences exist, no more may")
        self._next += 1
        self._sequences[self._next] = sequence
        return self._next

    def _get(self, sequence: SequenceId) -> _Sequence:
        try:
            return self._sequences[sequence]
        except KeyError:
            raise UnknownSequence(f"there is no sequence {sequence}") from None

    def _checked(self, sequence: SequenceId, length: int) -> _Sequence:
        held = self._get(sequence)
        if not 0 <= length <= held.length:
            raise OutOfBoundary(f"length {length} was wanted, the sequence has {held.length}")
        return held

    def _check_moves(self) -> None:
        if self._loaded.template is None:
            raise Unsupported("this model's caches can be neither copied nor moved")

    def _check_back(self, held: _Sequence) -> None:
        if held.spoilt:
            raise Unsupported("the sequence lost its state in a step that failed")
        if self._cuts == "never":
            raise Unsupported("this model's caches do not go back")

    def _check_room(self, more: int) -> None:
        total = self._held_tokens()
        if total + more > self._loaded.tokens:
            raise Capacity(
                f"{total} tokens are held and {more} more were wanted, {self._loaded.tokens} fit"
            )

    def _held_tokens(self) -> int:
        """As many as there is room taken for: a batch's rows are all as long as its longest."""
        alone = sum(it.length for it in self._sequences.values() if it.caches is not None)
        batched = [it.length for it in self._sequences.values() if it.caches is None]
        return alone + len(batched) * max(batched, default=0)

    def _check(self, feeds: Sequence[Feed]) -> None:
        held = [self._get(feed.sequence) for feed in feeds]
        if len({feed.sequence for feed in feeds}) != len(feeds):
            raise OutOfBoundary("a sequence is fed twice in one step")
        for feed, sequence in zip(feeds, held, strict=True):
            if feed.start != sequence.length:
                raise OutOfBoundary(f"start {feed.start}, the sequence has {sequence.length}")
            self._check_tokens(feed.tokens, self._loaded.context - sequence.length)
        total = sum(len(feed.tokens) for feed in feeds)
        if total > self._loaded.step_tokens:
            raise Capacity(f"{total} tokens in a step, {self._loaded.step_tokens} may be")
        self._check_room(total)

    def _check_states(self, feeds: Sequence[Feed]) -> None:
        """Also a feed of a spoilt sequence counts, so that its owner takes it back."""
        spoilt = [feed for feed in feeds if self._sequences[feed.sequence].spoilt]
        for feed in spoilt:
            self._sequences[feed.sequence].length += len(feed.tokens)
        if spoilt:
            raise Fault("the sequence lost its state in a step that failed")

    def _check_tokens(self, tokens: Sequence[int], most: int) -> None:
        if not len(tokens):
            raise OutOfBoundary("no tokens were given")
        if len(tokens) > most:
            raise OutOfBoundary(f"{len(tokens)} tokens were given, {most} more fit the context")
        # MLX reads past the embedding without a word, or dies.
        if not 0 <= min(tokens) <= max(tokens) < self._model.ids:
            raise OutOfBoundary(
                f"tokens {min(tokens)} to {max(tokens)} were given, the model has 0 to "
                f"{self._model.ids - 1}"
            )
