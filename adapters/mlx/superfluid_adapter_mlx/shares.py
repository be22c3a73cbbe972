"""Products with big matrices on all of a CPU's cores.

There MLX computes an operation on the thread of its stream, and on no other. So a matrix is cut by
its rows into as many shares as there are threads, each of which has a stream: the same sums, at
once. A GPU needs none of this.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, Final

from superfluid_adapter_mlx.caches import Array
from superfluid_adapter_mlx.engine import mx

_nn: Final[Any] = importlib.import_module("mlx.nn")
_Product = Callable[[Array], Array]
_LEAST_BYTES: Final = 1 << 17
"""Of a share: what takes less time than handing it to another thread is not cut."""


class _SharedLinear(_nn.Linear):  # type: ignore[misc]  # mlx has no types
    def __call__(self, x: Array) -> Array:
        return self.product(x)


class _SharedQuantizedLinear(_nn.QuantizedLinear):  # type: ignore[misc]  # mlx has no types
    def __call__(self, x: Array) -> Array:
        return self.product(x)


_LINEAR: Final = {
    _nn.Linear: _SharedLinear,
    _nn.QuantizedLinear: _SharedQuantizedLinear,
}
_EMBEDDINGS: Final = (_nn.Embedding, _nn.QuantizedEmbedding)


def share_out(module: Any, threads: int) -> None:
    """Let `threads` threads compute the module's big products, from now on and on this thread's
    behalf only. Its weights must be computed; they are shared, not copied."""
    if threads < 2 or mx.default_device() != mx.Device(mx.cpu):
        return
    streams = [mx.default_stream(mx.cpu), *(mx.new_stream(mx.cpu) for _ in range(1, threads))]
    for part in module.modules():
        kind = type(part)
        if kind not in _LINEAR and kind not in _EMBEDDINGS:
            continue
        if part.weight.nbytes < _LEAST_BYTES * threads:
            continue
        product = _quantized(part, streams) if "scales" in part else _plain(part, streams)
        if kind in _LINEAR:
            part.product = product
            part.__class__ = _LINEAR[kind]
        else:
            part.as_linear = product


def _spans(rows: int, streams: list[Any]) -> Iterator[tuple[Any, slice]]:
    count = len(streams)
    for place, stream in enumerate(streams):
        yield stream, slice(rows * place // count, rows * (place + 1) // count)


def _plain(part: Any, streams: list[Any]) -> _Product:
    weight, bias = part.weight, part.get("bias")
    shares = [
        (stream, weight[span].T, None if bias is None else bias[span])
        for stream, span in _spans(weight.shape[0], streams)
    ]
    mx.eval([share[1:] for share in shares])

    def product(x: Array) -> Array:
        parts = [
            mx.matmul(x, weight, stream=stream)
            if bias is None
            else mx.addmm(bias, x, weight, stream=stream)
            for stream, weight, bias in shares
        ]
        return mx.concatenate(parts, axis=-1)

    return product


def _quantized(part: Any, streams: list[Any]) -> _Product:
    biases, bias = part.get("biases"), part.get("bias")
    shares = [
        (stream, part.weight[span], part.scales[span], None if biases is None else biases[span])
        for stream, span in _spans(part.weight.shape[0], streams)
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
