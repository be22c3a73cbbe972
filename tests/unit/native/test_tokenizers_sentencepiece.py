"""SentencePiece-style vocabularies, against llama.cpp on files made here."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superfluid_adapter_native.tokenizers.sentencepiece import SentencePieceTokenizer
from superfluid_compat.errors import OutOfBoundary
from support import tiny_vocabularies as tiny
from support.gguf_writer import Kind, Typed
from support.tokenizer_cases import (
    TEXTS,
    assert_same,
    assert_same_vocabulary,
    both,
    plain,
    texts,
)

ADDS = {
    "tokenizer.ggml.add_eos_token": True,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.add_space_prefix": False,
}
VOCABULARIES = {
    "llama": tiny.spm(),
    "gemma": tiny.spm(gemma=True, controls=("<|im_end|>", "the<|im_end|>")),
    "padded": tiny.spm(size=700) | ADDS,
    "phi-3": tiny.spm(controls=("<|end|>", "<|user|>", "<|endoftext|>"))
    | {"general.name": "Phi-3 mini"},
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_tiny_vocabularies_are_the_same(tmp_path: Path, name: str) -> None:
    with both(tmp_path, VOCABULARIES[name]) as (ours, theirs):
        assert_same_vocabulary(ours, theirs)
        for text in (*TEXTS, " <|end|>  x <|user|>\n\n y<|endoftext|> z </s> w", "the<|im_end|>"):
            assert_same(ours, theirs, text)
            ids = theirs.tokenize(text, add_special=False)
            assert ours.decode(ids) == theirs.detokenize(ids)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_vocabularies_are_the_same(data: st.DataObject) -> None:
    check_random_vocabulary(data)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=3000, deadline=None)
@given(data=st.data())
def test_many_random_vocabularies_are_the_same(data: st.DataObject) -> None:
    check_random_vocabulary(data)


def check_random_vocabulary(data: st.DataObject) -> None:
    vocabulary = data.draw(random_vocabulary())
    with tempfile.TemporaryDirectory() as folder, both(Path(folder), vocabulary) as (ours, theirs):
        for text in data.draw(st.lists(st.text("ab \u2581<\n", max_size=40), max_size=10)):
            assert_same(ours, theirs, text)


@st.composite
def random_vocabulary(draw: st.DrawFn) -> dict[str, Any]:
    """Pieces of few letters, scores with many ties, kinds at random, spaces inside pieces."""
    pieces = draw(st.lists(st.text("ab\u2581<", min_size=1, max_size=5), max_size=40, unique=True))
    kinds = draw(st.lists(st.sampled_from((1, 1, 1, 3, 4, 5)), min_size=40, max_size=40))
    scores = draw(st.lists(st.integers(-3, 3).map(float), min_size=40, max_size=40))
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    rest, count = [0.0] * len(head), len(pieces)
    # Equally long pieces that are cut out in advance have no order in llama.cpp.
    lengths: set[int] = set()
    for place, piece in enumerate(pieces):
        length = len(piece.encode())
        if kinds[place] in (3, 4):
            kinds[place] = 1 if length in lengths else kinds[place]
            lengths.add(length)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": head + pieces,
        "tokenizer.ggml.scores": Typed(Kind.F32, rest + scores[:count], array=True),
        "tokenizer.ggml.token_type": Typed(
            Kind.I32, [2, 3, 3] + [6] * 256 + kinds[:count], array=True
        ),
        "tokenizer.ggml.add_space_prefix": draw(st.booleans()),
    }


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=texts())
def test_decoding_undoes_encoding(text: str) -> None:
    for vocabulary in (tiny.spm(), tiny.spm(gemma=True)):
        tokenizer = SentencePieceTokenizer(plain(vocabulary))
        ids = tokenizer.encode(text)
        # A literal U+2581 is a space to SentencePiece; nothing tells them apart afterwards.
        assert tokenizer.decode(ids).decode() == text.replace("\u2581", " ")


def test_lone_surrogates_are_replaced_and_pairs_joined() -> None:
    tokenizer = SentencePieceTokenizer(plain(tiny.spm()))
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")
    assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("\U0001f600")


@pytest.mark.parametrize("token", [-1, 10_000])
def test_an_id_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(OutOfBoundary, match="the vocabulary ends at"):
        SentencePieceTokenizer(plain(tiny.spm())).piece(token)
