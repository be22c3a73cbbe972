"""Plain NumPy decoders of every tensor type: what a block's bytes mean, and the kernels' oracle.

Block layouts and formulas: ggml-common.h (structs) and ggml-quants.c (`dequantize_row_*`) of the
ggml project. `d` and `m` are float16 scales of a block; a nibble pair holds weight i in the low
and weight i + n/2 in the high half. K-quants are blocks of 256 with packed sub-scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from superfluid_adapter_native.quants.types import TensorType

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]

IQ4_LEVELS: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
"""The non-linear levels of IQ4_NL and IQ4_XS (`kvalues_iq4nl`)."""

MXFP4_LEVELS: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the values of FP4 E2M1 (`kvalues_mxfp4`); a block's scale is halved to match."""


def decode(kind: TensorType, raw: Bytes, count: int) -> Floats:
    """The first `count` weights that `raw` holds as `kind`, flat float32.

    `count` is a multiple of the type's block. Raises ValueError where the two do not fit.
    """
    needed = kind.row_bytes(count)
    if raw.nbytes < needed:
        raise ValueError(f"{raw.nbytes} bytes hold fewer than {count} weights of {kind.name}")
    blocks = np.ascontiguousarray(raw).reshape(-1)[:needed].reshape(-1, kind.bytes)
    # Infinite and NaN scales are values like others: they decode, silently, as they do in C.
    with np.errstate(over="ignore", invalid="ignore"):
        return _DECODERS[kind.name](blocks).reshape(-1)


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _field(packed: Bytes, shift: int, bits: int) -> Bytes:
    """`bits` bits from bit `shift` of each byte."""
    return packed >> np.uint8(shift) & np.uint8((1 << bits) - 1)


def _nibbles(packed: Bytes) -> Bytes:
    """Low halves, then high halves, along the last axis."""
    return np.concatenate([_field(packed, 0, 4), _field(packed, 4, 4)], axis=-1)


def _pairs(packed: Bytes, groups: int) -> Bytes:
    """2-bit fields of `groups` runs of bytes: all fields at bit 0 of a run, then at bit 2, ..."""
    runs = packed.reshape(len(packed), groups, -1)
    return np.stack([_field(runs, shift, 2) for shift in (0, 2, 4, 6)], axis=2)


def _planes(packed: Bytes) -> Bytes:
    """Bit 0 of all bytes, then bit 1, ..., of each block, as bytes of 0 or 1."""
    return np.stack([_field(packed, shift, 1) for shift in range(8)], axis=1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """The 32 bits at byte `at` as a 5th bit for each weight's nibble."""
    bits = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return bits << np.uint8(4)


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    """d, 16 nibble pairs: d * (q - 8)."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    """d, m, 16 nibble pairs: d * q + m."""
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    """d, 32 fifth bits, 16 nibble pairs: d * (q - 16)."""
    levels = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (levels.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    """d, m, 32 fifth bits, 16 nibble pairs: d * q + m."""
    levels = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * levels.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    """d, 32 int8: d * q."""
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _affine(blocks: Bytes, at: int, scales: Bytes, minimums: Bytes, levels: Bytes) -> Floats:
    """d * scale * q - dmin * minimum per sub-block, with d and dmin at byte `at`."""
    scale: Floats = _half(blocks, at) * scales.astype(np.float32)
    minimum: Floats = _half(blocks, at + 2) * minimums.astype(np.float32)
    grouped = levels.reshape(len(blocks), scales.shape[1], -1).astype(np.float32)
    return scale[..., None] * grouped - minimum[..., None]


def _q2_k(blocks: Bytes) -> Floats:
    """16 bytes of scale (low) and minimum (high nibble) for 16 weights each, 64 bytes of 2-bit
    levels in two runs, d, dmin."""
    packed = blocks[:, :16]
    return _affine(
        blocks, 80, _field(packed, 0, 4), _field(packed, 4, 4), _pairs(blocks[:, 16:80], 2)
    )


def _q3_k(blocks: Bytes) -> Floats:
    """32 bytes of third bits (bit j of byte i is weight 32 j + i's), 64 bytes of 2-bit levels in
    two runs, 16 scales of 6 bits, d: d * (scale - 32) * (q - 4)."""
    third = _planes(blocks[:, :32]) << np.uint8(2)
    levels = _pairs(blocks[:, 32:96], 2).reshape(len(blocks), 8, 32) | third
    high = _pairs(blocks[:, 104:108], 1).reshape(len(blocks), 16) << np.uint8(4)
    scales = (_nibbles(blocks[:, 96:104]) | high).astype(np.float32) - 32
    scale = _half(blocks, 108) * scales
    return scale[..., None] * (levels.reshape(len(blocks), 16, 16).astype(np.float32) - 4)


def k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight 6-bit scales and eight 6-bit minimums of the 12 bytes that Q4_K and Q5_K have.

    Bytes 0-3: scales 0-3, 4-7: minimums 0-3, in the low 6 bits; 8-11: the low nibbles of scales
    4-7 and minimums 4-7, whose upper two bits top the first eight bytes (`get_scale_min_k4`).
    """
    scale, minimum, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    return (
        np.concatenate([_field(scale, 0, 6), _topped(_field(rest, 0, 4), scale)], axis=1),
        np.concatenate([_field(minimum, 0, 6), _topped(_field(rest, 4, 4), minimum)], axis=1),
    )


def _topped(low: Bytes, tops: Bytes) -> Bytes:
    """4-bit values with the upper two bits of `tops` above them."""
    return low | _field(tops, 6, 2) << np.uint8(4)


def _runs(packed: Bytes) -> Bytes:
    """Nibbles of 128 bytes in four runs of 32, each its low halves, then its high ones."""
    return _nibbles(packed.reshape(len(packed), 4, 32)).reshape(len(packed), 8, 32)


def _q4_k(blocks: Bytes) -> Floats:
    """d, dmin, 12 bytes of scales, 128 of nibbles."""
    return _affine(blocks, 0, *k_scales(blocks[:, 4:16]), _runs(blocks[:, 16:]))


def _q5_k(blocks: Bytes) -> Floats:
    """d, dmin, 12 bytes of scales, 32 of fifth bits (bit j of byte i is weight 32 j + i's), 128
    of nibbles."""
    levels = _runs(blocks[:, 48:]) | _planes(blocks[:, 16:48]) << np.uint8(4)
    return _affine(blocks, 0, *k_scales(blocks[:, 4:16]), levels)


def _q6_k(blocks: Bytes) -> Floats:
    """128 bytes of low nibbles and 64 of 2-bit high parts, each in two runs, 16 int8 scales, d:
    d * scale * (q - 32)."""
    low = _nibbles(blocks[:, :128].reshape(len(blocks), 2, 64)).reshape(len(blocks), 2, 4, 32)
    high = _pairs(blocks[:, 128:192], 2) << np.uint8(4)
    levels = (low | high).reshape(len(blocks), 16, 16)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return scale[..., None] * (levels.astype(np.float32) - 32)


def _iq4_nl(blocks: Bytes) -> Floats:
    """d, 16 nibble pairs: d * level[q]."""
    return _half(blocks, 0) * IQ4_LEVELS[_nibbles(blocks[:, 2:])].astype(np.float32)


def _iq4_xs(blocks: Bytes) -> Floats:
    """d, 16 bits of upper and 4 bytes of lower parts of eight 6-bit scales, then per sub-block
    of 32 its 16 nibble pairs: d * (scale - 32) * level[q]."""
    upper = np.stack([_field(blocks[:, 2:4], shift, 2) for shift in (0, 2, 4, 6)], axis=-1)
    packed = blocks[:, 4:8]
    lower = np.stack([_field(packed, 0, 4), _field(packed, 4, 4)], axis=-1).reshape(-1, 8)
    scales = (lower | upper.reshape(-1, 8) << np.uint8(4)).astype(np.float32) - 32
    scale = _half(blocks, 0) * scales
    levels = IQ4_LEVELS[_nibbles(blocks[:, 8:].reshape(-1, 8, 16))]
    return scale[..., None] * levels.astype(np.float32)


def _mxfp4(blocks: Bytes) -> Floats:
    """An E8M0 exponent e, 16 nibble pairs: 2^(e - 128) * level[q] (`ggml_e8m0_to_fp32_half`)."""
    scale: Floats = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return scale * MXFP4_LEVELS[_nibbles(blocks[:, 1:])].astype(np.float32)


_DECODERS: Final[dict[str, Callable[[Bytes], Floats]]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
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
