"""Byte-level BPE by its families of pre-tokenizers, against llama.cpp and the published pattern."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superfluid_adapter_native.tokenizers.bytepair import BytePairTokenizer
from superfluid_adapter_native.tokenizers.pretokenizers import PRE_TOKENIZERS
from superfluid_compat.errors import ModelDamaged, UnsupportedArchitecture
from superfluid_workerd.adapter import Tokenizer
from superfluid_workerd.tokenizing.pieces import bytes_of
from support import tiny_vocabularies as tiny
from support.llamacpp import LlamaCpp
from support.tokenizer_cases import (
    TEXTS,
    assert_same,
    assert_same_vocabulary,
    both,
    dense_bpe,
    plain,
    texts,
)

CASE_BY_UNICODE = ("tekken", "gpt-4o", "llama4", "kanana2", "minimax-m2")
"""llama.cpp approximates upper and lower case by a-z and A-Z in these; the publisher does not."""

DEEPSEEK = ("deepseek-llm", "deepseek-coder")
"""In these llama.cpp takes U+3000 and its like out of the ranges that hold them."""

CASED_TEXTS = (
    "\u00c9COLE \u00e9cole HelloWorld iPhone15Pro XMLHttpRequest",
    "\u00c9\u00e9\u00c9 a\u00c9b A\u00e9B we'LL We'll 1234567",
)


def comparable(pre: str, text: str) -> bool:
    """Whether llama.cpp follows the published pattern on `text`."""
    if pre in CASE_BY_UNICODE:
        return text.isascii()
    if pre in DEEPSEEK:
        return not any(ord(character) > 0x7F and character.isspace() for character in text)
    # The long s folds to s in the published patterns alone.
    return "\u017f" not in text and "\u0378" not in text


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_family_cuts_as_llama_cpp_does(tmp_path: Path, pre: str) -> None:
    with both(tmp_path, dense_bpe(pre)) as (ours, theirs):
        assert ours.stops == theirs.stops
        for text in (*TEXTS, *CASED_TEXTS):
            if comparable(pre, text):
                assert_same(ours, theirs, text)


FAMILIES = {family: name for name, family in PRE_TOKENIZERS.items()}
Pair = tuple[Tokenizer, LlamaCpp]


@pytest.fixture(scope="module")
def pairs() -> Iterator[dict[str, Pair]]:
    """Both tokenizers of one name of each family."""
    with contextlib.ExitStack() as stack:
        opened: dict[str, Pair] = {}
        for pre in FAMILIES.values():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            opened[pre] = stack.enter_context(both(Path(folder), dense_bpe(pre)))
        yield opened


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=st.text(st.sampled_from(" \n\r\ta'sSlL1234.,!<$=/+\u00e9\u6f22"), max_size=30))
def test_random_texts_are_the_same(pairs: dict[str, Pair], text: str) -> None:
    for pre, (ours, theirs) in pairs.items():
        if comparable(pre, text):
            assert ours.encode(text) == theirs.tokenize(text), pre


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("\u00c9COLE", ["\u00c9COLE"]),
        ("\u00e9cole\u00c9", ["\u00e9cole", "\u00c9"]),
        ("HelloWorld", ["Hello", "World"]),
    ],
)
def test_case_is_unicode_s_where_the_publisher_says_so(text: str, wanted: list[str]) -> None:
    tokenizer = BytePairTokenizer(plain(dense_bpe("tekken")))
    apart = [token for word in wanted for token in tokenizer.encode(word, add_special=False)]
    assert tokenizer.encode(text, add_special=False) == apart


def test_pieces_are_the_same(tmp_path: Path) -> None:
    with both(tmp_path, dense_bpe("qwen2")) as (ours, theirs):
        assert_same_vocabulary(ours, theirs)


def test_a_word_that_is_a_piece_needs_no_merges_in_llama3(tmp_path: Path) -> None:
    vocabulary = tiny.bpe(pre="llama-bpe")
    vocabulary["tokenizer.ggml.merges"] = vocabulary["tokenizer.ggml.merges"][:1]
    with both(tmp_path, vocabulary) as (ours, theirs):
        assert len(ours.encode("stone", add_special=False)) == 1
        assert_same(ours, theirs, "stone the stones")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=texts())
def test_decoding_undoes_encoding(text: str) -> None:
    tokenizer = BytePairTokenizer(plain(tiny.bpe()))
    assert tokenizer.decode(tokenizer.encode(text)).decode() == text


@pytest.mark.parametrize("unit", ["a", " ", "\n", "  \n", "!", "\u6f22"])
@pytest.mark.parametrize("pre", ["default", "llama-bpe", "deepseek-v3", "gpt-4o"])
def test_long_runs_take_seconds(pre: str, unit: str) -> None:
    tokenizer = BytePairTokenizer(plain(tiny.bpe(pre=pre)))
    text = (unit * (1 << 18))[: 1 << 18]
    started = time.thread_time()
    ids = tokenizer.encode(text, add_special=False)
    assert time.thread_time() - started < 30
    assert text.startswith(tokenizer.decode(ids[:999]).decode())


def test_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedArchitecture, match="'next-big-thing'"):
        BytePairTokenizer(plain(tiny.bpe(pre="next-big-thing")))


def test_a_file_without_pre_tokenizer_means_default() -> None:
    silent = plain(tiny.bpe(pre="default"))
    stated = BytePairTokenizer(silent)
    silent.pop("tokenizer.ggml.pre")
    for text in TEXTS:
        assert BytePairTokenizer(silent).encode(text) == stated.encode(text)


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        (["the"], "wanted two pieces"),
        (["t "], "wanted two pieces"),
        ([""], "wanted two pieces"),
        (["t zzz"], "merges do not fit"),
        (["q q"], "merges do not fit"),
        ([1], "does not hold strings"),
        ("t h", "wanted a list"),
        (None, "is missing"),
    ],
)
def test_merges_that_cannot_be_are_damage(merges: object, message: str) -> None:
    with pytest.raises(ModelDamaged, match=message):
        BytePairTokenizer(plain(tiny.bpe()) | {"tokenizer.ggml.merges": merges})


def test_pieces_outside_the_alphabet_are_plain_text() -> None:
    assert bytes_of("\u0120a\u010a") == b" a\n"
    assert bytes_of("\u2581a") == "\u2581a".encode()
    assert bytes_of("\u00a0") == "\u00a0".encode()
