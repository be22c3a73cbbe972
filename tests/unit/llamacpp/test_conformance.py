"""The llama.cpp runtime keeps the contract that every adapter keeps, for each kind of model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from superfluid_adapter_llamacpp import adapter
from superfluid_workerd.conformance import (
    AdapterContract,
    Case,
    RuntimeContract,
    TokenizerContract,
)
from support.llama_models import write_hybrid, write_recurrent
from support.tiny_models import TinyModel, write_model

WINDOWED = TinyModel(architecture="gemma3", window=4)
KINDS: dict[str, tuple[Callable[[Path], Path], dict[str, object]]] = {
    "plain": (lambda path: write_model(path, TinyModel()), {}),
    "window": (lambda path: write_model(path, WINDOWED), {}),
    "window-full": (lambda path: write_model(path, WINDOWED), {"swa-full": True}),
    "recurrent": (write_recurrent, {}),
    "hybrid": (write_hybrid, {}),
}
TOLERANCE = 5e-3
"""Sums are taken in another order for another number of tokens, over keys and values in F16."""


@pytest.fixture(scope="module", params=sorted(KINDS))
def case(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    lib: Path,
    shared: Path,
) -> Case:
    write, options = KINDS[str(request.param)]
    model = write(tmp_path_factory.mktemp("conformance") / "m.gguf")
    given = {"lib": str(lib), "threads": 1, **options}
    return Case(
        adapter=adapter(), model=model, folder=shared, options=given, context=128, lanes=4,
        tolerance=TOLERANCE,
    )  # fmt: skip


class TestAdapter(AdapterContract):
    pass


class TestRuntime(RuntimeContract):
    pass


class TestTokenizer(TokenizerContract):
    pass
