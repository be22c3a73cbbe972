"""What tokenizers over a GGUF vocabulary share."""

from __future__ import annotations

import abc
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from superfluid_adapter_native.tokenizers.partition import Partition, read_strips
from superfluid_adapter_native.tokenizers.vocabulary import HIDDEN, Kind, Vocabulary
from superfluid_compat.errors import ModelDamaged, OutOfBoundary
from superfluid_workerd.adapter import Tokenizer
from superfluid_workerd.tokenizing.pieces import SPACE, well_formed

# As plain ints: the enumeration's own operators would cost more than the rest of `piece`.
_HIDDEN: Final = int(HIDDEN)
_VERBATIM: Final = int(HIDDEN | Kind.USER_DEFINED)
_NORMAL: Final = int(Kind.NORMAL)
_BYTE: Final = int(Kind.BYTE)
_BYTE_PIECE: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class VocabularyTokenizer(Tokenizer):
    """A tokenizer over a `Vocabulary`: cuts out special pieces, leaves the text to a subclass."""

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> None:
        self._vocabulary = vocabulary
        strips = read_strips(metadata, vocabulary)
        self._partition = Partition(vocabulary, strips)
        self._keeps_bytes = not (strips.left or strips.right)
        for token in vocabulary.of(Kind.BYTE):
            text = vocabulary.pieces[token]
            if not _BYTE_PIECE.fullmatch(text):
                raise ModelDamaged(f"token {token} is a byte, but its piece is {text!r}")

    @property
    def size(self) -> int:
        return len(self._vocabulary.pieces)

    @property
    def bos(self) -> int | None:
        return self._vocabulary.bos

    @property
    def eos(self) -> int | None:
        return self._vocabulary.eos

    @property
    def stops(self) -> frozenset[int]:
        return self._vocabulary.stops

    @property
    def longest(self) -> int | None:
        return self._longest_piece if self._keeps_bytes else None

    @functools.cached_property
    def _longest_piece(self) -> int:
        """Counted by a piece's own text, which is as long as what it stands for, or longer: a
        space and some bytes are written with more."""
        return max(len(piece.encode()) for piece in self._vocabulary.pieces)

    def encode(self, text: str, *, add_special: bool = True, special: bool = False) -> list[int]:
        """See `Tokenizer.encode`. A lone surrogate in `text` counts as U+FFFD."""
        found: list[int] = self._opening() if add_special else []
        after_special = True
        for fragment in self._partition.cut(well_formed(text), special=special):
            if isinstance(fragment, int):
                found.append(fragment)
                after_special = True
            else:
                found += self._encode_text(fragment, after_special)
                after_special = False
        return found + self._closing() if add_special else found

    def _opening(self) -> list[int]:
        bos = self._vocabulary.bos
        return [bos] if self._vocabulary.add_bos and bos is not None else []

    def _closing(self) -> list[int]:
        eos = self._vocabulary.eos
        return [eos] if self._vocabulary.add_eos and eos is not None else []

    @abc.abstractmethod
    def _encode_text(self, text: str, after_special: bool) -> list[int]:
        """Ids of ordinary text that opens the whole or follows a special piece, or does not."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if not 0 <= token < self.size:
            raise OutOfBoundary(f"token {token}, the vocabulary ends at {self.size - 1}")
        kind, text = self._vocabulary.kinds[token], self._vocabulary.pieces[token]
        if kind & _HIDDEN and not special:
            return b""
        if kind & _VERBATIM:
            return text.encode()
        if kind & _NORMAL:
            return self._unescape(text)
        return bytes([int(text[3:5], 16)]) if kind & _BYTE else b""

    def _unescape(self, text: str) -> bytes:
        """The bytes of a normal piece."""
        return text.replace(SPACE, " ").encode()

    def _opens_with_space(self) -> bool:
        """Whether encoding puts a space before a text."""
        return self._vocabulary.add_space_prefix

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> bytes:
        """See `Tokenizer.decode`. An opening BOS that is not asked for does not keep the space
        after it, so that decoding is the inverse of encoding."""
        parts = [self.piece(token, special=special) for token in tokens]
        if self._opens_with_space():
            first = next((place for place, part in enumerate(parts) if part), None)
            if first is not None and (first == 0 or tokens[:first] == [self.bos]):
                parts[first] = parts[first].removeprefix(b" ")
        return b"".join(parts)
