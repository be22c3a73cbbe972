"""The memory plan: what it counts, what it chooses, when it refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from superfluid_adapter_native.config import configure
from superfluid_adapter_native.formats.open import open_source
from superfluid_adapter_native.kv_cache import KVType
from superfluid_adapter_native.native import OPTIONS, NativeAdapter
from superfluid_adapter_native.plan import RSS_VARIES_BYTES, Ask, MemoryPlan, make_plan
from superfluid_compat.errors import BadOptionValue, DoesNotFit
from superfluid_workerd.adapter import OpenRequest
from support.native_models import opened, whole
from support.tiny_models import TinyModel, write_model

MIB = 1 << 20
SPEC = TinyModel("llama", layers=8, width=256, ff=1024, head_dim=64, context=8192)
ASK = Ask(context=0, lanes=2, kv_type="f32", selected=tuple(range(8)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("plan") / "m.gguf", SPEC)


def planned(model: Path, ask: Ask, budget: int) -> MemoryPlan:
    source = open_source(model)
    return make_plan(source, configure(source), ask, budget=budget, rss=50 * MIB)


def test_with_room_everything_stays_and_the_trained_context_is_served(model: Path) -> None:
    plan = planned(model, ASK, 4096 * MIB)
    assert plan.context == 8192
    assert plan.resident == tuple(range(8))
    assert (plan.parts["streamed weights"], plan.parts["read-ahead"]) == (0, 0)
    weights = sum(tensor.bytes for tensor in open_source(model).tensors.values())
    assert plan.parts["resident weights"] == weights
    per_row = 8 * 2 * 2 * 64 * 4
    assert plan.parts["kv"] == plan.kv_rows * per_row
    assert plan.kv_rows >= 2 * 8192
    assert plan.total == sum(plan.parts.values())


def test_with_less_room_the_context_shrinks_first_then_layers_stream(model: Path) -> None:
    whole_plan = planned(model, ASK, 4096 * MIB)
    seen = []
    for budget in range(whole_plan.total, 0, -4 * MIB):
        try:
            plan = planned(model, ASK, budget)
        except DoesNotFit:
            break
        assert plan.total <= budget
        seen.append((plan.context, len(plan.resident)))
    assert seen[0] == (8192, 8)
    assert (4096, 8) in seen
    assert any(0 < kept < 8 for _, kept in seen)
    assert seen[-1][1] == 0


def test_resident_layers_are_spread_among_the_streamed(model: Path) -> None:
    layer = planned(model, replace(ASK, cache_bytes=0), 4096 * MIB).parts["streamed weights"]
    plan = planned(model, replace(ASK, cache_bytes=layer * 4 + MIB), 4096 * MIB)
    assert plan.resident == (0, 2, 4, 6)


def test_streaming_counts_room_for_the_layer_at_work_and_the_one_read_ahead(model: Path) -> None:
    plan = planned(model, replace(ASK, cache_bytes=0), 4096 * MIB)
    layer, tile, ahead = plan.rooms
    assert plan.parts["streamed weights"] == layer + tile
    assert plan.parts["read-ahead"] == ahead == layer
    assert layer > tile > plan.tile_bytes > 0
    alone = planned(model, replace(ASK, cache_bytes=0, read_ahead=False), 4096 * MIB)
    assert alone.parts["read-ahead"] == 0
    assert plan.resident == alone.resident == ()


def test_what_cannot_fit_is_refused_with_the_budget_that_would(model: Path) -> None:
    with pytest.raises(DoesNotFit) as caught:
        planned(model, ASK, 100 * MIB)
    found = re.search(r"--memory-budget (\d+)M", caught.value.line())
    assert found is not None
    enough = int(found[1]) * MIB
    assert planned(model, ASK, enough).total <= enough
    with pytest.raises(DoesNotFit):
        planned(model, ASK, enough - RSS_VARIES_BYTES - 2 * MIB)


def test_smaller_kv_types_take_less(model: Path) -> None:
    kinds: tuple[KVType, ...] = ("f32", "f16", "q8_0")
    sizes = [planned(model, replace(ASK, kv_type=kind), 4096 * MIB).parts["kv"] for kind in kinds]
    assert sizes[0] == 2 * sizes[1]
    assert sizes[2] < sizes[1]


def test_an_open_model_stays_within_its_plan_and_says_what_it_got(
    model: Path, kernels: Path
) -> None:
    with opened(model, kernels, context=300, lanes=2, cache_bytes=2 * MIB) as loaded:
        whole(loaded.runtime, list(range(3, 60)))
        use = loaded.runtime.memory()
        parts = ("resident weights", "streamed weights", "read-ahead")
        assert use.weights <= sum(loaded.plan[part] for part in parts)
        assert use.sequences <= loaded.plan["kv"]
        assert loaded.record.asked["context"] == loaded.record.got["context"] == 300
        assert loaded.record.got["layers-resident"] < 8


def test_more_context_than_trained_is_refused(model: Path, kernels: Path) -> None:
    with pytest.raises(DoesNotFit, match="trained for 8192"), opened(model, kernels, context=8193):
        pass


def test_a_kv_type_that_heads_do_not_divide_into_is_refused(tmp_path: Path, kernels: Path) -> None:
    path = write_model(tmp_path / "m.gguf", TinyModel("llama"))
    with (
        pytest.raises(BadOptionValue, match="multiples of 32"),
        opened(path, kernels, kv_type="q8_0"),
    ):
        pass


def test_selected_layers_alone_are_served(model: Path, kernels: Path, tmp_path: Path) -> None:
    first_two = write_model(tmp_path / "m.gguf", replace(SPEC, layers=8))
    with opened(first_two, kernels, layers=(0, 1, 5), max_layers=2, exact=True) as loaded:
        assert loaded.record.got["layers-resident"] == 2
        rows = whole(loaded.runtime, [5, 6, 7])
    assert rows.shape == (3, loaded.facts.vocabulary)


def test_the_plan_can_be_asked_for_without_loading(model: Path, kernels: Path) -> None:
    budget = 500 * MIB + psutil.Process().memory_info().rss
    options = {one.name: one.default for one in OPTIONS}
    request = OpenRequest(
        model=model,
        scratch=kernels,
        shared=kernels,
        context=1024,
        lanes=2,
        threads=2,
        memory_budget=budget,
        options=options,
    )
    found = NativeAdapter().memory(request)
    assert sum(found.values()) <= budget
    with opened(model, kernels, context=1024, lanes=2, memory_budget=budget) as loaded:
        assert {**loaded.plan, "interpreter": 0} == {**found, "interpreter": 0}
    with pytest.raises(DoesNotFit):
        NativeAdapter().memory(replace(request, memory_budget=MIB))
