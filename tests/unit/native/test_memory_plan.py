"""The memory plan that is told before a load is the one that the load follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from superfluid_adapter_native.native import OPTIONS, NativeAdapter
from superfluid_compat.errors import DoesNotFit
from superfluid_workerd.adapter import OpenRequest
from support.native_models import opened
from support.tiny_models import TinyModel, write_model


def request(model: Path, budget: int) -> OpenRequest:
    return OpenRequest(
        model=model, scratch=model.parent, shared=model.parent, context=64, lanes=2,
        memory_budget=budget, options={one.name: one.default for one in OPTIONS},
    )  # fmt: skip


def test_the_plan_told_is_the_plan_followed(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", TinyModel())
    told = dict(NativeAdapter().memory(request(model, 4 << 30)))
    with opened(model, tmp_path, context=64, lanes=2, memory_budget=4 << 30) as loaded:
        followed = dict(loaded.plan)
    # What the process holds already moves from call to call.
    assert told.pop("interpreter") > 0
    del followed["interpreter"]
    assert told == followed


def test_a_plan_that_does_not_fit_is_refused_as_the_load_would_be(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", TinyModel())
    with pytest.raises(DoesNotFit, match="the budget is 16 MiB"):
        NativeAdapter().memory(request(model, 16 << 20))
