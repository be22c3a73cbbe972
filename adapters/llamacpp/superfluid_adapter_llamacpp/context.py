"""One llama.cpp context: batches in, rows out. It knows cells and ids, and no sequences of ours."""

from __future__ import annotations

import ctypes as ct
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from superfluid_adapter_llamacpp.model import Model, failure
from superfluid_adapter_llamacpp.params import patched
from superfluid_adapter_llamacpp.symbols import Batch

if TYPE_CHECKING:
    from superfluid_workerd.adapter import Logits

Ints: TypeAlias = NDArray[np.int32]
_FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one feed that go into one call; the last `wanted` of them give a row each."""

    feed: int
    sequence: int
    tokens: Sequence[int]
    start: int
    wanted: int


class Context:
    """Owns the pointer, and the arrays that a batch is made of. One thread."""

    def __init__(self, model: Model, members: Mapping[str, float]) -> None:
        """Raises `ModelError` with the library's last error lines."""
        library = model.library
        self._call = call = library.call
        self._model = model
        library.log.clear()
        params = patched(call.llama_context_default_params, model.contract.context, members)
        pointer = call.llama_init_from_model(model.pointer, params)
        if not pointer:
            raise failure(library, "no context opens on this model")
        self.pointer: int = pointer
        self._finalizer = weakref.finalize(self, call.llama_free, pointer)
        self._finalizer.atexit = False
        self.memory: int | None = call.llama_get_memory(pointer)
        self.cells = int(call.llama_n_ctx(pointer))
        self.batch = int(call.llama_n_batch(pointer))
        self.ubatch = min(int(call.llama_n_ubatch(pointer)), self.batch)
        self.sequences = int(call.llama_n_seq_max(pointer))
        self.vocabulary = int(call.llama_vocab_n_tokens(model.vocabulary))
        self._row = ct.c_float * self.vocabulary
        self._arrays(self.ubatch)

    def _arrays(self, room: int) -> None:
        self._token = np.zeros(room, np.int32)
        self._pos = np.zeros(room, np.int32)
        self._logits = np.zeros(room, np.int8)
        self._counts = np.ones(room, np.int32)
        # A token names its sequences by an array of ids; each points at one id of these.
        self._ids = np.arange(self.sequences, dtype=np.int32)
        self._places = [self._ids.ctypes.data + 4 * it for it in range(self.sequences)]
        self._seq = np.zeros(room, np.uint64)
        self._batch = Batch(
            0,
            self._token.ctypes.data,
            None,
            self._pos.ctypes.data,
            self._counts.ctypes.data,
            self._seq.ctypes.data,
            self._logits.ctypes.data,
        )

    def decode(self, pieces: Sequence[Piece]) -> int:
        """One `llama_decode` of at most `ubatch` tokens; its return code."""
        tokens, positions, places, wanted = list[int](), list[int](), list[int](), list[int]()
        for piece in pieces:
            count = len(piece.tokens)
            tokens += piece.tokens
            positions += range(piece.start, piece.start + count)
            places += [self._places[piece.sequence]] * count
            wanted += [0] * (count - piece.wanted) + [1] * piece.wanted
        count = len(tokens)
        self._token[:count] = tokens
        self._pos[:count] = positions
        self._seq[:count] = places
        self._logits[:count] = wanted
        self._batch.n_tokens = count
        return int(self._call.llama_decode(self.pointer, self._batch))

    def row(self, index: int) -> Logits | None:
        """The logits after the batch's token `index`, of shape (1, vocabulary); None when it has
        none. llama.cpp's own memory: the next `decode` writes over it."""
        found = self._call.llama_get_logits_ith(self.pointer, index)
        if not found:
            return None
        row: Logits = np.frombuffer(memoryview(self._row.from_address(found)), np.float32)
        return row.reshape(1, self.vocabulary)

    def embedding(self, sequence: int, width: int) -> Logits | None:
        """The pooled vector of `sequence`, a copy."""
        found = self._call.llama_get_embeddings_seq(self.pointer, sequence)
        if not found:
            return None
        vector = np.empty(width, np.float32)
        ct.memmove(vector.ctypes.data, found, width * _FLOAT_BYTES)
        return vector

    # Memory, by sequence id.

    def length(self, sequence: int) -> int:
        """Tokens that the cache says it holds."""
        return int(self._call.llama_memory_seq_pos_max(self.memory, sequence)) + 1

    def first(self, sequence: int) -> int:
        """The oldest position still held by every layer that forgets."""
        return int(self._call.llama_memory_seq_pos_min(self.memory, sequence))

    def remove(self, sequence: int, start: int) -> bool:
        """Drop positions from `start` on; 0 drops all."""
        begin = start or -1
        return bool(self._call.llama_memory_seq_rm(self.memory, sequence, begin, -1))

    def share(self, source: int, target: int, length: int) -> None:
        """Let `target` hold the first `length` cells of `source`."""
        self._call.llama_memory_seq_cp(self.memory, source, target, 0, length)

    def export(self, sequence: int) -> memoryview:
        """The sequence's state."""
        size = self._call.llama_state_seq_get_size(self.pointer, sequence)
        state = np.empty(size, np.uint8)
        place = state.ctypes.data
        written = self._call.llama_state_seq_get_data(self.pointer, place, size, sequence)
        return state.data[:written]

    def restore(self, sequence: int, state: memoryview) -> bool:
        """Put a state in; when it fails the sequence is empty."""
        place = np.frombuffer(state, np.uint8).ctypes.data
        return bool(self._call.llama_state_seq_set_data(self.pointer, place, len(state), sequence))

    def close(self) -> None:
        """Free the context; nothing may be called afterwards."""
        self._finalizer()
