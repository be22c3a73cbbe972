"""Attention of query rows over one sequence's cache: keys and values read once per group of heads.

A task is one query row and one key head with the query heads that share it: scores, softmax, and
the values' sum, in the order of positions.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types

from superfluid_adapter_native.kernels import elementwise, rows
from superfluid_adapter_native.kernels.atomics import Inline, cgutils, inline, word
from superfluid_adapter_native.kernels.elementwise import Kernel, number, spans
from superfluid_adapter_native.kernels.features import PLAIN, Features
from superfluid_adapter_native.kernels.rows import moved
from superfluid_adapter_native.kernels.vectors import F8, FLOAT, LANES, Emit, Value


def _softmax() -> Inline:
    """In place over `count` scores: exp(s - max s) / sum, s = scores * scale, capped if cap > 0."""

    def write(builder: Value, *arguments: Value) -> None:
        scores, count, scale, cap = arguments
        e = Emit(builder, PLAIN)
        base, factor, limit = e.pointer(scores), number(e, scale), number(e, cap)
        most = cgutils.alloca_once_value(builder, ir.Constant(F8, [-3.0e38] * LANES))
        sums = cgutils.alloca_once_value(builder, ir.Constant(F8, [0.0] * LANES))
        has_cap = builder.fcmp_ordered(">", e.first(limit), ir.Constant(FLOAT, 0.0))
        _scale(e, base, count, factor)
        with builder.if_then(has_cap):
            for kind, place in spans(e, count):
                at = moved(e, base, place, 1)
                e.store(elementwise.capped(e, e.load(at, 0, kind), limit), at, 0)
        for kind, place in spans(e, count):
            read = e.load(moved(e, base, place, 1), 0, kind)
            wide = e.shuffle(read, [i % kind.count for i in range(LANES)])
            builder.store(e.call("maxnum", F8, wide, builder.load(most)), most)
        top = e.largest(builder.load(most))
        for kind, place in spans(e, count):
            at = moved(e, base, place, 1)
            below = builder.fsub(e.load(at, 0, kind), e.shuffle(top, [0] * kind.count))
            value = e.exp(below)
            e.store(value, at, 0)
            builder.store(builder.fadd(e.padded(value), builder.load(sums)), sums)
        share = builder.fdiv(ir.Constant(FLOAT, 1.0), e.total(builder.load(sums)))
        one = e.scalar(share, 1)
        _scale(e, base, count, one)

    return inline("scores count scale cap", types.void, write)


def _scale(e: Emit, base: Value, count: Value, factor: Value) -> None:
    for kind, place in spans(e, count):
        at = moved(e, base, place, 1)
        wide = e.shuffle(factor, [0] * kind.count)
        e.store(e.b.fmul(e.load(at, 0, kind), wide), at, 0)


def _clear() -> Inline:
    def write(builder: Value, *arguments: Value) -> None:
        out, count = arguments
        e = Emit(builder, PLAIN)
        for kind, place in spans(e, count):
            e.store(e.splat(kind, 0.0), moved(e, e.pointer(out), place, 1), 0)

    return inline("out count", types.void, write)


def attention(name: str, features: Features) -> Kernel:
    dot_one, dot_four = (rows.float_dot(name, tile, features) for tile in (1, rows.TILE))
    add_one, add_four = (rows.add_scaled(name, tile, features) for tile in (1, rows.TILE))
    softmax, clear = _softmax(), _clear()

    def kernel(p: int, task: int, thread: int) -> None:
        q, out, heads, kv_heads = word(p, 0), word(p, 1), word(p, 2), word(p, 3)
        key_size, value_size, start, window = word(p, 4), word(p, 5), word(p, 6), word(p, 7)
        scale, cap = word(p, 8), word(p, 9)
        keys, key_slot, key_head = word(p, 10), word(p, 11), word(p, 12)
        key_scales, value_scales = word(p, 13), word(p, 14)
        values, value_slot, value_head = word(p, 15), word(p, 16), word(p, 17)
        scores = word(p, 18) + thread * word(p, 19)
        row, kv_head = task // kv_heads, task % kv_heads
        group = heads // kv_heads
        last = start + row + 1
        first = max(0, last - window)
        span = 4 * (last - first)
        index = row * heads + kv_head * group
        mine, wide = q + index * key_size * 4, key_size * 4
        for t in range(first, last):
            key = keys + t * key_slot + kv_head * key_head
            at = key_scales + (t * kv_heads + kv_head) * (key_size // 8)
            score = scores + 4 * (t - first)
            h = 0
            while h + 4 <= group:
                dot_four(key, at, key_size, mine + h * wide, wide, score + h * span, span)
                h += 4
            while h < group:
                dot_one(key, at, key_size, mine + h * wide, wide, score + h * span, span)
                h += 1
        for h in range(group):
            softmax(scores + h * span, last - first, scale, cap)
        mine, wide = out + index * value_size * 4, value_size * 4
        clear(mine, group * value_size)
        for t in range(first, last):
            value = values + t * value_slot + kv_head * value_head
            at = value_scales + (t * kv_heads + kv_head) * (value_size // 8)
            score = scores + 4 * (t - first)
            h = 0
            while h + 4 <= group:
                add_four(value, at, value_size, score + h * span, span, mine + h * wide, wide)
                h += 4
            while h < group:
                add_one(value, at, value_size, score + h * span, span, mine + h * wide, wide)
                h += 1

    return kernel
