"""Products with big matrices as a CPU computes them fastest: by its cores at once, along rows.

There MLX computes an operation on the thread of its stream, and on no other. So a matrix is cut by
its rows into as many shares as there are threads, each of which has a stream. And the BLAS that MLX
brings multiplies by a single precision matrix that lies row by row about twice as fast as by a
transposed one, so a share of those is laid out as it is multiplied by. Both are the same sums in
the same order. A GPU needs none of this.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from superfluid_adapter_mlx.caches import Array
from superfluid_adapter_mlx.engine import mx

_nn: Final[Any] = importlib.import_module("mlx.nn")
_Product = Callable[[Array], Array]
_Span = tuple[Any, slice]
_LEAST_BYTES: Final = 1 << 17
"""Of a share: what takes less time than handing it to another thread is not cut."""

_BLOCK: Final = 64
"""Rows that are laid out at once: the cache holds them."""


class _SharedLinear(_nn.Linear):  # type: ignore[misc]  # mlx has no types
    def __call__(self, x: Array) -> Array:
        return self.product(x)


class _SharedQuantizedLinear(_nn.QuantizedLinear):  # type: ignore[misc]  # mlx has no types
    def __call__(self, x: Array) -> Array:
        return self.product(x)


class _LaidOut:
    """A module whose weights are `shares`, each of shape (columns, rows of the span)."""

    shares: Sequence[Array]

    @property
    def weight(self) -> Array:
        """What the module had; put together again, for a model that looks."""
        return mx.concatenate([share.T for share in self.shares])


class _LaidOutLinear(_LaidOut, _SharedLinear):
    pass


class _LaidOutEmbedding(_LaidOut, _nn.Embedding):  # type: ignore[misc]  # mlx has no types
    def __call__(self, x: Array) -> Array:
        first, *others = self.shares
        found, start = first.T[mx.minimum(x, first.shape[1] - 1)], first.shape[1]
        for share in others:
            rows = share.T[mx.clip(x - start, 0, share.shape[1] - 1)]
            found = mx.where((x >= start)[..., None], rows, found)
            start += share.shape[1]
        return found

    def as_linear(self, x: Array) -> Array:
        return self.product(x)


_LINEAR: Final = {
    _nn.Linear: _SharedLinear,
    _nn.QuantizedLinear: _SharedQuantizedLinear,
}
_LAID_OUT: Final = {_nn.Linear: _LaidOutLinear, _nn.Embedding: _LaidOutEmbedding}
_EMBEDDINGS: Final = (_nn.Embedding, _nn.QuantizedEmbedding)


def share_out(module: Any, threads: int) -> None:
    """Let `threads` threads compute the module's big products, from now on and on this thread's
    behalf only. Weights that are laid out anew are read here, the biggest first, while there is
    most room for two of them; the rest stay as they are."""
    if mx.default_device() != mx.Device(mx.cpu):
        return
    streams = [mx.default_stream(mx.cpu), *(mx.new_stream(mx.cpu) for _ in range(1, threads))]
    linear = [it for it in module.modules() if type(it) in _LINEAR]
    # A module may be in several places.
    parts = {id(it): it for it in (*linear, *_outputs(module))}.values()
    for part in sorted(parts, key=lambda it: it.weight.nbytes, reverse=True):
        if part.weight.nbytes >= _LEAST_BYTES * threads:
            _share(part, list(_spans(part.weight.shape[0], streams)))


def _outputs(module: Any) -> list[Any]:
    """The embeddings that a pass multiplies by too."""
    found: list[Any] = []
    every = [it for it in module.modules() if type(it) in _EMBEDDINGS]
    for part in every:
        part.as_linear = _noting(part, found)
    # Nothing of it is computed.
    module(mx.array([[0]]))
    for part in every:
        part.__dict__.pop("as_linear", None)
    return found


def _noting(part: Any, found: list[Any]) -> _Product:
    def as_linear(x: Array) -> Array:
        if not any(part is it for it in found):
            found.append(part)
        return type(part).as_linear(part, x)

    return as_linear


def _share(part: Any, spans: Sequence[_Span]) -> None:
    kind = type(part)
    if kind in _LAID_OUT and part.weight.dtype == mx.float32:
        _lay_out(part, spans)
        part.__class__ = _LAID_OUT[kind]
    elif len(spans) > 1:
        product = _quantized(part, spans) if "scales" in part else _plain(part, spans)
        if kind in _LINEAR:
            part.product = product
            part.__class__ = _LINEAR[kind]
        else:
            part.as_linear = product


def _spans(rows: int, streams: Sequence[Any]) -> Iterator[_Span]:
    count = len(streams)
    for place, stream in enumerate(streams):
        yield stream, slice(rows * place // count, rows * (place + 1) // count)


def _lay_out(part: Any, spans: Sequence[_Span]) -> None:
    """Replace the part's weight by its shares."""
    mx.eval(part.weight)
    held = np.array(part.weight, copy=False)
    part.shares = [_turned(held[span]) for _, span in spans]
    part.product = _products(
        [(stream, share) for (stream, _), share in zip(spans, part.shares, strict=True)],
        spans,
        part.get("bias"),
    )
    del held
    part.pop("weight")


def _turned(rows: Any) -> Array:
    """The transposed matrix, row by row. MLX takes ten times as long, cell by cell."""
    made = mx.zeros(rows.shape[::-1])
    mx.eval(made)
    into = np.array(made, copy=False)
    for start in range(0, len(rows), _BLOCK):
        into[:, start : start + _BLOCK] = rows[start : start + _BLOCK].T
    return made


def _plain(part: Any, spans: Sequence[_Span]) -> _Product:
    mx.eval(part.weight)
    shares = [(stream, part.weight[span].T) for stream, span in spans]
    mx.eval([share for _, share in shares])
    return _products(shares, spans, part.get("bias"))


def _products(
    shares: Sequence[tuple[Any, Array]], spans: Sequence[_Span], bias: Array | None
) -> _Product:
    biases = [None if bias is None else bias[span] for _, span in spans]
    mx.eval([it for it in biases if it is not None])

    def product(x: Array) -> Array:
        parts = [
            mx.matmul(x, weight, stream=stream)
            if bias is None
            else mx.addmm(bias, x, weight, stream=stream)
            for (stream, weight), bias in zip(shares, biases, strict=True)
        ]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    return product


def _quantized(part: Any, spans: Sequence[_Span]) -> _Product:
    mx.eval(part.parameters())
    biases, bias = part.get("biases"), part.get("bias")
    shares = [
        (stream, part.weight[span], part.scales[span], None if biases is None else biases[span])
        for stream, span in spans
    ]
    mx.eval([share[1:] for share in shares])
    how = {"group_size": part.group_size, "bits": part.bits, "mode": part.mode, "transpose": True}

    def product(x: Array) -> Array:
        parts = [
            mx.quantized_matmul(x, weight, scales, biases, stream=stream, **how)
            for stream, weight, scales, biases in shares
        ]
        whole = mx.concatenate(parts, axis=-1)
        return whole if bias is None else whole + bias

    return product
