"""WordPiece, against llama.cpp on a file made here."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from superfluid_adapter_native.tokenizers.wordpiece import WordPieceTokenizer
from superfluid_compat.errors import ModelDamaged
from support.gguf_writer import Kind, Typed
from support.tokenizer_cases import (
    TEXTS,
    assert_same,
    assert_same_vocabulary,
    both,
    plain,
    texts,
)

_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_CHARACTERS = (
    "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-:;()$+<=>^|`~\u6f22\u5b57\u65e5\u672c\u0430"
)
_TOKENS = [
    *_SPECIAL,
    *(f"\u2581{character}" for character in _CHARACTERS),
    *"abcdefghijklmnopqrstuvwxyz0123456789",
    *("\u2581the", "\u2581hello", "lo", "ing", "\u2581wor", "ld"),
]
VOCABULARY = {
    "tokenizer.ggml.model": "bert",
    "tokenizer.ggml.tokens": _TOKENS,
    "tokenizer.ggml.token_type": Typed(
        Kind.I32, [3] * len(_SPECIAL) + [1] * (len(_TOKENS) - len(_SPECIAL)), array=True
    ),
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.ggml.unknown_token_id": 1,
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.cls_token_id": 2,
    "tokenizer.ggml.seperator_token_id": 3,
    "tokenizer.ggml.mask_token_id": 4,
}


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(text=texts())
def test_random_texts_are_the_same(tmp_path: Path, text: str) -> None:
    # Code points that Unicode has not assigned, or assigned lately, differ by its version.
    known = "".join(one for one in text if ord(one) < 0x3100 or 0x4E00 <= ord(one) < 0x9FA6)
    with both(tmp_path, VOCABULARY) as (ours, theirs):
        assert_same(ours, theirs, known)


def test_vocabulary_and_awkward_texts_are_the_same(tmp_path: Path) -> None:
    with both(tmp_path, VOCABULARY) as (ours, theirs):
        assert_same_vocabulary(ours, theirs)
        # The last text has code points that are not assigned, see above.
        for text in (*TEXTS[:-1], "Hello [MASK] World", "\u00c9t\u00e9 \u6f22\u5b57x"):
            assert_same(ours, theirs, text)


def test_decoding_drops_the_first_space() -> None:
    tokenizer = WordPieceTokenizer(plain(VOCABULARY))
    assert tokenizer.decode(tokenizer.encode("hello world")) == b"hello world"


def test_a_vocabulary_without_its_special_tokens_is_damage() -> None:
    with pytest.raises(ModelDamaged, match="WordPiece"):
        WordPieceTokenizer(
            {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["\u2581a", "b"]}
        )
