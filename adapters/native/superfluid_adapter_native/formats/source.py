"""What a model is once its header is read: metadata and tensors in GGUF's names, bytes on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from superfluid_adapter_native.quants.types import TensorType


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor where it lies. `shape` is in NumPy's order: (rows, columns), a row contiguous.

    `offset` and `bytes` are within `ModelSource.files[file]` and proven to lie inside it. The
    offset may be any number: safetensors align nothing.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    file: int
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's header. Reading it touched no weights.

    `metadata` has GGUF's keys whatever the format (`llama.block_count`, `tokenizer.ggml.tokens`);
    arrays are sequences that decode an element when it is asked for. `tensors` has GGUF's names
    (`token_embd.weight`, `blk.0.attn_q.weight`). `rotated` says how queries and keys are laid out
    for RoPE: `pairs` for neighbours (GGUF's llama), `halves` for the first half with the second.

    Where formats differ: `norm_shift` is to be added to every tensor named `*_norm.weight`, as
    safetensors of Gemma hold them less by one than GGUF does. `vectors` has what GGUF keeps in
    small tensors and other formats as settings, by the tensor's name (`rope_freqs.weight`).
    Experts that lie apart have GGUF's older names, one matrix each (`blk.0.ffn_gate.3.weight`
    for expert 3), instead of one tensor for all (`blk.0.ffn_gate_exps.weight`).
    """

    path: Path
    format: Literal["gguf", "safetensors"]
    files: tuple[Path, ...]
    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    rotated: Literal["pairs", "halves"]
    total_bytes: int
    norm_shift: float = 0.0
    vectors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
