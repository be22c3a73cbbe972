"""The kit's suite over the native adapter."""

from __future__ import annotations

import pytest

from superfluid_adapter_native import adapter
from superfluid_workerd.conformance import (
    AdapterContract,
    Case,
    RuntimeContract,
    TokenizerContract,
)
from support.tiny_models import TinyModel, write_model


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("case")
    model = write_model(folder / "tiny.gguf", TinyModel("llama"))
    return Case(adapter=adapter(), model=model, folder=folder)


class TestRuntime(RuntimeContract):
    pass


class TestTokenizer(TokenizerContract):
    pass


class TestAdapter(AdapterContract):
    pass
