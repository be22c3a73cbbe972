"""One token for each byte, and three special ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from superfluid_compat.errors import OutOfBoundary
from superfluid_workerd.adapter import Tokenizer

BOS: Final = 256
EOS: Final = 257
TURN: Final = 258
VOCABULARY: Final = 259
_SPECIAL: Final = {"<bos>": BOS, "<eos>": EOS, "<turn>": TURN}
_NAMES: Final = {token: name.encode() for name, token in _SPECIAL.items()}


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of UTF-8."""

    @property
    def size(self) -> int:
        return VOCABULARY

    @property
    def bos(self) -> int | None:
        return BOS

    @property
    def eos(self) -> int | None:
        return EOS

    @property
    def stops(self) -> frozenset[int]:
        return frozenset({EOS, TURN})

    @property
    def longest(self) -> int | None:
        return max(map(len, _SPECIAL))

    def encode(self, text: str, *, add_special: bool = True, special: bool = False) -> list[int]:
        head = [BOS] if add_special else []
        if not special:
            return head + list(text.encode())
        for part in re.split("(<bos>|<eos>|<turn>)", text):
            head += [_SPECIAL[part]] if part in _SPECIAL else list(part.encode())
        return head

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if not 0 <= token < VOCABULARY:
            raise OutOfBoundary(f"token {token}, the vocabulary has {VOCABULARY}")
        if token < BOS:
            return bytes([token])
        return _NAMES[token] if special else b""

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
        return b"".join(self.piece(token, special=special) for token in tokens)
