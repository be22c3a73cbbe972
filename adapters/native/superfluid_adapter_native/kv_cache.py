"""Keys and values of one sequence, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from superfluid_compat.errors import Capacity, OutOfBoundary

Array: TypeAlias = NDArray[Any]
Parts: TypeAlias = tuple[Array, ...]
"""Values as stored: data (rows, kv_heads, head_dim) and for q8_0 the scales (…, head_dim / 32)."""

KVType: TypeAlias = Literal["f32", "f16", "q8_0"]

_FIRST_ROWS: Final = 64
BLOCK: Final = 32
"""Elements that share a scale in q8_0."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps for a token: `kv_heads` keys and values."""

    kv_heads: int
    head_dim: int

    def row_bytes(self, kind: KVType) -> int:
        """Bytes of one token's keys and values."""
        return sum(part.nbytes for part in _allocate(1, self, kind)) * 2


class KVCache:
    """One growing pair of buffers per layer, of shape (capacity, kv_heads, head_dim).

    The buffers are F32, or what `kind` says (q8_0: int8 and beside it an F32 scale per 32);
    `stack` is F32 always, and for F32 a view of the live region without a copy. Buffers double on
    overflow up to `limit` rows, so appending costs constant time on average. Positions are
    absolute: a cache is kept across steps.
    """

    def __init__(
        self,
        layers: tuple[LayerShape, ...],
        *,
        capacity: int = _FIRST_ROWS,
        limit: int | None = None,
        kind: KVType = "f32",
    ) -> None:
        if capacity < 1 or (limit is not None and limit < 1):
            raise OutOfBoundary(f"a KV cache of {capacity} rows was asked for, wanted at least 1")
        self.layers = layers
        self.kind: KVType = kind
        self.limit = limit
        self._first = capacity if limit is None else min(capacity, limit)
        self._rows = [0] * len(layers)
        self._buffers = [self._fresh(shape) for shape in layers]

    def _fresh(self, shape: LayerShape) -> tuple[Parts, Parts]:
        return _allocate(0, shape, self.kind), _allocate(0, shape, self.kind)

    def length(self, layer: int) -> int:
        """Rows that `layer` holds."""
        return self._rows[layer]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, used or not."""
        return sum(part.nbytes for part in self._parts())

    @property
    def capacity(self) -> int:
        """Rows for which memory is held, in the layer that has most."""
        return max(len(keys[0]) for keys, _ in self._buffers)

    def capacity_for(self, rows: int, *, fresh: bool = False) -> int:
        """The capacity that holding `rows` takes, here or in a cache that is `fresh`."""
        capacity = 0 if fresh else self.capacity
        return capacity if rows <= capacity else self._grown(capacity, rows)

    def reserve(self, rows: int) -> None:
        """Make room for `rows` tokens in every layer. Raises `Capacity`; nothing is lost then."""
        for layer in range(len(self.layers)):
            self._grow(layer, rows)

    def append(self, layer: int, keys: Array, values: Array) -> None:
        """Add tokens' keys and values, of shape (rows, kv_heads, head_dim), or (kv_heads,
        head_dim) for one. Raises `Capacity` past the limit or where memory ends."""
        shape = self.layers[layer]
        at = self._rows[layer]
        end = at + keys.size // (shape.kv_heads * shape.head_dim)
        self._grow(layer, end)
        for buffer, rows in zip(self._buffers[layer], (keys, values), strict=True):
            _store(_span(buffer, at, end), rows.reshape(end - at, shape.kv_heads, shape.head_dim))
        self._rows[layer] = end

    def stack(self, layer: int) -> tuple[Array, Array]:
        """The live keys and values, of shape (length, kv_heads, head_dim), F32."""
        keys, values = self.raw(layer)
        return _read(keys), _read(values)

    def raw(self, layer: int) -> tuple[Parts, Parts]:
        """Views of the live keys and values as stored."""
        keys, values = self._buffers[layer]
        rows = self._rows[layer]
        return _span(keys, 0, rows), _span(values, 0, rows)

    def _parts(self) -> Iterator[Array]:
        return (part for pair in self._buffers for buffer in pair for part in buffer)

    def truncate(self, rows: int) -> None:
        """Keep the first `rows` tokens of every layer that has more."""
        self._rows = [min(kept, rows) for kept in self._rows]

    def reset(self, layer: int | None = None) -> None:
        """Forget one layer's tokens, or all; their memory goes back."""
        for index in range(len(self.layers)) if layer is None else (layer,):
            self._rows[index] = 0
            self._buffers[index] = self._fresh(self.layers[index])

    def copy(self, rows: int) -> KVCache:
        """A cache of its own that holds the first `rows` tokens. Raises `Capacity`."""
        other = KVCache(self.layers, capacity=self._first, limit=self.limit, kind=self.kind)
        other.reserve(rows)
        for mine, theirs in zip(self._parts(), other._parts(), strict=True):
            theirs[:rows] = mine[:rows]
        other._rows = [rows] * len(self.layers)
        return other

    def dump(self, rows: int) -> list[bytes]:
        """The first `rows` tokens as bytes: each layer's keys, then its values."""
        return [part[:rows].tobytes() for part in self._parts()]

    def load(self, rows: int, payload: memoryview) -> None:
        """Fill an empty cache from what `dump` gave, joined. Raises `Capacity`, and
        `OutOfBoundary` when the payload's length is not what `rows` tokens take."""
        wanted = rows * sum(shape.row_bytes(self.kind) for shape in self.layers)
        if len(payload) != wanted:
            raise OutOfBoundary(f"{len(payload)} bytes of state, wanted {wanted}")
        self.reserve(rows)
        at = 0
        for part in self._parts():
            live = part[:rows]
            taken = payload[at : at + live.nbytes]
            live[...] = np.frombuffer(taken, live.dtype).reshape(live.shape)
            at += live.nbytes
        self._rows = [rows] * len(self.layers)

    def _grown(self, capacity: int, rows: int) -> int:
        capacity = max(self._first, capacity)
        while capacity < rows:
            capacity *= 2
        return capacity if self.limit is None else min(capacity, self.limit)

    def _grow(self, layer: int, rows: int) -> None:
        keys, values = self._buffers[layer]
        if rows <= len(keys[0]):
            return
        if self.limit is not None and rows > self.limit:
            raise Capacity(f"the KV cache holds {self.limit} tokens, {rows} were wanted")
        capacity, shape = self._grown(len(keys[0]), rows), self.layers[layer]
        live = self._rows[layer]
        try:
            larger = _allocate(capacity, shape, self.kind), _allocate(capacity, shape, self.kind)
        except MemoryError:
            raise Capacity(f"no memory for a KV cache of {capacity} tokens") from None
        for old, new in zip(keys + values, larger[0] + larger[1], strict=True):
            new[:live] = old[:live]
        self._buffers[layer] = larger


def _allocate(capacity: int, shape: LayerShape, kind: KVType) -> Parts:
    size = (capacity, shape.kv_heads, shape.head_dim)
    match kind:
        case "f32":
            return (np.empty(size, np.float32),)
        case "f16":
            return (np.empty(size, np.float16),)
        case "q8_0":
            return np.empty(size, np.int8), np.empty((*size[:2], size[2] // BLOCK), np.float32)


def _span(parts: Parts, first: int, end: int) -> Parts:
    return tuple(part[first:end] for part in parts)


def _store(target: Parts, rows: Array) -> None:
    """Write F32 `rows` into `target`, which has what `_allocate` made."""
    if len(target) == 1:
        with np.errstate(over="ignore"):
            target[0][...] = rows
        return
    data, scales = target
    blocks = rows.reshape(*rows.shape[:2], -1, BLOCK)
    scales[...] = np.abs(blocks).max(axis=-1) / np.float32(127)
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    with np.errstate(invalid="ignore"):
        codes = np.rint(blocks * inverse[..., None]).astype(np.int8)
    data[...] = codes.reshape(rows.shape)


def _read(stored: Parts) -> Array:
    data = stored[0]
    if len(stored) == 1:
        return data if data.dtype == np.float32 else data.astype(np.float32)
    blocks = data.reshape(*data.shape[:2], -1, BLOCK) * stored[1][..., None]
    return blocks.reshape(data.shape)
