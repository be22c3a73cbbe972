"""Widths and counts of a model's heads and layers, by its header."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from superfluid_adapter_llamacpp.gguf import Header
from superfluid_compat.errors import ModelDamaged

_MOST_HEADS: Final = 1 << 31


def head_widths(header: Header) -> tuple[int, int]:
    """Values of a head's key and of its value."""
    width = header.number("embedding_length")
    each = width // max(1, *per_layer(header, "attention.head_count"))
    number = header.number
    return number("attention.key_length", each), number("attention.value_length", each)


def per_layer(header: Header, key: str, otherwise: str = "") -> Sequence[int]:
    """A number that may be given once or for every layer."""
    value: Any = header.own(key, header.own(otherwise, 0) if otherwise else 0)
    layers = header.number("block_count")
    if _is_count(value):
        return [value] * layers
    if isinstance(value, list) and value and all(map(_is_count, value)):
        return value
    raise ModelDamaged(f"{header.path}: {key} is neither a number nor one for each layer")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_HEADS
