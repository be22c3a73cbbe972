"""A tokenizer small enough to check by hand: one token per byte, then its special tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence

from superfluid_compat.errors import OutOfBoundary
from superfluid_workerd.adapter import Tokenizer


class ToyTokenizer(Tokenizer):
    """Ids 0 to 255 are bytes; `specials` follow in order, the first two BOS and EOS."""

    def __init__(self, specials: Sequence[str] = ("<s>", "</s>"), *, opens: bool = True) -> None:
        self._specials = list(specials)
        self._opens = opens
        by_length = sorted(specials, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, by_length)) + ")")

    @property
    def size(self) -> int:
        return 256 + len(self._specials)

    @property
    def bos(self) -> int | None:
        return 256

    @property
    def eos(self) -> int | None:
        return 257

    @property
    def stops(self) -> frozenset[int]:
        return frozenset({257})

    def id(self, special: str) -> int:
        return 256 + self._specials.index(special)

    def encode(self, text: str, *, add_special: bool = True, special: bool = False) -> list[int]:
        tokens = [256] if add_special and self._opens else []
        for part in self._split.split(text) if special else [text]:
            tokens += [self.id(part)] if special and part in self._specials else part.encode()
        return tokens

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if not 0 <= token < self.size:
            raise OutOfBoundary(f"token {token}, the vocabulary has {self.size}")
        if token < 256:
            return bytes([token])
        return self._specials[token - 256].encode() if special else b""

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
        return b"".join(self.piece(token, special=special) for token in tokens)
