"""Byte-level BPE (`tokenizer.ggml.model` is `gpt2`), merging done by the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Regex
from tokenizers import Tokenizer as Engine
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from superfluid_adapter_native.tokenizers import metadata as read
from superfluid_adapter_native.tokenizers.base import VocabularyTokenizer
from superfluid_adapter_native.tokenizers.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from superfluid_adapter_native.tokenizers.vocabulary import Defaults, read_vocabulary
from superfluid_compat.errors import ModelDamaged, UnsupportedArchitecture
from superfluid_workerd.tokenizing.engine import encode_ids
from superfluid_workerd.tokenizing.pieces import BYTE_SYMBOLS, bytes_of


class BytePairTokenizer(VocabularyTokenizer):
    """Immutable; the engine is safe to share between threads."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        family = _family(metadata)
        defaults = Defaults(bos=None, eos=None, unk=None, add_bos=family.add_bos)
        vocabulary = read_vocabulary(metadata, defaults)
        super().__init__(vocabulary, metadata)
        self._engine = _engine(vocabulary.ids, _merges(metadata), family)
        # The engine leaves a byte out that has no piece.
        self._keeps_bytes = self._keeps_bytes and vocabulary.ids.keys() >= BYTE_SYMBOLS

    def _encode_text(self, text: str, after_special: bool) -> list[int]:
        return encode_ids(self._engine, text)

    def _unescape(self, text: str) -> bytes:
        return bytes_of(text)


def _family(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = read.text(metadata, "pre") or "default"
    if name not in PRE_TOKENIZERS:
        raise UnsupportedArchitecture(
            f"the file names the pre-tokenizer {name!r}, which the native runtime does not know",
            fix="serve the model with another runtime, or choose another model",
        )
    return PRE_TOKENIZERS[name]


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs in the order of their rank; of equal ones the first counts."""
    found: dict[tuple[str, str], None] = {}
    for rank, line in enumerate(read.texts(metadata, "merges")):
        middle = line.find(" ", 1)
        if middle < 0 or middle == len(line) - 1:
            raise ModelDamaged(f"merge {rank} is {line!r}, wanted two pieces")
        found.setdefault((line[:middle], line[middle + 1 :]))
    return list(found)


def _engine(ids: dict[str, int], merges: list[tuple[str, str]], family: PreTokenizer) -> Engine:
    try:
        model = BPE(ids, merges, ignore_merges=family.whole_words)
    except Exception as error:
        raise ModelDamaged(f"the merges do not fit the vocabulary: {error}") from error
    engine = Engine(model)
    cuts = [Split(Regex(pattern), "isolated") for pattern in family.patterns]
    to_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    engine.pre_tokenizer = Sequence([*cuts, to_bytes])
    return engine
