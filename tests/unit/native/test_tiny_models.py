"""The tiny models that other tests build on: llama.cpp takes them for what they claim to be."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from superfluid_adapter_native.quants.decode import decode
from superfluid_adapter_native.quants.types import TYPES, TensorType
from support.gguf_writer import TensorData, tensor, write_gguf
from support.llamacpp import LlamaCpp
from support.tiny_models import (
    Architecture,
    TinyModel,
    model_metadata,
    model_tensors,
    model_vocabulary,
    write_model,
)

TOKENS = [1, 270, 280, 300, 5, 290, 270]
WIDE = TinyModel("llama", layers=1, width=256, heads=4, head_dim=64, ff=256, tied=True)


@pytest.mark.parametrize("architecture", get_args(Architecture))
def test_llama_cpp_serves_every_architecture(tmp_path: Path, architecture: Architecture) -> None:
    spec = TinyModel(architecture)
    with LlamaCpp(write_model(tmp_path / "tiny.gguf", spec), vocab_only=False) as model:
        logits = model.logits(TOKENS)
        assert model.size == len(model_vocabulary(spec)["tokenizer.ggml.tokens"])
        text = "hello the world, é 世界"
        assert model.detokenize(model.tokenize(text, add_special=False)).decode().strip() == text
    assert logits.shape == (len(TOKENS), model.size)
    assert 0.3 < logits.std() < 3


def decoded(one: TensorData) -> TensorData:
    """`one` in F32, by our decoder."""
    raw = np.frombuffer(one.raw, np.uint8)
    values = decode(one.type, raw, int(np.prod(one.shape)))
    return tensor(one.name, values.reshape(one.shape))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_llama_cpp_reads_the_weights_that_we_decode(tmp_path: Path, kind: TensorType) -> None:
    """Its logits on quantised weights and on ours decoded from them, up to its own rounding of
    activations to 8 bits (here at most 3 % of the largest logit)."""
    spec = dataclasses.replace(WIDE, types={"*": kind.name})
    tensors = model_tensors(spec)
    assert {one.type.name for one in tensors} == {"F32", kind.name}
    ours = write_gguf(tmp_path / "f32.gguf", model_metadata(spec), [*map(decoded, tensors)])
    with LlamaCpp(write_model(tmp_path / "m.gguf", spec), vocab_only=False) as model:
        found = model.logits(TOKENS)
    with LlamaCpp(ours, vocab_only=False) as model:
        wanted = model.logits(TOKENS)
    assert np.abs(found - wanted).max() < 0.04 * np.abs(wanted).max()


def test_equal_specifications_give_equal_files(tmp_path: Path) -> None:
    spec = TinyModel("qwen3moe", types={"*exps*": "Q4_0"})
    one, two = (write_model(tmp_path / name, spec).read_bytes() for name in "ab")
    other = write_model(tmp_path / "c", dataclasses.replace(spec, seed=2)).read_bytes()
    assert one == two
    assert one != other
