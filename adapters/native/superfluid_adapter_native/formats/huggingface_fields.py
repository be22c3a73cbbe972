"""The fields of a Hugging Face `config.json` that we read, by their names there."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Length: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What we read of `config.json`; the rest is about training or other parts of a model."""

    model_type: str
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    max_position_embeddings: Length
    rms_norm_eps: float
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    tie_word_embeddings: bool | None = None
    rope_theta: float | None = None
    rope_local_base_freq: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: Length | None = None
    sliding_window: Length | None = None
    sliding_window_pattern: int | None = None
    use_sliding_window: bool = False
    layer_types: list[str] | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    query_pre_attn_scalar: float | None = None
    use_bidirectional_attention: bool = False
    num_experts: Count | None = None
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Count | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = []
