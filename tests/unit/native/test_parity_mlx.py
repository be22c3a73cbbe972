"""Logits of tiny folders against mlx-lm's own models, of both generations.

mlx-lm computes in F32 here, as the runtime's exact mode does. What mlx-lm leaves out is left out of
the models: windows of Gemma 2 and Mistral, scaling of Qwen 3 MoE, LongRoPE's short factors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from tokenizers import Tokenizer as Engine
from tokenizers.models import WordLevel

from superfluid_workerd.adapter import Feed, Runtime
from support.mlx_environments import GENERATIONS, answer
from support.native_models import Logits, ignore, one_by_one, opened, whole
from support.safetensors_writer import folder_tensors, write_folder
from support.tiny_models import TinyModel

pytestmark = pytest.mark.timeout(600)

LENGTH: Final = 60
LIMIT: Final = 2e-5
"""Of the largest logit. Found: at most 2.5e-6."""

FACTORS: Final = {"long": list(np.linspace(1, 6, 8)), "short": list(np.linspace(1, 1.4, 8))}


def scaling(kind: str, **keys: Any) -> dict[str, Any]:
    return {"rope_scaling": {"type": kind, "rope_type": kind, **keys}}


YARN: Final = scaling("yarn", factor=4.0, original_max_position_embeddings=128)
LLAMA3: Final = scaling(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
LINEAR: Final = scaling("linear", factor=4.0)
LONGROPE: Final = {
    "original_max_position_embeddings": 256,
    **scaling("longrope", long_factor=FACTORS["long"], short_factor=FACTORS["short"]),
}

MODELS: Final[Mapping[str, tuple[TinyModel, dict[str, Any]]]] = {
    "llama": (TinyModel("llama"), {}),
    "llama-tied": (TinyModel("llama", tied=True), {}),
    "llama-linear": (TinyModel("llama"), LINEAR),
    "llama-llama3": (TinyModel("llama"), LLAMA3),
    "llama-yarn": (TinyModel("llama"), YARN),
    "mistral": (TinyModel("llama"), {"model_type": "mistral", "sliding_window": None}),
    "qwen2": (TinyModel("qwen2"), {}),
    "qwen2-yarn": (TinyModel("qwen2"), YARN),
    "qwen3": (TinyModel("qwen3"), {}),
    "qwen3-yarn": (TinyModel("qwen3"), YARN),
    "qwen3-wide": (TinyModel("qwen3", head_dim=32), {}),
    "qwen3_moe": (TinyModel("qwen3moe"), {}),
    "gemma2": (TinyModel("gemma2", layers=4), {}),
    "gemma3": (TinyModel("gemma3", layers=7, window=16), {}),
    "gemma3-linear": (TinyModel("gemma3", layers=7, window=16), LINEAR),
    "phi3": (TinyModel("phi3"), {}),
    # mlx-lm wants a long factor whatever the scaling, and uses none here.
    "phi3-linear": (TinyModel("phi3"), scaling("linear", factor=4.0, long_factor=[1.0] * 8)),
    "phi3-longrope": (TinyModel("phi3"), LONGROPE),
    "phi3-half": (TinyModel("phi3"), {"partial_rotary_factor": 0.5}),
}


def tokens(seed: int = 7, count: int = LENGTH) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 300, count)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of every model, with what mlx-lm wants to be told of each."""
    made = tmp_path_factory.mktemp("folders")
    engine = Engine(WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    for name, (spec, config) in MODELS.items():
        vocabulary = len(folder_tensors(spec)["model.embed_tokens.weight"])
        told = {"vocab_size": vocabulary, "decoder_sparse_step": 1, "mlp_only_layers": [], **config}
        folder = write_folder(made / name, spec, config=told)
        engine.save(str(folder / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def oracle(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Logits]]:
    """By generation and model: (at once or token by token, position, vocabulary)."""
    given = tmp_path_factory.mktemp("given") / "tokens"
    given.write_text(json.dumps(tokens()))

    def said(generation: str) -> dict[str, Logits]:
        out = tmp_path_factory.mktemp(generation)
        answer(generation, "logits", str(root), str(given), str(out), cwd=out)
        return {name: np.load(out / f"{name}.npy") for name in MODELS}

    with ThreadPoolExecutor() as pool:
        return dict(zip(GENERATIONS, pool.map(said, GENERATIONS), strict=True))


def beside_others(runtime: Runtime, ids: list[int]) -> Logits:
    """The text's logits, its prompt in two cuts and then token by token, each step with two other
    sequences beside it."""
    seat, *others = (runtime.seq_create() for _ in range(3))
    company = [tokens(seed=seed) for seed in range(len(others))]
    found: list[Logits] = []
    for start, end in spans(len(ids)):
        feeds = [Feed(seat, ids[start:end], start, "all")]
        for other, text in zip(others, company, strict=True):
            at = runtime.seq_length(other)
            feeds.insert(0, Feed(other, text[at : at + 1 + at % 3], at))
        rows = runtime.step(feeds, ignore)[-1]
        assert rows is not None
        found.append(rows)
    return np.concatenate(found)


def spans(count: int) -> Iterator[tuple[int, int]]:
    yield from ((0, 7), (7, 40))
    yield from ((at, at + 1) for at in range(40, count))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_mlx_lms(
    name: str, root: Path, oracle: dict[str, dict[str, Logits]], kernels: Path
) -> None:
    ids, found = tokens(), {}
    layers = MODELS[name][0].layers
    for label, cache_bytes, kept in (("resident", "auto", layers), ("streamed", 0, 0)):
        with opened(root / name, kernels, exact=True, cache_bytes=cache_bytes) as loaded:
            runtime = loaded.runtime
            assert loaded.record.got["layers-resident"] == kept
            found[label] = whole(runtime, ids)
            found[f"{label}, token by token"] = one_by_one(runtime, runtime.seq_create(), ids)
            runtime.seq_free(0)
            runtime.seq_free(1)
            found[f"{label}, beside others"] = beside_others(runtime, ids)
    for generation, said in oracle.items():
        for wanted in said[name]:
            for way, rows in found.items():
                off = float(np.abs(rows - wanted).max() / np.abs(wanted).max())
                assert off < LIMIT, (generation, way)
