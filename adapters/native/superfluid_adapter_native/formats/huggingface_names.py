"""Tensor names of Hugging Face's models in GGUF's, one table for the families we read.

The names on the left are those of the `transformers` modules, on the right of llama.cpp's
`gguf-py/gguf/tensor_mapping.py`.
"""

from __future__ import annotations

import re
from typing import Final

_MODEL: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}

_BLOCK: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
}

_GEMMA_BLOCK: Final = _BLOCK | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

_LAYER: Final = re.compile(r"model\.layers\.(0|[1-9]\d{0,5})\.(.+)\.(weight|bias)")
_EXPERT: Final = re.compile(r"mlp\.experts\.(0|[1-9]\d{0,5})\.(gate|up|down)_proj")

IGNORED: Final = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Frequencies that old checkpoints carry; they follow from the configuration."""


def gguf_name(name: str, architecture: str) -> str | None:
    """GGUF's name of the tensor `name`, or None when the family has no such tensor."""
    if name in _MODEL:
        return _MODEL[name]
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return None
    number, module, kind = layer.groups()
    expert = _EXPERT.fullmatch(module)
    if expert is not None:
        return f"blk.{number}.ffn_{expert[2]}.{expert[1]}.{kind}"
    block = _GEMMA_BLOCK if architecture.startswith("gemma") else _BLOCK
    short = block.get(module)
    return None if short is None else f"blk.{number}.{short}.{kind}"
