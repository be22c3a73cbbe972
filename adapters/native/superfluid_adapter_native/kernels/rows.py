"""The inner loops, one matrix row at a time, as functions that compiled code can call.

Rows, one or four, meet a *tile* of one or four rows of x. However wide the tile, an element of the
result is summed in the same order, so it has the same bits whatever else is computed beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from llvmlite import ir
from numba.core import types

from superfluid_adapter_native.kernels import layouts
from superfluid_adapter_native.kernels.atomics import Inline, cgutils, inline
from superfluid_adapter_native.kernels.features import Features
from superfluid_adapter_native.kernels.vectors import (
    FLOAT,
    I8,
    I32,
    I64,
    LANES,
    Emit,
    Value,
    vector,
)
from superfluid_adapter_native.quants.types import BY_NAME

TILE: Final = 4
HEIGHT: Final = 4
"""Rows of weights that meet one row of x together on the float route."""
SQUARE: Final = (4, 4)
"""Rows of weights, and of x, that meet in registers where both are many."""


def moved(e: Emit, pointer: Value, index: Value, size: int) -> Value:
    """The byte pointer `index` times `size` bytes further on."""
    offset = e.b.mul(index, ir.Constant(I64, size))
    return e.b.gep(pointer, [offset], source_etype=I8)


def _tile(e: Emit, base: Value, stride: Value, count: int) -> list[Value]:
    """Byte pointers to `count` rows that lie `stride` bytes apart."""
    return [e.pointer(e.b.add(base, e.b.mul(stride, ir.Constant(I64, t)))) for t in range(count)]


def _sums(builder: Value, count: int, lanes: int = LANES) -> list[Value]:
    zeros = ir.Constant(vector(FLOAT, lanes), [0.0] * lanes)
    return [cgutils.alloca_once_value(builder, zeros) for _ in range(count)]


def _finish(e: Emit, sums: Sequence[Value], targets: Sequence[Value]) -> None:
    for cell, target in zip(sums, targets, strict=True):
        e.store(e.total(e.b.load(cell)), target, 0)


def float_dot(name: str, height: int, features: Features) -> Inline:
    """Dot products of `height` rows of `columns` weights with one row of floats."""
    lanes = features.lanes

    def write(builder: Value, *arguments: Value) -> None:
        w, row_bytes, columns, x, out = arguments
        e = Emit(builder, features)
        source, sums = e.pointer(x), _sums(builder, height, lanes)
        nowhere = ir.Constant(I64, 0)
        for each, offset in _weights(e, name, _tile(e, w, row_bytes, height), nowhere, columns):
            _add_products(e, each, [moved(e, source, offset, 1)], [[cell] for cell in sums])
        _finish(e, sums, _tile(e, out, ir.Constant(I64, 4), height))

    return inline("w row_bytes columns x out", types.void, write)


def square_dot(name: str, height: int, tile: int, features: Features) -> Inline:
    """A part, `columns` long, of the dot products of `height` rows of floats of type `name` with
    `tile` rows.

    Sums begin at `begun` where that is no null, and end in `left` (both height * tile vectors of
    `lanes` floats) or, where that is null, in `out`. So are many parts summed as one."""
    lanes = features.lanes
    kind = vector(FLOAT, lanes)

    def write(builder: Value, *arguments: Value) -> None:
        w, w_stride, columns, x, x_stride, begun, left, out, out_stride = arguments
        e = Emit(builder, features)
        cells = [_sums(builder, tile, lanes) for _ in range(height)]
        flat = [cell for sums in cells for cell in sums]
        null = ir.Constant(I64, 0)
        with builder.if_then(builder.icmp_unsigned("!=", begun, null)):
            for i, cell in enumerate(flat):
                builder.store(e.load(e.pointer(begun), 4 * lanes * i, kind), cell)
        xs = _tile(e, x, x_stride, tile)
        for each, offset in _weights(e, name, _tile(e, w, w_stride, height), null, columns):
            _add_products(e, each, [moved(e, pointer, offset, 1) for pointer in xs], cells)
        with builder.if_else(builder.icmp_unsigned("!=", left, null)) as (goes_on, ends):
            with goes_on:
                for i, cell in enumerate(flat):
                    e.store(builder.load(cell), e.pointer(left), 4 * lanes * i)
            with ends:
                targets = _tile(e, out, out_stride, tile)
                for r, sums in enumerate(cells):
                    _finish(e, sums, [e.past(target, 4 * r) for target in targets])

    return inline("w w_stride columns x x_stride begun left out out_stride", types.void, write)


def _add_products(
    e: Emit, weights: Sequence[Sequence[Value]], xs: Sequence[Value], cells: Sequence[Sequence[Any]]
) -> None:
    """Adds the products of each row's next weights with those floats of each of `xs` to a cell."""
    lanes = e.features.lanes
    wide = [_joined(e, values, lanes) for values in weights]
    width = int(weights[0][0].type.count) if len(weights[0]) == 1 else lanes
    for t, here in enumerate(xs):
        for i in range(len(wide[0])):
            read = e.padded(e.load(here, 4 * lanes * i, vector(FLOAT, width)), lanes)
            for values, sums in zip(wide, cells, strict=True):
                e.b.store(e.fma(values[i], read, e.b.load(sums[t])), sums[t])


def _joined(e: Emit, values: Sequence[Value], lanes: int) -> Sequence[Value]:
    """Vectors of `lanes` floats, of vectors of eight or of a single float."""
    if len(values) == 1:
        return [e.padded(values[0], lanes)]
    step = lanes // LANES
    if step == 1:
        return values
    return [e.join(*values[i : i + step]) for i in range(0, len(values), step)]


def _weights(
    e: Emit, name: str, rows: Sequence[Value], scales: Value, columns: Value
) -> Iterator[tuple[Sequence[Sequence[Value]], Value]]:
    """Writes a loop over rows: the weights of each in eights, and their place in bytes of floats.

    `scales` is where a type of `layouts.APART` has its scales. Floats whose number the step does
    not divide end in a loop of single ones.
    """
    step = layouts.step(name)
    steps = e.b.udiv(columns, ir.Constant(I64, step))
    with cgutils.for_range(e.b, steps) as loop:
        place = e.b.mul(loop.index, ir.Constant(I64, 4 * step))
        here = [moved(e, row, loop.index, layouts.step_bytes(name)) for row in rows]
        scale = moved(e, e.pointer(scales), loop.index, 4)
        yield [layouts.weights(e, name, at, scale) for at in here], place
    if name not in layouts.FLOATS:
        return
    done = e.b.mul(steps, ir.Constant(I64, step))
    with cgutils.for_range(e.b, e.b.sub(columns, done)) as loop:
        index = e.b.add(done, loop.index)
        each = [moved(e, row, index, BY_NAME[name].bytes) for row in rows]
        singles = [[layouts.FLOATS[name](e, at, 1)] for at in each]
        yield singles, e.b.mul(index, ir.Constant(I64, 4))


def int8_dot(name: str, tile: int, features: Features) -> Inline:
    """Dot products of a row of `blocks` blocks with quantised rows.

    A quantised row is, per thirty-two elements, a scale (float), thirty-two int8, eight floats with
    the sums of each four of them, and two with those of each sixteen times the scale.
    """
    single = BY_NAME[name].elements == layouts.GROUP

    def write(builder: Value, *arguments: Value) -> None:
        w, blocks, x, scales, fours, shares, x_stride, out, out_stride = arguments
        e = Emit(builder, features)
        # Bytes of scales and of shares per byte of codes: an eighth and a quarter.
        strides = [builder.lshr(x_stride, ir.Constant(I64, bits)) for bits in (0, 3, 0, 2)]
        bases = (x, scales, fours, shares)
        tables = [_tile(e, *each, tile) for each in zip(bases, strides, strict=True)]
        sums = _sums(builder, tile, 2 * LANES)
        for block, place in _blocks(e, name, w, blocks, single=single):
            here = [
                [moved(e, p, place, size) for p in pointers]
                for pointers, size in zip(tables, (32, 4, 32, 8), strict=True)
            ]
            codes = _signed(e, block)
            for t in range(tile):
                found = _block_dot(e, block, codes, [pointers[t] for pointers in here])
                wide = e.padded(found, 2 * LANES)
                builder.store(builder.fadd(builder.load(sums[t]), wide), sums[t])
        _finish(e, sums, _tile(e, out, out_stride, tile))

    return inline("w blocks x scales fours shares x_stride out out_stride", types.void, write)


def _blocks(
    e: Emit, name: str, w: Value, blocks: Value, *, single: bool
) -> Iterator[tuple[layouts.Block, Value]]:
    """Writes a loop over the blocks of a row: each, and its place in groups. Those of a single
    group come two at a time, and a last one alone."""
    kind, row, unpack = BY_NAME[name], e.pointer(w), layouts.UNPACK[name]
    if not single:
        with cgutils.for_range(e.b, blocks) as loop:
            groups = ir.Constant(I64, kind.elements // layouts.GROUP)
            yield unpack(e, moved(e, row, loop.index, kind.bytes)), e.b.mul(loop.index, groups)
        return
    pairs = e.b.lshr(blocks, ir.Constant(I64, 1))
    with cgutils.for_range(e.b, pairs) as loop:
        at = moved(e, row, loop.index, 2 * kind.bytes)
        first, second = unpack(e, at), unpack(e, e.past(at, kind.bytes))
        yield first.beside(e, second), e.b.mul(loop.index, ir.Constant(I64, 2))
    done = e.b.mul(pairs, ir.Constant(I64, 2))
    with cgutils.for_range(e.b, e.b.sub(blocks, done)) as loop:
        yield unpack(e, moved(e, row, done, kind.bytes)), done


def _signed(e: Emit, block: layouts.Block) -> Sequence[Value]:
    """Codes as the byte product wants them: unsigned, or with zero taken off."""
    if e.features.unsigned or not block.zero:
        return block.codes
    zero = e.splat(block.codes[0].type, block.zero)
    return [e.b.sub(codes, zero) for codes in block.codes]


def _block_dot(e: Emit, block: layouts.Block, codes: Sequence[Value], at: Sequence[Value]) -> Value:
    """A block's product in as many lanes as a vector of codes has fours."""
    x, scales, fours, shares = at
    count, size = block.groups, int(codes[0].type.count)
    each = [i // block.scales_per_group for i in range(block.scales.type.count)]
    steps = e.shuffle(e.load(scales, 0, vector(FLOAT, count)), each)
    scaled = e.b.fmul(block.scales, steps)
    total = None if block.shifts is None else _shift(e, block.shifts, count, shares, size // 4)
    for unit, vector_of_codes in enumerate(codes):
        integers = e.dot(vector_of_codes, e.bytes(x, size * unit, size))
        products = e.floats(integers, signed=True)
        if block.zero and e.features.unsigned:
            four = e.load(fours, size * unit, products.type)
            products = e.fma(four, e.splat(four.type, -float(block.zero)), products)
        scale = block.spread(e, scaled, unit)
        total = e.b.fmul(products, scale) if total is None else e.fma(products, scale, total)
    return total


def _shift(e: Emit, shifts: Value, groups: int, shares: Value, lanes: int) -> Value:
    """What the shifts of `groups` groups add: each times what x has in its sixteen elements."""
    per = 2 * groups // int(shifts.type.count)
    wide = e.shuffle(shifts, [i // per for i in range(2 * groups)])
    return e.padded(e.b.fmul(wide, e.load(shares, 0, wide.type)), lanes)


def decode(name: str, features: Features) -> Inline:
    """A row of `columns` weights written out as floats."""

    def write(builder: Value, *arguments: Value) -> None:
        w, scales, columns, out = arguments
        e = Emit(builder, features)
        target = e.pointer(out)
        for (values,), place in _weights(e, name, [e.pointer(w)], scales, columns):
            there = moved(e, target, place, 1)
            for i, value in enumerate(values):
                e.store(value, there, 4 * LANES * i)

    return inline("w scales columns out", types.void, write)


def quantise() -> Inline:
    """A row of `groups` thirty-two floats each, as `int8_dot` takes it.

    scale = max|x| / 127, codes = round(x / scale) to nearest even; a group below 1e-30 has codes 0.
    """

    def write(builder: Value, *arguments: Value) -> None:
        x, groups, codes, scales, fours, shares = arguments
        e = Emit(builder, Features())
        bases = [e.pointer(p) for p in (x, codes, scales, fours, shares)]
        with cgutils.for_range(builder, groups) as loop:
            sizes = (128, 32, 4, 32, 8)
            _quantise_group(
                e, [moved(e, p, loop.index, n) for p, n in zip(bases, sizes, strict=True)]
            )

    return inline("x groups codes scales fours shares", types.void, write)


def _quantise_group(e: Emit, at: Sequence[Value]) -> None:
    x, codes, scale, fours, shares = at
    step, wide = _to_int8(e, e.load(x, 0, vector(FLOAT, layouts.GROUP)))
    e.store(step, scale, 0)
    e.store(e.b.trunc(wide, vector(I8, layouts.GROUP)), codes, 0)
    each_four = _pairs_added(e, _pairs_added(e, wide))
    e.store(e.floats(each_four, signed=True), fours, 0)
    halves = e.floats(_pairs_added(e, _pairs_added(e, each_four)), signed=True)
    e.store(e.b.fmul(halves, e.shuffle(step, [0, 0])), shares, 0)


def _pairs_added(e: Emit, a: Value) -> Value:
    even, odd = (e.shuffle(a, range(i, a.type.count, 2)) for i in (0, 1))
    return e.b.add(even, odd)


def _to_int8(e: Emit, values: Value) -> tuple[Value, Value]:
    largest = e.largest(e.call("fabs", values.type, values))
    tiny = e.b.fcmp_ordered("<", largest, e.splat(largest.type, 1e-30))
    inverse = e.b.fdiv(e.splat(largest.type, 127.0), largest)
    inverse = e.b.select(tiny, e.splat(largest.type, 0.0), inverse)
    scaled = e.b.fmul(values, e.shuffle(inverse, [0] * values.type.count))
    rounded = e.call("rint", values.type, scaled)
    wide = e.b.fptosi(rounded, vector(I32, values.type.count))
    return e.b.fmul(largest, e.splat(largest.type, 1 / 127)), wide
