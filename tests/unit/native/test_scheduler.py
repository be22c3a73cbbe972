"""The walk over layers: order, selection, what is held when, and what an error leaves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from superfluid_adapter_native.executor import Pass, StreamingExecutor
from superfluid_adapter_native.formats.open import open_source
from superfluid_adapter_native.kv_cache import KVCache, LayerShape
from superfluid_adapter_native.memory import MemoryManager
from superfluid_adapter_native.scheduler import (
    LayerDescriptor,
    LayerHandles,
    LayerScheduler,
    select_layers,
)
from superfluid_compat.errors import BadOptionValue, OutOfBoundary
from support.gguf_writer import tensor, write_gguf


@pytest.fixture
def manager(tmp_path: Path) -> MemoryManager:
    tensors = [tensor(f"t{i}", np.full((8,), i, np.float32)) for i in range(4)]
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, tensors)
    return MemoryManager(open_source(path), cache_bytes=0)


def layers(*indices: int) -> list[LayerDescriptor]:
    return [LayerDescriptor(index, (f"t{index}",)) for index in indices]


def test_each_layer_is_prefetched_acquired_computed_and_released_in_order(
    manager: MemoryManager,
) -> None:
    events: list[str] = []

    def compute(handles: LayerHandles) -> None:
        held = handles.tensors[f"t{handles.index}"].view.view(np.float32)[0]
        events.append(f"compute {handles.index} {held:g} {manager.mapped}")

    walker = LayerScheduler(
        manager, layers(0, 1, 2), prefetch=lambda one: events.append(f"prefetch {one.index}")
    )
    walker.walk(compute)
    assert events == [
        text for i in range(3) for text in (f"prefetch {i}", f"compute {i} {i} ('t{i}',)")
    ]
    assert manager.mapped == ()


@pytest.mark.parametrize("chosen", [(0,), (1, 3), (0, 1, 2, 3)])
def test_the_first_and_last_selected_layers_are_flagged(
    manager: MemoryManager, chosen: tuple[int, ...]
) -> None:
    flags: list[tuple[int, bool, bool]] = []
    LayerScheduler(manager, layers(*chosen)).walk(
        lambda one: flags.append((one.index, one.is_first, one.is_last))
    )
    assert flags == [(i, i == chosen[0], i == chosen[-1]) for i in chosen]


def test_a_layer_that_fails_is_released(manager: MemoryManager) -> None:
    def fail(handles: LayerHandles) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        LayerScheduler(manager, layers(0, 1)).walk(fail)
    assert manager.mapped == ()


def test_the_manager_is_there_to_read_only(manager: MemoryManager) -> None:
    walker = LayerScheduler(manager, layers(0))
    assert walker.manager is manager
    with pytest.raises(AttributeError):
        walker.manager = manager  # type: ignore[misc]  # what the test is about


@pytest.mark.parametrize(
    ("named", "most", "wanted"),
    [(None, None, (0, 1, 2, 3)), (None, 2, (0, 1)), ((1, 3), None, (1, 3)), ((1, 2, 3), 2, (1, 2))],
)
def test_layers_are_selected_by_name_and_number(
    named: tuple[int, ...] | None, most: int | None, wanted: tuple[int, ...]
) -> None:
    assert select_layers(4, named, most) == wanted


def test_a_layer_the_model_lacks_is_refused() -> None:
    with pytest.raises(BadOptionValue, match="layer 4 was asked for, the model has layers 0 to 3"):
        select_layers(4, (2, 4))
    with pytest.raises(BadOptionValue, match="no layer"):
        select_layers(4, ())


def test_a_step_carries_its_tokens_through_and_returns_the_last_row(
    manager: MemoryManager,
) -> None:
    cache = KVCache((LayerShape(1, 2),) * 2)

    def forward(handles: LayerHandles, work: Pass) -> None:
        if handles.is_first:
            work.hidden = np.repeat(work.tokens[:, None], 2, axis=1).astype(np.float32)
        work.hidden += 100 * work.positions[:, None]
        cache.append(handles.index, work.hidden[:, None], work.hidden[:, None])

    executor = StreamingExecutor(LayerScheduler(manager, layers(0, 1)), forward, cache)
    with pytest.raises(OutOfBoundary):
        executor.step([])
    assert executor.step([5, 6]).last_hidden.tolist() == [206.0, 206.0]
    step = executor.step([7])
    assert (step.position, step.last_hidden.tolist()) == (2, [407.0, 407.0])
    assert cache.length(1) == 3


def test_tick_runs_before_every_layer_and_may_abandon_the_walk(manager: MemoryManager) -> None:
    computed: list[int] = []
    ticks = iter((None, None, KeyboardInterrupt()))

    def tick() -> None:
        found = next(ticks)
        if found is not None:
            raise found

    executor = StreamingExecutor(
        LayerScheduler(manager, layers(0, 1, 2, 3)), lambda one, work: computed.append(one.index)
    )
    with pytest.raises(KeyboardInterrupt):
        executor.run(_nothing(), tick)
    assert computed == [0, 1]


def _nothing() -> Pass:
    none = np.empty(0, np.int64)
    return Pass(none, none, (), none)
