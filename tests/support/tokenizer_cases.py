"""Texts and vocabularies that tokenizer tests share, and both sides over one file."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hypothesis import strategies as st

from superfluid_adapter_native.formats.gguf import read_gguf
from superfluid_adapter_native.tokenizers import load_tokenizer
from superfluid_workerd.adapter import Tokenizer
from support import tiny_vocabularies as tiny
from support.gguf_writer import Kind, Typed, write_gguf
from support.llamacpp import LlamaCpp

TEXTS: Final = (
    "",
    " ",
    "a",
    "Hello, world!",
    " leading and trailing ",
    "two  spaces   three    four",
    "\n",
    "\n\n\n a\n \nb\r\nc\r\rd\n\r",
    "\t\ttabs\t and\t\tmore \t ",
    "0123456789 12 345 6,789.01 \u0663\u0664\u0665 \u2167 \u00bd",
    "def f(x):\n    return x**2 + {'a': [1, 2]}  # done\n\n\nclass A: ...",
    "https://example.org/a?b=c&d=%20#e  user@example.org",
    "it's IT'S we'll WE'LL I'd they've 'tis o'clock ''' \u2019s",
    "na\u00efve caf\u00e9 \u00c9COLE \u00e9cole stra\u00dfe \u0130stanbul e\u0301 a\u030a\u0323",
    (
        "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u65e5\u672c\u8a9e\u306e\u30c6\u30b9\u30c8 "
        "\ud55c\uad6d\uc5b4"
    ),
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea \u202eflip\u202c",
    (
        "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22 \u0bb5\u0ba3\u0b95\u0bcd"
        "\u0b95\u0bae\u0bcd"
    ),
    (
        "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0395\u03bb\u03bb\u03b7\u03bd\u03b9"
        "\u03ba\u03ac \u10e5"
    ),
    (
        "\U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1e9"
        "\U0001f1ea\U0001f3fd"
    ),
    "\x00\x01\x07\x1b[0m\x7f\x80\x9f\ufeff\u200b\u2028\u2029\u0085\ufffd",
    "\u00a0\u2003\u3000 \u00a0 x\u3000y",
    "\u2581\u2581 a\u2581b <0x41> <0x0A>",
    "<bos><eos><s></s><unk><pad><end_of_turn><start_of_turn>user\n<|im_end|><|endoftext|>",
    "<h1>title</h1> <table><tr>\t</tr></table> <end_of_tur n> <<unused1>>",
    "x\u2581</ </ > </s",
    "the river runs in the stone hello there world herethestone",
    "a" * 3000,
    "ab " * 700,
    "\n" * 100 + " " * 100 + "\t" * 100,
    "\U0010ffff\ue000\u0378 \U0001d4b3\u01c5\u017f",
)

_PARTS: Final = (
    *" \n\t\raeht.,!'0123<>|/_\u2581\u00e9\u00df\u4e16\u0e44\u0301\u200d\u3000\x00",
    *(
        "  ",
        "\r\n",
        "the",
        "ing",
        "'s",
        "'LL",
        "<h1>",
        "</s>",
        "<eos>",
        "<end_of_turn>",
        "\U0001f600",
    ),
)


def texts() -> st.SearchStrategy[str]:
    """Any text that UTF-8 holds, and text made of parts that tokenizers treat unlike others."""
    parts = st.lists(st.sampled_from(_PARTS), max_size=40).map("".join)
    return parts | st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata for `write_gguf` as a reader gives it back."""
    return {
        key: value.value if isinstance(value, Typed) else value for key, value in metadata.items()
    }


def dense_bpe(pre: str) -> dict[str, Any]:
    """A byte-level vocabulary with a merge for every pair of common bytes, so that whether two
    neighbours are in one word shows in the ids."""
    alphabet = tiny.byte_alphabet()
    characters = (
        " \n\t\rae<h1>'sREtTlL23456!$`.,ABb=/\u00e9\u00c9\u6f22\u65e5\u0639\u0939\u0e44\u3002\u00a0"
    )
    used = [alphabet[byte] for byte in sorted(set(characters.encode()))]
    pairs = list(itertools.product(used, used))
    tokens = [*alphabet, *(left + right for left, right in pairs), "<|endoftext|>"]
    end = len(tokens) - 1
    return tiny.bpe(pre=pre) | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in pairs],
        "tokenizer.ggml.token_type": Typed(Kind.I32, [1] * end + [3], array=True),
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end,
    }


_LLAMA: Final = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.block_count": 1,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
_BERT: Final = {
    "general.architecture": "bert",
    "bert.context_length": 64,
    "bert.embedding_length": 32,
    "bert.block_count": 1,
    "bert.feed_forward_length": 32,
    "bert.attention.head_count": 1,
    "bert.attention.layer_norm_epsilon": 1e-5,
    "bert.attention.causal": False,
    "bert.pooling_type": 1,
}


@contextlib.contextmanager
def both(folder: Path, vocabulary: Mapping[str, Any]) -> Iterator[tuple[Tokenizer, LlamaCpp]]:
    """Our tokenizer and llama.cpp's, each from the same file, which has no tensors."""
    kind = _BERT if vocabulary["tokenizer.ggml.model"] == "bert" else _LLAMA
    path = write_gguf(folder / "vocabulary.gguf", {**kind, **vocabulary}, [])
    with LlamaCpp(path) as theirs:
        yield load_tokenizer(read_gguf(path)), theirs


def assert_same(ours: Tokenizer, theirs: LlamaCpp, text: str) -> None:
    """Both give the same ids for `text`, with special tokens read and unread."""
    for special in (False, True):
        ids = theirs.tokenize(text, parse_special=special)
        assert ours.encode(text, special=special) == ids, (text, special)


def assert_same_vocabulary(ours: Tokenizer, theirs: LlamaCpp) -> None:
    """Both have the same size, pieces and stops."""
    assert ours.size == theirs.size
    assert ours.stops == theirs.stops
    for special in (False, True):
        for token in range(theirs.size):
            assert ours.piece(token, special=special) == theirs.piece(token, special=special), token
