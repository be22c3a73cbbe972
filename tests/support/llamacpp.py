"""llama.cpp as an independent oracle: its C API, called through ctypes.

The library is the extension module of the development dependency `xllamacpp`, pinned in
pyproject.toml, or the build that `llama_libraries.BUILD` names. The struct offsets below were read
from llama.cpp's headers, and owe nothing to the adapter's tables.
"""

from __future__ import annotations

import ctypes as ct
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from support import llama_libraries


class ModelParams(ct.Structure):
    """`llama_model_params` and what may follow it; the library only reads its own prefix."""

    _fields_ = (("words", ct.c_uint64 * 64),)


class ContextParams(ct.Structure):
    """`llama_context_params`, opaque in the same way."""

    _fields_ = (("words", ct.c_uint64 * 64),)


class Batch(ct.Structure):
    """`llama_batch`: parallel arrays of `n_tokens` entries."""

    _fields_ = (
        ("n_tokens", ct.c_int32),
        ("token", ct.POINTER(ct.c_int32)),
        ("embd", ct.c_void_p),
        ("pos", ct.POINTER(ct.c_int32)),
        ("n_seq_id", ct.POINTER(ct.c_int32)),
        ("seq_id", ct.POINTER(ct.POINTER(ct.c_int32))),
        ("logits", ct.POINTER(ct.c_int8)),
    )


MODEL_N_GPU_LAYERS: Final = 16
CONTEXT_N_CTX: Final = 0
CONTEXT_N_BATCH: Final = 4
CONTEXT_N_UBATCH: Final = 8
CONTEXT_N_OUTPUTS_MAX: Final = 20
CONTEXT_TYPE_K: Final = 104
CONTEXT_TYPE_V: Final = 108


class _Moved(NamedTuple):
    """Offsets that are not the same in every build."""

    vocab_only: int
    repack: int  # use_extra_bufts
    threads: int
    threads_batch: int
    pooling: int
    flash_attention: int
    embeddings: int


_BY_CONTRACT: Final = {
    4: _Moved(64, 69, 24, 28, 40, 48, 128),
    5: _Moved(64, 66, 24, 28, 40, 48, 128),
    7: _Moved(72, 74, 28, 32, 44, 52, 128),
    8: _Moved(72, 74, 28, 32, 44, 52, 136),
}
_AT: Final = _BY_CONTRACT[llama_libraries.contract(llama_libraries.BUILD)]
POOLING_NONE: Final = 0
GGML_TYPE_F32: Final = 0

_EXACT: Final = (
    (_AT.flash_attention, 0),
    (CONTEXT_TYPE_K, GGML_TYPE_F32),
    (CONTEXT_TYPE_V, GGML_TYPE_F32),
)

_SYMBOLS: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "llama_log_set": (None, (ct.c_void_p, ct.c_void_p)),
    "llama_backend_init": (None, ()),
    "llama_model_default_params": (ModelParams, ()),
    "llama_context_default_params": (ContextParams, ()),
    "llama_model_load_from_file": (ct.c_void_p, (ct.c_char_p, ModelParams)),
    "llama_model_get_vocab": (ct.c_void_p, (ct.c_void_p,)),
    "llama_model_free": (None, (ct.c_void_p,)),
    "llama_init_from_model": (ct.c_void_p, (ct.c_void_p, ContextParams)),
    "llama_free": (None, (ct.c_void_p,)),
    "llama_get_memory": (ct.c_void_p, (ct.c_void_p,)),
    "llama_memory_clear": (None, (ct.c_void_p, ct.c_bool)),
    "llama_decode": (ct.c_int32, (ct.c_void_p, Batch)),
    "llama_get_logits_ith": (ct.POINTER(ct.c_float), (ct.c_void_p, ct.c_int32)),
    "llama_model_n_embd": (ct.c_int32, (ct.c_void_p,)),
    "llama_get_embeddings_ith": (ct.POINTER(ct.c_float), (ct.c_void_p, ct.c_int32)),
    "llama_batch_init": (Batch, (ct.c_int32, ct.c_int32, ct.c_int32)),
    "llama_batch_free": (None, (Batch,)),
    "llama_vocab_n_tokens": (ct.c_int32, (ct.c_void_p,)),
    "llama_vocab_bos": (ct.c_int32, (ct.c_void_p,)),
    "llama_vocab_eos": (ct.c_int32, (ct.c_void_p,)),
    "llama_vocab_is_eog": (ct.c_bool, (ct.c_void_p, ct.c_int32)),
    "llama_tokenize": (
        ct.c_int32,
        (
            ct.c_void_p,
            ct.c_char_p,
            ct.c_int32,
            ct.POINTER(ct.c_int32),
            ct.c_int32,
            ct.c_bool,
            ct.c_bool,
        ),
    ),
    "llama_token_to_piece": (
        ct.c_int32,
        (ct.c_void_p, ct.c_int32, ct.c_char_p, ct.c_int32, ct.c_int32, ct.c_bool),
    ),
    "llama_detokenize": (
        ct.c_int32,
        (
            ct.c_void_p,
            ct.POINTER(ct.c_int32),
            ct.c_int32,
            ct.c_char_p,
            ct.c_int32,
            ct.c_bool,
            ct.c_bool,
        ),
    ),
}


@functools.cache
def library() -> ct.CDLL:
    """The library, loaded once, silent and typed."""
    # Without this, an assertion inside the library forks a debugger that attaches to us.
    os.environ["GGML_NO_BACKTRACE"] = "1"
    lib = ct.CDLL(str(llama_libraries.library(llama_libraries.BUILD)))
    for name, (result, arguments) in _SYMBOLS.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    libc_abs = ct.cast(ct.CDLL(None).abs, ct.c_void_p)  # a log callback that does nothing
    lib.llama_log_set(libc_abs, None)
    lib.llama_backend_init()
    return lib


def _patch(params: ct.Structure, kind: type[Any], offset: int, value: int) -> None:
    kind.from_buffer(params, offset).value = value


class LlamaCpp:
    """One model in llama.cpp; a context manager that frees it.

    `context` and `threads` matter only without `vocab_only`. The KV cache is F32 and attention is
    not fused, so that the oracle rounds as little as it can; with `usual` both are the library's
    own choice. `repack` lets it copy weights into an arrangement of its own;
    without it they are read from the mapped file. `embeds` opens it for `hidden` alone.
    """

    def __init__(
        self,
        model: Path,
        *,
        vocab_only: bool = True,
        context: int = 512,
        threads: int = 2,
        repack: bool = True,
        embeds: bool = False,
        usual: bool = False,
    ) -> None:
        self._lib = library()
        params = self._lib.llama_model_default_params()
        _patch(params, ct.c_int32, MODEL_N_GPU_LAYERS, 0)
        _patch(params, ct.c_bool, _AT.vocab_only, vocab_only)
        _patch(params, ct.c_bool, _AT.repack, repack)
        self._context: int | None = None
        self._model: int | None = self._lib.llama_model_load_from_file(os.fsencode(model), params)
        if not self._model:
            raise ValueError(f"llama.cpp does not load {model.name}")
        self._vocab = self._lib.llama_model_get_vocab(self._model)
        self.context_size = context
        if not vocab_only:
            self._open_context(context, threads, embeds, usual)

    def _open_context(self, context: int, threads: int, embeds: bool, usual: bool) -> None:
        params = self._lib.llama_context_default_params()
        if embeds:
            _patch(params, ct.c_int32, _AT.pooling, POOLING_NONE)
            _patch(params, ct.c_bool, _AT.embeddings, True)
        for offset, value in (
            (CONTEXT_N_CTX, context),
            (CONTEXT_N_BATCH, context),
            (CONTEXT_N_UBATCH, context),
            (CONTEXT_N_OUTPUTS_MAX, context),
            (_AT.threads, threads),
            (_AT.threads_batch, threads),
            *(() if usual else _EXACT),
        ):
            _patch(params, ct.c_int32, offset, value)
        self._context = self._lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError("llama.cpp opens no context on this model")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the context and the model; nothing may be called afterwards."""
        if self._context:
            self._lib.llama_free(self._context)
        if self._model:
            self._lib.llama_model_free(self._model)
        self._context = self._model = None

    @property
    def size(self) -> int:
        """Entries of the vocabulary."""
        return int(self._lib.llama_vocab_n_tokens(self._vocab))

    @property
    def bos(self) -> int:
        """The id that opens a text, -1 for none."""
        return int(self._lib.llama_vocab_bos(self._vocab))

    @property
    def eos(self) -> int:
        """The id that ends a text, -1 for none."""
        return int(self._lib.llama_vocab_eos(self._vocab))

    @property
    def stops(self) -> frozenset[int]:
        """Every id that llama.cpp takes as the end of a generation."""
        is_eog, vocab = self._lib.llama_vocab_is_eog, self._vocab
        return frozenset(token for token in range(self.size) if is_eog(vocab, token))

    def tokenize(
        self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Ids of `text`."""
        raw = text.encode() if isinstance(text, str) else text
        room = len(raw) + 8
        while True:
            ids = (ct.c_int32 * room)()
            count = self._lib.llama_tokenize(
                self._vocab, raw, len(raw), ids, room, add_special, parse_special
            )
            if count >= 0:
                return ids[:count]
            room = -count

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one id."""
        buffer = ct.create_string_buffer(1024)
        count = self._lib.llama_token_to_piece(self._vocab, token, buffer, 1024, 0, special)
        if count < 0:
            raise ValueError(f"llama_token_to_piece wants {-count} bytes")
        return buffer.raw[:count]

    def detokenize(
        self, ids: Sequence[int], *, remove_special: bool = False, special: bool = False
    ) -> bytes:
        """The bytes of a whole text."""
        tokens = (ct.c_int32 * len(ids))(*ids)
        room = 64 + 64 * len(ids)
        while True:
            buffer = ct.create_string_buffer(room)
            count = self._lib.llama_detokenize(
                self._vocab, tokens, len(ids), buffer, room, remove_special, special
            )
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Teacher-forced logits, shape (tokens, vocabulary): one batch from an empty cache."""
        self._clear()
        self._decode(tokens, 0, every=True)
        found = np.empty((len(tokens), self.size), np.float32)
        for index in range(len(tokens)):
            found[index] = self._row(index)
        return found

    def hidden(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """What the model makes of each token before anything is pooled, shape (tokens, width)."""
        self._clear()
        self._decode(tokens, 0, every=True)
        width = int(self._lib.llama_model_n_embd(self._model))
        rows = [self._lib.llama_get_embeddings_ith(self._context, it) for it in range(len(tokens))]
        return np.stack([np.ctypeslib.as_array(row, shape=(width,)).copy() for row in rows])

    def generate_greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """The next `count` ids after `tokens`, each the most likely; stop ids do not stop it."""
        found: list[int] = []
        feed, start = list(tokens), 0
        while True:
            found.append(int(self.step(feed, start).argmax()))
            if len(found) == count:
                return found
            start += len(feed)
            feed = found[-1:]

    def step(self, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        """Logits after the last of `tokens`, put in at position `start`; 0 begins anew."""
        if start == 0:
            self._clear()
        self._decode(tokens, start, every=False)
        return self._row(len(tokens) - 1)

    def _clear(self) -> None:
        if self._context is None:
            raise ValueError("open the model with vocab_only=False")
        if memory := self._lib.llama_get_memory(self._context):
            self._lib.llama_memory_clear(memory, True)

    def _decode(self, tokens: Sequence[int], start: int, *, every: bool) -> None:
        batch = self._lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = start + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = every or index == len(tokens) - 1
        code = self._lib.llama_decode(self._context, batch)
        self._lib.llama_batch_free(batch)
        if code:
            raise ValueError(f"llama_decode returned {code}")

    def _row(self, index: int) -> NDArray[np.float32]:
        pointer = self._lib.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(pointer, shape=(self.size,)).copy()
