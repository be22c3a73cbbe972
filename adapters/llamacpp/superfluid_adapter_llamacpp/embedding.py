"""A loaded model that gives embeddings: texts in, one unit vector each out.

llama.cpp pools a text only where all of it is in one micro-batch, and computes several texts in
one call as well as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from superfluid_adapter_llamacpp.context import Piece
from superfluid_adapter_llamacpp.runtime import Loaded
from superfluid_compat.errors import Fault, OutOfBoundary
from superfluid_workerd.adapter import (
    Embedding,
    EmbeddingRuntime,
    MemoryUse,
    RuntimeDescription,
    Tick,
)

if TYPE_CHECKING:
    from superfluid_workerd.adapter import Logits


class LlamaEmbedder(EmbeddingRuntime):
    """One context, whose `pooling` is the model's."""

    def __init__(self, loaded: Loaded, pooling: str) -> None:
        self._loaded, self._context = loaded, loaded.context
        call = loaded.model.library.call
        wide = getattr(call, "llama_model_n_embd_out", call.llama_model_n_embd)
        self._width: Final = int(wide(loaded.model.pointer))
        most = min(loaded.plan.context, self._context.ubatch)
        self._description = RuntimeDescription(
            context=most,
            sequences=0,
            vocabulary=self._context.vocabulary,
            step_tokens=0,
            generates=False,
            embedding=Embedding(self._width, most, self._context.ubatch, pooling),
            devices=loaded.devices,
        )

    def describe(self) -> RuntimeDescription:
        return self._description

    def embed(self, tokens: Sequence[Sequence[int]], tick: Tick) -> Logits:
        for row in tokens:
            self._check(row)
        result = np.empty((len(tokens), self._width), np.float32)
        for group in self._groups(tokens):
            tick()
            self._embed(group, tokens, result)
        return result

    def memory(self) -> MemoryUse:
        return MemoryUse(weights=self._loaded.weights)

    def close(self) -> None:
        self._context.close()

    def _check(self, row: Sequence[int]) -> None:
        most, known = self._description.context, self._context.vocabulary
        if not 0 < len(row) <= most:
            raise OutOfBoundary(f"a text has {len(row)} tokens, wanted 1 to {most}")
        if not 0 <= min(row) <= max(row) < known:
            raise OutOfBoundary(
                f"tokens {min(row)} to {max(row)} were given, the vocabulary has 0 to {known - 1}"
            )

    def _groups(self, tokens: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Rows that go through together: a micro-batch of tokens and the sequences there are."""
        group: list[int] = []
        room = self._context.ubatch
        for index, row in enumerate(tokens):
            if group and (len(row) > room or len(group) == self._context.sequences):
                yield group
                group, room = [], self._context.ubatch
            group.append(index)
            room -= len(row)
        if group:
            yield group

    def _embed(self, group: Sequence[int], tokens: Sequence[Sequence[int]], into: Logits) -> None:
        pieces = [
            Piece(index, sequence, tokens[index], 0, len(tokens[index]))
            for sequence, index in enumerate(group)
        ]
        for piece in pieces:
            self._forget(piece.sequence)
        code = self._context.decode(pieces)
        if code:
            reason = self._loaded.model.library.log.reason("it gives no reason")
            raise Fault(f"llama_decode returned {code}: {reason}")
        for piece in pieces:
            vector = self._context.embedding(piece.sequence, self._width)
            if vector is None:
                raise Fault("llama.cpp gives no embedding for this text")
            into[piece.feed] = _unit(vector)

    def _forget(self, sequence: int) -> None:
        """Models that attend to what came before keep it, also for one that is done."""
        if self._context.memory:
            self._context.remove(sequence, 0)


def _unit(vector: Logits) -> Logits:
    """`vector` at Euclidean length 1, summed in doubles as llama.cpp's own server does."""
    length = np.linalg.norm(vector.astype(np.float64))
    return (vector / length).astype(np.float32) if length else vector
