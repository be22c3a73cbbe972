"""Tiny random-weight models in GGUF that this runtime and llama.cpp both load.

    path = write_model(tmp_path / "tiny.gguf", TinyModel("gemma3", types={"*ffn*": "Q8_0"}))

Equal specifications give equal files. Tensor names, shapes and keys are those that llama.cpp's
conversion writes for each architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import numpy as np

from support import tiny_vocabularies
from support.gguf_writer import TensorData, Typed, random_tensor, tensor, write_gguf

Architecture = Literal["llama", "gemma3", "gemma2", "qwen2", "qwen3", "qwen3moe", "phi3"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TinyModel:
    """What to build. K-quants and IQ4_XS need `width`, `heads * head_dim` and `ff` in multiples
    of 256, the other quants of 32.

    `types` maps patterns of tensor names to types, the first that matches wins and the rest are
    F32; norms and biases always are. `metadata` adds or replaces keys: RoPE settings go there
    (`llama.rope.scaling.type`). `vocabulary` None picks the family's own kind. `deviation` is
    that of the matrices' weights; None means 1/sqrt(columns), which keeps activations level.
    """

    architecture: Architecture = "llama"
    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ff: int = 128
    context: int = 512
    experts: int = 4
    experts_used: int = 2
    expert_ff: int = 64
    vocabulary: Mapping[str, Any] | None = None
    vocabulary_size: int = 0
    pre: str = ""
    types: Mapping[str, str] = field(default_factory=dict)
    tied: bool = False
    rope_base: float = 10_000.0
    window: int = 64
    rope_factors: tuple[float, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    deviation: float | None = None
    seed: int = 1

    @property
    def gemma(self) -> bool:
        return self.architecture in {"gemma2", "gemma3"}

    @property
    def has_head(self) -> bool:
        return not (self.tied or self.gemma)


def write_model(path: Path, spec: TinyModel) -> Path:
    """Write `spec` as one GGUF file."""
    return write_gguf(path, model_metadata(spec), model_tensors(spec))


def model_vocabulary(spec: TinyModel) -> dict[str, Any]:
    """The vocabulary's keys: `spec.vocabulary`, or what the family usually has."""
    if spec.vocabulary is not None:
        return dict(spec.vocabulary)
    if spec.architecture.startswith("qwen"):
        return tiny_vocabularies.bpe(pre=spec.pre or "qwen2", size=spec.vocabulary_size)
    if spec.pre:
        return tiny_vocabularies.bpe(pre=spec.pre, size=spec.vocabulary_size)
    controls = ("<|endoftext|>",) if spec.architecture == "phi3" else ()
    return tiny_vocabularies.spm(size=spec.vocabulary_size, gemma=spec.gemma, controls=controls)


def model_metadata(spec: TinyModel) -> dict[str, Any]:
    """Every key of the file."""
    name = spec.architecture
    keys: dict[str, Any] = {
        "general.architecture": name,
        "general.name": f"tiny {name}",
        "general.file_type": 0,
        f"{name}.block_count": spec.layers,
        f"{name}.context_length": spec.context,
        f"{name}.embedding_length": spec.width,
        f"{name}.feed_forward_length": spec.ff,
        f"{name}.attention.head_count": spec.heads,
        f"{name}.attention.head_count_kv": spec.kv_heads,
        f"{name}.attention.key_length": spec.head_dim,
        f"{name}.attention.value_length": spec.head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": 1e-6 if spec.gemma else 1e-5,
        f"{name}.rope.dimension_count": spec.head_dim,
        f"{name}.rope.freq_base": spec.rope_base,
    }
    vocabulary = model_vocabulary(spec)
    keys |= {f"{name}.{key}": value for key, value in _family_keys(spec).items()}
    return {**keys, **vocabulary, **spec.metadata}


def _family_keys(spec: TinyModel) -> dict[str, Any]:
    match spec.architecture:
        case "gemma3":
            return {"attention.sliding_window": spec.window}
        case "gemma2":
            return {
                "attention.sliding_window": spec.window,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            }
        case "phi3":
            return {
                "attention.sliding_window": 0,
                "rope.scaling.original_context_length": spec.context,
            }
        case "qwen3moe":
            return {
                "expert_count": spec.experts,
                "expert_used_count": spec.experts_used,
                "expert_feed_forward_length": spec.expert_ff,
            }
        case _:
            return {}


def model_tensors(spec: TinyModel) -> list[TensorData]:
    """Every tensor of the file, weights random by `spec.seed`."""
    rng = np.random.default_rng(spec.seed)
    tokens = model_vocabulary(spec)["tokenizer.ggml.tokens"]
    size = len(tokens.value if isinstance(tokens, Typed) else tokens)
    shapes: dict[str, Shape] = {
        "token_embd.weight": (size, spec.width),
        "output_norm.weight": (spec.width,),
    }
    if spec.has_head:
        shapes["output.weight"] = (size, spec.width)
    for layer in range(spec.layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in _layer(spec).items()}
    made = [_tensor(name, shape, spec, rng) for name, shape in shapes.items()]
    if spec.rope_factors:
        made.append(tensor("rope_freqs.weight", np.array(spec.rope_factors, np.float32)))
    return made


def _layer(spec: TinyModel) -> dict[str, Shape]:
    width, ff = spec.width, spec.ff
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, Shape] = {"attn_norm.weight": (width,)}
    if spec.architecture == "phi3":
        shapes["attn_qkv.weight"] = (queries + 2 * keys, width)
    else:
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"attn_{part}.weight"] = (rows, width)
            if spec.architecture == "qwen2":
                shapes[f"attn_{part}.bias"] = (rows,)
    shapes["attn_output.weight"] = (width, queries)
    if spec.architecture in {"gemma3", "qwen3", "qwen3moe"}:
        shapes |= {f"attn_{part}_norm.weight": (spec.head_dim,) for part in "qk"}
    shapes["ffn_norm.weight"] = (width,)
    if spec.gemma:
        shapes |= {"post_attention_norm.weight": (width,), "post_ffw_norm.weight": (width,)}
    return shapes | _feed_forward(spec, width, ff)


def _feed_forward(spec: TinyModel, width: int, ff: int) -> dict[str, Shape]:
    if spec.architecture == "qwen3moe":
        experts, inner = spec.experts, spec.expert_ff
        return {
            "ffn_gate_inp.weight": (experts, width),
            "ffn_gate_exps.weight": (experts, inner, width),
            "ffn_up_exps.weight": (experts, inner, width),
            "ffn_down_exps.weight": (experts, width, inner),
        }
    if spec.architecture == "phi3":
        return {"ffn_up.weight": (2 * ff, width), "ffn_down.weight": (width, ff)}
    return {
        "ffn_gate.weight": (ff, width),
        "ffn_up.weight": (ff, width),
        "ffn_down.weight": (width, ff),
    }


def _tensor(name: str, shape: Shape, spec: TinyModel, rng: np.random.Generator) -> TensorData:
    if name.endswith(".bias"):
        return tensor(name, (rng.standard_normal(shape) * 0.1).astype(np.float32))
    if len(shape) == 1:
        return tensor(name, rng.uniform(0.6, 1.4, shape).astype(np.float32))
    kind = next((kind for like, kind in spec.types.items() if fnmatchcase(name, like)), "F32")
    deviation = shape[-1] ** -0.5 if spec.deviation is None else spec.deviation
    return random_tensor(name, "F32" if "gate_inp" in name else kind, shape, rng, deviation)
