"""Tiny models of the kinds that only llama.cpp serves: recurrent, hybrid, encoder.

Names, shapes and keys are those that llama.cpp's conversion writes. Equal every time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from support import tiny_vocabularies
from support.gguf_writer import Kind, TensorData, Typed, tensor, write_gguf

WIDTH: Final = 64
LAYERS: Final = 2
HIDDEN: Final = 128
CONTEXT: Final = 512
Shapes = dict[str, tuple[int, ...]]


def write_recurrent(path: Path) -> Path:
    """A Mamba of two layers."""
    inner, state, kernel, rank = 2 * WIDTH, 16, 4, 4
    block: Shapes = {
        "attn_norm.weight": (WIDTH,),
        "ssm_in.weight": (2 * inner, WIDTH),
        "ssm_conv1d.weight": (inner, kernel),
        "ssm_conv1d.bias": (inner,),
        "ssm_x.weight": (rank + 2 * state, inner),
        "ssm_dt.weight": (inner, rank),
        "ssm_dt.bias": (inner,),
        "ssm_a": (inner, state),
        "ssm_d": (inner,),
        "ssm_out.weight": (WIDTH, inner),
    }
    keys = {
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": rank,
    }
    shapes = {"output_norm.weight": (WIDTH,), **_layered([block] * LAYERS)}
    return _write(path, "mamba", keys, shapes, tiny_vocabularies.spm())


def write_hybrid(path: Path) -> Path:
    """An LFM2 of two layers: a short convolution, then attention."""
    heads, kv_heads, kernel = 4, 2, 3
    head = WIDTH // heads
    feed: Shapes = {
        "attn_norm.weight": (WIDTH,),
        "ffn_norm.weight": (WIDTH,),
        "ffn_gate.weight": (HIDDEN, WIDTH),
        "ffn_up.weight": (HIDDEN, WIDTH),
        "ffn_down.weight": (WIDTH, HIDDEN),
    }
    convolution: Shapes = {
        "shortconv.conv.weight": (WIDTH, kernel),
        "shortconv.in_proj.weight": (3 * WIDTH, WIDTH),
        "shortconv.out_proj.weight": (WIDTH, WIDTH),
        **feed,
    }
    attention: Shapes = {
        "attn_q.weight": (WIDTH, WIDTH),
        "attn_k.weight": (kv_heads * head, WIDTH),
        "attn_v.weight": (kv_heads * head, WIDTH),
        "attn_output.weight": (WIDTH, WIDTH),
        "attn_q_norm.weight": (head,),
        "attn_k_norm.weight": (head,),
        **feed,
    }
    keys = {
        "feed_forward_length": HIDDEN,
        "attention.head_count": heads,
        "attention.head_count_kv": Typed(Kind.I32, [0, kv_heads], array=True),
        "attention.layer_norm_rms_epsilon": 1e-5,
        "shortconv.l_cache": kernel,
        "rope.freq_base": 10_000.0,
    }
    shapes = {"token_embd_norm.weight": (WIDTH,), **_layered([convolution, attention])}
    return _write(path, "lfm2", keys, shapes, tiny_vocabularies.spm())


def write_encoder(
    path: Path, *, width: int = WIDTH, layers: int = LAYERS, pooling: int | None = 1
) -> Path:
    """A BERT that pools by the number `pooling` of llama.cpp's kinds, by the mean if not told
    otherwise; None states nothing."""
    hidden = 2 * width
    vocabulary = _word_pieces()
    block: Shapes = {
        **{f"attn_{part}.{kind}": (width, width) if kind == "weight" else (width,)
           for part in ("q", "k", "v", "output") for kind in ("weight", "bias")},
        **{f"{name}.{kind}": (width,) for name in ("attn_output_norm", "layer_output_norm")
           for kind in ("weight", "bias")},
        "ffn_up.weight": (hidden, width),
        "ffn_up.bias": (hidden,),
        "ffn_down.weight": (width, hidden),
        "ffn_down.bias": (width,),
    }  # fmt: skip
    keys = {
        "embedding_length": width,
        "block_count": layers,
        "feed_forward_length": hidden,
        "attention.head_count": width // 16,
        "attention.layer_norm_epsilon": 1e-12,
        "attention.causal": False,
        **({} if pooling is None else {"pooling_type": pooling}),
    }
    shapes = {
        "token_types.weight": (2, width),
        "position_embd.weight": (CONTEXT, width),
        "token_embd_norm.weight": (width,),
        "token_embd_norm.bias": (width,),
        **_layered([block] * layers),
    }
    return _write(path, "bert", keys, shapes, vocabulary)


def _word_pieces() -> dict[str, Any]:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    special = len(tokens)
    whole = [*tiny_vocabularies.WORDS, *tiny_vocabularies.LETTERS]
    tokens += dict.fromkeys(f"\u2581{word}" for word in whole)
    tokens += tiny_vocabularies.LETTERS
    types = [3] * special + [1] * (len(tokens) - special)
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Typed(Kind.I32, types, array=True),
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.mask_token_id": 4,
    }


def _layered(blocks: list[Shapes]) -> Shapes:
    return {
        f"blk.{layer}.{name}": shape
        for layer, block in enumerate(blocks)
        for name, shape in block.items()
    }


def _write(
    path: Path, name: str, keys: dict[str, Any], shapes: Shapes, vocabulary: dict[str, Any]
) -> Path:
    common = {
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "block_count": LAYERS,
        "vocab_size": tiny_vocabularies.size_of(vocabulary),
    }
    metadata = {
        "general.architecture": name,
        "general.name": f"tiny {name}",
        **{f"{name}.{key}": value for key, value in {**common, **keys}.items()},
        **vocabulary,
    }
    rng = np.random.default_rng(11)
    width = keys.get("embedding_length", WIDTH)
    sizes = {"token_embd.weight": (tiny_vocabularies.size_of(vocabulary), width), **shapes}
    return write_gguf(path, metadata, [_random(one, shape, rng) for one, shape in sizes.items()])


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> TensorData:
    if name.endswith("ssm_a"):
        values = -rng.uniform(0.5, 4.0, shape)
    elif name.endswith(".bias"):
        values = rng.standard_normal(shape) * 0.1
    elif len(shape) == 1:
        values = rng.uniform(0.6, 1.4, shape)
    else:
        values = rng.standard_normal(shape) * shape[-1] ** -0.5
    return tensor(name, values.astype(np.float32))
