"""Tiny vocabularies as GGUF metadata: SentencePiece-style with byte pieces, and byte-level BPE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.gguf_writer import Kind, Typed

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_TEXT = """
the there a an and he hello her in is it of on or river run runs sea st stone th to tone world
wor ld
"""
WORDS = tuple(_TEXT.split())
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CAPITALS = LETTERS.upper()
SIGNS = "0123456789.,!?'-:;()éü世界"


def spm(*, size: int = 0, gemma: bool = False, controls: Sequence[str] = ()) -> dict[str, Any]:
    """A SentencePiece-style vocabulary; longer pieces score higher, as trained ones mostly do.

    Ids: control pieces first (Llama's order, or Gemma's), 256 byte pieces, then text, then
    `controls` (Gemma's turn marks among them). `size` pads with unused pieces.
    """
    special = ["<pad>", "<eos>", "<bos>", "<unk>"] if gemma else ["<unk>", "<s>", "</s>"]
    unknown = special.index("<unk>")
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = [0.0] * len(tokens)
    types = [CONTROL] * len(special) + [BYTE] * 256
    types[unknown] = UNKNOWN
    pieces = _spm_pieces()
    tokens += pieces
    scores += [-1.0 - place for place in range(len(pieces))]
    types += [NORMAL] * len(pieces)
    late = [*(("<start_of_turn>", "<end_of_turn>") if gemma else ()), *controls]
    tokens += late
    scores += [0.0] * len(late)
    types += [CONTROL] * len(late)
    _pad(tokens, types, size)
    scores += [-1e4] * (len(tokens) - len(scores))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": Typed(Kind.F32, scores, array=True),
        "tokenizer.ggml.token_type": Typed(Kind.I32, types, array=True),
        "tokenizer.ggml.bos_token_id": 2 if gemma else 1,
        "tokenizer.ggml.eos_token_id": 1 if gemma else 2,
        "tokenizer.ggml.unknown_token_id": unknown,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": not gemma,
    }


def _spm_pieces() -> list[str]:
    """Words, every prefix a merge needs on the way to them, and single characters, best first."""
    whole = [*WORDS, *("▁" + word for word in WORDS)]
    parts = {word[:end] for word in whole for end in range(2, len(word) + 1)}
    return [*sorted(parts, key=lambda part: (-len(part), part)), "▁", *LETTERS, *CAPITALS, *SIGNS]


def bpe(*, pre: str = "gpt-2", size: int = 0) -> dict[str, Any]:
    """A byte-level BPE vocabulary (`gpt2`) with merges towards `WORDS`, under pre-tokenizer `pre`.

    Ids: 256 bytes in GPT-2's alphabet, merged pieces, one control piece. `size` pads.
    """
    alphabet = byte_alphabet()
    merges: dict[tuple[str, str], None] = {}
    for word in [*WORDS, *("Ġ" + word for word in WORDS)]:
        for end in range(1, len(word)):
            merges[word[:end], word[end]] = None
    ordered = sorted(merges, key=lambda pair: (len(pair[0]) + len(pair[1]), pair))
    tokens = [*alphabet, *("".join(pair) for pair in ordered), "<|endoftext|>"]
    types = [NORMAL] * (len(tokens) - 1) + [CONTROL]
    end = len(tokens) - 1
    _pad(tokens, types, size)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Typed(Kind.I32, types, array=True),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in ordered],
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.add_bos_token": False,
    }


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte, by byte value."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    stand_in = {byte: chr(0x100 + place) for place, byte in enumerate(hidden)}
    return [stand_in.get(byte, chr(byte)) for byte in range(256)]


def _pad(tokens: list[str], types: list[int], size: int) -> None:
    missing = range(len(tokens), size)
    tokens.extend(f"<unused{place}>" for place in missing)
    types.extend(UNUSED for _ in missing)


def size_of(vocabulary: dict[str, Any]) -> int:
    """Entries of a vocabulary that `spm` or `bpe` made."""
    tokens: Sequence[str] = vocabulary["tokenizer.ggml.tokens"]
    return len(tokens)
