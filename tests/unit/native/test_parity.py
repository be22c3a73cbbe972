"""Logits of tiny models against llama.cpp and against NumPy written out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Engine
from tokenizers.models import WordLevel

from superfluid_adapter_native import loading
from superfluid_adapter_native.config import ModelConfig, configure
from superfluid_adapter_native.formats.source import ModelSource
from superfluid_adapter_native.quants.types import BY_NAME
from superfluid_workerd.adapter import Feed
from support.llamacpp import LlamaCpp
from support.native_models import ignore, one_by_one, opened, whole
from support.plain_forward import plain_logits
from support.safetensors_writer import write_folder
from support.tiny_models import TinyModel, write_model

FACTORS = (1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 8.0)


def scaled(architecture: str, kind: str, **keys: float) -> dict[str, object]:
    start = f"{architecture}.rope.scaling"
    return {f"{start}.type": kind, **{f"{start}.{name}": value for name, value in keys.items()}}


MODELS = {
    "llama": TinyModel("llama"),
    "llama, tied": TinyModel("llama", tied=True),
    "llama, llama3 factors": TinyModel("llama", rope_factors=FACTORS),
    "llama, linear": TinyModel("llama", metadata=scaled("llama", "linear", factor=4.0)),
    "llama, yarn": TinyModel(
        "llama", metadata=scaled("llama", "yarn", factor=4.0, original_context_length=128)
    ),
    "phi3, half of a head rotated": TinyModel("phi3", metadata={"phi3.rope.dimension_count": 8}),
    "qwen2": TinyModel("qwen2"),
    "qwen2, yarn": TinyModel(
        "qwen2", metadata=scaled("qwen2", "yarn", factor=4.0, original_context_length=64)
    ),
    "qwen3": TinyModel("qwen3"),
    "qwen3moe": TinyModel("qwen3moe"),
    "gemma2": TinyModel("gemma2", layers=4, window=16),
    "gemma3": TinyModel("gemma3", layers=7, window=16),
    "gemma3, linear": TinyModel(
        "gemma3", layers=7, window=16, metadata=scaled("gemma3", "linear", factor=8.0)
    ),
    "phi3": TinyModel("phi3"),
}
LENGTH = 60
EXACT = 3e-5
"""Of the largest logit: F32 against F64, at most."""

LLAMACPP = 1e-3
"""Of the largest logit: llama.cpp looks gelu up in a table of half floats."""


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def model(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf", MODELS[name])


def _save_a_tokenizer(folder: Path) -> None:
    Engine(WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")).save(str(folder / "tokenizer.json"))


def tokens(count: int = LENGTH, seed: int = 7) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 300, count)]


def off(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def test_the_whole_prompt_and_token_by_token_match_numpy(
    name: str, model: Path, kernels: Path
) -> None:
    wanted = plain_logits(MODELS[name], tokens())
    with opened(model, kernels, exact=True) as loaded:
        runtime = loaded.runtime
        at_once = whole(runtime, tokens())
        stepwise = one_by_one(runtime, runtime.seq_create(), tokens())
    assert off(at_once, wanted) < EXACT
    assert np.array_equal(at_once, stepwise)


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_a_window_that_the_file_states_holds_in_every_layer(
    architecture: str, tmp_path: Path, kernels: Path
) -> None:
    """llama.cpp passes over it for these, so NumPy alone is the judge."""
    stated = {f"{architecture}.attention.sliding_window": 8}
    spec = TinyModel(architecture, metadata=stated)  # type: ignore[arg-type]  # of the Literal
    wanted = plain_logits(spec, tokens())
    with opened(write_model(tmp_path / "m.gguf", spec), kernels, exact=True) as loaded:
        assert off(whole(loaded.runtime, tokens()), wanted) < EXACT
    assert off(plain_logits(replace(spec, metadata={}), tokens()), wanted) > 1000 * EXACT


def test_mistral_attends_to_its_window(tmp_path: Path, kernels: Path) -> None:
    spec = TinyModel("llama", metadata={"llama.attention.sliding_window": 8})
    told = {"model_type": "mistral", "sliding_window": 8}
    folder = write_folder(tmp_path / "m", replace(spec, metadata={}), config=told)
    _save_a_tokenizer(folder)
    with opened(folder, kernels, exact=True) as loaded:
        found = whole(loaded.runtime, tokens())
    assert off(found, plain_logits(spec, tokens())) < EXACT


def test_logits_match_llamacpp(name: str, model: Path, kernels: Path) -> None:
    with LlamaCpp(model, vocab_only=False) as oracle:
        wanted = oracle.logits(tokens())
    with opened(model, kernels, exact=True) as loaded:
        assert off(whole(loaded.runtime, tokens()), wanted) < LLAMACPP


def test_streaming_gives_the_same_bits(name: str, model: Path, kernels: Path) -> None:
    found = []
    for cache_bytes in ("auto", 0, 60_000):
        with opened(model, kernels, cache_bytes=cache_bytes) as loaded:
            found.append(whole(loaded.runtime, tokens()))
            resident = loaded.record.got["layers-resident"]
            assert (resident == MODELS[name].layers) == (cache_bytes == "auto")
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_company_and_cuts_change_nothing(name: str, model: Path, kernels: Path) -> None:
    streams = [tokens(length, seed) for seed, length in enumerate((40, 23, 31))]
    with opened(model, kernels) as loaded:
        runtime = loaded.runtime
        alone = [whole(runtime, stream) for stream in streams]
        for sequence in range(3):
            runtime.seq_free(sequence)
        seats = [runtime.seq_create() for _ in streams]
        joined: list[list[np.ndarray]] = [[], [], []]
        for cut in ((0, 17, 0), (5, 18, 31), (6, 23, 31), (40, 23, 31)):
            feeds = [
                Feed(seat, stream[start:end], start, "all")
                for seat, stream, end in zip(seats, streams, cut, strict=True)
                if (start := runtime.seq_length(seat)) < end
            ]
            for one, rows in zip(feeds, runtime.step(feeds, ignore), strict=True):
                assert rows is not None
                joined[seats.index(one.sequence)].append(rows)
    for mine, theirs in zip(alone, joined, strict=True):
        assert np.array_equal(mine, np.concatenate(theirs))


@pytest.mark.parametrize(("kind", "limit"), [("f16", 2e-3), ("q8_0", 2e-2)])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_smaller_kv_types_stay_close(
    architecture: str, kind: str, limit: float, tmp_path: Path, kernels: Path
) -> None:
    spec = TinyModel(architecture, head_dim=32)  # type: ignore[arg-type]  # one of the Literal
    path = write_model(tmp_path / "m.gguf", spec)
    with opened(path, kernels, exact=True, kv_type=kind) as loaded:
        assert off(whole(loaded.runtime, tokens()), plain_logits(spec, tokens())) < limit


@pytest.mark.parametrize("kind", sorted(BY_NAME.keys() - {"F32"}))
def test_quantised_weights_match_numpy_over_their_decoded_values(
    kind: str, tmp_path: Path, kernels: Path
) -> None:
    spec = TinyModel(
        "llama", width=256, heads=4, kv_heads=2, head_dim=64, ff=256, types={"*": kind}
    )
    path = write_model(tmp_path / "m.gguf", spec)
    wanted = plain_logits(spec, tokens())
    with opened(path, kernels, exact=True) as loaded:
        assert off(whole(loaded.runtime, tokens()), wanted) < 1e-4
    with opened(path, kernels) as loaded:
        assert off(whole(loaded.runtime, tokens()), wanted) < 5e-2


@pytest.mark.parametrize("context", [256, 512])
def test_longrope_takes_the_factors_of_the_context_served(
    context: int, tmp_path: Path, kernels: Path
) -> None:
    from support.gguf_writer import tensor, write_gguf
    from support.tiny_models import model_metadata, model_tensors

    keys = {
        "phi3.rope.scaling.original_context_length": 256,
        "phi3.rope.scaling.attn_factor": 1.19,
    }
    spec = TinyModel("phi3", metadata=keys)
    factors = {"long": np.linspace(1, 6, 8), "short": np.linspace(1, 1.4, 8)}
    extra = [
        tensor(f"rope_factors_{kind}.weight", values.astype(np.float32))
        for kind, values in factors.items()
    ]
    path = write_gguf(tmp_path / "m.gguf", model_metadata(spec), [*model_tensors(spec), *extra])
    with LlamaCpp(path, vocab_only=False, context=context) as oracle:
        wanted = oracle.logits(tokens())
    with opened(path, kernels, exact=True, context=context) as loaded:
        assert off(whole(loaded.runtime, tokens()), wanted) < LLAMACPP


@pytest.mark.parametrize(
    "architecture", ["llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3"]
)
def test_a_folder_gives_what_its_gguf_gives(
    architecture: str, tmp_path: Path, kernels: Path
) -> None:
    spec = TinyModel(architecture)  # type: ignore[arg-type]  # one of the Literal
    folder = write_folder(tmp_path / "m", spec)
    _save_a_tokenizer(folder)
    with opened(folder, kernels, exact=True) as loaded:
        found = whole(loaded.runtime, tokens())
        seq = loaded.runtime.seq_create()
        assert np.array_equal(one_by_one(loaded.runtime, seq, tokens()), found)
    with opened(folder, kernels, exact=True, cache_bytes=0) as loaded:
        assert np.array_equal(whole(loaded.runtime, tokens()), found)
    with opened(write_model(tmp_path / "m.gguf", spec), kernels, exact=True) as loaded:
        assert off(found, whole(loaded.runtime, tokens())) < 1e-6
    assert off(found, plain_logits(spec, tokens())) < EXACT


@pytest.mark.parametrize("step", [-1, 1])
def test_a_window_off_by_one_is_past_twice_the_limit(
    step: int, tmp_path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.gguf", MODELS["gemma3"])
    with LlamaCpp(path, vocab_only=False) as oracle:
        wanted = oracle.logits(tokens())

    def faulty(source: ModelSource) -> ModelConfig:
        config = configure(source)
        layers = [
            replace(one, window=one.window + step) if one.window else one for one in config.layers
        ]
        return replace(config, layers=tuple(layers))

    monkeypatch.setattr(loading, "configure", faulty)
    with opened(path, kernels, exact=True) as loaded:
        assert off(whole(loaded.runtime, tokens()), wanted) > 2 * LLAMACPP
