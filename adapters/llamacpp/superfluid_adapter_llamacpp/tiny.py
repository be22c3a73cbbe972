"""The smallest llama that a decode goes through: one layer, random weights, a byte vocabulary.

The file is laid out by the GGUF specification, version 3; about 60 kB. Equal every time.
"""

from __future__ import annotations

import math
import random
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

WIDTH: Final = 32
HEADS: Final = 2
HIDDEN: Final = 48
CONTEXT: Final = 1024
LAYERS: Final = 1
_ALIGNMENT: Final = 32
_U32, _F32, _STRING, _ARRAY, _I32 = 4, 6, 8, 9, 5
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6

Tensor = tuple[str, tuple[int, ...]]


def tiny_model() -> bytes:
    """The model, as the bytes of a GGUF file."""
    tokens, types = _vocabulary()
    shapes = _tensors(len(tokens))
    head = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(shapes), 0))
    keys = _keys(tokens, types)
    struct.pack_into("<Q", head, 16, len(keys))
    for key, value in keys.items():
        head += _text(key) + value
    data = bytearray()
    rng = random.Random(7)  # noqa: S311  # weights of a toy
    for name, shape in shapes:
        head += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, len(data))
        count, spread = math.prod(shape), shape[0] ** -0.5
        values = (1.0 if len(shape) == 1 else rng.gauss(0, spread) for _ in range(count))
        data += array("f", values).tobytes()
        data += bytes(-len(data) % _ALIGNMENT)
    head += bytes(-len(head) % _ALIGNMENT)
    return bytes(head + data)


def _tensors(vocabulary: int) -> list[Tensor]:
    """Names and shapes, the row's length first."""
    block = {
        "attn_norm.weight": (WIDTH,),
        "attn_q.weight": (WIDTH, WIDTH),
        "attn_k.weight": (WIDTH, WIDTH),
        "attn_v.weight": (WIDTH, WIDTH),
        "attn_output.weight": (WIDTH, WIDTH),
        "ffn_norm.weight": (WIDTH,),
        "ffn_gate.weight": (WIDTH, HIDDEN),
        "ffn_up.weight": (WIDTH, HIDDEN),
        "ffn_down.weight": (HIDDEN, WIDTH),
    }
    return [
        ("token_embd.weight", (WIDTH, vocabulary)),
        ("output_norm.weight", (WIDTH,)),
        ("output.weight", (WIDTH, vocabulary)),
        *((f"blk.0.{name}", shape) for name, shape in block.items()),
    ]


def _vocabulary() -> tuple[list[str], list[int]]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    return tokens, [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, _NORMAL]


def _keys(tokens: Sequence[str], types: Sequence[int]) -> Mapping[str, bytes]:
    plain: dict[str, Any] = {
        "general.architecture": "llama",
        "general.name": "canary",
        "llama.block_count": LAYERS,
        "llama.context_length": CONTEXT,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": HIDDEN,
        "llama.attention.head_count": HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": WIDTH // HEADS,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    count = len(tokens)
    return {
        **{key: _value(value) for key, value in plain.items()},
        "tokenizer.ggml.tokens": _array(_STRING, count) + b"".join(map(_text, tokens)),
        "tokenizer.ggml.scores": _array(_F32, count) + struct.pack(f"<{count}f", *[0.0] * count),
        "tokenizer.ggml.token_type": _array(_I32, count) + struct.pack(f"<{count}i", *types),
    }


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    return struct.pack("<II", _U32, value)


def _array(kind: int, count: int) -> bytes:
    return struct.pack("<IIQ", _ARRAY, kind, count)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw
