"""Row functions and attention against NumPy in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from superfluid_adapter_native.kernels.engine import CacheType, Kernels

Floats = NDArray[np.float32]
Parts = tuple[NDArray[np.generic], ...]


@pytest.fixture(scope="module")
def engine(kernels: Path) -> Kernels:
    return Kernels(threads=2, exact=False, cache=kernels, writable=True)


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


widths = pytest.mark.parametrize("columns", [1, 8, 37, 640])


@widths
def test_rms_norm(engine: Kernels, columns: int) -> None:
    x, w = normal(50, columns), normal(columns)
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6) * w
    np.testing.assert_allclose(engine.rms_norm(x, w, 1e-6), wanted, rtol=1e-5, atol=1e-6)
    engine.rms_norm(x, w, 1e-6, x)
    np.testing.assert_allclose(x, wanted, rtol=1e-5, atol=1e-6)


@widths
def test_gates(engine: Kernels, columns: int) -> None:
    gate, up = normal(50, columns) * 6, normal(50, columns, seed=1)
    gate[0, 0], gate[1, 0], gate[2, 0] = -200, 200, 0
    g = gate.astype(np.float64)
    silu = g / (1 + np.exp(-g)) * up
    gelu = g / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * up
    np.testing.assert_allclose(engine.silu_mul(gate, up), silu, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(engine.gelu_tanh_mul(gate, up), gelu, rtol=1e-5, atol=1e-5)


@widths
def test_softcap(engine: Kernels, columns: int) -> None:
    x = normal(50, columns) * 40
    wanted = 30 * np.tanh(x.astype(np.float64) / 30)
    engine.softcap(x, 30.0)
    np.testing.assert_allclose(x, wanted, atol=2e-5)


@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize(("size", "half"), [(64, 32), (64, 10), (6, 3), (256, 128)])
def test_rope(engine: Kernels, pairs: bool, size: int, half: int) -> None:
    q, angles, positions = normal(3, 2, size), normal(9, half), np.array([7, 0, 3])
    cosine, sine = (f(angles[positions])[:, None] for f in (np.cos, np.sin))
    first = slice(0, 2 * half, 2) if pairs else slice(0, half)
    second = slice(1, 2 * half, 2) if pairs else slice(half, 2 * half)
    wanted = q.copy()
    wanted[..., first] = q[..., first] * cosine - q[..., second] * sine
    wanted[..., second] = q[..., second] * cosine + q[..., first] * sine
    engine.rope(q, positions, np.cos(angles), np.sin(angles), pairs=pairs)
    np.testing.assert_allclose(q, wanted, atol=1e-6)
    with pytest.raises(IndexError):
        engine.rope(q, np.array([0, 1, 9]), np.cos(angles), np.sin(angles), pairs=pairs)


def kept(kind: CacheType, x: Floats) -> tuple[Parts, NDArray[np.float64]]:
    """A cache's parts, and what they mean."""
    if kind != "q8_0":
        data = x.astype({"f32": np.float32, "f16": np.float16}[kind])
        return (data,), data.astype(np.float64)
    blocks = x.reshape(*x.shape[:2], -1, 32)
    scales = np.abs(blocks).max(axis=-1) / np.float32(127)
    codes = np.rint(blocks / scales[..., None]).astype(np.int8)
    return (codes.reshape(x.shape), scales), (codes * scales[..., None]).reshape(x.shape)


def attended(
    q: Floats,
    keys: NDArray[np.float64],
    values: NDArray[np.float64],
    start: int,
    window: int | None,
    cap: float | None,
) -> NDArray[np.float64]:
    n, heads, size = q.shape
    out = np.empty((n, heads, values.shape[2]))
    for row in range(n):
        last = start + row + 1
        seen = slice(max(0, last - (window or last)), last)
        for head in range(heads):
            group = head * keys.shape[1] // heads
            scores = keys[seen, group] @ q[row, head] / np.sqrt(size)
            scores = cap * np.tanh(scores / cap) if cap else scores
            shares = np.exp(scores - scores.max())
            out[row, head] = shares / shares.sum() @ values[seen, group]
    return out


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (6, 2), (3, 3), (10, 2)])
@pytest.mark.parametrize(
    ("start", "n", "window", "cap"),
    [(0, 9, None, None), (40, 3, 16, None), (100, 1, None, 2.0), (0, 50, 7, 5.0), (3, 2, 64, None)],
)
def test_attention(
    engine: Kernels,
    kind: CacheType,
    heads: int,
    kv_heads: int,
    start: int,
    n: int,
    window: int | None,
    cap: float | None,
) -> None:
    q = normal(n, heads, 64) * 3
    keys, plain_keys = kept(kind, normal(start + n + 2, kv_heads, 64, seed=1))
    values, plain_values = kept(kind, normal(start + n + 2, kv_heads, 96, seed=2))
    found = engine.attention(q, keys, values, start=start, scale=64**-0.5, window=window, cap=cap)
    wanted = attended(q, plain_keys, plain_values, start, window, cap)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("size", [6, 20, 256])
def test_attention_with_heads_of_any_size(engine: Kernels, size: int) -> None:
    q, keys, values = normal(5, 2, size), normal(5, 1, size, seed=1), normal(5, 1, size, seed=2)
    found = engine.attention(q, (keys,), (values,), start=0, scale=size**-0.5)
    plain = (keys.astype(np.float64), values.astype(np.float64))
    np.testing.assert_allclose(found, attended(q, *plain, 0, None, None), atol=1e-5)


def test_attention_rows_have_the_same_bits_in_any_company(engine: Kernels) -> None:
    q = normal(40, 4, 64)
    keys, values = (normal(50, 2, 64, seed=i) for i in (1, 2))
    together = engine.attention(q, (keys,), (values,), start=10, scale=0.1, window=17)
    for row in (0, 21, 39):
        alone = engine.attention(
            q[row : row + 1], (keys,), (values,), start=10 + row, scale=0.1, window=17
        )
        np.testing.assert_array_equal(alone[0], together[row])


def test_caches_that_do_not_fit_are_refused(engine: Kernels) -> None:
    q, keys = normal(2, 4, 64), normal(5, 2, 64)
    refuse = pytest.raises(ValueError, match=r"cache|keys")
    with refuse:
        engine.attention(q, (keys,), (keys,), start=4, scale=1.0)
    with refuse:
        engine.attention(q, (keys[:, :, :32],), (keys,), start=0, scale=1.0)
    with refuse:
        engine.attention(q, (keys,), (keys.astype(np.float16),), start=0, scale=1.0)
    with refuse:
        engine.attention(q, (keys.astype(np.int8),), (keys.astype(np.int8),), start=0, scale=1.0)
