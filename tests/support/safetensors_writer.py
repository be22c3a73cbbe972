"""Safetensors files and Hugging Face folders for tests, with the weights of a `TinyModel`."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from support.gguf_writer import encode
from support.tiny_models import TinyModel, model_tensors

Array = NDArray[np.float32]

_TYPES: Final = {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe"}
_MODEL: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA: Final = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI: Final = _BLOCK | {"ffn_up": "mlp.gate_up_proj"}


def safetensors_bytes(tensors: Mapping[str, Array], kind: str = "F32") -> bytes:
    """One file of `tensors`, each encoded as `kind` (F32, F16, BF16)."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, values in tensors.items():
        raw = encode(values, kind)
        place = [len(data), len(data) + len(raw)]
        entries[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": place}
        data += raw
    return with_header(entries, bytes(data))


def with_header(entries: Any, data: bytes) -> bytes:
    """A file of the JSON header `entries` (bytes go in as they are), padded to 8 bytes."""
    head = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + data


def shift_data(path: Path, by: int) -> None:
    """Make the header of a file `by` bytes longer, so that no tensor is aligned."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    end = 8 + length
    path.write_bytes(struct.pack("<Q", length + by) + raw[8:end] + b" " * by + raw[end:])


def write_folder(
    folder: Path,
    spec: TinyModel,
    *,
    kind: str = "F32",
    shards: int = 1,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """The model that `write_model` writes in F32, as a Hugging Face folder without a tokenizer.

    `config` adds or replaces keys of `config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**folder_config(spec), **(config or {})}
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = folder_tensors(spec)
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, kind))
        return folder
    names = list(tensors)
    where: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        (folder / file).write_bytes(safetensors_bytes(part, kind))
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def folder_config(spec: TinyModel) -> dict[str, Any]:
    """`config.json` of `spec`."""
    gemma = spec.gemma
    config: dict[str, Any] = {
        "model_type": _TYPES.get(spec.architecture, spec.architecture),
        "hidden_size": spec.width,
        "intermediate_size": spec.ff,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.context,
        "rms_norm_eps": 1e-6 if gemma else 1e-5,
        "rope_theta": spec.rope_base,
        "tie_word_embeddings": not spec.has_head,
        "torch_dtype": "float32",
        "hidden_act": "gelu_pytorch_tanh" if gemma else "silu",
    }
    if gemma:
        config |= {"sliding_window": spec.window, "query_pre_attn_scalar": spec.head_dim}
    if spec.architecture == "gemma2":
        config |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    if spec.architecture == "qwen3moe":
        config |= {
            "num_experts": spec.experts,
            "num_experts_per_tok": spec.experts_used,
            "moe_intermediate_size": spec.expert_ff,
            "norm_topk_prob": True,
        }
    return config


def folder_tensors(spec: TinyModel) -> dict[str, Array]:
    """The weights of `spec` under the names and in the layout of Hugging Face's models."""
    made: dict[str, Array] = {}
    for one in model_tensors(spec):
        values = np.frombuffer(one.raw, np.float32).reshape(one.shape)
        made |= dict(_named(one.name, values, spec))
    return made


def _named(name: str, values: Array, spec: TinyModel) -> Iterator[tuple[str, Array]]:
    if spec.gemma and name.endswith("_norm.weight"):
        values = values - np.float32(1)
    if name in _MODEL:
        yield _MODEL[name], values
        return
    _, layer, module, kind = name.split(".")
    start = f"model.layers.{layer}"
    experts = re.fullmatch(r"ffn_(gate|up|down)_exps", module)
    if experts:
        for expert, matrix in enumerate(values):
            yield f"{start}.mlp.experts.{expert}.{experts[1]}_proj.{kind}", matrix
        return
    if spec.architecture == "llama" and module in {"attn_q", "attn_k"}:
        values = halves(values, spec.heads if module == "attn_q" else spec.kv_heads)
    table = _GEMMA if spec.gemma else _PHI if spec.architecture == "phi3" else _BLOCK
    yield f"{start}.{table[module]}.{kind}", values


def halves(values: Array, heads: int) -> Array:
    """Rows of GGUF's llama, where RoPE turns neighbours, in Hugging Face's order of halves."""
    rows, *rest = values.shape
    split = values.reshape(heads, rows // heads // 2, 2, *rest)
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)
