"""The default model's 262,144 pieces, against llama.cpp."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings

from superfluid_adapter_native.formats.gguf import read_gguf
from superfluid_adapter_native.tokenizers import load_tokenizer
from superfluid_workerd.adapter import Tokenizer
from support.llamacpp import LlamaCpp
from support.tokenizer_cases import TEXTS, assert_same, assert_same_vocabulary, texts

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def ours(default_model: Path) -> Tokenizer:
    return load_tokenizer(read_gguf(default_model))


@pytest.fixture(scope="module")
def theirs(default_model: Path) -> Iterator[LlamaCpp]:
    with LlamaCpp(default_model) as opened:
        yield opened


def test_every_piece_and_every_stop_is_the_same(ours: Tokenizer, theirs: LlamaCpp) -> None:
    assert (ours.size, ours.bos, ours.eos) == (262_144, theirs.bos, theirs.eos)
    assert_same_vocabulary(ours, theirs)


@pytest.mark.parametrize("text", TEXTS)
def test_awkward_texts_give_the_same_ids_and_come_back(
    ours: Tokenizer, theirs: LlamaCpp, text: str
) -> None:
    assert_same(ours, theirs, text)
    ids = ours.encode(text)
    for special in (False, True):
        assert ours.decode(ids, special=special) == theirs.detokenize(ids, special=special)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=texts())
def test_random_texts_give_the_same_ids(ours: Tokenizer, theirs: LlamaCpp, text: str) -> None:
    assert_same(ours, theirs, text)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=20_000, deadline=None)
@given(text=texts())
def test_many_random_texts_give_the_same_ids(ours: Tokenizer, theirs: LlamaCpp, text: str) -> None:
    assert_same(ours, theirs, text)


@pytest.mark.parametrize("unit", ["a", " ", "\n", "\t ", "x y ", "\u6f22", "<unused1>", "ab"])
def test_a_megabyte_takes_seconds(ours: Tokenizer, unit: str) -> None:
    text = (unit * (1 << 20))[: 1 << 20]
    started = time.thread_time()
    ids = ours.encode(text, add_special=False, special=True)
    assert time.thread_time() - started < 60
    assert text.startswith(ours.decode(ids[:999], special=True).decode())


def test_special_tokens_in_a_text_are_text_unless_asked_for(ours: Tokenizer) -> None:
    turn = "<start_of_turn>user\nhi<end_of_turn>"
    assert not {105, 106} & set(ours.encode(turn))
    assert ours.encode(turn, special=True)[:2] == [2, 105]
    assert ours.encode(turn, special=True)[-1] == 106


def test_threads_share_a_tokenizer(ours: Tokenizer) -> None:
    wanted = [ours.encode(text) for text in TEXTS]
    with ThreadPoolExecutor(8) as pool:
        rounds = [list(pool.map(ours.encode, TEXTS)) for _ in range(3)]
    assert rounds == [wanted] * 3
