"""Embeddings are llama.cpp's own: what its server says, and what pooling its hidden rows gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from numpy.typing import NDArray

from superfluid_adapter_llamacpp.embedding import LlamaEmbedder
from superfluid_compat.errors import (
    DoesNotFit,
    ModelDamaged,
    Unsupported,
    UnsupportedArchitecture,
)
from support.llama_models import write_encoder
from support.llama_runtime import opened
from support.llamacpp import LlamaCpp
from support.tiny_models import TinyModel, write_model

TEXTS: Final = ["hello the river", "run", "a stone in the sea", "seven green houses"]
TOLERANCE: Final = 1e-3
"""Keys and values are F16 here and F32 in the oracle."""

MEAN, CLS, LAST, RANK = 1, 2, 3, 4
DECODER = TinyModel(metadata={"llama.pooling_type": LAST})
WINDOWED = TinyModel("gemma3", window=4, metadata={"gemma3.pooling_type": MEAN})
MODELS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "encoder, mean": (lambda path: write_encoder(path, pooling=MEAN), "mean"),
    "encoder, cls": (lambda path: write_encoder(path, pooling=CLS), "cls"),
    "encoder, last": (lambda path: write_encoder(path, pooling=LAST), "last"),
    "encoder that pools nothing": (lambda path: write_encoder(path, pooling=0), "mean"),
    "encoder that states nothing": (lambda path: write_encoder(path, pooling=None), "mean"),
    "decoder, last": (lambda path: write_model(path, DECODER), "last"),
    "decoder with a window, mean": (lambda path: write_model(path, WINDOWED), "mean"),
}
POOLED: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "mean": lambda rows: rows.mean(axis=0),
    "cls": lambda rows: rows[0],
    "last": lambda rows: rows[-1],
}


def ignore() -> None:
    """A tick that does nothing."""


def unit(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    scaled: NDArray[np.float64] = vector / np.linalg.norm(vector)
    return scaled


@pytest.mark.parametrize("kind", MODELS)
def test_a_vector_is_the_pooled_rows_of_its_text_alone(
    kind: str, tmp_path: Path, shared: Path
) -> None:
    write, pooling = MODELS[kind]
    model = write(tmp_path / "m.gguf")
    oracle = LlamaCpp(model, vocab_only=False, context=128, threads=1, embeds=True)
    with opened(model, shared, context=128, lanes=2) as loaded, oracle:
        assert isinstance(loaded.runtime, LlamaEmbedder)
        described = loaded.runtime.describe()
        assert described.embedding is not None
        assert described.embedding.pooling == loaded.record.got["pooling"] == pooling
        rows = [loaded.tokenizer.encode(text) for text in TEXTS * 4]
        found = loaded.runtime.embed(rows, ignore)
        for row, vector in zip(rows, found, strict=True):
            wanted = unit(POOLED[pooling](oracle.hidden(row).astype(np.float64)))
            np.testing.assert_allclose(vector, wanted, rtol=0, atol=TOLERANCE)
        assert np.abs(found[0] - found[1]).max() > 20 * TOLERANCE


SERVER = """
import json, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, texts, answer = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
params.embedding, params.n_gpu_layers, params.warmup = True, 0, False
params.n_ctx = params.n_batch = params.n_ubatch = 512
params.cpuparams.n_threads = 1
server = xllamacpp.Server(params)
said = server.handle_embeddings({"model": "m", "input": texts})
json.dump([it["embedding"] for it in said["data"]], open(answer, "w"))
"""


def server_vectors(model: Path) -> NDArray[np.float64]:
    """What llama.cpp's own server says, in a process of its own."""
    answer = model.with_suffix(".json")
    subprocess.run(
        [sys.executable, "-c", SERVER, str(model), json.dumps(TEXTS), str(answer)],
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        timeout=60,
        check=True,
    )
    return np.array(json.loads(answer.read_text()))


@pytest.mark.parametrize("kind", [kind for kind in MODELS if "nothing" not in kind])
def test_a_vector_is_what_llama_cpps_own_server_says(
    kind: str, tmp_path: Path, shared: Path
) -> None:
    model = MODELS[kind][0](tmp_path / "m.gguf")
    with opened(model, shared, context=128, lanes=2) as loaded:
        rows = [loaded.tokenizer.encode(text) for text in TEXTS]
        found = loaded.runtime.embed(rows, ignore)
    np.testing.assert_allclose(found, server_vectors(model), rtol=0, atol=TOLERANCE)


def test_a_model_that_ranks_is_refused(tmp_path: Path, shared: Path) -> None:
    model = write_encoder(tmp_path / "m.gguf", pooling=RANK)
    with pytest.raises(UnsupportedArchitecture, match="ranks texts"), opened(model, shared):
        pass


def test_a_pooling_that_nobody_knows_is_damage(tmp_path: Path, shared: Path) -> None:
    model = write_encoder(tmp_path / "m.gguf", pooling=5)
    with (
        pytest.raises(ModelDamaged, match="pooling_type is 5, wanted 0 to 4"),
        opened(model, shared),
    ):
        pass


def test_positions_that_were_learned_do_not_stretch(tmp_path: Path, shared: Path) -> None:
    model = write_encoder(tmp_path / "m.gguf")
    with (
        pytest.raises(DoesNotFit, match="was trained for 512"),
        opened(model, shared, context=1024, rope_scaling="linear", rope_scale=2.0),
    ):
        pass


def test_a_model_for_text_does_not_embed(tmp_path: Path, shared: Path) -> None:
    with opened(write_model(tmp_path / "m.gguf", TinyModel()), shared) as loaded:
        assert loaded.runtime.describe().embedding is None
        with pytest.raises(Unsupported):
            loaded.runtime.embed([[1]], ignore)
