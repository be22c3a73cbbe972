"""What a load makes of the library, the settings and what the engine gave."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from superfluid_adapter_llamacpp import adapter, loading, where
from superfluid_adapter_llamacpp.context import Context
from superfluid_adapter_llamacpp.model import Model
from superfluid_adapter_llamacpp.probe import Finding
from superfluid_adapter_llamacpp.runtime import LlamaRuntime
from superfluid_compat.errors import BadOptionValue, DoesNotFit, Unsupported
from superfluid_workerd.adapter import Feed, Runtime
from superfluid_workerd.registry import checked_options
from support.llama_libraries import library
from support.llama_runtime import opened
from support.tiny_models import TinyModel, write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf", TinyModel(head_dim=32, context=512))


def exported(runtime: Runtime) -> bytes:
    sequence = runtime.seq_create()
    tokens = [int(token) for token in np.random.default_rng(0).integers(5, 300, 12)]
    runtime.step([Feed(sequence, tokens, 0, "none")], lambda: None)
    return runtime.seq_export(sequence)


def test_a_state_of_another_library_is_refused(
    model: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(model, shared, context=128) as loaded:
        state = exported(loaded.runtime)
        assert loaded.runtime.seq_length(loaded.runtime.seq_import(state)) == 12

    def another(*given: Any) -> Finding:
        return msgspec.structs.replace(where.require(*given), digest="0" * 64)

    monkeypatch.setattr(loading, "require", another)
    with (
        opened(model, shared, context=128) as loaded,
        pytest.raises(Unsupported, match="another library"),
    ):
        loaded.runtime.seq_import(state)


@pytest.mark.parametrize(
    "more",
    [
        {"flash_attn": "on"}, {"flash_attn": "auto"}, {"cache_type_v": "f32"},
        {"cache_type_k": "f32"}, {"swa_full": True},
    ],
)  # fmt: skip
def test_a_state_of_other_settings_is_refused(
    more: dict[str, Any], model: Path, shared: Path
) -> None:
    with opened(model, shared, context=128, flash_attn="off") as loaded:
        state = exported(loaded.runtime)
    given = {"flash_attn": "off", **more}
    with (
        opened(model, shared, context=128, **given) as loaded,
        pytest.raises(Unsupported, match="other settings"),
    ):
        loaded.runtime.seq_import(state)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"threads": 2}, (2, 2)),
        ({"threads": 1, "threads_batch": 3}, (1, 3)),
        ({"threads": 3, "threads_batch": 1}, (3, 1)),
    ],
)
def test_each_kind_of_threads_reaches_the_engine(
    options: dict[str, int], wanted: tuple[int, int], model: Path, shared: Path
) -> None:
    with opened(model, shared, context=128, **options) as loaded:
        runtime = loaded.runtime
        assert isinstance(runtime, LlamaRuntime)
        call, pointer = runtime._loaded.model.library.call, runtime._context.pointer
        got = (call.llama_n_threads(pointer), call.llama_n_threads_batch(pointer))
        assert got == wanted
        assert (loaded.record.got["threads"], loaded.record.got["threads-batch"]) == wanted


@pytest.mark.parametrize(("member", "less"), [("n_ctx", 256), ("n_seq_max", 7)])
def test_an_engine_that_gives_less_than_was_planned_does_not_serve(
    member: str, less: int, model: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stingy(Context):
        def __init__(self, model: Model, members: Mapping[str, float]) -> None:
            super().__init__(model, {**members, member: members[member] - less})

    monkeypatch.setattr(loading, "Context", Stingy)
    with (
        pytest.raises(DoesNotFit, match=r"were asked for, llama\.cpp gave"),
        opened(model, shared, context=256, lanes=4),
    ):
        pass


def test_the_check_refuses_an_option_that_the_library_has_no_member_for(shared: Path) -> None:
    older = {"lib": str(library("b10229")), "lazy-mode": "on"}
    with pytest.raises(BadOptionValue, match="lazy-mode needs lazy_mode") as refused:
        adapter().check(checked_options(adapter(), older), shared)
    assert refused.value.param == "lazy-mode"
