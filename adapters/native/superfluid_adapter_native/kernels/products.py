"""Kernels over weights: products with rows of x, rows read out, rows of x quantised.

Each `make` returns a function for `Driver.kernel`; the comment beside its words is the order of the
parameters that `engine` passes.
"""

from __future__ import annotations

from collections.abc import Callable

from superfluid_adapter_native.kernels import rows
from superfluid_adapter_native.kernels.atomics import word
from superfluid_adapter_native.kernels.features import Features

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
    one, row = (rows.float_dot(name, 1, tile, features) for tile in (1, rows.TILE))
    column, square = (rows.float_dot(name, rows.HEIGHT, tile, features) for tile in (1, rows.TILE))

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
        t = 0
        while t < n:
            here, there = x + t * x_stride, out + t * stride
            r = first
            if t + 4 <= n:
                while r + 4 <= last:
                    at = w + r * row_bytes
                    square(at, row_bytes, columns, here, x_stride, there + 4 * r, stride)
                    r += 4
                while r < last:
                    at = w + r * row_bytes
                    row(at, row_bytes, columns, here, x_stride, there + 4 * r, stride)
                    r += 1
                t += 4
            else:
                while r + 4 <= last:
                    at = w + r * row_bytes
                    column(at, row_bytes, columns, here, x_stride, there + 4 * r, stride)
                    r += 4
                while r < last:
                    at = w + r * row_bytes
                    one(at, row_bytes, columns, here, x_stride, there + 4 * r, stride)
                    r += 1
                t += 1

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
