"""What a description of an architecture says: its tensors and how they are put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Dimension: TypeAlias = Literal[
    "width",
    "vocabulary",
    "queries",
    "keys",
    "qkv",
    "head_dim",
    "ff",
    "gate_up",
    "experts",
    "expert_ff",
    "frequencies",
]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor by its GGUF name (in a block: what follows `blk.N.`) and shape, rows first.

    An `optional` one takes part where the file has it."""

    name: str
    shape: tuple[Dimension, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Widths:
    """What an attention scale may depend on."""

    width: int
    heads: int
    head_dim: int
    layers: int


def by_head_dim(widths: Widths) -> float:
    """1 / sqrt(head size), the usual scale of attention scores."""
    return float(widths.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture. The blocks' tensors say which parts a block has: norms of queries and
    keys, norms after attention and feed-forward, fused or separate projections, experts.

    `window_every` n > 1: of n layers the last attends to everything, the others to the sliding
    window; 1: every layer has the window; 0: none has. `local_rope_base` is the RoPE base of
    windowed layers where it is another. Soft caps come from the file where it names them, else
    from `attention_cap` and `logit_cap`, 0 for none.
    """

    name: str
    serves: str
    block: tuple[TensorSpec, ...]
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scaled: bool = False
    window_every: int = 0
    window: int = 0
    local_rope_base: float | None = None
    attention_scale: Callable[[Widths], float] = by_head_dim
    attention_cap: float = 0.0
    logit_cap: float = 0.0


MODEL: Final = (
    TensorSpec("token_embd.weight", ("vocabulary", "width")),
    TensorSpec("output_norm.weight", ("width",)),
    TensorSpec("output.weight", ("vocabulary", "width"), optional=True),
    TensorSpec("rope_freqs.weight", ("frequencies",), optional=True),
    TensorSpec("rope_factors_long.weight", ("frequencies",), optional=True),
    TensorSpec("rope_factors_short.weight", ("frequencies",), optional=True),
)
"""Tensors outside the blocks. Without `output.weight` the embedding is the head."""

ATTENTION: Final = (
    TensorSpec("attn_norm.weight", ("width",)),
    TensorSpec("attn_q.weight", ("queries", "width")),
    TensorSpec("attn_k.weight", ("keys", "width")),
    TensorSpec("attn_v.weight", ("keys", "width")),
    TensorSpec("attn_q.bias", ("queries",), optional=True),
    TensorSpec("attn_k.bias", ("keys",), optional=True),
    TensorSpec("attn_v.bias", ("keys",), optional=True),
    TensorSpec("attn_output.weight", ("width", "queries")),
    TensorSpec("attn_output.bias", ("width",), optional=True),
)
FUSED_ATTENTION: Final = (
    TensorSpec("attn_norm.weight", ("width",)),
    TensorSpec("attn_qkv.weight", ("qkv", "width")),
    TensorSpec("attn_output.weight", ("width", "queries")),
)
QK_NORMS: Final = (
    TensorSpec("attn_q_norm.weight", ("head_dim",)),
    TensorSpec("attn_k_norm.weight", ("head_dim",)),
)
POST_NORMS: Final = (
    TensorSpec("post_attention_norm.weight", ("width",)),
    TensorSpec("post_ffw_norm.weight", ("width",)),
)
GATED: Final = (
    TensorSpec("ffn_norm.weight", ("width",)),
    TensorSpec("ffn_gate.weight", ("ff", "width")),
    TensorSpec("ffn_up.weight", ("ff", "width")),
    TensorSpec("ffn_down.weight", ("width", "ff")),
)
FUSED_GATED: Final = (
    TensorSpec("ffn_norm.weight", ("width",)),
    TensorSpec("ffn_up.weight", ("gate_up", "width")),
    TensorSpec("ffn_down.weight", ("width", "ff")),
)
EXPERTS: Final = (
    TensorSpec("ffn_norm.weight", ("width",)),
    TensorSpec("ffn_gate_inp.weight", ("experts", "width")),
    TensorSpec("ffn_gate_exps.weight", ("experts", "expert_ff", "width")),
    TensorSpec("ffn_up_exps.weight", ("experts", "expert_ff", "width")),
    TensorSpec("ffn_down_exps.weight", ("experts", "width", "expert_ff")),
)
