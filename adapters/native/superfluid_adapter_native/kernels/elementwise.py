"""What happens between products, one row of floats at a time, as kernels for `Driver`."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final

from llvmlite import ir
from numba.core import types

from superfluid_adapter_native.kernels.atomics import Inline, cgutils, inline, word
from superfluid_adapter_native.kernels.features import PLAIN
from superfluid_adapter_native.kernels.rows import moved
from superfluid_adapter_native.kernels.vectors import F8, FLOAT, I64, LANES, Emit, Value, vector

Kernel = Callable[[int, int, int], None]


def bits(number: float) -> int:
    """A float as the 64-bit word that kernels take it by."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


def number(e: Emit, bits_: Value) -> Value:
    """A word's float, in a vector of one."""
    double = e.b.bitcast(bits_, ir.DoubleType())
    return e.b.insert_element(
        ir.Constant(vector(FLOAT, 1), [0.0]), e.b.fptrunc(double, FLOAT), ir.Constant(I64, 0)
    )


def spans(e: Emit, count: Value) -> Iterator[tuple[Value, Value]]:
    """Writes a loop over `count` floats in eights, then one over single ones: (type, bytes in)."""
    done = e.b.and_(count, ir.Constant(I64, -LANES))
    with cgutils.for_range(e.b, e.b.lshr(count, ir.Constant(I64, 3))) as loop:
        yield F8, e.b.mul(loop.index, ir.Constant(I64, 4 * LANES))
    with cgutils.for_range(e.b, e.b.sub(count, done)) as loop:
        yield vector(FLOAT, 1), e.b.mul(e.b.add(done, loop.index), ir.Constant(I64, 4))


def _all(e: Emit, one: Value, like: Value) -> Value:
    return e.shuffle(one, [0] * like.count)


def rms_norm() -> Kernel:
    """out = x / sqrt(mean(x²) + eps) * w; a task is a row."""

    def write(builder: Value, *arguments: Value) -> None:
        x, w, count, eps, out = arguments
        e = Emit(builder, PLAIN)
        source, weights, target = e.pointer(x), e.pointer(w), e.pointer(out)
        cell = cgutils.alloca_once_value(builder, ir.Constant(F8, [0.0] * LANES))
        for kind, place in spans(e, count):
            read = e.padded(e.load(moved(e, source, place, 1), 0, kind))
            builder.store(e.fma(read, read, builder.load(cell)), cell)
        mean = builder.fdiv(e.total(builder.load(cell)), builder.sitofp(count, FLOAT))
        root = e.call("sqrt", FLOAT, builder.fadd(mean, e.first(number(e, eps))))
        scale = builder.fdiv(ir.Constant(FLOAT, 1.0), root)
        for kind, place in spans(e, count):
            read, weight = (e.load(moved(e, p, place, 1), 0, kind) for p in (source, weights))
            normal = builder.fmul(read, e.scalar(scale, kind.count))
            e.store(builder.fmul(normal, weight), moved(e, target, place, 1), 0)

    norm = inline("x w count eps out", types.void, write)

    def kernel(p: int, task: int, thread: int) -> None:
        x, w, count, eps, out = word(p, 0), word(p, 1), word(p, 2), word(p, 3), word(p, 4)
        norm(x + task * count * 4, w, count, eps, out + task * count * 4)

    return kernel


def _silu(e: Emit, a: Value) -> Value:
    return e.b.fmul(a, e.sigmoid(a))


def _gelu_tanh(e: Emit, a: Value) -> Value:
    """x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))), by sigmoid."""
    cube = e.fma(e.b.fmul(a, a), e.splat(a.type, 0.044715), e.splat(a.type, 1.0))
    inner = e.b.fmul(e.b.fmul(a, cube), e.splat(a.type, 1.5957691216057308))
    return e.b.fmul(a, e.sigmoid(inner))


GATES: Final[dict[str, Callable[[Emit, Value], Value]]] = {"silu": _silu, "gelu_tanh": _gelu_tanh}


def gated(name: str) -> Kernel:
    """out = activation(gate) * up over a span of floats per task."""
    activation = GATES[name]

    def write(builder: Value, *arguments: Value) -> None:
        gate, up, out, count = arguments
        e = Emit(builder, PLAIN)
        pointers = [e.pointer(p) for p in (gate, up, out)]
        for kind, place in spans(e, count):
            source, other, target = (moved(e, p, place, 1) for p in pointers)
            active = activation(e, e.load(source, 0, kind))
            e.store(builder.fmul(active, e.load(other, 0, kind)), target, 0)

    body = inline("gate up out count", types.void, write)

    def kernel(p: int, task: int, thread: int) -> None:
        gate, up, out, count, per_task = word(p, 0), word(p, 1), word(p, 2), word(p, 3), word(p, 4)
        first = task * per_task
        body(gate + 4 * first, up + 4 * first, out + 4 * first, min(per_task, count - first))

    return kernel


def add() -> Kernel:
    """x += y in place, a row of x per task; y's rows lie a stride apart, which is 0 for one row."""

    def write(builder: Value, *arguments: Value) -> None:
        x, y, count = arguments
        e = Emit(builder, PLAIN)
        for kind, place in spans(e, count):
            target, other = (moved(e, e.pointer(p), place, 1) for p in (x, y))
            e.store(builder.fadd(e.load(target, 0, kind), e.load(other, 0, kind)), target, 0)

    body = inline("x y count", types.void, write)

    def kernel(p: int, task: int, thread: int) -> None:
        x, y, stride, count = word(p, 0), word(p, 1), word(p, 2), word(p, 3)
        body(x + 4 * count * task, y + stride * task, count)

    return kernel


def softcap() -> Kernel:
    """x = cap * tanh(x / cap), in place, a span of floats per task."""

    def write(builder: Value, *arguments: Value) -> None:
        x, count, cap = arguments
        e = Emit(builder, PLAIN)
        pointer, limit = e.pointer(x), number(e, cap)
        for kind, place in spans(e, count):
            at = moved(e, pointer, place, 1)
            e.store(capped(e, e.load(at, 0, kind), limit), at, 0)

    body = inline("x count cap", types.void, write)

    def kernel(p: int, task: int, thread: int) -> None:
        x, count, per_task, cap = word(p, 0), word(p, 1), word(p, 2), word(p, 3)
        first = task * per_task
        body(x + 4 * first, min(per_task, count - first), cap)

    return kernel


def capped(e: Emit, a: Value, limit: Value) -> Value:
    """limit * tanh(a / limit)."""
    wide = _all(e, limit, a.type)
    return e.b.fmul(wide, e.tanh(e.b.fdiv(a, wide)))


PAIRINGS: Final = ("halves", "pairs")


def rope(pairing: str) -> Kernel:
    """Turns the first 2 * half floats of each head by the angles of its row's position.

    `halves` turns float i with float half + i, `pairs` float 2i with float 2i + 1.
    """
    turn = _turn_halves() if pairing == "halves" else _turn_pairs()

    def kernel(p: int, task: int, thread: int) -> None:
        q, heads, size, half = word(p, 0), word(p, 1), word(p, 2), word(p, 3)
        angles = word(word(p, 6), task) * half * 4
        cosines, sines = word(p, 4) + angles, word(p, 5) + angles
        for head in range(heads):
            turn(q + (task * heads + head) * size * 4, half, cosines, sines)

    return kernel


def _turn_halves() -> Inline:
    def write(builder: Value, *arguments: Value) -> None:
        q, half, cosines, sines = arguments
        e = Emit(builder, PLAIN)
        second = e.pointer(builder.add(q, builder.mul(half, ir.Constant(I64, 4))))
        pointers = [e.pointer(q), second, e.pointer(cosines), e.pointer(sines)]
        for kind, place in spans(e, half):
            at = [moved(e, p, place, 1) for p in pointers]
            turned = _turned(e, *(e.load(p, 0, kind) for p in at))
            for value, target in zip(turned, at, strict=False):
                e.store(value, target, 0)

    return inline("q half cosines sines", types.void, write)


def _turn_pairs() -> Inline:
    def write(builder: Value, *arguments: Value) -> None:
        q, half, cosines, sines = arguments
        e = Emit(builder, PLAIN)
        pointers = [e.pointer(p) for p in (cosines, sines)]
        for kind, place in spans(e, half):
            at = moved(e, e.pointer(q), place, 2)
            both = e.load(at, 0, vector(FLOAT, 2 * kind.count))
            even, odd = (e.shuffle(both, range(i, 2 * kind.count, 2)) for i in (0, 1))
            angles = [e.load(moved(e, p, place, 1), 0, kind) for p in pointers]
            order = [i // 2 + (i % 2) * kind.count for i in range(2 * kind.count)]
            first, second = _turned(e, even, odd, *angles)
            e.store(e.shuffle(first, order, second), at, 0)

    return inline("q half cosines sines", types.void, write)


def _turned(e: Emit, first: Value, second: Value, cosine: Value, sine: Value) -> list[Value]:
    minus = e.b.fneg(e.b.fmul(second, sine))
    return [e.fma(first, cosine, minus), e.fma(second, cosine, e.b.fmul(first, sine))]
