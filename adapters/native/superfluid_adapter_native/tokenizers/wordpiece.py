"""WordPiece (`tokenizer.ggml.model` is `bert`): words from a normalized text, the longest piece
first; a word that does not come out even is unknown as a whole.

GGUF writes a piece that opens a word with `▁` before it and one inside a word bare. Normalizing
is llama.cpp's (`llm_tokenizer_wpm_session`): accents off, lower case, control characters dropped,
punctuation and Chinese characters words of their own.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, Final

from superfluid_adapter_native.tokenizers import metadata as read
from superfluid_adapter_native.tokenizers.base import VocabularyTokenizer
from superfluid_adapter_native.tokenizers.vocabulary import Defaults, read_vocabulary
from superfluid_compat.errors import ModelDamaged
from superfluid_workerd.tokenizing.pieces import SPACE

_DEFAULTS: Final = Defaults(bos=101, eos=None, unk=100, sep=102, add_bos=True)
_CHINESE: Final = (
    range(0x4E00, 0xA000),
    range(0x3400, 0x4DC0),
    range(0x20000, 0x2A6E0),
    range(0x2A700, 0x2B740),
    range(0x2B740, 0x2B820),
    range(0x2B920, 0x2CEB0),
    range(0xF900, 0xFB00),
    range(0x2F800, 0x2FA20),
)
"""Blocks that BERT's reference tokenizer sets apart."""


class WordPieceTokenizer(VocabularyTokenizer):
    """Immutable."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        vocabulary = read_vocabulary(metadata, _DEFAULTS)
        super().__init__(vocabulary, metadata)
        if vocabulary.unk is None or vocabulary.bos is None or vocabulary.sep is None:
            raise ModelDamaged("a WordPiece vocabulary without unknown, opening or closing token")
        self._unknown, self._ends = vocabulary.unk, (vocabulary.bos, vocabulary.sep)
        # Spaces vanish, and a word that no pieces make is one unknown token.
        self._keeps_bytes = False
        self._longest = max(map(len, vocabulary.pieces))
        self._lower = read.flag(metadata, "normalizer.lowercase", True)
        self._strip = read.flag(metadata, "normalizer.strip_accents", self._lower)

    def _opening(self) -> list[int]:
        return [self._ends[0]]

    def _closing(self) -> list[int]:
        return [self._ends[1]]

    def _opens_with_space(self) -> bool:
        return True

    def _encode_text(self, text: str, after_special: bool) -> list[int]:
        return [token for word in self._split(text) for token in self._pieces_of(SPACE + word)]

    def _pieces_of(self, word: str) -> list[int]:
        found: list[int] = []
        start = 0
        while start < len(word):
            for end in range(min(len(word), start + self._longest), start, -1):
                token = self._vocabulary.ids.get(word[start:end])
                if token is not None:
                    found.append(token)
                    start = end
                    break
            else:
                return [self._unknown]
        return found

    def _split(self, text: str) -> Iterator[str]:
        word: list[str] = []
        for character in unicodedata.normalize("NFD", text) if self._strip else text:
            kind = unicodedata.category(character)
            if character.isspace():
                yield from _flush(word)
            elif character in "\0\ufffd" or kind[0] == "C" or (self._strip and kind[0] == "M"):
                continue
            elif _stands_alone(character, kind):
                yield from _flush(word)
                yield character.lower() if self._lower else character
            else:
                word.append(character.lower() if self._lower else character)
        yield from _flush(word)


def _flush(word: list[str]) -> Iterator[str]:
    if word:
        yield "".join(word)
        word.clear()


def _stands_alone(character: str, kind: str) -> bool:
    code = ord(character)
    sign = kind[0] == "P" or (kind[0] == "S" and code < 0x7F)
    return sign or any(code in block for block in _CHINESE)
