"""Text to token ids and back, by libllama's own vocabulary of the model."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Sequence
from typing import Any, Final

from superfluid_adapter_llamacpp.model import Model
from superfluid_compat.errors import OutOfBoundary
from superfluid_workerd.adapter import Tokenizer

_PIECE_BYTES: Final = 256
_KEPT_PIECES: Final = 8192
_NONE: Final = -1


class LlamaTokenizer(Tokenizer):
    """Keeps its model loaded as long as it is used; libllama's vocabulary is read only."""

    def __init__(self, model: Model) -> None:
        self._model, self._vocab = model, model.vocabulary
        call: Any = model.library.call
        self._call = call
        self._size = int(call.llama_vocab_n_tokens(self._vocab))
        self._bos = int(call.llama_vocab_bos(self._vocab))
        self._eos = int(call.llama_vocab_eos(self._vocab))
        is_end, vocab = call.llama_vocab_is_eog, self._vocab
        ends = {token for token in range(self._size) if is_end(vocab, token)}
        self._stops = frozenset(ends | ({self._eos} if self._eos != _NONE else set()))
        self._pieces: dict[tuple[int, bool], bytes] = {}

    @property
    def size(self) -> int:
        return self._size

    @property
    def bos(self) -> int | None:
        return None if self._bos == _NONE else self._bos

    @property
    def eos(self) -> int | None:
        return None if self._eos == _NONE else self._eos

    @property
    def stops(self) -> frozenset[int]:
        return self._stops

    def encode(self, text: str, *, add_special: bool = True, special: bool = False) -> list[int]:
        raw = text.encode(errors="replace")
        room = len(raw) + 8
        while True:
            ids = (ct.c_int32 * room)()
            count = self._call.llama_tokenize(
                self._vocab, raw, len(raw), ids, room, add_special, special
            )
            if count >= 0:
                return ids[:count]
            room = -count

    def piece(self, token: int, *, special: bool = False) -> bytes:
        found = self._pieces.get((token, special))
        if found is None:
            found = self._piece(token, special)
            if len(self._pieces) >= _KEPT_PIECES:
                self._pieces.clear()
            self._pieces[token, special] = found
        return found

    def _piece(self, token: int, special: bool) -> bytes:
        self._check(token)
        if not special and token in self._stops:
            return b""
        room = _PIECE_BYTES
        while True:
            buffer = ct.create_string_buffer(room)
            count = self._call.llama_token_to_piece(self._vocab, token, buffer, room, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
        for token in tokens:
            self._check(token)
        shown = list(tokens)
        if not special:
            # The space that encoding puts at a text's start follows BOS, and goes with it.
            while shown and shown[0] == self._bos:
                del shown[0]
            shown = [token for token in shown if token not in self._stops]
        ids = (ct.c_int32 * len(shown))(*shown)
        room = _PIECE_BYTES + 16 * len(shown)
        while True:
            buffer = ct.create_string_buffer(room)
            count = self._call.llama_detokenize(
                self._vocab, ids, len(shown), buffer, room, False, special
            )
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    def _check(self, token: int) -> None:
        if not 0 <= token < self._size:
            raise OutOfBoundary(f"token {token}, the vocabulary has 0 to {self._size - 1}")
