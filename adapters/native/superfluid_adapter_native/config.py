"""A model's configuration, read from its header and proven against its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from superfluid_adapter_native.architectures import architecture
from superfluid_adapter_native.architectures.description import (
    MODEL,
    Architecture,
    Dimension,
    TensorSpec,
    Widths,
)
from superfluid_adapter_native.formats.source import ModelSource, Tensor
from superfluid_compat.errors import ModelDamaged, UnsupportedArchitecture

Scaling: TypeAlias = Literal["none", "linear", "yarn", "longrope"]

_MOST_CONTEXT: Final = 1 << 24
_MOST_WIDTH: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotation of `dimensions` of a head. `factor` and `original_context` belong to `scaling`.

    `attention_factor` multiplies cosines and sines. `pairs`: neighbours rotate together, else the
    first half with the second. `beta_fast` and `beta_slow` bound YaRN's ramp.
    """

    base: float
    dimensions: int
    pairs: bool
    scaling: Scaling = "none"
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One block. `window` 0 attends to everything, else to that many tokens, its own included."""

    heads: int
    kv_heads: int
    ff: int
    window: int
    rope: RopeConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything a forward pass needs to know besides the weights."""

    architecture: Architecture
    width: int
    vocabulary: int
    context: int
    head_dim: int
    epsilon: float
    attention_scale: float
    attention_cap: float
    logit_cap: float
    embedding_scale: float
    experts: int
    experts_used: int
    expert_ff: int
    layers: tuple[LayerConfig, ...]

    @property
    def rotary_dims(self) -> int:
        return self.layers[0].rope.dimensions


def configure(source: ModelSource) -> ModelConfig:
    """Read and check the header, and every tensor's shape against it.

    Raises `UnsupportedArchitecture`, and `ModelDamaged` naming the key or tensor at fault."""
    described = architecture(source.architecture)
    config = _Reader(source, described).config()
    _check_vocabulary(source, config)
    _check_tensors(source, config)
    return config


class _Reader:
    """Typed access to the header's keys of one architecture."""

    def __init__(self, source: ModelSource, described: Architecture) -> None:
        self.source = source
        self.described = described
        self.metadata: Mapping[str, Any] = source.metadata

    def config(self) -> ModelConfig:
        described = self.described
        count = self.whole("block_count", most=max(1, len(self.source.tensors)))
        width = self.whole("embedding_length", most=_MOST_WIDTH)
        heads = self.each("attention.head_count", count)
        kv_heads = self.each("attention.head_count_kv", count, heads)
        head_dim = self.whole("attention.key_length", width // heads[0] or 1)
        value_dim = self.whole("attention.value_length", head_dim)
        if value_dim != head_dim:
            raise self.wrong("attention.value_length", value_dim, f"the keys' {head_dim}")
        used = any(spec.name.startswith("ffn_gate_exps") for spec in described.block)
        experts = self.whole("expert_count") if used else 0
        return ModelConfig(
            architecture=described,
            width=width,
            vocabulary=self.rows("token_embd.weight"),
            context=self.whole("context_length", most=_MOST_CONTEXT),
            head_dim=head_dim,
            epsilon=self.real("attention.layer_norm_rms_epsilon", most=1.0),
            attention_scale=described.attention_scale(Widths(width, heads[0], head_dim, count)),
            attention_cap=self.cap("attn_logit_softcapping", described.attention_cap),
            logit_cap=self.cap("final_logit_softcapping", described.logit_cap),
            embedding_scale=math.sqrt(width) if described.embedding_scaled else 1.0,
            experts=experts,
            experts_used=self.whole("expert_used_count", most=experts) if used else 0,
            expert_ff=self.whole("expert_feed_forward_length") if used else 0,
            layers=self.layers(count, heads, kv_heads, head_dim),
        )

    def layers(
        self, count: int, heads: Sequence[int], kv_heads: Sequence[int], head_dim: int
    ) -> tuple[LayerConfig, ...]:
        widths = self.each("feed_forward_length", count)
        overall = self.rope(head_dim)
        window = self.whole("attention.sliding_window", self.described.window, least=0)
        made = []
        for index in range(count):
            if heads[index] % kv_heads[index]:
                raise self.wrong(
                    "attention.head_count_kv", kv_heads[index], f"a divisor of {heads[index]}"
                )
            seen = window if self.windowed(index) else 0
            made.append(
                LayerConfig(
                    heads[index],
                    kv_heads[index],
                    widths[index],
                    seen,
                    self.local_rope(overall) if seen else overall,
                )
            )
        return tuple(made)

    def windowed(self, index: int) -> bool:
        every = self.described.window_every
        if every <= 1:
            return every == 1
        return index % every < every - 1

    def local_rope(self, overall: RopeConfig) -> RopeConfig:
        if self.described.local_rope_base is None:
            return overall
        base = self.real("rope.freq_base_swa", self.described.local_rope_base)
        return RopeConfig(base, overall.dimensions, overall.pairs)

    def rope(self, head_dim: int) -> RopeConfig:
        dimensions = self.whole("rope.dimension_count", head_dim, most=head_dim)
        if dimensions % 2:
            raise self.wrong("rope.dimension_count", dimensions, "an even number")
        scaling = self.scaling()
        return RopeConfig(
            base=self.real("rope.freq_base", 10_000.0, least=1.0),
            dimensions=dimensions,
            pairs=self.source.rotated == "pairs",
            scaling=scaling,
            factor=self.factor() if scaling in ("linear", "yarn") else 1.0,
            original_context=self.whole(
                "rope.scaling.original_context_length",
                self.whole("context_length", most=_MOST_CONTEXT),
                most=_MOST_CONTEXT,
            ),
            attention_factor=self.real("rope.scaling.attn_factor", 1.0),
            beta_fast=self.real("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self.real("rope.scaling.yarn_beta_slow", 1.0),
        )

    def factor(self) -> float:
        # Old files call the linear factor `scale_linear`.
        old = self.real("rope.scale_linear", 1.0)
        return self.real("rope.scaling.factor", old)

    def scaling(self) -> Scaling:
        long = "rope_factors_long.weight"
        if long in self.source.tensors or long in self.source.vectors:
            return "longrope"
        kind = self.metadata.get(self.key("rope.scaling.type"))
        if kind is None:
            return "linear" if self.factor() != 1.0 else "none"
        match str(kind).lower():
            # Llama 3's factors stand in a tensor, so nothing is left to compute.
            case "none" | "llama3" | "default":
                return "none"
            case "linear":
                return "linear"
            case "yarn":
                return "yarn"
            case "longrope" | "su":
                return "longrope"
        raise UnsupportedArchitecture(
            f"RoPE scaling {kind!r}, the native runtime serves linear, yarn, llama3 and longrope"
        )

    def key(self, name: str) -> str:
        return f"{self.source.architecture}.{name}"

    def wrong(self, name: str, found: object, wanted: str) -> ModelDamaged:
        return ModelDamaged(f"{self.key(name)} is {found!r:.60}, wanted {wanted}")

    def whole(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = _MOST_WIDTH
    ) -> int:
        found = self.metadata.get(self.key(name))
        if found is None:
            if default is None:
                raise self.wrong(name, None, "a whole number")
            return default
        if isinstance(found, Sequence) and not isinstance(found, str | bytes) and len(found):
            found = found[0]
        return self.checked(name, found, least, most)

    def checked(self, name: str, found: object, least: int, most: int) -> int:
        if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
            raise self.wrong(name, found, f"a whole number from {least} to {most}")
        return found

    def each(self, name: str, count: int, default: Sequence[int] | None = None) -> tuple[int, ...]:
        """One number for each layer, from a number or an array."""
        found = self.metadata.get(self.key(name))
        if found is None and default is not None:
            return tuple(default)
        if isinstance(found, Sequence) and not isinstance(found, str | bytes):
            if len(found) != count:
                raise self.wrong(name, len(found), f"{count} numbers")
            return tuple(self.checked(name, found[i], 1, _MOST_WIDTH) for i in range(count))
        return (self.whole(name),) * count

    def real(
        self,
        name: str,
        default: float | None = None,
        *,
        least: float = 0.0,
        most: float = 1e12,
    ) -> float:
        found = self.metadata.get(self.key(name), default)
        fits = isinstance(found, int | float) and not isinstance(found, bool)
        if not fits or not math.isfinite(found) or not least < found <= most:
            raise self.wrong(name, found, f"a number above {least:g} and at most {most:g}")
        return float(found)

    def cap(self, name: str, default: float) -> float:
        if self.metadata.get(self.key(name), default) == 0:
            return 0.0
        return self.real(name, default or None)

    def rows(self, name: str) -> int:
        tensor = self.source.tensors.get(name)
        if tensor is None or len(tensor.shape) != 2:
            found = "none" if tensor is None else f"shape {tensor.shape}"
            raise ModelDamaged(f"tensor {name}: found {found}, wanted a matrix")
        return tensor.shape[0]


def _check_vocabulary(source: ModelSource, config: ModelConfig) -> None:
    tokens = source.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return
    # Folders pad the embedding past the tokenizer's last id; GGUF files name every row.
    fits = len(tokens) == config.vocabulary
    if source.format == "safetensors":
        fits = len(tokens) <= config.vocabulary
    if not fits:
        raise ModelDamaged(
            f"the vocabulary has {len(tokens)} tokens, the embedding {config.vocabulary} rows"
        )


def dimensions(config: ModelConfig, layer: LayerConfig) -> dict[Dimension, int]:
    """What the shapes of a block's tensors stand for."""
    queries, keys = layer.heads * config.head_dim, layer.kv_heads * config.head_dim
    return {
        "width": config.width,
        "vocabulary": config.vocabulary,
        "queries": queries,
        "keys": keys,
        "qkv": queries + 2 * keys,
        "head_dim": config.head_dim,
        "ff": layer.ff,
        "gate_up": 2 * layer.ff,
        "experts": config.experts,
        "expert_ff": config.expert_ff,
        "frequencies": layer.rope.dimensions // 2,
    }


def _check_tensors(source: ModelSource, config: ModelConfig) -> None:
    seen: set[str] = set()
    for spec in MODEL:
        _check_setting(source, spec, dimensions(config, config.layers[0]))
        _check(source, spec.name, spec, dimensions(config, config.layers[0]), seen)
    for index, layer in enumerate(config.layers):
        sizes = dimensions(config, layer)
        for spec in config.architecture.block:
            _check(source, f"blk.{index}.{spec.name}", spec, sizes, seen)
    for name in source.tensors:
        if name not in seen:
            raise UnsupportedArchitecture(
                f"tensor {name} has no place in {config.architecture.name} as the native runtime "
                "knows it"
            )


def _check_setting(source: ModelSource, spec: TensorSpec, sizes: Mapping[Dimension, int]) -> None:
    values = source.vectors.get(spec.name)
    if values is not None and (len(values),) != tuple(sizes[name] for name in spec.shape):
        raise ModelDamaged(f"{spec.name} has {len(values)} numbers, wanted {sizes[spec.shape[0]]}")


def _check(
    source: ModelSource,
    name: str,
    spec: TensorSpec,
    sizes: Mapping[Dimension, int],
    seen: set[str],
) -> None:
    wanted = tuple(sizes[dimension] for dimension in spec.shape)
    apart = name.replace("_exps.weight", ".0.weight")
    if apart != name and apart in source.tensors:
        for expert in range(wanted[0]):
            one = TensorSpec(name.replace("_exps.weight", f".{expert}.weight"), spec.shape[1:])
            _check(source, one.name, one, sizes, seen)
        return
    tensor: Tensor | None = source.tensors.get(name)
    if tensor is None:
        if spec.optional:
            return
        raise ModelDamaged(f"tensor {name}: found none, wanted shape {wanted}")
    if tensor.shape != wanted:
        raise ModelDamaged(f"tensor {name}: found shape {tensor.shape}, wanted {wanted}")
    seen.add(name)
