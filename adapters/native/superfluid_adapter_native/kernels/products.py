"""Kernels over weights: products with rows of x, rows read out, rows of x quantised.

Each `make` returns a function for `Driver.kernel`; the comment beside its words is the order of the
parameters that `engine` passes.
"""

from __future__ import annotations

from collections.abc import Callable

from superfluid_adapter_native.kernels import layouts, rows
from superfluid_adapter_native.kernels.atomics import word
from superfluid_adapter_native.kernels.features import Features
from superfluid_adapter_native.quants.types import BY_NAME

Kernel = Callable[[int, int, int], None]


def int8_product(name: str, features: Features) -> Kernel:
    one = rows.int8_dot(name, 1, features)
    four = rows.int8_dot(name, rows.TILE, features)

    def kernel(p: int, task: int, thread: int) -> None:
        w, row_bytes, count, per_task, blocks = (
            word(p, 0),
            word(p, 1),
            word(p, 2),
            word(p, 3),
            word(p, 4),
        )
        n, out, out_stride = word(p, 5), word(p, 6), word(p, 7)
        x, scales, fours, shares = word(p, 8), word(p, 9), word(p, 10), word(p, 11)
        x_stride = word(p, 12)
        first = task * per_task
        last = min(first + per_task, count)
        t = 0
        while t + 4 <= n:
            for r in range(first, last):
                four(
                    w + r * row_bytes,
                    blocks,
                    x + t * x_stride,
                    scales + t * (x_stride >> 3),
                    fours + t * x_stride,
                    shares + t * (x_stride >> 2),
                    x_stride,
                    out + t * out_stride + 4 * r,
                    out_stride,
                )
            t += 4
        while t < n:
            for r in range(first, last):
                one(
                    w + r * row_bytes,
                    blocks,
                    x + t * x_stride,
                    scales + t * (x_stride >> 3),
                    fours + t * x_stride,
                    shares + t * (x_stride >> 2),
                    x_stride,
                    out + t * out_stride + 4 * r,
                    out_stride,
                )
            t += 1

    return kernel


def float_product(name: str, features: Features) -> Kernel:
    one, column = (rows.float_dot(name, height, features) for height in (1, rows.HEIGHT))

    def kernel(p: int, task: int, thread: int) -> None:
        w, row_bytes, count, per_task, columns = (
            word(p, 0),
            word(p, 1),
            word(p, 2),
            word(p, 3),
            word(p, 4),
        )
        n, out, stride = word(p, 5), word(p, 6), word(p, 7)
        x, x_stride = word(p, 8), word(p, 9)
        first = task * per_task
        last = min(first + per_task, count)
        for t in range(n):
            here, there = x + t * x_stride, out + t * stride
            r = first
            while r + 4 <= last:
                column(w + r * row_bytes, row_bytes, columns, here, there + 4 * r)
                r += 4
            while r < last:
                one(w + r * row_bytes, row_bytes, columns, here, there + 4 * r)
                r += 1

    return kernel


def tiled_product(name: str, features: Features) -> Kernel:
    """Many rows of x: weights that are no floats become such a tile at a time, in the second cache;
    parts of their rows meet parts of x in the first one. Sums are those of `float_product`."""
    floats = name in layouts.FLOATS
    decode, met = rows.decode(name, features), name if floats else "F32"
    height, tile = rows.SQUARE
    square, row = (rows.square_dot(met, height, width, features) for width in (tile, 1))
    column, one = (rows.square_dot(met, 1, width, features) for width in (tile, 1))
    size = BY_NAME[met].bytes
    vectors = 4 * features.lanes * height * tile

    def kernel(p: int, task: int, thread: int) -> None:
        w, row_bytes, count, per_task, columns = (
            word(p, 0),
            word(p, 1),
            word(p, 2),
            word(p, 3),
            word(p, 4),
        )
        n, out, stride = word(p, 5), word(p, 6), word(p, 7)
        x, x_stride = word(p, 8), word(p, 9)
        per_tile, part = word(p, 10), word(p, 11)
        sums = word(p, 12) + thread * word(p, 13)
        decoded = sums + (per_tile // height + height) * vectors
        end = min((task + 1) * per_task, count)
        for first in range(task * per_task, end, per_tile):
            last = min(first + per_tile, end)
            at, w_stride = w + first * row_bytes, row_bytes
            if not floats:
                for r in range(last - first):
                    decode(at + r * row_bytes, 0, columns, decoded + r * 4 * columns)
                at, w_stride = decoded, 4 * columns
            t = 0
            while t < n:
                width = tile if t + tile <= n else 1
                for k in range(0, columns, part):
                    length = min(part, columns - k)
                    here = x + t * x_stride + 4 * k
                    cell, r = sums, first
                    while r < last:
                        high = height if r + height <= last else 1
                        begun = cell if k else 0
                        left = cell if k + length < columns else 0
                        there = out + t * stride + 4 * r
                        a = at + (r - first) * w_stride + size * k
                        if high == height and width == tile:
                            square(a, w_stride, length, here, x_stride, begun, left, there, stride)
                        elif high == height:
                            row(a, w_stride, length, here, x_stride, begun, left, there, stride)
                        elif width == tile:
                            column(a, w_stride, length, here, x_stride, begun, left, there, stride)
                        else:
                            one(a, w_stride, length, here, x_stride, begun, left, there, stride)
                        cell += vectors
                        r += high
                t += width

    return kernel


def reader(name: str, features: Features) -> Kernel:
    read = rows.decode(name, features)
    index = word

    def kernel(p: int, task: int, thread: int) -> None:
        w, row_bytes, columns, ids, out, out_stride = (
            word(p, 0),
            word(p, 1),
            word(p, 2),
            word(p, 3),
            word(p, 4),
            word(p, 5),
        )
        read(w + index(ids, task) * row_bytes, 0, columns, out + task * out_stride)

    return kernel


def quantiser() -> Kernel:
    quantise = rows.quantise()

    def kernel(p: int, task: int, thread: int) -> None:
        x, x_stride, groups = word(p, 0), word(p, 1), word(p, 2)
        codes, scales, fours, shares = word(p, 3), word(p, 4), word(p, 5), word(p, 6)
        quantise(
            x + task * x_stride,
            groups,
            codes + task * groups * 32,
            scales + task * groups * 4,
            fours + task * groups * 32,
            shares + task * groups * 8,
        )

    return kernel
