"""Steps of several sequences: together or one by one, whichever is quicker, with the same rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluid_adapter_llamacpp.batching import Batching
from superfluid_adapter_llamacpp.runtime import LlamaRuntime
from superfluid_workerd.adapter import Feed
from support.llama_models import write_hybrid, write_recurrent
from support.llama_runtime import opened
from support.tiny_models import TinyModel, write_model

STEPS = 2048
Cost = Callable[[int, int], float]
"""Seconds of a call of so many sequences at a step."""


def run(batching: Batching, count: int, cost: Cost, steps: int = STEPS) -> list[float]:
    """What each step took."""
    spent = list[float]()
    for step in range(steps):
        sizes = batching.sizes(count)
        assert sum(sizes) == count
        seconds = [cost(size, step) for size in sizes]
        batching.took(sizes, seconds)
        spent.append(sum(seconds))
    return spent


@given(count=st.integers(2, 64), alone=st.floats(0.001, 1.0), together=st.floats(0.001, 64.0))
def test_steps_cost_hardly_more_than_the_quicker_way_would(
    count: int, alone: float, together: float
) -> None:
    spent = run(Batching(), count, _costs(alone, together))
    best = min(together, count * alone)
    looks = STEPS.bit_length() + 1
    # What the other way takes at a look, and one step before anything is known.
    assert sum(spent) <= STEPS * best / 0.9 + looks * max(together, alone) * 1.001


def test_a_step_in_which_the_machine_was_busy_changes_nothing() -> None:
    batching = Batching()
    run(batching, 4, _costs(1.0, 10.0))

    def disturbed(size: int, step: int) -> float:
        return (50.0 if step == 7 else 1.0) if size == 1 else 10.0

    took = run(batching, 4, disturbed)
    assert took.pop(7) == 200.0
    assert set(took[:32]) <= {4.0, 10.0}
    assert took[:32].count(10.0) <= 1


@pytest.mark.parametrize("before", [0.1, 10.0])
def test_it_turns_round_when_costs_do(before: float) -> None:
    """As they do when texts get long: then a call together shares what it reads."""
    batching, after = Batching(), 1.0 / before
    for together in (before, after, before):
        spent = run(batching, 4, _costs(0.25, together))
        assert sum(spent[-32:]) <= 32 * min(1.0, together) * 1.01


def _costs(alone: float, together: float) -> Cost:
    return lambda size, _: alone if size == 1 else together


def test_each_number_of_sequences_goes_its_own_way() -> None:
    batching = Batching()

    def cost(size: int, _: int) -> float:
        return {1: 1.0, 2: 3.5, 3: 6.0}.get(size, 4.9)

    for count, wanted in {2: 2.0, 3: 3.0, 8: 4.9}.items():
        run(batching, count, cost)
        assert run(batching, count, cost, 3)[-1] == wanted


def test_one_sequence_is_one_call() -> None:
    assert set(map(tuple, (Batching().sizes(1) for _ in range(20)))) == {(1,)}


MODELS: dict[str, Callable[[Path], Path]] = {
    "plain": lambda path: write_model(path, TinyModel(context=512)),
    "window": lambda path: write_model(path, TinyModel("gemma3", layers=2, window=64, context=512)),
    "recurrent": write_recurrent,
    "hybrid": write_hybrid,
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("sizes", [[3], [1, 2], [1, 1, 1]])
def test_rows_are_each_feeds_own_whichever_way_they_go(
    kind: str, sizes: list[int], tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(MODELS[kind](tmp_path / "m.gguf"), shared, context=256, lanes=6) as loaded:
        runtime = loaded.runtime
        assert isinstance(runtime, LlamaRuntime)
        monkeypatch.setattr(runtime._batching, "sizes", lambda count: sizes if count > 1 else [1])
        prompts = [[5 + at, *range(20, 30 + 3 * at)] for at in range(3)]
        ticks = list[None]()
        lanes = [_fed(runtime, prompt) for prompt in prompts]
        feeds = [Feed(lane, [40 + at], len(prompts[at])) for at, lane in enumerate(lanes)]
        found = [np.array(row) for row in runtime.step(feeds, lambda: ticks.append(None))]
        assert len(ticks) == len(sizes)
        for at, row in enumerate(found):
            alone = _fed(runtime, prompts[at])
            (wanted,) = runtime.step([Feed(alone, [40 + at], len(prompts[at]))], lambda: None)
            np.testing.assert_allclose(row, np.array(wanted), rtol=0, atol=0.02)
            assert runtime.seq_length(lanes[at]) == len(prompts[at]) + 1
            runtime.seq_free(alone)


def _fed(runtime: LlamaRuntime, tokens: Sequence[int]) -> int:
    sequence = runtime.seq_create()
    runtime.step([Feed(sequence, list(tokens), 0, "none")], lambda: None)
    return sequence
