"""Sequences to bytes and back: what comes in is held against the model's own caches first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from superfluid_adapter_mlx.caches import (
    FORMS,
    Array,
    Cache,
    Form,
    Part,
    build,
    live,
)
from superfluid_adapter_mlx.engine import mx
from superfluid_adapter_mlx.envelope import (
    VERSION,
    Header,
    Key,
    StoredArray,
    StoredPart,
    seal,
    unseal,
)
from superfluid_compat.errors import Unsupported

_ROWS: Final = 2
"""The axis of tokens in keys and values: (batch, heads, rows, width)."""


def export(caches: Sequence[Cache], tokens: int, key: Key) -> bytes:
    """The live view of a sequence of `tokens` tokens. Raises `Unsupported`."""
    parts = [live(cache).mapped(mx.contiguous) for cache in caches]
    leaves = [leaf for part in parts for leaf in part.leaves()]
    mx.eval(leaves)
    header = Header(VERSION, key, tokens, tuple(_stored(part) for part in parts))
    return seal(header, [_bytes_of(leaf) for leaf in leaves])


def imported(
    payload: bytes, template: Sequence[Part], key: Key, *, foreign: bool = False
) -> tuple[int, list[Cache]]:
    """How many tokens, and the caches that hold them.

    `template` is the live view of the model's caches after one token: classes, settings, types
    and every side but the rows must be its. Raises `Unsupported`."""
    header, blocks = unseal(payload, key, foreign=foreign)
    if header.tokens < 0 or len(header.parts) != len(template):
        raise Unsupported(
            f"{header.tokens} tokens in {len(header.parts)} caches were exported, the model has "
            f"{len(template)} caches"
        )
    for part, wanted in zip(header.parts, template, strict=True):
        _check(part, wanted, header.tokens)
    arrays = [_array(each, block) for each, block in zip(_all(header), blocks, strict=True)]
    # Nothing lazy may reach another thread.
    mx.eval(arrays)
    rest = iter(arrays)
    caches = [build(_part(part, rest)) for part in header.parts]
    return header.tokens, caches


def _all(header: Header) -> list[StoredArray]:
    return [array for part in header.parts for array in part.stored()]


def _stored(part: Part) -> StoredPart:
    return StoredPart(
        form=part.form,
        numbers=dict(part.numbers),
        arrays=tuple(None if it is None else _describe(it) for it in part.arrays),
        members=tuple(_stored(member) for member in part.members),
    )


def _describe(array: Array) -> StoredArray:
    return StoredArray(_type_name(array), tuple(array.shape))


def _type_name(array: Array) -> str:
    return str(array.dtype).rpartition(".")[2]


def _bytes_of(array: Array) -> bytes:
    if array.size == 0:
        return b""
    flat = array.reshape(-1)
    # NumPy has no bfloat16.
    plain = flat.view(mx.uint16) if array.dtype == mx.bfloat16 else flat
    return np.array(plain).tobytes()


def _array(stored: StoredArray, block: bytes) -> Array:
    kind = getattr(mx, "bool_" if stored.type == "bool" else stored.type)
    if not block:
        return mx.zeros(stored.shape, kind)
    plain = np.frombuffer(block, np.uint16 if stored.type == "bfloat16" else stored.type)
    array = mx.array(plain)
    return (array.view(kind) if stored.type == "bfloat16" else array).reshape(stored.shape)


def _part(stored: StoredPart, arrays: Iterator[Array]) -> Part:
    return Part(
        form=stored.form,
        numbers=stored.numbers,
        arrays=tuple(None if it is None else next(arrays) for it in stored.arrays),
        members=tuple(_part(member, arrays) for member in stored.members),
    )


def _check(found: StoredPart, wanted: Part, tokens: int) -> None:
    if found.form != wanted.form or len(found.members) != len(wanted.members):
        raise Unsupported(f"a {found.form} was exported where the model has a {wanted.form}")
    for member, own in zip(found.members, wanted.members, strict=True):
        _check(member, own, tokens)
    if wanted.form in FORMS:
        _check_numbers(found, wanted, FORMS[wanted.form], tokens)
        _check_arrays(found, wanted, FORMS[wanted.form], tokens)


def _check_numbers(found: StoredPart, wanted: Part, form: Form, tokens: int) -> None:
    if found.numbers.keys() != wanted.numbers.keys():
        raise Unsupported(f"{found.form}: {sorted(found.numbers)}, wanted {sorted(wanted.numbers)}")
    settled = {name: wanted.numbers[name] for name in form.fixed}
    if "offset" in form.numbers:
        settled["offset"] = tokens
    for name, value in settled.items():
        if found.numbers[name] != value:
            raise Unsupported(f"{found.form}: {name} is {found.numbers[name]}, wanted {value}")
    if not 0 <= found.numbers.get("start_position", 0) <= tokens:
        raise Unsupported(f"{found.form}: it starts at {found.numbers['start_position']}")


def _check_arrays(found: StoredPart, wanted: Part, form: Form, tokens: int) -> None:
    there = [array is not None and tokens > 0 for array in wanted.arrays]
    if [array is not None for array in found.arrays] != there:
        raise Unsupported(f"{found.form}: other arrays are there than {tokens} tokens leave")
    for array, own in zip(found.arrays, wanted.arrays, strict=True):
        if array is None or own is None:
            continue
        shape = tuple(own.shape)
        if form.buffered:
            shape = (*shape[:_ROWS], _rows(found, array, tokens), *shape[_ROWS + 1 :])
        if (array.type, array.shape) != (_type_name(own), shape):
            raise Unsupported(
                f"{found.form}: an array of {array.type} {array.shape}, the model's is of "
                f"{_type_name(own)} {shape}"
            )


def _rows(found: StoredPart, array: StoredArray, tokens: int) -> int:
    """The rows that an array of this part must have."""
    if "max_size" not in found.numbers:
        return tokens - found.numbers.get("start_position", 0)
    window, at = found.numbers["max_size"], found.numbers["_idx"]
    rows = array.shape[_ROWS] if len(array.shape) > _ROWS else 0
    if tokens <= window:
        rows = tokens
    elif not window <= rows <= tokens:
        rows = window
    if not (found.numbers["keep"] <= at <= rows and (tokens >= window or at == tokens)):
        raise Unsupported(f"{found.form}: it goes on at row {at} of {rows}")
    return rows
