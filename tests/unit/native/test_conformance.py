"""The native runtime keeps the contract that every adapter keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from superfluid_adapter_native import adapter
from superfluid_workerd.conformance import (
    AdapterContract,
    Case,
    RuntimeContract,
    TokenizerContract,
)
from superfluid_workerd.registry import checked_options
from support.tiny_models import TinyModel, write_model

KINDS: dict[str, tuple[TinyModel, bool, float]] = {
    "llama-exact": (TinyModel(), True, 0.0),
    "gemma3-fast": (TinyModel(architecture="gemma3", window=4), False, 2e-3),
}
"""The model, whether the exact mode runs it, and how far its logits may differ."""


@pytest.fixture(scope="module", params=sorted(KINDS))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kernels: Path
) -> Case:
    spec, exact, tolerance = KINDS[str(request.param)]
    model = write_model(tmp_path_factory.mktemp("conformance") / "m.gguf", spec)
    native, options = adapter(), {"exact": exact}
    native.prepare(
        native.facts(model), checked_options(native, options), kernels, lambda done, total: None
    )
    return Case(
        adapter=native, model=model, folder=kernels, options=options, context=128, lanes=4,
        tolerance=tolerance,
    )  # fmt: skip


class TestAdapter(AdapterContract):
    pass


class TestRuntime(RuntimeContract):
    pass


class TestTokenizer(TokenizerContract):
    pass
