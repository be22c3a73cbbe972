"""Tiny models of mlx-lm's architectures, made in code; for tests inside MLX's environment."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from superfluid_adapter_mlx.engine import cache_module, mx, utils
from superfluid_adapter_mlx.model import Model

VOCABULARY = 400
_trees = importlib.import_module("mlx.utils")
_BASE: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
_MAMBA: Mapping[str, Any] = {
    "num_heads": 8, "head_dim": 16, "state_size": 32, "conv_kernel": 3, "n_groups": 4,
    "time_step_limit": (0.01, 10.0), "time_step_rank": "auto", "use_bias": False,
    "use_conv_bias": False, "layer_norm_epsilon": 1e-5, "expand": 2, "chunk_size": 16,
}  # fmt: skip
_FALCON: Mapping[str, Any] = {
    "intermediate_size": 64, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_chunk_size": 16,
    "mamba_expand": 2,
}  # fmt: skip
_AFM7: Mapping[str, Any] = {
    "hidden_dim": 64, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2,
}  # fmt: skip
_DEEPSEEK: Mapping[str, Any] = {
    "index_head_dim": 32, "index_n_heads": 4, "index_topk": 64, "kv_lora_rank": 16,
    "q_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 16, "qk_nope_head_dim": 16,
    "moe_intermediate_size": 32, "num_key_value_heads": 4, "first_k_dense_replace": 2,
}  # fmt: skip
_LLAMA4: Mapping[str, Any] = {
    "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 8,
    "num_hidden_layers": 4, "interleave_moe_layer_step": 1, "intermediate_size": 64,
    "intermediate_size_mlp": 128, "num_experts_per_tok": 1, "num_local_experts": 2,
    "use_qk_norm": True, "rope_scaling": None,
}  # fmt: skip
_GEMMA3N: Mapping[str, Any] = {
    "model_type": "gemma3n_text", "num_hidden_layers": 4, "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY, "sliding_window": 16,
    "rope_local_base_freq": 10000.0, "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.0] * 4, "hidden_size_per_layer_input": 16,
    "altup_num_inputs": 2, "altup_coef_clip": 120.0, "altup_correct_scale": True,
    "altup_active_idx": 0, "laurel_rank": 8,
}  # fmt: skip
_QWEN3_NEXT: Mapping[str, Any] = {
    "num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "num_experts": 2, "num_experts_per_tok": 1, "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32, "mlp_only_layers": [], "moe_intermediate_size": 32,
    "partial_rotary_factor": 0.5, "full_attention_interval": 4,
}  # fmt: skip
CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "wide": {"model_type": "llama", "head_dim": 32},
    "16-byte": {
        "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 64,
        "max_position_embeddings": 16384,
    },
    "qwen3": {"model_type": "qwen3"},
    "gemma3": {
        "model_type": "gemma3_text", "num_hidden_layers": 4, "num_key_value_heads": 1,
        "sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16,
    },
    "mamba2": {"model_type": "mamba2", **_MAMBA},
    "falcon_h1": {"model_type": "falcon_h1", **_FALCON},
    "afm7": {"model_type": "afm7", **_AFM7},
    "deepseek_v32": {"model_type": "deepseek_v32", **_DEEPSEEK},
    "gemma3n": {"model_type": "gemma3n", "text_config": {**_BASE, **_GEMMA3N}},
    "llama4": {"model_type": "llama4", "text_config": {**_BASE, **_LLAMA4}},
    "qwen3_next": {"model_type": "qwen3_next", **_QWEN3_NEXT},
}  # fmt: skip
"""By a short name. `falcon_h1` keeps a recurrent state and keys in one list per layer,
`deepseek_v32` two pairs of keys and values; the last five are in trouble in one generation."""


def config(name: str) -> dict[str, Any]:
    """The whole configuration, as `config.json` has it."""
    return {**_BASE, **CONFIGS[name]}


def module(name: str, kind: str = "float32", seed: int = 0, **changes: Any) -> Any:
    """mlx-lm's model with random weights of one floating type; `changes` go into its settings."""
    mx.random.seed(seed)
    settings = {**config(name), **changes}
    build, arguments = utils._get_classes(settings)
    made = build(arguments.from_dict(settings))
    made.update(_trees.tree_map(lambda weight: weight.astype(getattr(mx, kind)), made.parameters()))
    mx.eval(made.parameters())
    made.eval()
    return made


def model(name: str, kind: str = "float32") -> Model:
    vocabulary = config(name)["vocab_size"]
    return Model(module(name, kind), vocabulary, vocabulary)


def write_folder(
    path: Path, name: str = "llama", kind: str = "float32", *, bits: int = 0, **changes: Any
) -> Path:
    """A model's folder as mlx-lm's own converter leaves it; `changes` go into `config.json`."""
    path.mkdir(parents=True, exist_ok=True)
    tokens = write_tokenizer(path)
    settings = {**config(name), "eos_token_id": tokens.token_to_id("<|im_end|>")}
    made = module(name, kind)
    if bits:
        made, settings = utils.quantize_model(made, settings, 32, bits)
    weights = dict(_trees.tree_flatten(made.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    (path / "config.json").write_text(json.dumps({**settings, **changes}))
    return path


def write_tokenizer(path: Path) -> Tokenizer:
    """A byte-level tokenizer of at most `VOCABULARY` ids, with a chat template."""
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokens.train_from_iterator(["a few words go here", "hello world again"] * 4, trainer)
    tokens.save(str(path / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": template,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokens


def quantized(made: Model, bits: int = 8) -> Model:
    """The same model with caches of quantized keys and values."""
    made.module.make_cache = lambda: [
        cache_module.QuantizedKVCache(group_size=32, bits=bits) for _ in made.module.layers
    ]
    return made
