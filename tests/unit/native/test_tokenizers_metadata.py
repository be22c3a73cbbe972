"""Stops by llama.cpp's rule, and metadata that contradicts itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superfluid_adapter_native.formats.source import ModelSource
from superfluid_adapter_native.tokenizers import load_tokenizer
from superfluid_compat.errors import ModelDamaged, UnsupportedArchitecture
from superfluid_workerd.tokenizing.pieces import STOP_TEXTS
from support import tiny_vocabularies as tiny
from support.gguf_writer import Kind, Typed
from support.tokenizer_cases import assert_same_vocabulary, both, plain

_HARMONY = ("<|return|>", "<|call|>", "<|end|>", "<|channel|>", "<|message|>", "<|start|>")


@pytest.mark.parametrize(
    "texts",
    [
        STOP_TEXTS[:7],
        ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        ("<|im_end|>", "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
        ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
        _HARMONY,
        ("<|end|>", "<|return|>"),
        ("<EOT>", "[EOS]", "<eos>"),
    ],
)
@pytest.mark.parametrize("kind", [1, 3, 4])
def test_stops_and_kinds_are_found_by_text(
    tmp_path: Path, texts: tuple[str, ...], kind: int
) -> None:
    vocabulary = tiny.bpe(pre="qwen2")
    tokens = [*vocabulary["tokenizer.ggml.tokens"][:-1], *texts, "<|closing|>"]
    types = [1] * (len(tokens) - len(texts) - 1) + [kind] * len(texts) + [3]
    vocabulary |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Typed(Kind.I32, types, array=True),
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }
    with both(tmp_path, vocabulary) as (ours, theirs):
        assert_same_vocabulary(ours, theirs)


def source(metadata: dict[str, Any]) -> ModelSource:
    path = Path("model.gguf")
    return ModelSource(path, "gguf", (path,), "llama", metadata, {}, "pairs", 0)


KEY = "tokenizer.ggml."


SIGNALLING = b"\x00\x00\xa0\x7f"
"""A NaN in F32 that the processor reports where a quiet one passes."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": "abc"}, "wanted a list"),
        ({"tokens": 7}, "wanted a list"),
        ({"tokens": ["a", 1]}, "does not hold strings only"),
        ({"tokens": ["a", "b", "a"]}, "the piece 'a' twice"),
        ({"scores": [0.0]}, "scores has 1 entries"),
        ({"scores": 1.0}, "wanted a list"),
        ({"scores": ["x"] * 999}, "does not hold numbers"),
        ({"scores": [float("nan")] * 999}, "score of token 0 is not a number"),
        ({"scores": memoryview(SIGNALLING * 999).cast("f")}, "score of token 0 is not a number"),
        ({"scores": [[0.0]] * 999}, "does not hold numbers only"),
        ({"token_type": [1, 2]}, "token_type has 2 entries"),
        ({"token_type": [6] * 999}, "token 0 is a byte, but its piece is"),
        ({"bos_token_id": 10_000}, "bos_token_id is 10000, the vocabulary ends"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": "2"}, "eos_token_id is str, wanted a token id"),
        ({"eot_token_id": True}, "eot_token_id is bool"),
        ({"add_bos_token": 1}, "add_bos_token is int"),
        ({"add_space_prefix": "no"}, "add_space_prefix is str"),
        ({"model": 3}, "model is int, wanted a string"),
        ({"pre": [], "model": "gpt2"}, "pre is list, wanted a string"),
    ],
)
def test_what_contradicts_itself_is_damage(changes: dict[str, Any], message: str) -> None:
    metadata = plain(tiny.spm()) | {KEY + name: value for name, value in changes.items()}
    with pytest.raises(ModelDamaged, match=message):
        load_tokenizer(source(metadata))


def test_adding_an_id_that_the_file_does_not_name_is_damage() -> None:
    metadata = plain(tiny.bpe())
    del metadata[KEY + "bos_token_id"]
    with pytest.raises(ModelDamaged, match="add_bos_token is true"):
        load_tokenizer(source(metadata | {KEY + "add_bos_token": True}))


@pytest.mark.parametrize("name", ["t5", "rwkv", ""])
def test_an_unknown_tokenizer_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=f"'{name}', known are"):
        load_tokenizer(source({KEY + "model": name}))


def test_bytes_without_pieces_become_unknown() -> None:
    tokenizer = load_tokenizer(
        source(
            {
                KEY + "model": "llama",
                KEY + "tokens": ["<unk>", "<s>", "</s>", "\u2581", "a"],
                KEY + "token_type": [2, 3, 3, 1, 1],
            }
        )
    )
    assert tokenizer.encode("a\u00e9") == [1, 3, 4, 0, 0]


_ODD_VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 1 << 31, 1 << 70, float("nan"), float("inf")),
    *("", "x", "llama", "gpt2", "bert", [], [1], ["a"], b"x", {}),
    *([value] * 900 for value in (None, True, float("inf"), 1 << 80, "\u2581", ["a"], "a b")),
    *([-5] * 900, [6] * 900, [str(place) for place in range(900)], [" "], ["\0", "a"]),
]
_KEYS = [
    *sorted({*tiny.spm(), *tiny.bpe()}),
    *(KEY + name for name in ("eot_token_id", "fim_pad_token_id", "normalizer.lowercase")),
    "general.name",
]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    base=st.sampled_from([tiny.spm(), tiny.bpe()]),
    changes=st.dictionaries(
        st.sampled_from(_KEYS), st.sampled_from(_ODD_VALUES), min_size=1, max_size=3
    ),
)
def test_odd_metadata_is_refused_or_serves(base: dict[str, Any], changes: dict[str, Any]) -> None:
    try:
        tokenizer = load_tokenizer(source(plain(base) | changes))
    except (ModelDamaged, UnsupportedArchitecture):
        return
    ids = tokenizer.encode("hello the \u00e9 </s>\n", special=True)
    assert all(0 <= token < tokenizer.size for token in (*ids, *tokenizer.stops))
    tokenizer.decode(ids)
