"""What streaming reads and what a token costs: counted, not timed."""

from __future__ import annotations

import itertools
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from superfluid_adapter_native.forward import Forwarder
from superfluid_adapter_native.kernels.driver import Driver
from superfluid_adapter_native.kernels.tape import Tape
from superfluid_adapter_native.kv_cache import KVCache
from superfluid_adapter_native.memory import MemoryManager, TensorHandle
from superfluid_workerd.adapter import Feed
from support.gguf_writer import write_split
from support.native_models import ignore, one_by_one, opened, whole
from support.tiny_models import TinyModel, model_metadata, model_tensors, write_model

TOKENS = [int(token) for token in np.random.default_rng(5).integers(3, 300, 24)]
SPEC = TinyModel("llama", layers=5, width=64, ff=256)
MIXTURE = TinyModel("qwen3moe", layers=3, experts=16, experts_used=2)
MIB = 1 << 20


def test_a_split_model_streams_from_all_its_files(tmp_path: Path, kernels: Path) -> None:
    tensors = model_tensors(SPEC)
    parts = write_split(
        tmp_path, "m", model_metadata(SPEC), [tensors[:7], tensors[7:20], tensors[20:]]
    )
    single = write_model(tmp_path / "single.gguf", SPEC)
    with opened(single, kernels) as loaded:
        wanted = whole(loaded.runtime, TOKENS)
    for part in (parts[0], parts[2]):
        with opened(part, kernels, cache_bytes=0) as loaded:
            assert loaded.record.got["layers-resident"] == 0
            assert np.array_equal(whole(loaded.runtime, TOKENS), wanted)


@pytest.mark.parametrize("read_ahead", [True, False])
@pytest.mark.parametrize("cache_bytes", [0, 300_000])
def test_several_sequences_and_many_steps_stream_to_the_same_bits(
    cache_bytes: int, read_ahead: bool, tmp_path: Path, kernels: Path
) -> None:
    path = write_model(tmp_path / "m.gguf", SPEC)
    with opened(path, kernels) as loaded:
        wanted = one_by_one(loaded.runtime, loaded.runtime.seq_create(), TOKENS)
    with opened(path, kernels, cache_bytes=cache_bytes, read_ahead=read_ahead) as loaded:
        runtime = loaded.runtime
        seats = [runtime.seq_create() for _ in range(3)]
        for at, token in enumerate(TOKENS):
            for row in runtime.step([Feed(seat, [token], at) for seat in seats], ignore):
                assert row is not None
                assert np.array_equal(row[0], wanted[at])


def test_a_step_walks_the_streamed_layers_once_for_all_sequences(
    tmp_path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.gguf", SPEC)
    acquired: list[str] = []
    right = MemoryManager.acquire

    def counting(self: MemoryManager, name: str) -> TensorHandle:
        acquired.append(name)
        return right(self, name)

    with opened(path, kernels, cache_bytes=0, read_ahead=False) as loaded:
        runtime = loaded.runtime
        seats = [runtime.seq_create() for _ in range(4)]
        runtime.step([Feed(seat, [9], 0) for seat in seats], ignore)
        monkeypatch.setattr(MemoryManager, "acquire", counting)
        runtime.step([Feed(seat, [9], 1) for seat in seats], ignore)
    assert len(acquired) == len(set(acquired))
    layers = {name for name in acquired if name.startswith("blk.")}
    assert len(layers) == SPEC.layers * 7


def test_a_streamed_head_is_never_mapped_whole(
    tmp_path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = TinyModel("llama", layers=2, width=256, vocabulary_size=40_000)
    path = write_model(tmp_path / "m.gguf", spec)
    held: list[int] = []
    right = MemoryManager.acquire

    def watching(self: MemoryManager, name: str) -> TensorHandle:
        found = right(self, name)
        held.append(self.resident_bytes)
        return found

    with opened(path, kernels) as loaded:
        wanted = whole(loaded.runtime, TOKENS)
    monkeypatch.setattr(MemoryManager, "acquire", watching)
    with opened(path, kernels, cache_bytes=0) as loaded:
        held.clear()
        assert np.array_equal(whole(loaded.runtime, TOKENS), wanted)
        room = loaded.plan["streamed weights"] + loaded.plan["read-ahead"]
    head = 40_000 * 256 * 4
    assert max(held) <= room + MIB // 4
    assert room < head // 3


@pytest.mark.parametrize("cache_bytes", [0, "auto"])
def test_of_experts_only_the_chosen_are_bound(
    cache_bytes: int | str, tmp_path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.gguf", MIXTURE)
    read: list[tuple[str, int]] = []
    bound: set[int] = set()
    right_read, right_expert = MemoryManager.read, Forwarder._expert

    def reading(self: MemoryManager, name: str, first: int = 0, count: int | None = None) -> Any:
        if "_exps" in name:
            assert count is not None
            read.append((name, first // count))
        return right_read(self, name, first, count)

    def expert(self: Forwarder, weights: Any, number: int, x: Any) -> Any:
        bound.add(number)
        return right_expert(self, weights, number, x)

    monkeypatch.setattr(Forwarder, "_expert", expert)
    with opened(path, kernels, cache_bytes=cache_bytes) as loaded:
        monkeypatch.setattr(MemoryManager, "read", reading)
        runtime = loaded.runtime
        runtime.step([Feed(runtime.seq_create(), [7], 0)], ignore)
    assert 0 < len(bound) <= MIXTURE.layers * MIXTURE.experts_used
    if cache_bytes == 0:
        # Three matrices of each of two experts of each layer; never a tensor from end to end.
        assert len(read) == MIXTURE.layers * MIXTURE.experts_used * 3
        assert {expert for _, expert in read} == bound
    else:
        assert not read


@dataclass(frozen=True, slots=True)
class Cost:
    """What one step took: kernels with their tasks, calls of functions, and the most bytes that it
    held beyond what was there, arrays included."""

    kernels: list[tuple[int, int]]
    calls: int
    bytes: int


def _cost(steps: Iterator[Callable[[], object]], monkeypatch: pytest.MonkeyPatch) -> Cost:
    """Counted over one step each, so that no counting counts another."""
    kernels: list[tuple[int, int]] = []
    calls = 0
    right, again = Driver.run, Driver.replay

    def counting(self: Driver, kernel: int, words: Any, tasks: int, **rest: Any) -> None:
        kernels.append((kernel, tasks))
        right(self, kernel, words, tasks, **rest)

    def counting_again(self: Driver, tape: Tape, segment: int) -> None:
        kernels.append((segment, tape.segment(segment)[1]))
        again(self, tape, segment)

    def called(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event.endswith("call")

    with monkeypatch.context() as patch:
        patch.setattr(Driver, "run", counting)
        patch.setattr(Driver, "replay", counting_again)
        next(steps)()
    step = next(steps)
    sys.setprofile(called)
    try:
        step()
    finally:
        sys.setprofile(None)
    step = next(steps)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        step()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return Cost(kernels, calls, peak - before)


def _early_and_late(path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Cost, ...]:
    """Of a token at position 3 and at 484; in between the tables and buffers grow to their size."""
    with opened(path, kernels, context=512) as loaded:
        runtime = loaded.runtime
        sequence = runtime.seq_create()

        def steps() -> Iterator[Callable[[], object]]:
            for at in itertools.count(runtime.seq_length(sequence)):
                yield partial(runtime.step, [Feed(sequence, [9], at)], ignore)

        runtime.step([Feed(sequence, [5, 6, 7], 0)], ignore)
        early = _cost(steps(), monkeypatch)
        at = runtime.seq_length(sequence)
        runtime.step([Feed(sequence, [3 + i % 200 for i in range(484 - at)], at)], ignore)
        return early, _cost(steps(), monkeypatch)


_NOISE_BYTES = 4096
"""Less than a sixteenth of what 484 tokens' keys take in a layer."""


def test_a_token_costs_the_same_late_in_a_stream_but_for_attentions_share(
    tmp_path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step computes one row through the same kernels on as many tasks, calls the same functions
    as often, and holds no more memory, wherever it stands: what grows is within attention."""
    early, late = _early_and_late(write_model(tmp_path / "m.gguf", SPEC), kernels, monkeypatch)
    assert early.kernels == late.kernels
    assert early.calls == late.calls
    assert abs(late.bytes - early.bytes) < _NOISE_BYTES


def _copied(parts: tuple[NDArray[Any], ...]) -> tuple[NDArray[Any], ...]:
    return tuple(part.copy() for part in parts)


def test_a_copy_of_the_cache_would_show(
    tmp_path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above counts does see a cache that is copied for each token."""
    right = KVCache.raw

    def copying(self: KVCache, layer: int) -> tuple[Any, Any]:
        keys, values = right(self, layer)
        return _copied(keys), _copied(values)

    monkeypatch.setattr(KVCache, "raw", copying)
    early, late = _early_and_late(write_model(tmp_path / "m.gguf", SPEC), kernels, monkeypatch)
    assert late.bytes - early.bytes > 16 * _NOISE_BYTES


def test_rows_of_a_streamed_embedding_are_all_that_is_read_of_it(
    tmp_path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.gguf", SPEC)
    read: list[int] = []
    right = MemoryManager.read_rows

    def counting(self: MemoryManager, name: str, rows: Any) -> Any:
        read.extend(rows.tolist())
        return right(self, name, rows)

    monkeypatch.setattr(MemoryManager, "read_rows", counting)
    with opened(path, kernels, cache_bytes=0) as loaded:
        whole(loaded.runtime, [9, 5, 9, 9])
    assert read == [5, 9]
