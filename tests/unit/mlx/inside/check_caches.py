"""The shim on each class of caches: live views, copies, cuts, prices, envelopes."""

from __future__ import annotations

import hashlib
import struct
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from superfluid_adapter_mlx import caches, trial
from superfluid_adapter_mlx.batch import Batch
from superfluid_adapter_mlx.engine import cache_module, mx
from superfluid_adapter_mlx.envelope import Header, Key, StoredPart, seal
from superfluid_adapter_mlx.model import Model
from superfluid_adapter_mlx.moves import export, imported
from superfluid_compat.errors import Unsupported
from support.mlx_models import model, quantized

KEY = Key("model", "mlx-lm of this kind")
PLAIN = caches.generation() == "plain"
NAMES = ("llama", "qwen3", "gemma3", "mamba2", "falcon_h1", "deepseek_v32", "quantized")


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    made = {name: model(name) for name in NAMES if name != "quantized"}
    return {
        **made,
        "quantized": quantized(model("wide")),
        "16-byte": model("16-byte", "float16"),
    }


def tokens(count: int, seed: int = 0, below: int = 64) -> list[int]:
    return [int(each) for each in np.random.default_rng(seed).integers(0, below, count)]


def filled(made: Model, count: int, seed: int = 0) -> list[Any]:
    held = made.fresh()
    if count:
        made.absorb(tokens(count, seed), held)
    return held


def apart(made: Model, left: list[Any], right: list[Any], steps: int = 3) -> float:
    """The largest difference of any logit over some single steps of both."""
    worst = 0.0
    for token in tokens(steps, seed=9):
        one, two = made.rows([token], left), made.rows([token], right)
        worst = max(worst, float(np.abs(one - two).max()))
    return worst


def moved(made: Model, held: list[Any], count: int) -> list[Any]:
    length, there = imported(export(held, count, KEY), made.template(), KEY)
    assert length == count
    return there


# Generations


def test_a_generation_is_told_by_class_and_not_by_version() -> None:
    class Meta:
        meta_state = ""

    between = SimpleNamespace(__version__="0.32.0", KVCache=Meta)
    assert caches.generation(between) == "meta"
    assert caches.generation(SimpleNamespace(__version__="0.31.3", KVCache=object)) == "plain"
    assert (not hasattr(cache_module.KVCache, "meta_state")) == PLAIN


# Prices


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("16-byte", 16), ("llama", 512), ("falcon_h1", 512), ("mamba2", 0), ("gemma3", 512)],
)
def test_a_token_costs_what_it_adds(models: dict[str, Model], name: str, wanted: int) -> None:
    assert trial.token_bytes(models[name]) == wanted


def test_a_cut_from_8192_to_128_gives_8064_tokens_back(models: dict[str, Model]) -> None:
    made = models["16-byte"]
    held = made.fresh()
    for start in range(0, 8192, 1024):
        made.absorb(tokens(1024, start), held)
    assert caches.held_bytes(held) == 131_072
    caches.cut(held, 8192 - 128)
    assert caches.held_bytes(held) - caches.live_bytes(held) == 8064 * 16
    assert caches.compactable(held, 16)
    compacted = caches.copied(held)
    assert caches.held_bytes(compacted) == 2048
    assert apart(made, held, compacted) == 0


def test_a_cut_of_less_than_a_growth_step_keeps_its_room(models: dict[str, Model]) -> None:
    held = filled(models["16-byte"], 256)
    caches.cut(held, 100)
    assert not caches.compactable(held, 16)


# Live views


def test_the_live_view_of_five_tokens_in_a_buffer_of_256() -> None:
    cache = cache_module.KVCache()
    cache.update_and_fetch(mx.zeros((1, 2, 5, 64)), mx.zeros((1, 2, 5, 64)))
    assert cache.keys.shape[2] == 256
    assert [it.shape for it in caches.live(cache).leaves()] == [(1, 2, 5, 64)] * 2


def test_the_live_view_of_quantized_keys() -> None:
    cache = cache_module.QuantizedKVCache(group_size=64, bits=8)
    cache.update_and_fetch(*[mx.zeros((1, 2, 5, 64), mx.float16)] * 2)
    found = [(it.dtype, it.shape) for it in caches.live(cache).leaves()]
    side = [(mx.uint32, (1, 2, 5, 16)), (mx.float16, (1, 2, 5, 1)), (mx.float16, (1, 2, 5, 1))]
    assert found == side * 2


def test_the_live_view_of_a_ring_before_and_after_it_wraps() -> None:
    cache = cache_module.RotatingKVCache(max_size=64)
    for count, rows in ((5, 5), (1, 6), (1, 7), *[(1, None)] * 60, (1, 64)):
        cache.update_and_fetch(mx.zeros((1, 2, count, 8)), mx.zeros((1, 2, count, 8)))
        if rows is not None:
            assert {it.shape[2] for it in caches.live(cache).leaves()} == {rows}


@pytest.mark.parametrize("count", [1, 5, 16, 17, 40])
def test_a_ring_goes_on_exactly_from_its_live_view(models: dict[str, Model], count: int) -> None:
    made = models["gemma3"]
    held = filled(made, count)
    assert apart(made, caches.copied(held), held, steps=80) == 0


def _every_empty_cache() -> list[Any]:
    made = [
        cache_module.KVCache(),
        cache_module.QuantizedKVCache(),
        cache_module.RotatingKVCache(8),
        cache_module.ArraysCache(2),
        cache_module.ChunkedKVCache(8),
    ]
    return [*made, cache_module.CacheList(cache_module.ArraysCache(2), cache_module.KVCache())]


def test_empty_caches_of_every_class_hold_nothing_and_can_be_copied_and_exported() -> None:
    every = _every_empty_cache()
    assert caches.held_bytes(every) == caches.live_bytes(every) == 0
    copies = caches.copied(every)
    assert [type(it) for it in copies] == [type(it) for it in every]
    template = [caches.live(it) for it in every]
    count, there = imported(export(every, 0, KEY), template, KEY)
    assert (count, caches.held_bytes(there)) == (0, 0)


# Copies


@pytest.mark.parametrize("full", [False, True], ids=["with-room", "without"])
def test_copies_of_keys_go_their_own_way(full: bool) -> None:
    cache = cache_module.KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, 6, 4)), mx.zeros((1, 1, 6, 4)))
    if full:
        (cache,) = caches.copied([cache])
    (copy,) = caches.copied([cache])
    for each in (cache, copy):
        each.trim(1)
    for each, value in ((cache, 100.0), (copy, 200.0)):
        each.update_and_fetch(mx.full((1, 1, 1, 4), value), mx.full((1, 1, 1, 4), value))
    assert (cache.keys[0, 0, 5, 0].item(), copy.keys[0, 0, 5, 0].item()) == (100.0, 200.0)


def test_a_copy_of_a_recurrent_state_is_its_own_list_and_may_have_gaps() -> None:
    cache = cache_module.ArraysCache(2)
    cache[0] = mx.ones((1, 3))
    (copy,) = caches.copied([cache])
    copy[0] = mx.zeros((1, 3))
    assert cache[0].sum().item() == 3
    assert copy[1] is None
    (there,) = imported(export([cache], 1, KEY), [caches.live(cache)], KEY)[1]
    assert there[0].sum().item() == 3
    assert there[1] is None


def test_a_small_copy_does_not_keep_a_large_buffer() -> None:
    cache = cache_module.KVCache()
    for _ in range(8):
        cache.update_and_fetch(mx.zeros((1, 1, 1024, 64)), mx.zeros((1, 1, 1024, 64)))
    mx.eval(cache.keys, cache.values)
    cache.trim(8192 - 16)
    (copy,) = caches.copied([cache])
    before = mx.get_active_memory()
    del cache
    assert before - mx.get_active_memory() > 4_000_000
    assert caches.held_bytes([copy]) == 2 * 16 * 64 * 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 6, 41])
def test_copies_and_moves_go_on_exactly(models: dict[str, Model], name: str, count: int) -> None:
    made = models[name]
    held = filled(made, count)
    copy, there = caches.copied(held), moved(made, held, count)
    again = caches.copied(held)
    assert apart(made, copy, held) == 0
    assert apart(made, there, again) == 0


# Cuts


@pytest.mark.parametrize("name", ["llama", "quantized", "deepseek_v32"])
def test_a_cut_goes_back_exactly(models: dict[str, Model], name: str) -> None:
    made = models[name]
    held, wanted = filled(made, 18), filled(made, 7)
    caches.cut(held, 11)
    assert apart(made, held, wanted) < 2e-6


def test_a_wrapped_ring_is_not_cut() -> None:
    cache = cache_module.RotatingKVCache(max_size=16)
    cache.update_and_fetch(mx.zeros((1, 1, 16, 4)), mx.zeros((1, 1, 16, 4)))
    before = (cache.offset, cache._idx)
    with pytest.raises(Unsupported, match="RotatingKVCache has wrapped"):
        caches.cut([cache_module.KVCache(), cache], 1)
    assert (cache.offset, cache._idx) == before


def test_a_recurrent_state_in_a_list_is_refused_by_its_class(models: dict[str, Model]) -> None:
    made = models["falcon_h1"]
    held, same = filled(made, 8), filled(made, 8)
    assert caches.cuts(held) == "never"
    with pytest.raises(Unsupported, match="ArraysCache does not go back"):
        caches.cut(held, 2)
    assert apart(made, held, same) == 0


def test_a_cut_past_the_start_is_a_fault_and_no_short_cut() -> None:
    from superfluid_compat.errors import Fault

    cache = cache_module.KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, 18, 4)), mx.zeros((1, 1, 18, 4)))
    with pytest.raises(Fault, match="less than 999"):
        caches.cut([cache], 999)


def test_a_class_that_is_not_known_is_refused_by_name() -> None:
    class Mine(cache_module.KVCache):  # type: ignore[misc]  # mlx-lm has no types
        pass

    for cache in (Mine(), cache_module.ConcatenateKVCache()):
        with pytest.raises(Unsupported, match=type(cache).__name__):
            caches.copied([cache])


def test_what_one_generation_computes_wrongly_is_refused_by_class_and_reason() -> None:
    held = [cache_module.CacheList(cache_module.ChunkedKVCache(8), cache_module.KVCache())]
    assert caches.broken(held, "plain") is None
    assert "ChunkedKVCache loses tokens" in (caches.broken(held, "meta") or "")
    assert caches.broken([cache_module.KVCache()]) is None


# Envelopes


def test_an_export_has_the_size_of_what_is_live() -> None:
    cache = cache_module.KVCache()
    cache.update_and_fetch(*[mx.zeros((1, 2, 5, 64), mx.float16)] * 2)
    assert len(export([cache], 5, KEY)) < 4096


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_every_bit_of_a_state_comes_back(kind: str) -> None:
    mx.random.seed(1)
    cache = cache_module.KVCache()
    arrays = [mx.random.normal((1, 2, 5, 8)).astype(getattr(mx, kind)) for _ in range(2)]
    cache.update_and_fetch(*arrays)
    (there,) = imported(export([cache], 5, KEY), [caches.live(cache)], KEY)[1]
    assert there.keys.dtype == arrays[0].dtype
    assert mx.array_equal(there.keys, arrays[0]).item()
    assert mx.array_equal(there.values, arrays[1]).item()


def test_arrays_without_width_are_arrays() -> None:
    cache = cache_module.KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, 5, 8)), mx.zeros((1, 1, 5, 0)))
    (there,) = imported(export([cache], 5, KEY), [caches.live(cache)], KEY)[1]
    assert there.values.shape == (1, 1, 5, 0)


def _resealed(payload: bytes, **changes: object) -> bytes:
    """The payload with other words in its header, and the right checksum."""
    _, length, _ = struct.unpack_from("<8sI16s", payload)
    content = payload[28:]
    header = msgspec.json.decode(content[:length], type=Header)
    return seal(msgspec.structs.replace(header, **changes), [content[length:]])


def test_a_truncated_payload_is_refused_wherever_it_ends(models: dict[str, Model]) -> None:
    made = models["llama"]
    payload, template = export(filled(made, 5), 5, KEY), made.template()
    for end in range(0, len(payload), 64):
        with pytest.raises(Unsupported):
            imported(payload[:end], template, KEY)


def test_a_payload_that_contradicts_the_model_is_refused(models: dict[str, Model]) -> None:
    made = models["gemma3"]
    held = filled(made, 20)
    payload, template = export(held, 20, KEY), made.template()
    _, length, _ = struct.unpack_from("<8sI16s", payload)
    parts = msgspec.json.decode(payload[28 : 28 + length], type=Header).parts
    first = parts[0]

    def other(**changes: object) -> tuple[StoredPart, ...]:
        return (msgspec.structs.replace(first, **changes), *parts[1:])

    wrong: list[dict[str, object]] = [
        {"parts": other(form="KVCache")},
        {"parts": other(form="Popen")},
        {"parts": (*parts, first)},
        {"parts": parts[1:]},
        {"parts": other(numbers={**first.numbers, "max_size": 4096})},
        {"parts": other(numbers={**first.numbers, "_idx": 999})},
        {"parts": other(numbers={**first.numbers, "_idx": -1})},
        {"parts": other(numbers={"offset": 20})},
        {"parts": other(arrays=first.arrays[:1])},
        {"parts": other(arrays=(None, None))},
        {"tokens": 19},
        {"tokens": 1 << 40},
        {"tokens": -1},
        {"version": 2},
    ]
    for changes in wrong:
        with pytest.raises(Unsupported):
            imported(_resealed(payload, **changes), template, KEY)
    assert imported(_resealed(payload), template, KEY)[0] == 20


def test_state_of_another_model_or_version_is_refused_by_it(models: dict[str, Model]) -> None:
    made = models["llama"]
    payload, template = export(filled(made, 5), 5, KEY), made.template()
    with pytest.raises(Unsupported, match="another model"):
        imported(payload, template, Key("other", KEY.engine))
    newer = Key(KEY.model, "mlx-lm of another kind")
    with pytest.raises(Unsupported, match="mlx-lm of this kind, this is mlx-lm of another kind"):
        imported(payload, template, newer)
    assert imported(payload, template, newer, foreign=True)[0] == 5
    with pytest.raises(Unsupported, match="another model"):
        imported(payload, template, Key("other", newer.engine), foreign=True)


def test_a_flipped_bit_anywhere_is_seen(models: dict[str, Model]) -> None:
    made = models["llama"]
    payload, template = export(filled(made, 5), 5, KEY), made.template()
    for at in range(0, len(payload), 997):
        damaged = payload[:at] + bytes([payload[at] ^ 4]) + payload[at + 1 :]
        with pytest.raises(Unsupported):
            imported(damaged, template, KEY)
    assert hashlib.blake2b(payload[28:], digest_size=16).digest() == payload[12:28]


# Batches


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mamba2", "falcon_h1"])
def test_a_batch_of_unequal_histories_decodes_as_its_rows_alone(
    models: dict[str, Model], name: str
) -> None:
    made = models[name]
    lengths = (5, 23, 40, 9)
    alone = [filled(made, count, seed=count) for count in lengths]
    batch = Batch({row: filled(made, count, seed=count) for row, count in enumerate(lengths[:3])})

    def step(token: int) -> None:
        rows = made.together([token] * len(batch.rows), batch)
        for found, row in zip(rows, batch.rows, strict=True):
            np.testing.assert_allclose(found, made.rows([token], alone[row])[0], atol=1e-5)

    step(3)
    step(4)
    middle = batch.take(1)
    assert apart(made, middle, caches.copied(alone[1]), steps=1) < 1e-5
    batch.keep([0, 2])
    batch.join({3: filled(made, 9, seed=9)})
    assert batch.rows == [0, 2, 3]
    step(5)
    step(6)


def test_a_batch_of_half_precision_stays_so(models: dict[str, Model]) -> None:
    made = models["16-byte"]
    batch = Batch({0: filled(made, 3), 1: filled(made, 4)})
    batch.join({2: filled(made, 1)})
    made.together([1, 2, 3], batch)
    assert {it.dtype for it in caches.held_arrays(batch.caches)} <= {mx.float16, mx.int32}


def test_padding_and_room_to_grow_are_charged(models: dict[str, Model]) -> None:
    made = models["16-byte"]
    batch = Batch({row: filled(made, 3, seed=row) for row in range(4)})
    made.together([1, 2, 3, 4], batch)
    assert batch.bytes // 16 // 4 == 259


def test_a_prompt_longer_than_its_ring_is_charged_until_the_next_step(
    models: dict[str, Model],
) -> None:
    made = models["gemma3"]
    held = filled(made, 300)
    assert held[0].keys.shape[2] == 300
    assert caches.held_bytes(held[:1]) == 153_600 // 4
    made.rows([1], held)
    assert held[0].keys.shape[2] == 16


@pytest.mark.parametrize(
    ("name", "meta", "plain"),
    [
        ("llama", None, None),
        ("gemma3", None, None),
        ("falcon_h1", None, None),
        ("quantized", "QuantizedKVCache does not batch", "QuantizedKVCache does not batch"),
        ("afm7", "a batch fails with ValueError", "a batch decodes otherwise"),
        ("gemma3n", "a batch fails with ValueError", None),
        ("llama4", "ChunkedKVCache does not batch", "ChunkedKVCache does not batch"),
    ],
)
def test_a_model_that_batches_wrongly_is_found_out(
    models: dict[str, Model], name: str, meta: str | None, plain: str | None
) -> None:
    found = trial.batching_fault(models[name] if name in models else model(name))
    wanted = plain if PLAIN else meta
    assert (found is None) == (wanted is None), found
    assert (wanted or "") in (found or "")


def test_a_ring_that_keeps_its_first_tokens_does_not_batch(models: dict[str, Model]) -> None:
    made = model("llama")
    made.module.make_cache = lambda: [
        cache_module.RotatingKVCache(16, keep=4) for _ in made.module.layers
    ]
    assert "forgets the tokens it is to keep" in (trial.batching_fault(made) or "")
