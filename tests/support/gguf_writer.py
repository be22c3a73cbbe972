"""A small writer of GGUF files for tests, apart from the reader under test.

Layout: the GGUF specification (docs/gguf.md of the ggml project). Little endian only.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from superfluid_adapter_native.quants.types import BY_NAME, TensorType


class Kind(enum.IntEnum):
    """GGUF's metadata value types."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


CODES: Final = {
    Kind.U8: "B",
    Kind.I8: "b",
    Kind.U16: "H",
    Kind.I16: "h",
    Kind.U32: "I",
    Kind.I32: "i",
    Kind.F32: "f",
    Kind.BOOL: "?",
    Kind.U64: "Q",
    Kind.I64: "q",
    Kind.F64: "d",
}


@dataclass(frozen=True, slots=True)
class Typed:
    """A metadata value of a stated type; for an array, `kind` is that of its elements."""

    kind: Kind
    value: Any
    array: bool = False


@dataclass(frozen=True, slots=True)
class TensorData:
    """A tensor to write: `shape` in NumPy's order, `raw` its bytes as they go into the file.

    `ggml` overrides the type's id, for files that are wrong on purpose.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    raw: bytes
    ggml: int | None = None


def tensor(name: str, values: NDArray[np.float32], kind: str = "F32") -> TensorData:
    """A tensor of float32 `values`, encoded as `kind` (F32, F16, BF16, Q8_0 or Q4_0)."""
    return TensorData(name, BY_NAME[kind], values.shape, encode(values, kind))


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[TensorData],
    *,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    """Write one GGUF file; plain ints become U32 (or wider), floats F32, lists arrays."""
    path.write_bytes(gguf_bytes(metadata, tensors, version=version, alignment=alignment))
    return path


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Sequence[TensorData],
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """The file that `write_gguf` writes."""
    values = dict(metadata)
    if alignment != 32:
        values["general.alignment"] = alignment
    head = bytearray(b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values)))
    for key, value in values.items():
        head += _string(key) + _value(value)
    data = bytearray()
    for one in tensors:
        head += _string(one.name) + struct.pack("<I", len(one.shape))
        head += struct.pack(f"<{len(one.shape)}Q", *reversed(one.shape))
        kind = one.type.ggml if one.ggml is None else one.ggml
        head += struct.pack("<IQ", kind, len(data))
        data += one.raw + bytes(-len(one.raw) % alignment)
    head += bytes(-len(head) % alignment)
    return bytes(head + data)


def write_split(
    folder: Path, stem: str, metadata: Mapping[str, Any], parts: Sequence[Sequence[TensorData]]
) -> list[Path]:
    """Write `parts` as a split model; the first part carries the metadata."""
    paths: list[Path] = []
    for number, part in enumerate(parts):
        split = {
            "split.no": Typed(Kind.U16, number),
            "split.count": Typed(Kind.U16, len(parts)),
            "split.tensors.count": Typed(Kind.I32, sum(map(len, parts))),
        }
        path = folder / f"{stem}-{number + 1:05}-of-{len(parts):05}.gguf"
        paths.append(write_gguf(path, {**(metadata if number == 0 else {}), **split}, part))
    return paths


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    typed = value if isinstance(value, Typed) else _typed(value)
    if not typed.array:
        return struct.pack("<I", typed.kind) + _scalar(typed.kind, typed.value)
    head = struct.pack("<IIQ", Kind.ARRAY, typed.kind, len(typed.value))
    if typed.kind is Kind.STRING:
        return head + b"".join(map(_string, typed.value))
    return head + struct.pack(f"<{len(typed.value)}{CODES[typed.kind]}", *typed.value)


def _scalar(kind: Kind, value: Any) -> bytes:
    return _string(value) if kind is Kind.STRING else struct.pack("<" + CODES[kind], value)


def _typed(value: Any) -> Typed:
    if isinstance(value, (list, tuple)):
        first = _typed(value[0] if value else 0)
        return Typed(Kind.I32 if first.kind is Kind.U32 else first.kind, value, array=True)
    if isinstance(value, bool):
        return Typed(Kind.BOOL, value)
    if isinstance(value, int):
        fits = 0 <= value < 1 << 32
        return Typed(Kind.U32 if fits else Kind.U64 if value >= 0 else Kind.I64, value)
    return Typed(Kind.F32 if isinstance(value, float) else Kind.STRING, value)


def encode(values: NDArray[np.float32], kind: str) -> bytes:
    """Float32 values as `kind`, rounded to nearest (GGML's reference quantizers, simplified)."""
    flat = np.ascontiguousarray(values, np.float32)
    if kind == "F32":
        return flat.tobytes()
    if kind == "F16":
        return flat.astype(np.float16).tobytes()
    if kind == "BF16":
        bits = flat.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).tobytes()
    blocks = flat.reshape(-1, 32)
    steps, low = {"Q8_0": (127, -127), "Q4_0": (8, -8)}[kind]
    peak = blocks[np.arange(len(blocks)), np.abs(blocks).argmax(axis=1)]
    scale = (np.abs(peak) / 127 if kind == "Q8_0" else peak / -8).astype(np.float16)
    divisor = np.where(scale == 0, 1, scale).astype(np.float32)[:, None]
    levels = np.clip(np.rint(blocks / divisor), low, steps - (kind == "Q4_0")).astype(np.int8)
    if kind == "Q4_0":
        nibbles = (levels + 8).astype(np.uint8)
        packed = nibbles[:, :16] | nibbles[:, 16:] << 4
    else:
        packed = levels.view(np.uint8)
    return np.hstack([scale[:, None].view(np.uint8), packed]).tobytes()


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Where a block's float16 scale (and minimum) lie, the minimum for a mean of zero over the
    scale, and the standard deviation of the weights for a scale of one and random levels."""

    scale: int
    spread: float
    minimum: int | None = None
    offset: float = 0.0


_BLOCKS: Final = {
    "Q4_0": _Blocks(0, 4.6),
    "Q4_1": _Blocks(0, 4.6, 2, -7.5),
    "Q5_0": _Blocks(0, 9.2),
    "Q5_1": _Blocks(0, 9.2, 2, -15.5),
    "Q8_0": _Blocks(0, 74.0),
    "Q2_K": _Blocks(80, 13.9, 82, 1.5),
    "Q3_K": _Blocks(108, 43.0),
    "Q4_K": _Blocks(0, 258.0, 2, 7.5),
    "Q5_K": _Blocks(0, 527.0, 2, 15.5),
    "Q6_K": _Blocks(208, 1368.0),
    "IQ4_NL": _Blocks(0, 70.0),
    "IQ4_XS": _Blocks(0, 1300.0),
}


def random_raw(kind: str, count: int, rng: np.random.Generator, deviation: float = 0.1) -> bytes:
    """`count` random weights as `kind`: every level and sub-scale occurs, scales are such that
    the weights' standard deviation is about `deviation`."""
    if kind in {"F32", "F16", "BF16"}:
        return encode((rng.standard_normal(count) * deviation).astype(np.float32), kind)
    wanted = BY_NAME[kind]
    blocks = rng.integers(0, 256, (count // wanted.elements, wanted.bytes), dtype=np.uint8)
    if kind == "MXFP4":
        exponent = round(np.log2(deviation / 8)) + 128
        blocks[:, 0] = rng.integers(exponent - 1, exponent + 2, len(blocks))
        return blocks.tobytes()
    layout = _BLOCKS[kind]
    scale = deviation / layout.spread * rng.uniform(0.7, 1.3, (len(blocks), 1))
    _put(blocks, layout.scale, scale)
    if layout.minimum is not None:
        _put(blocks, layout.minimum, scale * layout.offset)
    return blocks.tobytes()


def _put(blocks: NDArray[np.uint8], at: int, values: NDArray[np.float64]) -> None:
    blocks[:, at : at + 2] = values.astype(np.float16).view(np.uint8)


def random_tensor(
    name: str,
    kind: str,
    shape: tuple[int, ...],
    rng: np.random.Generator,
    deviation: float = 0.1,
) -> TensorData:
    """A tensor of random weights, see `random_raw`."""
    return TensorData(
        name, BY_NAME[kind], shape, random_raw(kind, int(np.prod(shape)), rng, deviation)
    )
