"""The kit's suite, on models of each kind of cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from superfluid_adapter_mlx import adapter
from superfluid_workerd.conformance import (
    AdapterContract,
    Case,
    RuntimeContract,
    TokenizerContract,
)
from support.mlx_models import write_folder

TOLERANCE = 1e-4
"""Of logits that spread over some units: batches and chunks add in another order."""


def _case(folder: Path, name: str, **options: int) -> Case:
    folder.mkdir()
    shared = folder / "shared"
    shared.mkdir()
    return Case(
        adapter=adapter(),
        model=write_folder(folder / name, name),
        folder=shared,
        options={"compile": False, **options},
        context=64,
        tolerance=TOLERANCE,
    )


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("case") / request.param
    return _case(folder, request.param, **{"prefill-chunk": 4})


@pytest.mark.parametrize("case", ["llama", "gemma3", "falcon_h1"], indirect=True)
class TestRuntime(RuntimeContract): ...


@pytest.mark.parametrize("case", ["llama"], indirect=True)
class TestTokenizer(TokenizerContract): ...


@pytest.mark.parametrize("case", ["llama"], indirect=True)
class TestAdapter(AdapterContract): ...
