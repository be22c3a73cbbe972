"""Attention of query rows over one sequence's cache: keys and values read once per group of heads.

A task is one query row and one key head with the query heads that share it. Positions come in tiles
that stay in the first cache while every head meets them; keys and values that are not floats become
floats there. Scores, softmax, and the values' sum, in the order of positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from llvmlite import ir
from numba.core import types

from superfluid_adapter_native.kernels import elementwise, rows
from superfluid_adapter_native.kernels.atomics import Inline, cgutils, inline, word
from superfluid_adapter_native.kernels.elementwise import Kernel, number, spans
from superfluid_adapter_native.kernels.features import PLAIN, Features
from superfluid_adapter_native.kernels.rows import moved
from superfluid_adapter_native.kernels.vectors import F8, FLOAT, I64, LANES, Emit, Value, vector

POSITIONS: Final = 32
"""Of a tile."""
_BLOCK: Final = 32
"""Elements of a head that are in registers at once."""


def _blocks(e: Emit, size: Value, lanes: int) -> Iterator[tuple[Value, Sequence[int], Value]]:
    """Writes loops over `size` floats, in vectors of `lanes` as far as they go, then of eight, then
    one by one: (type, offsets of vectors in bytes, bytes in)."""
    done = ir.Constant(I64, 0)
    for step, width in ((_BLOCK, lanes), (LANES, LANES), (1, 1)):
        count = e.b.udiv(e.b.sub(size, done), ir.Constant(I64, step))
        with cgutils.for_range(e.b, count) as loop:
            index = e.b.add(done, e.b.mul(loop.index, ir.Constant(I64, step)))
            place = e.b.mul(index, ir.Constant(I64, 4))
            yield vector(FLOAT, width), range(0, 4 * step, 4 * width), place
        done = e.b.add(done, e.b.mul(count, ir.Constant(I64, step)))


def _scores(lanes: int) -> Inline:
    """Dot products of one query with `count` keys that lie `slot` bytes apart."""

    def write(builder: Value, *arguments: Value) -> None:
        keys, slot, count, size, query, scores = arguments
        e = Emit(builder, PLAIN)
        fours = builder.lshr(count, ir.Constant(I64, 2))
        with cgutils.for_range(builder, fours) as loop:
            first = builder.mul(loop.index, ir.Constant(I64, 4))
            sums = _dots(e, (keys, slot, size, query), first, 4, lanes)
            e.store(_four_totals(e, sums), moved(e, e.pointer(scores), first, 4), 0)
        done = builder.mul(fours, ir.Constant(I64, 4))
        with cgutils.for_range(builder, builder.sub(count, done)) as loop:
            first = builder.add(done, loop.index)
            (sum_,) = _dots(e, (keys, slot, size, query), first, 1, lanes)
            e.store(e.total(sum_), moved(e, e.pointer(scores), first, 4), 0)

    return inline("keys slot count size query scores", types.void, write)


def _dots(e: Emit, arguments: Sequence[Value], first: Value, count: int, lanes: int) -> list[Value]:
    """The products of `count` keys from the first on, still in `lanes` lanes each."""
    keys, slot, size, query = arguments
    zeros = ir.Constant(vector(FLOAT, lanes), [0.0] * lanes)
    cells = [cgutils.alloca_once(e.b, zeros.type) for _ in range(count)]
    places = [e.b.add(first, ir.Constant(I64, i)) for i in range(count)]
    each = [e.pointer(e.b.add(keys, e.b.mul(slot, place))) for place in places]
    for cell in cells:
        e.b.store(zeros, cell)
    for kind, offsets, place in _blocks(e, size, lanes):
        for offset in offsets:
            mine = e.load(moved(e, e.pointer(query), place, 1), offset, kind)
            for key, cell in zip(each, cells, strict=True):
                theirs = e.load(moved(e, key, place, 1), offset, kind)
                wide = e.padded(theirs, lanes), e.padded(mine, lanes)
                e.b.store(e.fma(wide[0], wide[1], e.b.load(cell)), cell)
    return [e.b.load(cell) for cell in cells]


def _four_totals(e: Emit, sums: Sequence[Value]) -> Value:
    """The total of each of four vectors, added in the order of `Emit.total`."""
    while sums[0].type.count > LANES:
        sums = [_halves_added(e, each) for each in sums]
    low, high = ((sums[i], sums[i + 1]) for i in (0, 2))
    pairs = [
        e.b.fadd(e.shuffle(a, [0, 1, 2, 3, 8, 9, 10, 11], b), e.shuffle(a, _HIGH_FOURS, b))
        for a, b in (low, high)
    ]
    a, b = pairs
    twos = e.b.fadd(
        e.shuffle(a, [0, 1, 8, 9, 4, 5, 12, 13], b), e.shuffle(a, [2, 3, 10, 11, 6, 7, 14, 15], b)
    )
    # Lanes are the first, third, second and fourth vector's, two each.
    return e.b.fadd(e.shuffle(twos, [0, 4, 2, 6]), e.shuffle(twos, [1, 5, 3, 7]))


_HIGH_FOURS: Final = (4, 5, 6, 7, 12, 13, 14, 15)


def _halves_added(e: Emit, a: Value) -> Value:
    half = int(a.type.count) // 2
    return e.b.fadd(e.shuffle(a, range(half)), e.shuffle(a, range(half, 2 * half)))


def _mixed(lanes: int, heads: int) -> Inline:
    """Adds `count` values, times their scores, to the rows of `heads` heads."""

    def write(builder: Value, *arguments: Value) -> None:
        values, slot, count, size, scores, span, out, stride = arguments
        e = Emit(builder, PLAIN)
        strides = [ir.Constant(I64, h) for h in range(heads)]
        shares = [e.pointer(builder.add(scores, builder.mul(span, h))) for h in strides]
        targets = [e.pointer(builder.add(out, builder.mul(stride, h))) for h in strides]
        for kind, offsets, place in _blocks(e, size, lanes):
            cells = [[cgutils.alloca_once(builder, kind) for _ in offsets] for _ in targets]
            for target, mine in zip(targets, cells, strict=True):
                for offset, cell in zip(offsets, mine, strict=True):
                    builder.store(e.load(moved(e, target, place, 1), offset, kind), cell)
            with cgutils.for_range(builder, count) as loop:
                value = e.pointer(builder.add(values, builder.mul(slot, loop.index)))
                read = [e.load(moved(e, value, place, 1), offset, kind) for offset in offsets]
                for share, mine in zip(shares, cells, strict=True):
                    factor = e.scalar(e.load(moved(e, share, loop.index, 4), 0, FLOAT), kind.count)
                    for part, cell in zip(read, mine, strict=True):
                        builder.store(e.fma(part, factor, builder.load(cell)), cell)
            for target, mine in zip(targets, cells, strict=True):
                for offset, cell in zip(offsets, mine, strict=True):
                    e.store(builder.load(cell), moved(e, target, place, 1), offset)

    return inline("values slot count size scores span out stride", types.void, write)


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
    lanes = features.lanes
    dots, decode = _scores(lanes), rows.decode(name, features)
    mix_one, mix_two, mix_four = (_mixed(lanes, heads) for heads in (1, 2, 4))
    softmax, clear = _softmax(), _clear()
    converts = name != "F32"

    def kernel(p: int, task: int, thread: int) -> None:
        q, out, heads, kv_heads = word(p, 0), word(p, 1), word(p, 2), word(p, 3)
        key_size, value_size, start, window = word(p, 4), word(p, 5), word(p, 6), word(p, 7)
        scale, cap = word(p, 8), word(p, 9)
        keys, key_slot, key_head = word(p, 10), word(p, 11), word(p, 12)
        key_scales, value_scales = word(p, 13), word(p, 14)
        values, value_slot, value_head = word(p, 15), word(p, 16), word(p, 17)
        tile = word(p, 18) + thread * word(p, 19)
        scores = tile + word(p, 20)
        row, kv_head = task // kv_heads, task % kv_heads
        group = heads // kv_heads
        last = start + row + 1
        first = max(0, last - window)
        span = 4 * (last - first)
        index = row * heads + kv_head * group
        mine, wide = q + index * key_size * 4, key_size * 4
        for t in range(first, last, POSITIONS):
            count = min(POSITIONS, last - t)
            score = scores + 4 * (t - first)
            at, slot = keys + t * key_slot + kv_head * key_head, key_slot
            if converts:
                for i in range(count):
                    steps = key_scales + ((t + i) * kv_heads + kv_head) * (key_size // 8)
                    decode(at + i * key_slot, steps, key_size, tile + i * wide)
                at, slot = tile, wide
            for h in range(group):
                dots(at, slot, count, key_size, mine + h * wide, score + h * span)
        for h in range(group):
            softmax(scores + h * span, last - first, scale, cap)
        mine, wide = out + index * value_size * 4, value_size * 4
        clear(mine, group * value_size)
        for t in range(first, last, POSITIONS):
            count = min(POSITIONS, last - t)
            score = scores + 4 * (t - first)
            at, slot = values + t * value_slot + kv_head * value_head, value_slot
            if converts:
                for i in range(count):
                    steps = value_scales + ((t + i) * kv_heads + kv_head) * (value_size // 8)
                    decode(at + i * value_slot, steps, value_size, tile + i * wide)
                at, slot = tile, wide
            h = 0
            while h + 4 <= group:
                mix_four(at, slot, count, value_size, score + h * span, span, mine + h * wide, wide)
                h += 4
            while h + 2 <= group:
                mix_two(at, slot, count, value_size, score + h * span, span, mine + h * wide, wide)
                h += 2
            while h < group:
                mix_one(at, slot, count, value_size, score + h * span, span, mine + h * wide, wide)
                h += 1

    return kernel
