"""Headers that contradict themselves or promise what cannot be, refused before anything loads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from superfluid_adapter_native.architectures import served
from superfluid_adapter_native.config import configure
from superfluid_adapter_native.formats.open import open_source
from superfluid_adapter_native.native import NativeAdapter
from superfluid_compat.errors import ModelDamaged, SuperfluidError, UnsupportedArchitecture
from support.gguf_writer import TensorData, write_gguf
from support.tiny_models import TinyModel, model_metadata, model_tensors, write_model

SPEC = TinyModel("llama")
Change = Callable[[list[TensorData]], list[TensorData]]


def refused(tmp_path: Path, keys: dict[str, Any], change: Change = lambda some: some) -> str:
    metadata = {**model_metadata(SPEC), **keys}
    kept = {key: value for key, value in metadata.items() if value is not None}
    path = write_gguf(tmp_path / "m.gguf", kept, change(model_tensors(SPEC)))
    with pytest.raises(ModelDamaged) as caught:
        configure(open_source(path))
    return caught.value.line()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 0),
        ("block_count", 1 << 40),
        ("block_count", "2"),
        ("block_count", None),
        ("embedding_length", 0),
        ("embedding_length", 1 << 60),
        ("attention.head_count", 0),
        ("attention.head_count", None),
        ("attention.head_count", [4, 4, 4]),
        ("attention.head_count_kv", 0),
        ("attention.head_count_kv", 3),
        ("attention.key_length", 0),
        ("attention.value_length", 8),
        ("attention.layer_norm_rms_epsilon", math.nan),
        ("attention.layer_norm_rms_epsilon", -1.0),
        ("attention.layer_norm_rms_epsilon", None),
        ("feed_forward_length", 0),
        ("context_length", 0),
        ("context_length", 1 << 50),
        ("rope.freq_base", math.inf),
        ("rope.freq_base", 0.0),
        ("rope.dimension_count", 7),
        ("rope.dimension_count", 64),
        ("rope.scaling.factor", math.nan),
        ("rope.scaling.factor", 0.0),
    ],
)
def test_a_key_that_cannot_be_is_named_with_what_was_wanted(
    key: str, value: object, tmp_path: Path
) -> None:
    line = refused(tmp_path, {f"llama.{key}": value, "llama.rope.scaling.type": "linear"})
    assert f"llama.{key} is" in line
    assert "wanted" in line
    assert "\n" not in line


def _without(name: str) -> Change:
    return lambda some: [one for one in some if one.name != name]


def _reshaped(name: str) -> Change:
    def change(some: list[TensorData]) -> list[TensorData]:
        return [replace(x, shape=x.shape[::-1]) if x.name == name else x for x in some]

    return change


def test_a_tensor_that_is_missing_or_misshapen_is_named(tmp_path: Path) -> None:
    line = refused(tmp_path, {}, _without("blk.1.ffn_up.weight"))
    assert "tensor blk.1.ffn_up.weight: found none, wanted shape (128, 64)" in line
    line = refused(tmp_path, {}, _reshaped("blk.0.ffn_down.weight"))
    assert "tensor blk.0.ffn_down.weight: found shape (128, 64), wanted (64, 128)" in line
    assert "token_embd.weight" in refused(tmp_path, {}, _without("token_embd.weight"))


def test_a_vocabulary_that_contradicts_the_embedding_is_refused(tmp_path: Path) -> None:
    tokens = model_metadata(SPEC)["tokenizer.ggml.tokens"]
    shorter = replace(tokens, value=tokens.value[:-1]) if hasattr(tokens, "kind") else tokens[:-1]
    line = refused(tmp_path, {"tokenizer.ggml.tokens": shorter})
    assert "the vocabulary has" in line
    assert "the embedding" in line


def test_another_architecture_is_refused_with_those_served(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "mamba"}, [])
    with pytest.raises(UnsupportedArchitecture) as caught:
        NativeAdapter().facts(path)
    assert "'mamba'" in caught.value.line()
    for name in ("llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3"):
        assert name in served()
        assert name in caught.value.line()


def test_a_tensor_that_has_no_place_is_not_ignored(tmp_path: Path) -> None:
    tensors = model_tensors(SPEC)
    odd = replace(tensors[-1], name="blk.0.ffn_gate_inp.weight")
    path = write_gguf(tmp_path / "m.gguf", model_metadata(SPEC), [*tensors, odd])
    with pytest.raises(UnsupportedArchitecture, match=r"blk\.0\.ffn_gate_inp\.weight"):
        configure(open_source(path))


@pytest.mark.parametrize("scaling", ["dynamic", "mystery"])
def test_an_unknown_rope_scaling_is_refused(scaling: str, tmp_path: Path) -> None:
    spec = replace(SPEC, metadata={"llama.rope.scaling.type": scaling})
    with pytest.raises(UnsupportedArchitecture, match=scaling):
        configure(open_source(write_model(tmp_path / "m.gguf", spec)))


def test_gemma3_windows_five_layers_of_six_with_their_own_rope_base(tmp_path: Path) -> None:
    spec = TinyModel("gemma3", layers=13, rope_base=1e6)
    config = configure(open_source(write_model(tmp_path / "m.gguf", spec)))
    windowed = [layer.window == 64 for layer in config.layers]
    assert windowed == [index % 6 != 5 for index in range(13)]
    for layer in config.layers:
        assert layer.rope.base == (1e4 if layer.window else 1e6)
    assert config.embedding_scale == 8.0


def test_every_error_is_of_the_tree(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(range(200)))
    with pytest.raises(SuperfluidError):
        NativeAdapter().facts(path)
