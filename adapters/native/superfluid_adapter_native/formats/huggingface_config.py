"""`config.json` of a Hugging Face folder in GGUF's metadata keys.

Meanings and defaults: the configuration classes of `transformers` for each `model_type`; keys:
llama.cpp's `convert_hf_to_gguf.py`. A setting that changes the computation and that we do not
carry over is refused, never dropped.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from superfluid_adapter_native.formats.huggingface_fields import Config
from superfluid_adapter_native.formats.huggingface_rope import rope
from superfluid_compat.errors import ModelDamaged, UnsupportedArchitecture

ARCHITECTURES: Final = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
"""`model_type` to GGUF's architecture."""

_WINDOW_EVERY: Final = {"gemma2": 2, "gemma3": 6}
"""Each block of so many layers ends in one that sees everything."""

_WINDOWED: Final = ("llama", "phi3")
"""Families in which every layer may have a window."""


class Header(msgspec.Struct, frozen=True):
    """A configuration as `ModelSource` states it. `tied`: the embedding is the head too; None
    where nothing is said, and it is the head if there is no other."""

    architecture: str
    metadata: dict[str, Any]
    vectors: dict[str, tuple[float, ...]]
    tied: bool | None


def header(found: dict[str, Any], where: str) -> Header:
    """The header that `config.json`'s object `found` stands for.

    Raises `UnsupportedArchitecture` for a `model_type` or setting we do not serve, `ModelDamaged`
    for a missing key or a value of the wrong type."""
    kind = found.get("model_type")
    architecture = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if architecture is None:
        raise UnsupportedArchitecture(
            f"{where}: model_type is {kind!r:.60}, one of {', '.join(ARCHITECTURES)} was wanted"
        )
    if found.get("quantization_config") is not None:
        raise UnsupportedArchitecture(
            f"{where}: has a quantization_config, plain weights were wanted"
        )
    try:
        config = msgspec.convert(found, Config)
        _check(config, architecture, where)
        return _header(config, architecture, where)
    except (msgspec.ValidationError, OverflowError) as error:
        raise ModelDamaged(f"{where}: {error}") from error


def _header(config: Config, architecture: str, where: str) -> Header:
    head_dim = config.head_dim or config.hidden_size // max(1, config.num_attention_heads)
    settings, vectors = rope(config, head_dim, where)
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads or config.num_attention_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        **settings,
        **_family(config, architecture),
    }
    metadata = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    tied = config.tie_word_embeddings
    return Header(
        architecture,
        {"general.architecture": architecture, **metadata},
        vectors,
        True if tied is None and architecture.startswith("gemma") else tied,
    )


def _family(config: Config, architecture: str) -> dict[str, Any]:
    """Keys that only some families have; None leaves a key out."""
    match architecture:
        case "gemma2" | "gemma3":
            scalar = config.query_pre_attn_scalar
            return {
                "attention.sliding_window": config.sliding_window,
                "attention.scale": None if not scalar or scalar < 0 else scalar**-0.5,
                # In a configuration null means off, in GGUF an absent key the family's default.
                "attn_logit_softcapping": config.attn_logit_softcapping or 0.0,
                "final_logit_softcapping": config.final_logit_softcapping or 0.0,
            }
        case "phi3" | "llama":
            return {"attention.sliding_window": _window(config)}
        case "qwen3moe":
            return {
                "expert_count": config.num_experts,
                "expert_used_count": config.num_experts_per_tok,
                "expert_feed_forward_length": config.moe_intermediate_size,
            }
        case _:
            return {}


def _check(config: Config, architecture: str, where: str) -> None:
    """Settings that the forward pass of a family takes for granted."""
    gemma = architecture.startswith("gemma")
    activation = config.hidden_activation or config.hidden_act
    wanted = ("gelu_pytorch_tanh", "gelu_tanh") if gemma else ("silu", "swish")
    moe = architecture == "qwen3moe"
    refused = {
        "hidden_act": activation not in {*wanted, None},
        "use_sliding_window": config.use_sliding_window,
        "use_bidirectional_attention": config.use_bidirectional_attention,
        "layer_types": not _windows_fit(config, architecture),
        "norm_topk_prob": moe and not config.norm_topk_prob,
        "decoder_sparse_step": moe and config.decoder_sparse_step != 1,
        "mlp_only_layers": moe and bool(config.mlp_only_layers),
    }
    for name, wrong in refused.items():
        if wrong:
            raise UnsupportedArchitecture(
                f"{where}: {name} is {getattr(config, name)!r:.80}, which the native runtime's "
                f"{architecture} does not do"
            )


def _window(config: Config) -> int | None:
    """The window of every layer. Llama's own models attend to everything, whatever is stated,
    unless their layers are said to have one."""
    kinds = set(config.layer_types or ())
    stated = kinds or {"full_attention" if config.model_type == "llama" else "sliding_attention"}
    return None if stated == {"full_attention"} else config.sliding_window


def _windows_fit(config: Config, architecture: str) -> bool:
    """Whether the layers that see everything are every so-manieth, as GGUF takes for granted, or
    in a family without such a pattern all of them or none."""
    every = _WINDOW_EVERY.get(architecture)
    if every is None:
        kinds = set(config.layer_types or ())
        return kinds <= {"full_attention"} or (
            kinds == {"sliding_attention"} and architecture in _WINDOWED
        )
    if config.layer_types is not None:
        return all(
            (kind == "full_attention") == (layer % every == every - 1)
            for layer, kind in enumerate(config.layer_types)
        )
    return config.sliding_window_pattern in {None, every}
