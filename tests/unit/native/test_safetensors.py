"""Hugging Face folders: the same model as its GGUF, and folders that are wrong."""

from __future__ import annotations

import json
import math
import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from superfluid_adapter_native.formats.gguf import read_gguf
from superfluid_adapter_native.formats.safetensors import read_safetensors
from superfluid_adapter_native.formats.source import ModelSource
from superfluid_adapter_native.quants.decode import decode
from superfluid_compat.errors import (
    ModelDamaged,
    ModelError,
    ModelNotFound,
    UnsupportedArchitecture,
    UnsupportedType,
)
from support.safetensors_writer import (
    folder_tensors,
    halves,
    safetensors_bytes,
    shift_data,
    with_header,
    write_folder,
)
from support.tiny_models import Architecture, TinyModel, write_model

Values = NDArray[np.float32]
SMALL = TinyModel("llama", layers=1, width=16, heads=2, kv_heads=1, head_dim=8, ff=16)
ARCHITECTURES: tuple[Architecture, ...] = (
    "llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3",
)  # fmt: skip


def values_of(source: ModelSource, name: str) -> Values:
    """A tensor's weights, as the model computes with them."""
    one = source.tensors[name]
    with source.files[one.file].open("rb") as stream:
        stream.seek(one.offset)
        raw = np.frombuffer(stream.read(one.bytes), np.uint8)
    found = decode(one.type, raw, math.prod(one.shape)).reshape(one.shape)
    return found + np.float32(source.norm_shift) if name.endswith("_norm.weight") else found


def expert_values(source: ModelSource, name: str) -> Values:
    """`name`, put together from its experts where they lie apart."""
    if name in source.tensors or "_exps" not in name:
        return values_of(source, name)
    short = name.replace("_exps", ".{}")
    return np.stack([values_of(source, short.format(expert)) for expert in range(4)])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_holds_the_same_model_as_its_gguf(
    tmp_path: Path, architecture: Architecture, shards: int
) -> None:
    spec = TinyModel(architecture)
    wanted = read_gguf(write_model(tmp_path / "tiny.gguf", spec))
    found = read_safetensors(write_folder(tmp_path / "tiny", spec, shards=shards))
    assert found.format == "safetensors"
    assert found.architecture == architecture
    assert found.rotated == "halves"
    assert len(found.files) == shards
    assert found.total_bytes == sum(path.stat().st_size for path in found.files)
    stacked = {name for name in wanted.tensors if "_exps" in name}
    assert found.tensors.keys() >= wanted.tensors.keys() - stacked
    for name in wanted.tensors:
        expected = values_of(wanted, name)
        if wanted.rotated == "pairs" and ("attn_q" in name or "attn_k" in name):
            expected = halves(expected, spec.heads if "attn_q" in name else spec.kv_heads)
        np.testing.assert_allclose(expert_values(found, name), expected, atol=1e-6)
    for key, value in wanted.metadata.items():
        if key.startswith(f"{architecture}.") and value != 0 and "original_context" not in key:
            assert found.metadata[key] == pytest.approx(value), key


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_types(tmp_path: Path, kind: str) -> None:
    source = read_safetensors(write_folder(tmp_path / "m", SMALL, kind=kind))
    assert {one.type.name for one in source.tensors.values()} == {kind}
    wanted = folder_tensors(SMALL)["model.embed_tokens.weight"]
    np.testing.assert_allclose(values_of(source, "token_embd.weight"), wanted, rtol=1e-2, atol=1e-6)


def test_mistral_is_llama_and_keeps_its_window(tmp_path: Path) -> None:
    settings = {"model_type": "mistral", "sliding_window": 32}
    source = read_safetensors(write_folder(tmp_path / "m", SMALL, config=settings))
    assert source.architecture == "llama"
    assert source.metadata["llama.attention.sliding_window"] == 32


def test_a_tied_head_that_is_stored_is_left_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", SMALL, config={"tie_word_embeddings": True})
    assert "lm_head.weight" in folder_tensors(SMALL)
    assert "output.weight" not in read_safetensors(folder).tensors


@pytest.mark.parametrize("stored", [True, False])
def test_where_nothing_is_said_of_a_head_the_embedding_is_one_if_there_is_no_other(
    tmp_path: Path, stored: bool
) -> None:
    spec = SMALL if stored else replace(SMALL, tied=True)
    folder = write_folder(tmp_path / "m", spec, config={"tie_word_embeddings": None})
    assert ("lm_head.weight" in folder_tensors(spec)) is stored
    assert ("output.weight" in read_safetensors(folder).tensors) is stored


def test_a_head_that_is_said_to_be_there_and_is_not_can_be_mended(tmp_path: Path) -> None:
    spec = replace(SMALL, tied=True)
    folder = write_folder(tmp_path / "m", spec, config={"tie_word_embeddings": False})
    with pytest.raises(ModelDamaged, match=r"no lm_head\.weight, .*tie_word_embeddings") as raised:
        read_safetensors(folder)
    assert "correct config.json" in raised.value.fix


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("by", [1, 2, 3])
def test_a_header_may_have_any_length(tmp_path: Path, kind: str, by: int) -> None:
    folder = write_folder(tmp_path / "m", SMALL, kind=kind)
    shift_data(folder / "model.safetensors", by)
    source = read_safetensors(folder)
    assert all(one.offset % 4 == by for one in source.tensors.values())
    wanted = folder_tensors(SMALL)["model.embed_tokens.weight"]
    np.testing.assert_allclose(values_of(source, "token_embd.weight"), wanted, rtol=1e-2, atol=1e-6)


def test_frequencies_of_old_checkpoints_are_left_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", SMALL)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    raw = safetensors_bytes(folder_tensors(SMALL) | old)
    (folder / "model.safetensors").write_bytes(raw)
    assert not any("rot" in name for name in read_safetensors(folder).tensors)


@pytest.mark.parametrize(
    ("file", "content", "wanted"),
    [
        ("chat_template.jinja", "{{ messages }}", "{{ messages }}"),
        ("tokenizer_config.json", '{"chat_template": "a"}', "a"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "tool_use", "template": "b"},'
            ' {"name": "default", "template": "c"}]}',
            "c",
        ),
        ("tokenizer_config.json", '{"chat_template": [{"name": []}, 3]}', None),
        ("tokenizer_config.json", "{}", None),
    ],
)
def test_chat_template(tmp_path: Path, file: str, content: str, wanted: str | None) -> None:
    folder = write_folder(tmp_path / "m", SMALL)
    (folder / file).write_text(content)
    assert read_safetensors(folder).metadata.get("tokenizer.chat_template") == wanted


def rope_of(tmp_path: Path, settings: Mapping[str, Any], spec: TinyModel = SMALL) -> ModelSource:
    return read_safetensors(write_folder(tmp_path / "m", spec, config=settings))


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_factors(tmp_path: Path, key: str) -> None:
    """Against the blend in wavelengths, written out in NumPy."""
    stated = {**LLAMA3, "rope_theta": 5e5} if key == "rope_parameters" else LLAMA3
    source = rope_of(tmp_path, {"rope_theta": 5e5, key: stated})
    frequencies = 5e5 ** -(np.arange(0, 8, 2) / 8)
    wavelengths = 2 * np.pi / frequencies
    smooth = np.clip((256 / wavelengths - 1) / (4 - 1), 0, 1)
    scaled = (1 - smooth) * frequencies / 8 + smooth * frequencies
    np.testing.assert_allclose(source.vectors["rope_freqs.weight"], frequencies / scaled, rtol=1e-6)
    assert source.metadata["llama.rope.freq_base"] == 5e5
    assert source.metadata["llama.rope.scaling.type"] == "none"


def test_linear_and_yarn(tmp_path: Path) -> None:
    linear = rope_of(tmp_path, {"rope_scaling": {"type": "linear", "factor": 4}}).metadata
    assert (linear["llama.rope.scaling.type"], linear["llama.rope.scaling.factor"]) == ("linear", 4)
    yarn = {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
        "beta_fast": 16.0, "attention_factor": 1.5,
    }  # fmt: skip
    found = rope_of(tmp_path, {"rope_scaling": yarn}).metadata
    assert found["llama.rope.scaling.type"] == "yarn"
    assert found["llama.rope.scaling.original_context_length"] == 128
    assert found["llama.rope.scaling.yarn_beta_fast"] == 16.0
    assert "llama.rope.scaling.yarn_beta_slow" not in found
    assert found["llama.rope.scaling.attn_factor"] * (1 + 0.1 * math.log(4)) == pytest.approx(1.5)


def test_longrope(tmp_path: Path) -> None:
    spec = TinyModel("phi3", layers=1, width=16, heads=2, kv_heads=1, head_dim=8, ff=16)
    factors = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    source = rope_of(
        tmp_path,
        {"original_max_position_embeddings": 128, "rope_scaling": {"type": "longrope", **factors}},
        spec,
    )
    assert source.vectors["rope_factors_long.weight"] == (2.0, 3.0, 4.0, 5.0)
    assert source.vectors["rope_factors_short.weight"] == (1.0, 1.5, 2.0, 3.0)
    wanted = math.sqrt(1 + math.log(512 / 128) / math.log(128))
    assert source.metadata["phi3.rope.scaling.attn_factor"] == pytest.approx(wanted)


def test_gemma3_states_a_base_for_each_kind_of_layer(tmp_path: Path) -> None:
    spec = TinyModel("gemma3", layers=6)
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    found = rope_of(tmp_path, {"rope_parameters": parameters, "layer_types": kinds}, spec)
    keys = found.metadata
    assert (keys["gemma3.rope.freq_base"], keys["gemma3.rope.freq_base_swa"]) == (1e6, 5e3)
    assert keys["gemma3.rope.scaling.factor"] == 8.0
    assert found.norm_shift == 1.0


def test_a_partial_rotation(tmp_path: Path) -> None:
    found = rope_of(tmp_path, {"partial_rotary_factor": 0.5}).metadata
    assert found["llama.rope.dimension_count"] == 4


GEMMA = TinyModel("gemma3", layers=1, width=16, heads=2, kv_heads=1, head_dim=8, ff=16)
MOE = TinyModel("qwen3moe", layers=1, width=16, heads=2, kv_heads=1, head_dim=8, expert_ff=16)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"model_type": "bloom"}, UnsupportedArchitecture, "model_type is 'bloom', one of llama"),
        ({"model_type": None}, UnsupportedArchitecture, "model_type is None"),
        ({"model_type": ["llama"]}, UnsupportedArchitecture, r"model_type is \['llama'\]"),
        ({"quantization_config": {}}, UnsupportedArchitecture, "quantization_config"),
        ({"hidden_act": "relu"}, UnsupportedArchitecture, "hidden_act is 'relu'"),
        ({"use_sliding_window": True}, UnsupportedArchitecture, "use_sliding_window is True"),
        ({"hidden_size": "wide"}, ModelDamaged, r"Expected `int`, got `str` .*hidden_size"),
        ({"hidden_size": -1}, ModelDamaged, "hidden_size"),
        ({"num_attention_heads": 0}, ModelDamaged, "num_attention_heads"),
        ({"head_dim": 1 << 60}, ModelDamaged, "head_dim"),
        ({"num_hidden_layers": 10**400}, ModelDamaged, "num_hidden_layers"),
        ({"rope_theta": -1.0}, ModelDamaged, "rope_theta"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, UnsupportedArchitecture, "'dynamic', linear"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ModelDamaged, "positive"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -2.0}}, ModelDamaged, "positive"),
        ({"rope_scaling": {"rope_type": 7}}, ModelDamaged, "rope_type"),
        ({"rope_scaling": {"rope_type": "yarn", "mscale": 1.0}}, UnsupportedArchitecture, "mscale"),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0, "factor": 1e300}},
            ModelDamaged, "positive",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}},
            ModelDamaged, "short_factor has 1 entries, 4",
        ),
    ],
)  # fmt: skip
def test_configurations_that_are_wrong(
    tmp_path: Path, settings: dict[str, Any], error: type[ModelError], message: str
) -> None:
    folder = write_folder(tmp_path / "m", SMALL, config=settings)
    with pytest.raises(error, match=message) as caught:
        read_safetensors(folder)
    assert "config.json" in caught.value.message


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        (GEMMA, {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        (GEMMA, {"layer_types": ["full_attention"]}, "layer_types is"),
        (GEMMA, {"sliding_window_pattern": 3}, "layer_types is"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (SMALL, {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types is"),
        (MOE, {"layer_types": ["sliding_attention"]}, "layer_types is"),
        (MOE, {"norm_topk_prob": False}, "norm_topk_prob is False"),
        (MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        (MOE, {"mlp_only_layers": [0]}, "mlp_only_layers"),
    ],
)
def test_settings_that_change_the_computation_are_refused(
    tmp_path: Path, spec: TinyModel, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedArchitecture, match=message):
        read_safetensors(write_folder(tmp_path / "m", spec, config=settings))


@pytest.mark.parametrize(
    ("kind", "layer_types", "window"),
    [
        ("mistral", None, 8),
        ("mistral", ["full_attention"], None),
        ("mistral", ["sliding_attention"], 8),
        ("llama", None, None),
        ("llama", ["sliding_attention"], 8),
        ("phi3", None, 8),
    ],
)
def test_a_window_is_that_of_the_layers_that_are_said_to_have_it(
    kind: str, layer_types: list[str] | None, window: int | None, tmp_path: Path
) -> None:
    spec = replace(SMALL, architecture="phi3" if kind == "phi3" else "llama")
    told = {"model_type": kind, "sliding_window": 8, "layer_types": layer_types}
    found = read_safetensors(write_folder(tmp_path / "m", spec, config=told)).metadata
    assert found.get(f"{spec.architecture}.attention.sliding_window") == window


def entry(
    shape: Any = (2, 2), offsets: Any = (0, 16), dtype: Any = "F32", **more: Any
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


NORM = "model.norm.weight"
HUGE = 1 << 60
WRONG_FILES: dict[str, tuple[bytes, type[ModelError], str]] = {
    "empty": (b"", ModelDamaged, "has 0 bytes"),
    "short": (b"\1\0\0", ModelDamaged, "has 3 bytes"),
    "header-2^60": (struct.pack("<Q", HUGE) + b"{}", ModelDamaged, f"header of {HUGE} bytes"),
    "header-longer": (struct.pack("<Q", 99) + b"{}", ModelDamaged, "2 are left"),
    "not-json": (with_header(b"{nope", b""), ModelDamaged, "not the JSON"),
    "not-utf8": (with_header(b'{"\xff": 1}', b""), ModelDamaged, "not the JSON"),
    "not-object": (with_header(b"[]", b""), ModelDamaged, "holds list"),
    "deep": (with_header(b'{"a":' * 100_000, b""), ModelDamaged, "not the JSON"),
    "deep-list": (with_header(b'{"a":' + b"[" * 100_000, b""), ModelDamaged, "not the JSON"),
    "digits": (with_header(b'{"a":' + b"9" * 9999 + b"}", b""), ModelDamaged, "not the JSON"),
    "key-twice": (with_header(b'{"a": 1, "a": 2}', b""), ModelDamaged, "'a' is there twice"),
    "nan": (with_header(b'{"a": NaN}', b""), ModelDamaged, "NaN is no number"),
    "entry-type": (with_header({NORM: 3}, b""), ModelDamaged, "Expected `object`, got `int`"),
    "entry-lacks": (with_header({NORM: {"dtype": "F32"}}, b""), ModelDamaged, "missing"),
    "entry-more": (with_header({NORM: entry(x=1)}, bytes(16)), ModelDamaged, "unknown field `x`"),
    "dtype": (
        with_header({NORM: entry(dtype="F8_E4M3")}, bytes(16)), UnsupportedType,
        "'model.norm.weight' is of dtype 'F8_E4M3', one of F32, F16, BF16",
    ),
    "dtype-type": (with_header({NORM: entry(dtype=4)}, bytes(16)), ModelDamaged, "dtype"),
    "shape-scalar": (with_header({NORM: entry((), (0, 4))}, bytes(16)), ModelDamaged, "shape"),
    "shape-0": (with_header({NORM: entry((0, 4), (0, 0))}, bytes(16)), ModelDamaged, "positive"),
    "shape-negative": (with_header({NORM: entry((-2, -2))}, bytes(16)), ModelDamaged, "positive"),
    "shape-rank": (with_header({NORM: entry([1] * 9, (0, 4))}, bytes(16)), ModelDamaged, "1 to 4"),
    "shape-overflow": (
        with_header({NORM: entry((1 << 40, 1 << 40))}, bytes(16)), ModelDamaged, "bytes within",
    ),
    "shape-float": (with_header({NORM: entry((2.5, 2))}, bytes(16)), ModelDamaged, "shape"),
    "shape-other": (with_header({NORM: entry((2, 3))}, bytes(24)), ModelDamaged, "24 bytes within"),
    "offset-outside": (with_header({NORM: entry()}, bytes(15)), ModelDamaged, "of 15 bytes"),
    "offset-2^60": (
        with_header({NORM: entry(offsets=(HUGE, HUGE + 16))}, bytes(16)), ModelDamaged, "lies at",
    ),
    "offset-negative": (
        with_header({NORM: entry(offsets=(-16, 0))}, bytes(16)), ModelDamaged, "lies at -16",
    ),
    "offset-backwards": (
        with_header({NORM: entry(offsets=(16, 0))}, bytes(16)), ModelDamaged, "lies at 16 to 0",
    ),
    "overlap": (
        with_header({NORM: entry(), "lm_head.weight": entry(offsets=(8, 24))}, bytes(24)),
        ModelDamaged, "'model.norm.weight' and 'lm_head.weight' overlap",
    ),
    "foreign-tensor": (
        with_header({"model.layers.0.mystery.weight": entry()}, bytes(16)),
        UnsupportedArchitecture, "'model.layers.0.mystery.weight' has no place in llama",
    ),
    "no-head": (with_header({NORM: entry()}, bytes(16)), ModelDamaged, "no lm_head.weight"),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "error", "message"), WRONG_FILES.values(), ids=WRONG_FILES.keys())
def test_files_that_are_wrong(
    tmp_path: Path, raw: bytes, error: type[ModelError], message: str
) -> None:
    folder = write_folder(tmp_path / "m", SMALL)
    (folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(error, match=message) as caught:
        read_safetensors(folder)
    assert str(folder) in caught.value.message
    assert "\n" not in caught.value.line()
    assert len(caught.value.line()) < 600 + len(str(folder))


def index_of(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def lose_a_shard(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def swap_shards(folder: Path) -> None:
    first, second = (folder / f"model-0000{part}-of-00003.safetensors" for part in (1, 2))
    raw = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(raw)


def double_a_shard(folder: Path) -> None:
    shard = folder / "model-00002-of-00003.safetensors"
    (folder / "other.safetensors").write_bytes(shard.read_bytes())
    index_of(folder, lambda where: where.update({NORM: "other.safetensors"}))


def shard_by_path(folder: Path) -> None:
    index_of(folder, lambda where: where.update({NORM: "../secret.safetensors"}))


def shard_by_number(folder: Path) -> None:
    index_of(folder, lambda where: where.update({NORM: 3}))  # type: ignore[dict-item]  # on purpose


def shard_is_a_fifo(folder: Path) -> None:
    lose_a_shard(folder)
    os.mkfifo(folder / "model-00002-of-00003.safetensors")


def shard_is_a_loop(folder: Path) -> None:
    lose_a_shard(folder)
    shard = folder / "model-00002-of-00003.safetensors"
    shard.symlink_to(shard.name)


def index_without_map(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def index_is_a_loop(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    path.unlink()
    path.symlink_to(path.name)


def lose_the_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


def lose_the_configuration(folder: Path) -> None:
    (folder / "config.json").unlink()


def configuration_is_a_fifo(folder: Path) -> None:
    lose_the_configuration(folder)
    os.mkfifo(folder / "config.json")


def configuration_is_huge(folder: Path) -> None:
    os.truncate(folder / "config.json", 1 << 30)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lose_a_shard, ModelNotFound, "00002-of-00003.safetensors: cannot be opened: No such"),
        (swap_shards, ModelDamaged, "lacks tensor 'model.embed_tokens.weight', which the index"),
        (double_a_shard, ModelDamaged, "is there twice"),
        (shard_by_path, ModelDamaged, "'../secret.safetensors' is no name"),
        (shard_by_number, ModelDamaged, "file 3 is no name"),
        (shard_is_a_fifo, ModelNotFound, "is a FIFO"),
        (shard_is_a_loop, ModelNotFound, "symbolic links"),
        (index_without_map, ModelDamaged, "no weight_map"),
        (index_is_a_loop, ModelNotFound, "symbolic links"),
        (lose_the_index, ModelNotFound, "holds 3 \\*.safetensors, one or model.safetensors.index"),
        (lose_the_configuration, ModelNotFound, "config.json: cannot be opened"),
        (configuration_is_a_fifo, ModelNotFound, "is a FIFO"),
        (configuration_is_huge, ModelDamaged, "at most 16777216 were wanted"),
    ],
)
def test_folders_that_are_wrong(
    tmp_path: Path, damage: Callable[[Path], None], error: type[ModelError], message: str
) -> None:
    folder = write_folder(tmp_path / "m", SMALL, shards=3)
    damage(folder)
    with pytest.raises(error, match=message):
        read_safetensors(folder)


def mutated(whole: bytes, rng: random.Random, reach: int) -> bytes:
    """One to three changed, removed, doubled or replaced runs within the first `reach` bytes."""
    raw = bytearray(whole)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(max(1, min(len(raw), reach)))
        match rng.randrange(6):
            case 0:
                raw[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                raw[at : at + 1] = rng.choice([b"9", b"-", b"e", b'"', b"[", b"{", b"}", b"\\"])
            case 2:
                del raw[at:]
            case 3:
                del raw[at : at + rng.randint(1, 16)]
            case 4:
                raw[at:at] = raw[at : at + rng.randint(1, 16)]
            case _:
                raw[:8] = struct.pack("<Q", rng.choice([0, 1, 2**31, HUGE, 2**64 - 1]))
    return bytes(raw)


def fuzz(folder: Path, count: int, seed: int) -> set[str]:
    """Read `count` folders with one mutated file each; the kinds of outcome seen."""
    rng = random.Random(seed)
    spec = TinyModel(
        "llama", layers=1, width=8, heads=1, kv_heads=1, head_dim=8, ff=8, vocabulary_size=300
    )
    write_folder(folder, spec, shards=2, config={"rope_scaling": LLAMA3})
    sound = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    seen: set[str] = set()
    for _ in range(count):
        path = rng.choice(list(sound))
        path.write_bytes(mutated(sound[path], rng, 2048))
        started = time.process_time()
        try:
            read_safetensors(folder)
            seen.add("read")
        except ModelError as error:
            seen.add(error.code)
        assert time.process_time() - started < 2
        path.write_bytes(sound[path])
    return seen


def test_mutations_end_in_a_model_or_a_typed_error(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        seen = fuzz(tmp_path / "m", 600, seed=11)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert {"read", "model_damaged", "unsupported_architecture", "model_missing"} <= seen
    assert peak < 64 << 20


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
def test_many_mutations(tmp_path: Path, seed: int) -> None:
    fuzz(tmp_path / "m", 5000, seed=100 + seed)
