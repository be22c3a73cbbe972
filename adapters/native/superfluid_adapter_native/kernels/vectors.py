"""Vector code in LLVM's terms: what the kernels' inner loops are written with.

Everything is generic LLVM except two operations that it has no name for, the byte product and the
byte table, which `Features` chooses per processor. Vectors are eight or sixteen floats, thirty-two
or sixty-four bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from llvmlite import ir

from superfluid_adapter_native.kernels.features import Features

I1: Final = ir.IntType(1)
I8: Final = ir.IntType(8)
I16: Final = ir.IntType(16)
I32: Final = ir.IntType(32)
I64: Final = ir.IntType(64)
HALF: Final = ir.HalfType()
FLOAT: Final = ir.FloatType()
LANES: Final = 8
F8: Final = ir.VectorType(FLOAT, LANES)

Value = Any
"""An LLVM value; llvmlite ships no types."""

_DOT_ASM: Final = {
    "evex": ("vpdpbusd $3, $2, $0", "=v,0,v,v"),
    "vex": ("{vex} vpdpbusd $3, $2, $0", "=x,0,x,x"),
}
"""Written out, because LLVM's own names for these have changed their types between releases."""
_DOT_BYTES: Final = {"evex": 64, "vex": 32, "neon": 16}
_LOOKUP_ASM: Final = ("vpshufb $2, $1, $0", "=x,x,x")
_NEON_DOT: Final = "llvm.aarch64.neon.sdot.v4i32.v16i8"
_NEON_LOOKUP: Final = "llvm.aarch64.neon.tbl1.v16i8"

_EXP: Final = (1.9875691e-4, 1.3981999e-3, 8.3334519e-3, 4.1665796e-2, 0.16666665, 0.5, 1.0, 1.0)


def vector(element: Value, count: int) -> Value:
    return ir.VectorType(element, count)


class Emit:
    """Writes instructions at `builder`; addresses are 64-bit integers."""

    def __init__(self, builder: Value, features: Features) -> None:
        self.b = builder
        self.features = features

    def pointer(self, address: Value) -> Value:
        return self.b.inttoptr(address, I8.as_pointer())

    def past(self, base: Value, offset: int) -> Value:
        """The byte pointer `offset` bytes past another."""
        return self.b.gep(base, [ir.Constant(I64, offset)], source_etype=I8)

    def load(self, base: Value, offset: int, kind: Value) -> Value:
        """A value of `kind`, `offset` bytes past the byte pointer `base`, however aligned."""
        at = self.b.bitcast(self.past(base, offset), kind.as_pointer())
        return self.b.load(at, align=1, typ=kind)

    def store(self, value: Value, base: Value, offset: int) -> None:
        at = self.b.bitcast(self.past(base, offset), value.type.as_pointer())
        self.b.store(value, at, align=1)

    def bytes(self, base: Value, offset: int, count: int) -> Value:
        return self.load(base, offset, vector(I8, count))

    def half(self, base: Value, offset: int) -> Value:
        """A half-precision scalar as one float in a vector."""
        return self.b.fpext(self.load(base, offset, vector(HALF, 1)), vector(FLOAT, 1))

    def splat(self, kind: Value, number: float) -> Value:
        return ir.Constant(kind, [number] * kind.count)

    def shuffle(self, a: Value, lanes: Sequence[int], b: Value | None = None) -> Value:
        mask = ir.Constant(vector(I32, len(lanes)), list(lanes))
        return self.b.shuffle_vector(a, ir.Constant(a.type, ir.Undefined) if b is None else b, mask)

    def join(self, a: Value, b: Value) -> Value:
        return self.shuffle(a, range(a.type.count + b.type.count), b)

    def scalar(self, value: Value, count: int = LANES) -> Value:
        """`value` in each of `count` lanes."""
        one = ir.Constant(vector(value.type, 1), ir.Undefined)
        return self.shuffle(self.b.insert_element(one, value, ir.Constant(I32, 0)), [0] * count)

    def first(self, a: Value) -> Value:
        """Lane 0."""
        return self.b.extract_element(a, ir.Constant(I32, 0))

    def padded(self, a: Value, count: int = LANES) -> Value:
        """`count` lanes: those of `a` and zeros."""
        own = int(a.type.count)
        if own == count:
            return a
        return self.shuffle(a, [*range(own), *[own] * (count - own)], self.splat(a.type, 0.0))

    def ands(self, a: Value, mask: int) -> Value:
        return self.b.and_(a, self.splat(a.type, mask))

    def right(self, a: Value, bits: int) -> Value:
        return self.b.lshr(a, self.splat(a.type, bits)) if bits else a

    def left(self, a: Value, bits: int) -> Value:
        return self.b.shl(a, self.splat(a.type, bits)) if bits else a

    def bits(self, word: Value, shift: int) -> Value:
        """The bits of a 32-bit word as bytes, lowest first, moved left by `shift`."""
        lanes = self.b.bitcast(word, vector(I1, 32))
        return self.left(self.b.zext(lanes, vector(I8, 32)), shift)

    def floats(self, a: Value, *, signed: bool) -> Value:
        kind = vector(FLOAT, a.type.count)
        return self.b.sitofp(a, kind) if signed else self.b.uitofp(a, kind)

    def call(self, name: str, kind: Value, *args: Value) -> Value:
        """The overloaded intrinsic `llvm.<name>` of one vector or scalar type."""
        count = getattr(kind, "count", None)
        suffix = "f32" if count is None else f"v{count}f32"
        return self._named(f"llvm.{name}.{suffix}", kind, *args)

    def _named(self, name: str, kind: Value, *args: Value) -> Value:
        declared = self.b.module.globals.get(name)
        if declared is None:
            function = ir.FunctionType(kind, [arg.type for arg in args])
            declared = ir.Function(self.b.module, function, name)
        return self.b.call(declared, args)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return self.call("fma", a.type, a, b, c)

    def total(self, a: Value) -> Value:
        """The sum of a power of two of lanes, always in the same order."""
        width = int(a.type.count)
        while width > 1:
            width //= 2
            a = self.b.fadd(self.shuffle(a, range(width)), self.shuffle(a, range(width, 2 * width)))
        return self.first(a)

    def largest(self, a: Value) -> Value:
        """The largest lane of a power of two of them, as a vector of one."""
        width = a.type.count
        while width > 1:
            width //= 2
            low, high = self.shuffle(a, range(width)), self.shuffle(a, range(width, 2 * width))
            a = self.call("maxnum", low.type, low, high)
        return a

    def exp(self, a: Value) -> Value:
        """e^a by 2^n times a polynomial of the rest (Cephes' expf), clamped to finite floats."""
        low, high = self.splat(a.type, -87.3), self.splat(a.type, 88.3)
        a = self.call("minnum", a.type, self.call("maxnum", a.type, a, low), high)
        whole = self.b.fmul(a, self.splat(a.type, 1.4426950408889634))
        whole = self.call("rint", a.type, whole)
        rest = self.fma(whole, self.splat(a.type, -0.693359375), a)
        rest = self.fma(whole, self.splat(a.type, 2.12194440e-4), rest)
        sum_ = self.splat(a.type, _EXP[0])
        for term in _EXP[1:]:
            sum_ = self.fma(sum_, rest, self.splat(a.type, term))
        words = vector(I32, a.type.count)
        power = self.b.add(self.b.fptosi(whole, words), self.splat(words, 127))
        return self.b.fmul(sum_, self.b.bitcast(self.left(power, 23), a.type))

    def sigmoid(self, a: Value) -> Value:
        one = self.splat(a.type, 1.0)
        return self.b.fdiv(one, self.b.fadd(one, self.exp(self.b.fneg(a))))

    def tanh(self, a: Value) -> Value:
        """2 sigmoid(2a) - 1: good to a float's last bits of one, not of a tiny result."""
        two = self.splat(a.type, 2.0)
        return self.fma(two, self.sigmoid(self.b.fmul(a, two)), self.splat(a.type, -1.0))

    def dot(self, codes: Value, x: Value) -> Value:
        """Sums of each four byte products, of 32 or 64 bytes; `codes` unsigned if
        `features.unsigned`, `x` signed."""
        kind = self.features.dot
        if kind == "plain":
            return self._plain_dot(codes, x)
        count = int(codes.type.count)
        if count > _DOT_BYTES[kind]:
            halves = ((self._half(codes, i), self._half(x, i)) for i in (0, 1))
            return self.join(*(self.dot(*half) for half in halves))
        sums = self.splat(vector(I32, count // 4), 0)
        if kind == "neon":
            return self._named(_NEON_DOT, sums.type, sums, codes, x)
        return self._asm(_DOT_ASM[kind], sums, codes, x)

    def _half(self, a: Value, which: int) -> Value:
        width = int(a.type.count) // 2
        return self.shuffle(a, range(width * which, width * (which + 1)))

    def _plain_dot(self, codes: Value, x: Value) -> Value:
        wide = vector(I32, codes.type.count)
        products = self.b.mul(self.b.sext(codes, wide), self.b.sext(x, wide))
        for count in (wide.count // 2, wide.count // 4):
            even, odd = (self.shuffle(products, range(i, 2 * count, 2)) for i in (0, 1))
            products = self.b.add(even, odd)
        return products

    def lookup(self, table: Sequence[int], codes: Value) -> Value:
        """Thirty-two entries of a table of sixteen unsigned bytes; `codes` are below sixteen."""
        kind = self.features.lookup
        row = ir.Constant(vector(I8, 16), list(table))
        if kind == "pshufb":
            return self._asm(_LOOKUP_ASM, self.join(row, row), codes)
        if kind == "tbl":
            halves = (self._half(codes, i) for i in (0, 1))
            return self.join(*(self._named(_NEON_LOOKUP, row.type, row, h) for h in halves))
        found = self.splat(codes.type, 0)
        for code, entry in enumerate(table):
            same = self.b.icmp_unsigned("==", codes, self.splat(codes.type, code))
            found = self.b.select(same, self.splat(codes.type, entry), found)
        return found

    def _asm(self, template: tuple[str, str], *args: Value) -> Value:
        result = args[0].type
        function = ir.FunctionType(result, [arg.type for arg in args])
        return self.b.call(ir.InlineAsm(function, *template), args)
