"""How vocabularies write text: spaces, bytes, and the pieces that end a generation.

The texts that end one are llama.cpp's (src/llama-vocab.cpp)."""

from __future__ import annotations

from typing import Final

SPACE: Final = "▁"
"""How SentencePiece writes a space inside a piece (U+2581)."""

END_OF_TURN: Final = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001  # DeepSeek's own spelling
    "<end_of_utterance>",
)
END_OF_MESSAGE: Final = ("<|eom_id|>",)
STOP_TEXTS: Final = (
    *END_OF_TURN,
    *END_OF_MESSAGE,
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "</s>",
    "[EOS]",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
)
"""Pieces that end a generation wherever they occur in a vocabulary."""

_NO_BYTE: Final = "\uffff"


def _stand_ins() -> dict[int, int | str]:
    """GPT-2's printable stand-in of each byte, by code point: printable Latin-1 is itself, the
    rest follow from U+0100 in order (openai/gpt-2, encoder.py). Latin-1 that stands for nothing
    is sent outside Latin-1."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    plain: dict[int, int | str] = dict.fromkeys(hidden, _NO_BYTE)
    return plain | {0x100 + place: byte for place, byte in enumerate(hidden)}


_STAND_INS: Final = _stand_ins()
BYTE_SYMBOLS: Final = frozenset(
    chr(point)
    for point in range(0x200)
    if _STAND_INS.get(point, point) != _NO_BYTE and (point in _STAND_INS or point < 0x100)
)
"""The stand-ins of all 256 bytes in GPT-2's alphabet."""


def bytes_of(piece: str) -> bytes:
    """The bytes that a piece in GPT-2's alphabet stands for; a piece with any other character
    is taken as plain text."""
    try:
        return piece.translate(_STAND_INS).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()


def well_formed(text: str) -> str:
    """`text` as UTF-8 can hold it: surrogate pairs joined, a lone surrogate becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


__all__ = [
    "BYTE_SYMBOLS",
    "END_OF_MESSAGE",
    "END_OF_TURN",
    "SPACE",
    "STOP_TEXTS",
    "bytes_of",
    "well_formed",
]
