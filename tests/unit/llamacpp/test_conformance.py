"""The llama.cpp runtime keeps the contract that every adapter keeps, for each kind of model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from superfluid_adapter_llamacpp import adapter
from superfluid_workerd.conformance import (
    AdapterContract,
    Case,
    EmbeddingContract,
    RuntimeContract,
    TokenizerContract,
)
from support.llama_models import write_encoder, write_hybrid, write_recurrent
from support.tiny_models import TinyModel, write_model

WINDOWED = TinyModel(architecture="gemma3", window=4)
KINDS: dict[str, tuple[Callable[[Path], Path], dict[str, object]]] = {
    "plain": (lambda path: write_model(path, TinyModel()), {}),
    "window": (lambda path: write_model(path, WINDOWED), {}),
    "window-full": (lambda path: write_model(path, WINDOWED), {"swa-full": True}),
    "recurrent": (write_recurrent, {}),
    "hybrid": (write_hybrid, {}),
}
EMBEDDERS: dict[str, Callable[[Path], Path]] = {
    "encoder-mean": write_encoder,
    "encoder-cls": lambda path: write_encoder(path, pooling=2),
    "decoder-last": lambda path: write_model(path, TinyModel(metadata={"llama.pooling_type": 3})),
    "window-mean": lambda path: write_model(
        path, replace(WINDOWED, metadata={"gemma3.pooling_type": 1})
    ),
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


@pytest.fixture(scope="module", params=sorted(EMBEDDERS))
def embedder(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    lib: Path,
    shared: Path,
) -> Case:
    model = EMBEDDERS[str(request.param)](tmp_path_factory.mktemp("embedder") / "m.gguf")
    given = {"lib": str(lib), "threads": 1}
    return Case(adapter=adapter(), model=model, folder=shared, options=given, context=128,
                tolerance=TOLERANCE)  # fmt: skip


class TestEmbedding(EmbeddingContract):
    @pytest.fixture
    def case(self, embedder: Case) -> Case:
        return embedder


class TestEmbeddingAdapter(AdapterContract):
    @pytest.fixture
    def case(self, embedder: Case) -> Case:
        return embedder
