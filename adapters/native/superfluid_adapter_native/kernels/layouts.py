"""How each type's block becomes numbers, in vector code (layouts: ggml-common.h, ggml-quants.c).

A block is either plain floats or *groups* of thirty-two small unsigned codes with

    weight = scale * (code - zero) + shift

where a group has one scale (and shift) or two, one per sixteen codes. The integer products use the
codes as they are; the float products, the reading of embedding rows and attention over quantised
caches use `weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from llvmlite import ir

from superfluid_adapter_native.kernels.vectors import (
    FLOAT,
    HALF,
    I8,
    I16,
    I32,
    I64,
    LANES,
    Emit,
    Value,
    vector,
)
from superfluid_adapter_native.quants.types import BY_NAME

GROUP: Final = 32


@dataclass(frozen=True, slots=True)
class Block:
    """Groups of codes, in vectors of one group or of two; `scales` and `shifts` hold one or two
    floats per group."""

    codes: Sequence[Value]
    zero: int
    scales: Value
    shifts: Value | None = None

    @property
    def groups(self) -> int:
        return len(self.codes) * int(self.codes[0].type.count) // GROUP

    @property
    def scales_per_group(self) -> int:
        return int(self.scales.type.count) // self.groups

    def spread(self, e: Emit, values: Value, unit: int) -> Value:
        """Of a vector of codes the scales, lane i belonging to its codes 4i to 4i + 3."""
        count = int(self.codes[unit].type.count)
        lanes, each = count // 4, LANES // self.scales_per_group
        return e.shuffle(values, [(unit * lanes + i) // each for i in range(lanes)])

    def beside(self, e: Emit, other: Block) -> Block:
        """Two blocks of one group each, as one of two groups."""
        shifts = None
        if self.shifts is not None and other.shifts is not None:
            shifts = e.join(self.shifts, other.shifts)
        codes = e.join(self.codes[0], other.codes[0])
        return Block([codes], self.zero, e.join(self.scales, other.scales), shifts)

    def weights(self, e: Emit) -> list[Value]:
        """All weights of the block as vectors of eight floats."""
        return [
            self._eight(e, group, quarter)
            for group in range(self.groups)
            for quarter in range(GROUP // LANES)
        ]

    def _eight(self, e: Emit, group: int, quarter: int) -> Value:
        width = int(self.codes[0].type.count)
        first = GROUP * group + LANES * quarter
        codes = self.codes[first // width]
        codes = e.shuffle(codes, range(first % width, first % width + LANES))
        wide = e.b.zext(codes, vector(I32, LANES))
        if self.zero:
            wide = e.b.sub(wide, e.splat(wide.type, self.zero))
        per = self.scales_per_group
        at = per * group + (quarter // 2 if per == 2 else 0)
        numbers, scale = e.floats(wide, signed=True), e.shuffle(self.scales, [at] * LANES)
        if self.shifts is None:
            return e.b.fmul(numbers, scale)
        return e.fma(numbers, scale, e.shuffle(self.shifts, [at] * LANES))


Unpack = Callable[[Emit, Value], Block]


def _nibbles(e: Emit, p: Value, offset: int) -> Value:
    """Sixteen bytes: the low halves are codes 0 to 15, the high halves 16 to 31."""
    raw = e.bytes(p, offset, 16)
    return e.join(e.ands(raw, 15), e.right(raw, 4))


def _twice(e: Emit, group: Value) -> Value:
    """Thirty-two bytes, and the same once more: a load that needs no shuffle."""
    return e.shuffle(group, [*range(GROUP), *range(GROUP)])


def _shifted(e: Emit, pair: Value, left: tuple[int, int]) -> Value:
    """The bits of a pair's first and second half moved left by `left`, right where negative.

    They move within 64-bit words, so that what a byte's neighbour sheds is the caller's to mask:
    processors have no shifts of bytes."""
    words = e.b.bitcast(pair, vector(I64, GROUP // 4))
    counts = ir.Constant(words.type, [abs(left[i // 4]) for i in range(GROUP // 4)])
    move = e.b.shl if max(left) > 0 else e.b.lshr
    return e.b.bitcast(move(words, counts), pair.type)


def _q4_0(e: Emit, p: Value) -> Block:
    return Block([_nibbles(e, p, 2)], 8, e.half(p, 0))


def _q4_1(e: Emit, p: Value) -> Block:
    return Block([_nibbles(e, p, 4)], 0, e.half(p, 0), e.half(p, 2))


def _q5_0(e: Emit, p: Value) -> Block:
    high = e.bits(e.load(p, 2, I32), 4)
    return Block([e.b.or_(_nibbles(e, p, 6), high)], 16, e.half(p, 0))


def _q5_1(e: Emit, p: Value) -> Block:
    high = e.bits(e.load(p, 4, I32), 4)
    return Block([e.b.or_(_nibbles(e, p, 8), high)], 0, e.half(p, 0), e.half(p, 2))


def _q8_0(e: Emit, p: Value) -> Block:
    raw = e.bytes(p, 2, 32)
    return Block([e.b.xor(raw, e.splat(raw.type, 128))], 128, e.half(p, 0))


def _packed_six_bits(e: Emit, p: Value, offset: int) -> tuple[Value, Value]:
    """Eight scales and eight minimums of six bits in twelve bytes (Q4_K, Q5_K)."""
    a, b, c = (e.load(p, offset + 4 * i, vector(I32, 1)) for i in range(3))
    scales = e.join(
        e.ands(a, 0x3F3F3F3F), e.b.or_(e.ands(c, 0x0F0F0F0F), e.ands(e.right(a, 2), 0x30303030))
    )
    minimums = e.join(
        e.ands(b, 0x3F3F3F3F),
        e.b.or_(e.ands(e.right(c, 4), 0x0F0F0F0F), e.ands(e.right(b, 2), 0x30303030)),
    )
    first, second = (e.b.bitcast(v, vector(I8, 8)) for v in (scales, minimums))
    return e.floats(first, signed=False), e.floats(second, signed=False)


def _scaled(e: Emit, values: Value, factor: Value) -> Value:
    return e.b.fmul(values, e.shuffle(factor, [0] * values.type.count))


def _with_minimums(e: Emit, p: Value, codes: list[Value]) -> Block:
    scales, minimums = _packed_six_bits(e, p, 4)
    lowest = e.b.fneg(e.half(p, 2))
    return Block(codes, 0, _scaled(e, scales, e.half(p, 0)), _scaled(e, minimums, lowest))


def _nibble_pair(e: Emit, p: Value, offset: int) -> Value:
    """Thirty-two bytes: the low halves are one group, the high halves the next."""
    raw = _twice(e, e.bytes(p, offset, GROUP))
    return e.ands(_shifted(e, raw, (0, -4)), 15)


def _q4_k(e: Emit, p: Value) -> Block:
    return _with_minimums(e, p, [_nibble_pair(e, p, 16 + 32 * j) for j in range(4)])


def _q5_k(e: Emit, p: Value) -> Block:
    high, codes = _twice(e, e.bytes(p, 16, GROUP)), []
    for j in range(4):
        top = e.ands(_shifted(e, high, (4 - 2 * j, 3 - 2 * j)), 16)
        codes.append(e.b.or_(_nibble_pair(e, p, 48 + 32 * j), top))
    return _with_minimums(e, p, codes)


def _q6_k(e: Emit, p: Value) -> Block:
    codes = []
    for half in range(2):
        low = e.bytes(p, 64 * half, 2 * GROUP)
        high = _twice(e, e.bytes(p, 128 + 32 * half, GROUP))
        nibbles = e.ands(low, 15), e.ands(_shifted(e, low, (-4, -4)), 15)
        for nibble, left in zip(nibbles, ((4, 2), (0, -2)), strict=True):
            codes.append(e.b.or_(nibble, e.ands(_shifted(e, high, left), 48)))
    scales = e.floats(e.bytes(p, 192, 16), signed=True)
    return Block(codes, 32, _scaled(e, scales, e.half(p, 208)))


def _q2_k(e: Emit, p: Value) -> Block:
    packed = e.bytes(p, 0, 16)
    codes = []
    for half in range(2):
        raw = _twice(e, e.bytes(p, 16 + 32 * half, GROUP))
        codes += [e.ands(_shifted(e, raw, (-4 * k, -4 * k - 2)), 3) for k in range(2)]
    scales, minimums = (e.floats(v, signed=False) for v in (e.ands(packed, 15), e.right(packed, 4)))
    lowest = e.b.fneg(e.half(p, 82))
    return Block(codes, 0, _scaled(e, scales, e.half(p, 80)), _scaled(e, minimums, lowest))


def _q3_k(e: Emit, p: Value) -> Block:
    mask, codes = _twice(e, e.bytes(p, 0, GROUP)), []
    for half in range(2):
        raw = _twice(e, e.bytes(p, 32 + 32 * half, GROUP))
        for k in range(2):
            first = 2 - 4 * half - 2 * k
            bit = e.ands(_shifted(e, mask, (first, first - 1)), 4)
            codes.append(e.b.or_(e.ands(_shifted(e, raw, (-4 * k, -4 * k - 2)), 3), bit))
    low, top = e.load(p, 96, vector(I32, 2)), e.load(p, 104, vector(I32, 1))
    tops = e.shuffle(top, [0, 0])
    parts = []
    for nibble in range(2):
        shifts = ir.Constant(vector(I32, 2), [4 * nibble, 4 * nibble + 2])
        high = e.left(e.ands(e.b.lshr(tops, shifts), 0x03030303), 4)
        parts.append(e.b.or_(e.ands(e.right(low, 4 * nibble), 0x0F0F0F0F), high))
    six_bits = e.b.bitcast(e.join(*parts), vector(I8, 16))
    scales = e.floats(e.b.sub(six_bits, e.splat(six_bits.type, 32)), signed=True)
    return Block(codes, 4, _scaled(e, scales, e.half(p, 108)))


_IQ4: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4_DOUBLED: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _looked_up(e: Emit, table: Sequence[int], codes: Value) -> Value:
    return e.lookup([entry + 128 for entry in table], codes)


def _iq4_nl(e: Emit, p: Value) -> Block:
    return Block([_looked_up(e, _IQ4, _nibbles(e, p, 2))], 128, e.half(p, 0))


def _iq4_xs(e: Emit, p: Value) -> Block:
    eight = vector(I32, 8)
    low = e.scalar(e.load(p, 4, I32))
    high = e.scalar(e.b.zext(e.load(p, 2, I16), I32))
    low = e.ands(e.b.lshr(low, ir.Constant(eight, [4 * i for i in range(8)])), 15)
    high = e.ands(e.b.lshr(high, ir.Constant(eight, [2 * i for i in range(8)])), 3)
    six_bits = e.b.or_(low, e.left(high, 4))
    scales = e.floats(e.b.sub(six_bits, e.splat(eight, 32)), signed=True)
    groups = [_looked_up(e, _IQ4, _nibbles(e, p, 8 + 16 * j)) for j in range(8)]
    codes = [e.join(*groups[i : i + 2]) for i in range(0, 8, 2)]
    return Block(codes, 128, _scaled(e, scales, e.half(p, 0)))


def _mxfp4(e: Emit, p: Value) -> Block:
    """The exponent is that of the doubled table: 2^(byte - 128), subnormal below two."""
    exponent = e.b.zext(e.load(p, 0, vector(I8, 1)), vector(I32, 1))
    small = e.b.shl(e.splat(exponent.type, 0x00200000), e.ands(exponent, 1))
    large = e.left(e.b.sub(exponent, e.splat(exponent.type, 1)), 23)
    tiny = e.b.icmp_unsigned("<", exponent, e.splat(exponent.type, 2))
    scale = e.b.bitcast(e.b.select(tiny, small, large), vector(FLOAT, 1))
    return Block([_looked_up(e, _FP4_DOUBLED, _nibbles(e, p, 1))], 128, scale)


UNPACK: Final[dict[str, Unpack]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
"""The types whose products have an integer route."""


def _f32(e: Emit, p: Value, count: int) -> Value:
    return e.load(p, 0, vector(FLOAT, count))


def _f16(e: Emit, p: Value, count: int) -> Value:
    return e.b.fpext(e.load(p, 0, vector(HALF, count)), vector(FLOAT, count))


def _bf16(e: Emit, p: Value, count: int) -> Value:
    wide = e.b.zext(e.load(p, 0, vector(I16, count)), vector(I32, count))
    return e.b.bitcast(e.left(wide, 16), vector(FLOAT, count))


FLOATS: Final[dict[str, Callable[[Emit, Value, int], Value]]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
}
"""The types that are floats already, read any number at a time."""


APART: Final = "INT8"
"""Groups of int8 with a float scale each in a table of its own: a cache's keys and values."""


def step(name: str) -> int:
    """Weights that `weights` reads at once; a row of floats may end in a part of that."""
    return GROUP if name == APART else max(BY_NAME[name].elements, GROUP)


def step_bytes(name: str) -> int:
    """Bytes of `step(name)` weights."""
    return GROUP if name == APART else BY_NAME[name].row_bytes(step(name))


def weights(e: Emit, name: str, p: Value, scale: Value) -> list[Value]:
    """The next `step(name)` weights at `p`, in vectors of eight floats."""
    if name == APART:
        raw = e.bytes(p, 0, GROUP)
        codes = e.b.xor(raw, e.splat(raw.type, 128))
        return Block([codes], 128, e.load(scale, 0, vector(FLOAT, 1))).weights(e)
    if name not in FLOATS:
        return UNPACK[name](e, p).weights(e)
    size = BY_NAME[name].bytes
    return [FLOATS[name](e, e.past(p, i * size), LANES) for i in range(0, GROUP, LANES)]
