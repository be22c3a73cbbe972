"""Keys and values: growth, views, types, copies."""

from __future__ import annotations

import numpy as np
import pytest

from superfluid_adapter_native.kv_cache import Array, KVCache, KVType, LayerShape
from superfluid_compat.errors import Capacity, OutOfBoundary

SHAPES = (LayerShape(2, 64), LayerShape(1, 32))


def rows(count: int, shape: LayerShape, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((count, shape.kv_heads, shape.head_dim), np.float32)
    return keys, rng.standard_normal((count, shape.kv_heads, shape.head_dim), np.float32)


def filled(count: int, kind: KVType = "f32", limit: int | None = None) -> KVCache:
    cache = KVCache(SHAPES, kind=kind, limit=limit)
    for layer, shape in enumerate(SHAPES):
        cache.append(layer, *rows(count, shape, layer))
    return cache


def test_stack_gives_back_what_was_appended_in_order() -> None:
    cache = KVCache(SHAPES, capacity=4)
    keys, values = rows(50, SHAPES[0])
    for at in range(0, 50, 5):
        cache.append(0, keys[at : at + 5], values[at : at + 5])
    kept = cache.stack(0)
    assert np.array_equal(kept[0], keys)
    assert np.array_equal(kept[1], values)
    assert (cache.length(0), cache.length(1)) == (50, 0)


def test_one_token_may_come_without_a_row_axis() -> None:
    cache = KVCache(SHAPES)
    keys, values = rows(1, SHAPES[0])
    cache.append(0, keys[0], values[0])
    assert np.array_equal(cache.stack(0)[0], keys)


def test_stack_is_a_view_of_the_buffer() -> None:
    cache = filled(3)
    first, second = cache.stack(0)[0], cache.stack(0)[0]
    assert np.shares_memory(first, second)
    assert first.dtype == np.float32
    assert first.shape == (3, 2, 64)


def test_buffers_double_so_that_appending_is_cheap_on_average() -> None:
    cache = KVCache((LayerShape(1, 32),), capacity=4)
    sizes = set()
    for _ in range(1000):
        cache.append(0, *rows(1, LayerShape(1, 32)))
        sizes.add(cache.capacity)
    assert sorted(sizes) == [4 << n for n in range(9)]


def test_the_limit_ends_growth_and_loses_nothing() -> None:
    cache = filled(10, limit=10)
    assert cache.capacity == 10
    with pytest.raises(Capacity, match="holds 10 tokens, 11 were wanted"):
        cache.append(0, *rows(1, SHAPES[0]))
    assert cache.length(0) == 10
    with pytest.raises(OutOfBoundary):
        KVCache(SHAPES, capacity=0)


def test_reset_of_one_layer_and_of_all() -> None:
    cache = filled(5)
    cache.reset(0)
    assert (cache.length(0), cache.length(1)) == (0, 5)
    cache.reset()
    assert cache.length(1) == 0
    assert cache.nbytes == 0


def test_truncation_keeps_the_first_tokens() -> None:
    cache = filled(9)
    before = cache.stack(1)[0][:4].copy()
    cache.truncate(4)
    assert np.array_equal(cache.stack(1)[0], before)
    cache.append(0, *rows(1, SHAPES[0]))
    assert (cache.length(0), cache.length(1)) == (5, 4)


@pytest.mark.parametrize(("kind", "error"), [("f32", 0.0), ("f16", 1e-3), ("q8_0", 5e-3)])
def test_each_type_keeps_values_within_its_rounding(kind: KVType, error: float) -> None:
    cache = filled(40, kind)
    for layer, shape in enumerate(SHAPES):
        for kept, wanted in zip(cache.stack(layer), rows(40, shape, layer), strict=True):
            assert kept.dtype == np.float32
            assert np.abs(kept - wanted).max() <= error * np.abs(wanted).max()
    per_row = sum(shape.row_bytes(kind) for shape in SHAPES)
    assert cache.nbytes == cache.capacity * per_row


def test_q8_0_keeps_zeros_and_does_not_divide_by_them() -> None:
    cache = KVCache((LayerShape(1, 32),), kind="q8_0")
    cache.append(0, np.zeros((1, 1, 32), np.float32), np.zeros((1, 1, 32), np.float32))
    assert not cache.stack(0)[0].any()


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_a_copy_is_its_own(kind: KVType) -> None:
    cache = filled(20, kind)
    other = cache.copy(7)
    assert other.length(0) == 7
    assert np.array_equal(other.stack(1)[1], cache.stack(1)[1][:7])
    other.append(0, *rows(1, SHAPES[0], 9))
    assert cache.length(0) == 20
    assert not np.shares_memory(other.stack(0)[0], cache.stack(0)[0])


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_dump_and_load_are_inverse(kind: KVType) -> None:
    cache = filled(20, kind)
    payload = b"".join(cache.dump(13))
    other = KVCache(SHAPES, kind=kind)
    other.load(13, memoryview(payload))
    for layer in range(2):
        for mine, theirs in zip(other.stack(layer), cache.stack(layer), strict=True):
            assert np.array_equal(mine, theirs[:13])
    with pytest.raises(OutOfBoundary, match="bytes of state"):
        KVCache(SHAPES, kind=kind).load(14, memoryview(payload))
