"""The NumPy decoders against the reference `gguf` package's, on random blocks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from superfluid_adapter_native.quants.decode import decode
from superfluid_adapter_native.quants.types import BY_NAME, TYPES, TensorType
from support.gguf_writer import encode, random_raw

reference: Callable[..., NDArray[np.float32]] = dequantize


def expected(kind: TensorType, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return reference(raw, GGMLQuantizationType(kind.ggml)).reshape(-1)


def close(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
    """Equal within float rounding of the largest term a weight is made of."""
    finite = np.abs(wanted[np.isfinite(wanted)])
    scale = float(finite.max()) if finite.size else 1.0
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6 * scale)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_random_blocks(kind: TensorType) -> None:
    rng = np.random.default_rng(kind.ggml)
    raw = np.frombuffer(random_raw(kind.name, 256 * 64, rng), np.uint8)
    found = decode(kind, raw, 256 * 64)
    assert found.dtype == np.float32
    assert found.shape == (256 * 64,)
    assert 0.05 < found.std() < 0.2
    close(found, expected(kind, raw))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    "scale", [0.0, -0.0, 6e-8, 65504.0, -65504.0, np.inf, np.nan], ids=lambda scale: f"{scale:g}"
)
def test_scales_at_the_edges(kind: TensorType, scale: float) -> None:
    rng = np.random.default_rng(kind.ggml)
    blocks = rng.integers(0, 256, (8, kind.bytes), dtype=np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "F32": (2,)}.get(
        kind.name, (0, 2) if kind.name in {"Q4_1", "Q5_1", "Q4_K", "Q5_K"} else (0,)
    )
    half = np.array([scale], np.float16).view(np.uint8)
    for place in places:
        if kind.name == "MXFP4":
            blocks[:, 0] = {0.0: 1, 6e-8: 2, 65504.0: 254}.get(scale, 200)
        else:
            blocks[:, place : place + 2] = half
    raw = blocks.reshape(-1)
    close(decode(kind, raw, 8 * kind.elements), expected(kind, raw))


def test_mxfp4_exponents() -> None:
    """2^(e - 128) for every e, by exact arithmetic, past both ends of float32's normal range."""
    for exponent in range(256):
        found = decode(BY_NAME["MXFP4"], np.array([exponent, *range(16)], np.uint8), 32)
        exact = np.ldexp([0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0], exponent - 128)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(found[:8], exact.astype(np.float32))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_what_the_tests_encode_comes_back(kind: str) -> None:
    values = np.random.default_rng(3).standard_normal((4, 64)).astype(np.float32)
    raw = np.frombuffer(encode(values, kind), np.uint8)
    error = np.abs(decode(BY_NAME[kind], raw, values.size) - values.reshape(-1)).max()
    assert error <= {"F32": 0, "F16": 2e-3, "BF16": 1.6e-2, "Q8_0": 0.02, "Q4_0": 0.45}[kind]


def test_a_row_within_a_larger_buffer() -> None:
    kind = BY_NAME["Q4_K"]
    rng = np.random.default_rng(5)
    raw = np.frombuffer(random_raw("Q4_K", 1024, rng), np.uint8)
    np.testing.assert_array_equal(decode(kind, raw, 256), decode(kind, raw, 1024)[:256])


def test_counts_that_do_not_fit_are_refused() -> None:
    kind = BY_NAME["Q4_K"]
    with pytest.raises(ValueError, match="no multiple"):
        decode(kind, np.zeros(144, np.uint8), 200)
    with pytest.raises(ValueError, match="fewer than 512"):
        decode(kind, np.zeros(144, np.uint8), 512)
