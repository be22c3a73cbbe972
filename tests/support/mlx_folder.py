"""The default model as an MLX folder: decoded by our own reader, so MLX serves the same weights.

Weights are written in F32 (what the file's quantized blocks stand for, exactly), with a tokenizer
whose merges follow from the pieces' scores, as in a `tokenizer.json` of the same family.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from superfluid_adapter_native.formats.gguf import read_gguf
from superfluid_adapter_native.formats.huggingface_names import gguf_name
from superfluid_adapter_native.formats.source import ModelSource, Tensor
from superfluid_adapter_native.quants.decode import decode
from support.safetensors_writer import with_header

_MODULES: Final = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm",
    "pre_feedforward_layernorm", "post_feedforward_layernorm", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip
_TILE: Final = 1 << 22
_NORMAL, _USER, _BYTE = 1, 4, 6
"""Kinds of pieces in a GGUF vocabulary."""


def write_folder(file: Path, folder: Path) -> Path:
    """The Gemma 3 model in a GGUF file, as a folder that mlx-lm reads."""
    folder.mkdir(parents=True)
    source = read_gguf(file)
    (folder / "config.json").write_text(json.dumps(_config(source)))
    _write_weights(source, file, folder / "model.safetensors")
    _write_tokenizer(source.metadata, folder)
    return folder


def _config(source: ModelSource) -> dict[str, Any]:
    said = {key.partition(".")[2]: value for key, value in source.metadata.items()}
    return {
        "model_type": "gemma3_text",
        "hidden_size": said["embedding_length"],
        "num_hidden_layers": said["block_count"],
        "intermediate_size": said["feed_forward_length"],
        "num_attention_heads": said["attention.head_count"],
        "num_key_value_heads": said["attention.head_count_kv"],
        "head_dim": said["attention.key_length"],
        "query_pre_attn_scalar": said["attention.key_length"],
        "rms_norm_eps": said["attention.layer_norm_rms_epsilon"],
        "rope_theta": said["rope.freq_base"],
        "rope_local_base_freq": 10_000.0,
        "sliding_window": said["attention.sliding_window"],
        "sliding_window_pattern": 6,
        "max_position_embeddings": said["context_length"],
        "vocab_size": source.tensors["token_embd.weight"].shape[0],
        "eos_token_id": [1, 106],
        "tie_word_embeddings": True,
    }


def _write_weights(source: ModelSource, file: Path, path: Path) -> None:
    raw, entries, at = np.memmap(file, np.uint8, "r"), {}, 0
    named = dict(_names(source))
    for name, tensor in named.items():
        size = 4 * int(np.prod(tensor.shape))
        entries[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [at, at + size]}
        at += size
    with path.open("wb") as out:
        out.write(with_header(entries, b""))
        for name, tensor in named.items():
            # Gemma's norms are stored as what is added to one, in a folder.
            shift = np.float32(1 if "norm" in name else 0)
            for tile in _tiles(tensor, raw):
                out.write((tile - shift).astype("<f4").tobytes())


def _names(source: ModelSource) -> Iterator[tuple[str, Tensor]]:
    layers = int(source.metadata[f"{source.architecture}.block_count"])
    names = [f"model.layers.{n}.{module}.weight" for n in range(layers) for module in _MODULES]
    for name in ("model.embed_tokens.weight", "model.norm.weight", *names):
        yield name, source.tensors[str(gguf_name(name, source.architecture))]


def _tiles(tensor: Tensor, raw: Any) -> Iterator[Any]:
    kind, count = tensor.type, int(np.prod(tensor.shape))
    step = _TILE // kind.elements * kind.elements
    for first in range(0, count, step):
        last = min(first + step, count)
        start, end = (tensor.offset + it // kind.elements * kind.bytes for it in (first, last))
        yield decode(kind, np.array(raw[start:end]), last - first)


def _write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    pieces = [str(piece) for piece in metadata["tokenizer.ggml.tokens"]]
    kinds = list(metadata["tokenizer.ggml.token_type"])
    scores = list(metadata["tokenizer.ggml.scores"])
    ids = {piece: token for token, piece in enumerate(pieces)}
    joins: list[tuple[float, int, tuple[str, str]]] = []
    for token, piece in enumerate(pieces):
        if kinds[token] != _NORMAL:
            continue
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        joins += [
            (-scores[token], token, (left, right))
            for left, right in cuts
            if left in ids and right in ids
        ]
    joins.sort(key=lambda join: join[:2])
    engine = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=[pair for _, _, pair in joins],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    engine.normalizer = normalizers.Replace(" ", "▁")
    engine.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    bos = int(metadata["tokenizer.ggml.bos_token_id"])
    engine.post_processor = processors.TemplateProcessing(
        single=f"{pieces[bos]} $A", special_tokens=[(pieces[bos], bos)]
    )
    for special in (True, False):
        wanted = [
            AddedToken(piece, normalized=False, special=special)
            for piece, kind in zip(pieces, kinds, strict=True)
            if (kind not in (_NORMAL, _USER, _BYTE)) == special and kind not in (_NORMAL, _BYTE)
        ]
        engine.add_special_tokens(wanted) if special else engine.add_tokens(wanted)
    engine.save(str(folder / "tokenizer.json"), pretty=False)
    names = {"bos_token": pieces[bos], "eos_token": pieces[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
