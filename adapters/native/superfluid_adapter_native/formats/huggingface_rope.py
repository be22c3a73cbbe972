"""RoPE settings of a Hugging Face configuration in GGUF's keys, and as factors per frequency.

Formulas: `modeling_rope_utils.py` of `transformers` (`_compute_llama3_parameters`,
`_compute_yarn_parameters`, `_compute_longrope_parameters`).
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from superfluid_adapter_native.formats.huggingface_fields import Config
from superfluid_compat.errors import ModelDamaged, UnsupportedArchitecture

Settings = dict[str, Any]
Vectors = dict[str, tuple[float, ...]]


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """`rope_parameters`, or `rope_scaling` of older configurations, under one type's name."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: list[float] = []
    long_factor: list[float] = []
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def name(self) -> str:
        return self.rope_type or self.type or "default"


def rope(config: Config, head_dim: int, where: str) -> tuple[Settings, Vectors]:
    """GGUF's `rope.*` keys and the vectors GGUF would hold as tensors."""
    stated, local = _stated(config)
    found = msgspec.convert(stated, Rope)
    theta = found.rope_theta or config.rope_theta or _default_theta(config)
    part = found.partial_rotary_factor or config.partial_rotary_factor or 1.0
    if not (0 < theta < 1e15 and 0 < part <= 1):
        raise ModelDamaged(f"{where}: rope_theta {theta} or partial_rotary_factor {part} is absurd")
    dimensions = int(head_dim * part)
    settings: Settings = {"rope.dimension_count": dimensions, "rope.freq_base": float(theta)}
    if config.model_type == "gemma3_text":
        settings["rope.freq_base_swa"] = float(local)
    if found.name == "default":
        return settings, {}
    original = (
        found.original_max_position_embeddings
        or config.original_max_position_embeddings
        or config.max_position_embeddings
    )
    _check(found, original, where)
    scaling, vectors = _scaling(config, found, original, _frequencies(theta, dimensions), where)
    kind = {"llama3": "none", "su": "longrope"}.get(found.name, found.name)
    return {**settings, "rope.scaling.type": kind, **scaling}, vectors


def _stated(config: Config) -> tuple[dict[str, Any], float]:
    """The parameters of layers that see everything, and the windowed ones' base."""
    whole = config.rope_parameters or config.rope_scaling or {}
    full, windowed = whole.get("full_attention"), whole.get("sliding_attention")
    if not isinstance(full, dict):
        return whole, config.rope_local_base_freq
    local = msgspec.convert(windowed if isinstance(windowed, dict) else {}, Rope)
    return full, local.rope_theta or config.rope_local_base_freq


def _default_theta(config: Config) -> float:
    return 1e6 if config.model_type == "gemma3_text" else 1e4


def _frequencies(theta: float, dimensions: int) -> list[float]:
    return [theta ** (-2.0 * pair / dimensions) for pair in range(dimensions // 2)]


def _check(found: Rope, original: int, where: str) -> None:
    numbers = (found.factor, found.low_freq_factor, found.high_freq_factor, original)
    if not all(0 < number < 1e9 for number in numbers):
        raise ModelDamaged(
            f"{where}: rope scaling has factors {numbers}, positive ones were wanted"
        )
    if not found.truncate or found.mscale is not None or found.mscale_all_dim is not None:
        raise UnsupportedArchitecture(
            f"{where}: rope scaling with truncate or mscale is not served"
        )


def _scaling(
    config: Config, found: Rope, original: int, frequencies: list[float], where: str
) -> tuple[Settings, Vectors]:
    match found.name:
        case "linear":
            return {"rope.scaling.factor": found.factor}, {}
        case "yarn":
            return _yarn(found, original), {}
        case "llama3":
            return {}, {"rope_freqs.weight": _llama3(found, original, frequencies)}
        case "longrope" | "su":
            return _longrope(config, found, original, len(frequencies), where)
    raise UnsupportedArchitecture(
        f"{where}: rope scaling is {found.name!r:.60}, linear, yarn, llama3 or longrope was wanted"
    )


def _yarn(found: Rope, original: int) -> Settings:
    """`rope.scaling.attn_factor` multiplies what the factor itself gives, 1 + 0.1 ln(factor)."""
    own = 1.0 + 0.1 * math.log(found.factor) if found.factor > 1 else 1.0
    settings: Settings = {
        "rope.scaling.factor": found.factor,
        "rope.scaling.original_context_length": original,
        "rope.scaling.yarn_beta_fast": found.beta_fast,
        "rope.scaling.yarn_beta_slow": found.beta_slow,
    }
    if found.attention_factor is not None:
        settings["rope.scaling.attn_factor"] = found.attention_factor / own
    return settings


def _llama3(found: Rope, original: int, frequencies: list[float]) -> tuple[float, ...]:
    """What each frequency is divided by: 1 for the fast, `factor` for the slow, a blend between."""
    low, high = found.low_freq_factor, found.high_freq_factor

    def divisor(frequency: float) -> float:
        turns = original * frequency / (2 * math.pi)
        if turns >= high:
            return 1.0
        if turns < low:
            return found.factor
        smooth = (turns - low) / (high - low)
        return 1.0 / ((1.0 - smooth) / found.factor + smooth)

    return tuple(map(divisor, frequencies))


def _longrope(
    config: Config, found: Rope, original: int, pairs: int, where: str
) -> tuple[Settings, Vectors]:
    for name in ("short_factor", "long_factor"):
        factors: list[float] = getattr(found, name)
        if len(factors) != pairs or not all(0 < factor < 1e9 for factor in factors):
            raise ModelDamaged(
                f"{where}: {name} has {len(factors)} entries, {pairs} positive ones were wanted"
            )
    stretch = config.max_position_embeddings / original
    own = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 < original else 1.0
    return {
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": found.attention_factor or own,
    }, {
        "rope_factors_long.weight": tuple(found.long_factor),
        "rope_factors_short.weight": tuple(found.short_factor),
    }
