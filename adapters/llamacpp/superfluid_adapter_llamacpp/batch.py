"""`llama_batch` over arrays of our own: filled by ctypes, read by one `llama_decode`."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Sequence

from superfluid_adapter_llamacpp.symbols import Batch


class PlainBatch:
    """A batch of tokens of one sequence, for code that runs without numpy."""

    def __init__(self, tokens: Sequence[int], start: int, sequence: int, outputs: Sequence[int]):
        count = len(tokens)
        self._sequence = ct.c_int32(sequence)
        self._arrays = (
            (ct.c_int32 * count)(*tokens),
            (ct.c_int32 * count)(*range(start, start + count)),
            (ct.c_int32 * count)(*[1] * count),
            (ct.c_void_p * count)(*[ct.addressof(self._sequence)] * count),
            (ct.c_int8 * count)(*(index in outputs for index in range(count))),
        )
        token, pos, n_seq_id, seq_id, logits = [ct.addressof(one) for one in self._arrays]
        self.batch = Batch(count, token, None, pos, n_seq_id, seq_id, logits)
