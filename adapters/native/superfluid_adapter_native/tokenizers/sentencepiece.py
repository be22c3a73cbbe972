"""SentencePiece-style tokenizing by piece scores (`tokenizer.ggml.model` is `llama`).

Neighbouring symbols merge while their join is a piece, the best score first and the leftmost of
equals, as in llama.cpp (`llm_tokenizer_spm_session`); what is no piece in the end is written as
byte pieces.
"""

from __future__ import annotations

import functools
import heapq
import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from superfluid_adapter_native.tokenizers import metadata as read
from superfluid_adapter_native.tokenizers.base import VocabularyTokenizer
from superfluid_adapter_native.tokenizers.vocabulary import Defaults, Vocabulary, read_vocabulary
from superfluid_compat.errors import ModelDamaged
from superfluid_workerd.tokenizing.pieces import SPACE

_DEFAULTS: Final = Defaults(bos=1, eos=2, unk=0, add_bos=True, add_space_prefix=True)
_CACHED_WORDS: Final = 1 << 15
_CACHED_CHARACTERS: Final = 64


class SentencePieceTokenizer(VocabularyTokenizer):
    """Immutable but for a cache of words, which is safe to share between threads."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        vocabulary = read_vocabulary(metadata, _DEFAULTS)
        super().__init__(vocabulary, metadata)
        self._costs = _costs(metadata, len(vocabulary.pieces))
        self._bytes = _byte_ids(vocabulary)
        self._words = _word_pattern(vocabulary.pieces)
        self._cached = functools.lru_cache(_CACHED_WORDS)(self._merge)

    def _encode_text(self, text: str, after_special: bool) -> list[int]:
        if self._vocabulary.add_space_prefix and after_special:
            text = " " + text
        found: list[int] = []
        for word in self._words.findall(text.replace(" ", SPACE)):
            short = len(word) <= _CACHED_CHARACTERS
            found += self._cached(word) if short else self._merge(word)
        return found

    def _merge(self, word: str) -> tuple[int, ...]:
        """Ids of a text that no piece reaches out of.

        A symbol is its start; `ends` has its end, `starts` its predecessor's start. A queued
        join is stale once either symbol has grown or gone, which shows in their ends."""
        get, costs, size = self._vocabulary.ids.get, self._costs, len(word)
        ends = list(range(1, size + 1))
        starts = list(range(-1, size))
        queue = [
            (costs[token], left, left + 1, left + 2)
            for left in range(size - 1)
            if (token := get(word[left : left + 2])) is not None
        ]
        heapq.heapify(queue)
        while queue:
            _, left, middle, end = heapq.heappop(queue)
            if ends[left] != middle or ends[middle] != end:
                continue
            ends[left], ends[middle] = end, 0
            starts[end] = left
            before = starts[left]
            if before >= 0 and (token := get(word[before:end])) is not None:
                heapq.heappush(queue, (costs[token], before, left, end))
            if end < size and (token := get(word[left : ends[end]])) is not None:
                heapq.heappush(queue, (costs[token], left, end, ends[end]))
        return self._read_off(word, ends)

    def _read_off(self, word: str, ends: list[int]) -> tuple[int, ...]:
        found: list[int] = []
        start = 0
        while start < len(word):
            text = word[start : ends[start]]
            token = self._vocabulary.ids.get(text)
            if token is None:
                found += (self._bytes[byte] for byte in text.encode())
            else:
                found.append(token)
            start = ends[start]
        return tuple(found)


def _costs(metadata: Mapping[str, Any], size: int) -> list[float]:
    """Negative scores by id, since a heap gives the least first. Scores are float32 in a file."""
    scores = read.numbers(metadata, "scores", size)
    if scores is None:
        return [0.0] * size
    if np.isnan(scores).any():
        raise ModelDamaged(f"the score of token {int(np.isnan(scores).argmax())} is not a number")
    costs: list[float] = (-scores).tolist()
    return costs


def _byte_ids(vocabulary: Vocabulary) -> list[int]:
    """The id that stands for each byte: its byte piece, else its character, else unknown."""
    ids, unknown = vocabulary.ids, vocabulary.unk
    found = []
    for byte in range(256):
        plain = ids.get(chr(byte)) if byte < 128 else None
        token = ids.get(f"<0x{byte:02X}>", unknown if plain is None else plain)
        if token is None:
            raise ModelDamaged(f"the vocabulary has no piece for byte {byte} and no unknown piece")
        found.append(token)
    return found


def _word_pattern(pieces: list[str]) -> re.Pattern[str]:
    """Matches runs of text that merge independently of their neighbours.

    Text is cut before a space, unless some piece has a space after the very same character: any
    join across the cut would be a piece that has both side by side."""
    joints = set(re.findall(f"[^{SPACE}\0](?={SPACE})", "\0".join(pieces)))
    inside = f"[^{SPACE}]+"
    if joints:
        inside += f"|(?<=[{re.escape(''.join(sorted(joints)))}]){SPACE}+"
    return re.compile(f"{SPACE}*(?:{inside})+|{SPACE}+")
