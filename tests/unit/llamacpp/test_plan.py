"""What a load is priced at: what llama.cpp gets, within what it counts to; and what is advised."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from superfluid_adapter_llamacpp import plan
from superfluid_adapter_llamacpp.gguf import read_header
from superfluid_adapter_llamacpp.llamacpp import LlamaCppAdapter
from superfluid_adapter_llamacpp.plan import MIB, Plan, make_plan
from superfluid_adapter_llamacpp.runtime import LlamaRuntime
from superfluid_adapter_llamacpp.settings import Settings
from superfluid_compat.errors import DoesNotFit
from superfluid_workerd.adapter import OpenRequest
from superfluid_workerd.registry import checked_options
from support.llama_models import write_encoder
from support.llama_runtime import opened
from support.tiny_models import TinyModel, write_model

LARGE = 1 << 16


def planned(model: Path, *, context: int = 0, lanes: int = 1, budget: int | None = None,
            **options: Any) -> Plan:  # fmt: skip
    named = {name.replace("_", "-"): value for name, value in options.items()}
    given = checked_options(LlamaCppAdapter(), named)
    request = OpenRequest(
        model=model, scratch=model.parent, shared=model.parent, context=context, lanes=lanes,
        threads=1, memory_budget=budget, options=given,
    )  # fmt: skip
    return make_plan(read_header(model), Settings.of(given), request)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What this process holds each time it is asked, the last of it from then on."""
    held = [100 * MIB]

    monkeypatch.setattr(plan, "held_bytes", lambda: held.pop(0) if len(held) > 1 else held[0])
    return held


@pytest.mark.parametrize(("batch", "ubatch"), [(LARGE, LARGE), (LARGE, 4096), (2048, 512), (32, 8)])
def test_the_sizes_priced_are_those_that_llamacpp_has(
    batch: int, ubatch: int, tmp_path: Path, shared: Path
) -> None:
    model = write_model(tmp_path / "m.gguf", TinyModel())
    given = {"batch_size": batch, "ubatch_size": ubatch}
    found = planned(model, context=512, **given)
    with opened(model, shared, context=512, lanes=1, **given) as loaded:
        runtime = loaded.runtime
        assert isinstance(runtime, LlamaRuntime)
        got = (runtime._context.cells, runtime._context.batch, runtime._context.ubatch)
        assert (found.cells, found.batch, found.ubatch) == got
        record = loaded.record.got
        assert (record["cells"], record["batch-size"], record["ubatch-size"]) == got
        assert runtime.describe().step_tokens == found.batch


def test_a_micro_batch_past_the_cells_costs_no_more_than_one_of_them(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", TinyModel())
    most = planned(model, context=512, batch_size=LARGE, ubatch_size=LARGE)
    exact = planned(model, context=512, batch_size=LARGE, ubatch_size=most.cells)
    assert most.parts["transient"] == exact.parts["transient"]


def test_a_refusal_names_the_micro_batch_where_that_is_to_blame(
    tmp_path: Path, sizes: list[int]
) -> None:
    model = write_model(tmp_path / "m.gguf", TinyModel(context=LARGE))
    usual = planned(model, context=LARGE, batch_size=LARGE).total
    budget = usual + 64 * MIB
    given = {"batch_size": LARGE, "ubatch_size": LARGE}
    with pytest.raises(DoesNotFit, match="65536 computed together") as refused:
        planned(model, context=LARGE, budget=budget, **given)
    assert refused.value.param == "ubatch-size"
    assert (refused.value.fix or "").startswith("give --llamacpp-ubatch-size 512, or ")
    planned(model, context=LARGE, budget=budget, batch_size=LARGE, ubatch_size=512)
    with pytest.raises(DoesNotFit, match="65536 tokens, the budget") as refused:
        planned(model, context=LARGE, budget=sizes[0] + MIB, **given)
    assert refused.value.param == "memory-budget"


@pytest.mark.parametrize("grown", [0, 1, 8])
def test_a_budget_that_is_advised_is_enough_when_the_process_is_larger_then(
    grown: int, tmp_path: Path, sizes: list[int]
) -> None:
    model = write_model(tmp_path / "m.gguf", TinyModel(context=LARGE))
    for context in (LARGE, 0):
        sizes[:] = [100 * MIB + 511]
        with pytest.raises(DoesNotFit) as refused:
            planned(model, context=context, budget=101 * MIB)
        advised = re.search(r"--memory-budget (\d+)M", refused.value.fix or "")
        assert advised is not None
        sizes[:] = [100 * MIB + 511 + grown * MIB]
        assert planned(model, context=context, budget=int(advised[1]) * MIB).context >= 512


def test_a_process_is_measured_once_and_before_it_holds_the_model(
    tmp_path: Path, shared: Path, sizes: list[int]
) -> None:
    """The loaded model may say otherwise than its header, and is then priced again."""
    stated = {"llama.attention.sliding_window": 64}
    model = write_model(tmp_path / "m.gguf", TinyModel(metadata=stated))
    sizes[:] = [100 * MIB, 900 * MIB]
    with opened(model, shared, context=128, memory_budget=400 * MIB) as loaded:
        assert loaded.plan["interpreter"] == 100 * MIB


@pytest.mark.parametrize("lanes", [128, 256])
def test_more_cells_than_llamacpp_counts_are_refused_by_range(lanes: int, tmp_path: Path) -> None:
    context = 1 << 24
    model = write_model(tmp_path / "m.gguf", TinyModel(context=context))
    with pytest.raises(DoesNotFit, match=r"cells, llama\.cpp counts to 2147483647$") as refused:
        planned(model, context=context, lanes=lanes, budget=1 << 50)
    assert refused.value.param == "context"
    assert refused.value.fix == "give fewer --lanes, or less --context"
    assert planned(model, context=context, lanes=127, budget=1 << 50).cells < 1 << 31
    assert planned(model, lanes=lanes, budget=1 << 50).context == context // 2 // (lanes // 128)


def test_an_encoder_of_more_tokens_than_llamacpp_counts_is_refused(tmp_path: Path) -> None:
    model = write_encoder(tmp_path / "m.gguf")
    with pytest.raises(DoesNotFit):
        planned(model, context=1 << 24, lanes=1, budget=1 << 50)


def test_the_record_says_what_became_of_each_option(tmp_path: Path, shared: Path) -> None:
    model = write_model(tmp_path / "m.gguf", TinyModel())
    names = ("flash-attn", "swa-full", "kv-offload", "op-offload", "batch-size")
    with opened(model, shared, context=512, lanes=1) as loaded:
        got = loaded.record.got
        assert [got[name] for name in names] == ["auto", False, False, False, 768]
    given: dict[str, Any] = {"flash_attn": "on", "swa_full": True, "kv_offload": True}
    with opened(
        model, shared, context=512, lanes=1, batch_size=64, ubatch_size=32, **given
    ) as loaded:
        got = loaded.record.got
        assert [got[name] for name in names] == ["on", True, False, False, 64]
