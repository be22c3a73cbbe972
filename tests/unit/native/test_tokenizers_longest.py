"""`longest` bounds what one id stands for, so that a text's bytes show how many it must hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings

from superfluid_adapter_native.formats.gguf import read_gguf
from superfluid_adapter_native.tokenizers import load_tokenizer
from superfluid_adapter_native.tokenizers.bytepair import BytePairTokenizer
from superfluid_adapter_native.tokenizers.sentencepiece import SentencePieceTokenizer
from superfluid_adapter_native.tokenizers.wordpiece import WordPieceTokenizer
from superfluid_workerd.adapter import Tokenizer
from support import tiny_vocabularies as tiny
from support.tokenizer_cases import TEXTS, dense_bpe, plain, texts

FULL = ("\0\x7f\xa0\u2028\ufeff" * 9, " " * 500, "\n" * 500, "a" * 999, "\U0010ffff" * 30)


def check(tokenizer: Tokenizer, text: str) -> None:
    longest = tokenizer.longest
    assert longest is not None
    ids = tokenizer.encode(text, add_special=False, special=True)
    assert len(text.encode()) <= longest * len(ids)


@pytest.mark.model
def test_of_the_default_model(default_model: Path) -> None:
    tokenizer = load_tokenizer(read_gguf(default_model))

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(text=texts())
    def random(text: str) -> None:
        check(tokenizer, text)

    random()
    for text in (*TEXTS, *FULL):
        check(tokenizer, text)
    assert tokenizer.longest is not None
    assert tokenizer.longest < 200


@pytest.mark.parametrize(
    "tokenizer",
    [
        BytePairTokenizer(plain(dense_bpe("llama-bpe"))),
        SentencePieceTokenizer(plain(tiny.spm())),
        SentencePieceTokenizer(plain(tiny.spm(gemma=True, controls=("<|im_end|>",)))),
    ],
    ids=["bytepair", "sentencepiece", "gemma"],
)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=texts())
def test_of_tiny_vocabularies(tokenizer: Tokenizer, text: str) -> None:
    check(tokenizer, text)
    for full in FULL:
        check(tokenizer, full)


def test_where_bytes_can_vanish_there_is_none() -> None:
    spaces = plain(tiny.spm(controls=("<|end|>",)) | {"general.name": "Phi-3"})
    assert SentencePieceTokenizer(spaces).longest is None
    lacking = dense_bpe("llama-bpe")
    tokens = list(lacking["tokenizer.ggml.tokens"])
    tokens[tokens.index("\u0100")] = "<byte 0 is not here>"
    gone = {**lacking, "tokenizer.ggml.tokens": tokens}
    assert BytePairTokenizer(plain(gone)).longest is None


def test_a_wordpiece_vocabulary_has_none() -> None:
    pieces = ["[UNK]", "[CLS]", "[SEP]", "\u2581a"]
    tokenizer = WordPieceTokenizer(
        {
            "tokenizer.ggml.tokens": pieces,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.seperator_token_id": 2,
        }
    )
    assert tokenizer.longest is None
    assert len(tokenizer.encode("x" * 5000, add_special=False)) == 1
