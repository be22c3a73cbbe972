"""How far past its trained context a model's positions mean something, by its RoPE settings.

llama.cpp turns pair i of the `width` values that turn by position * base^(-2i/width) * scale
(src/llama-context.cpp, ggml's rope_yarn). Positions past the trained ones mean something where the
slowest pair, which passes least of its circle in training, turns no further than it did then. YaRN
leaves the quick pairs alone (arXiv 2309.00071), all of them where its limits say so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from superfluid_adapter_llamacpp.facts import turns_positions
from superfluid_adapter_llamacpp.gguf import Header
from superfluid_adapter_llamacpp.heads import head_widths, per_layer
from superfluid_adapter_llamacpp.settings import Settings
from superfluid_compat.errors import DoesNotFit, ModelDamaged

_BASE: Final = 10_000.0
_FAST: Final = 32.0
_SLOW: Final = 1.0
_ROUNDING: Final = 1e-6
"""A scale of 1/3 is less than a third in 32 bits, or more."""


def check_context(header: Header, settings: Settings, asked: int) -> None:
    """Refuse a context past the trained one that the settings do not stretch as far.

    Raises `DoesNotFit`, `ModelDamaged`."""
    trained = header.number("context_length")
    if not asked > trained > 0:
        return
    own = Rope.of(header, Settings.of({}))
    turns = turns_positions(header) and any(per_layer(header, "attention.head_count"))
    reach = trained * Rope.of(header, settings).stretch(own) if turns else trained
    if reach * (1 + _ROUNDING) >= asked:
        return
    further = f", the settings stretch it to {reach:.0f}" if int(reach) > trained else ""
    raise DoesNotFit(
        f"a context of {asked} tokens was asked for, the model was trained for {trained}{further}",
        fix=f"give --context {max(trained, int(reach))} or less"
        + (f", or stretch it with {_remedy(header, own, asked)}" if turns else ""),
        param="context",
    )


def _remedy(header: Header, own: Rope, asked: int) -> str:
    """Settings that stretch far enough, YaRN's where they stretch anything."""
    trained = header.number("context_length")
    scale = math.ceil(asked / trained / own.scale * (1 - _ROUNDING))
    yarn = Settings.of({"rope-scaling": "yarn", "rope-scale": float(scale)})
    enough = trained * Rope.of(header, yarn).stretch(own) * (1 + _ROUNDING) >= asked
    kind = "yarn" if enough else "linear"
    return f"--llamacpp-rope-scaling {kind} --llamacpp-rope-scale {scale} and no other RoPE option"


@dataclass(frozen=True, slots=True)
class Rope:
    """What llama.cpp turns positions by. `extends` is YaRN's share of pairs left alone, `origin`
    the context it starts from, `fast` and `slow` its limits, in turns within that context."""

    width: int
    base: float
    scale: float
    extends: float
    origin: int
    fast: float
    slow: float

    @classmethod
    def of(cls, header: Header, settings: Settings) -> Rope:
        """The model's own, where the settings say nothing else."""
        kind = settings.text("rope-scaling") or header.own("rope.scaling.type", "linear")
        factor = _number(header, "rope.scaling.factor") or _number(header, "rope.scale_linear")
        stated = settings.real("rope-freq-scale") or 1 / (settings.real("rope-scale") or math.inf)
        extends = _own_below_0(settings, "yarn-ext-factor", header, -1.0)
        trained = header.number("context_length")
        return cls(
            width=header.number("rope.dimension_count", head_widths(header)[0]),
            base=settings.real("rope-freq-base") or _number(header, "rope.freq_base", _BASE),
            scale=1.0 if kind == "none" else stated or 1 / (factor or 1.0),
            extends=extends if extends >= 0 else float(kind == "yarn"),
            origin=settings.number("yarn-orig-ctx")
            or header.number("rope.scaling.original_context_length")
            or trained,
            fast=_own_below_0(settings, "yarn-beta-fast", header, _FAST),
            slow=_own_below_0(settings, "yarn-beta-slow", header, _SLOW),
        )

    def stretch(self, own: Rope) -> float:
        """By how much slower the slowest pair turns than by the model's `own` settings, as long as
        YaRN does not leave that one alone too."""
        scale = 1.0 if self._kept() >= 1 else self.scale
        slower = math.pow(self.base / own.base, (self.width - 2) / self.width)
        return slower * own.scale / scale

    def _kept(self) -> float:
        """YaRN's share of the unscaled turn in the slowest pair's."""
        if not self.extends:
            return 0.0
        low = max(0.0, math.floor(self._pair(self.fast)))
        high = min(self.width - 1, math.ceil(self._pair(self.slow)))
        ramp = (self.width // 2 - 1 - low) / max(0.001, high - low)
        return (1 - min(1.0, max(0.0, ramp))) * self.extends

    def _pair(self, turns: float) -> float:
        """The pair, not a whole number, that turns so often within the context it starts from."""
        if self.base <= 1 or turns <= 0:
            return float(self.width)
        often = math.log(self.origin / (turns * 2 * math.pi))
        return self.width * often / (2 * math.log(self.base))


def _own_below_0(settings: Settings, name: str, header: Header, default: float) -> float:
    """An option of which a negative number, as none, means the model's own."""
    given, key = settings.real(name, -1.0), f"rope.scaling.{name.replace('-', '_')}"
    return given if given >= 0 else _number(header, key, default)


def _number(header: Header, key: str, default: float = 0.0) -> float:
    value, name = header.own(key, default), f"{header.architecture}.{key}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ModelDamaged(f"{header.path}: {name} is {str(value)[:40]!r}, a number was wanted")
    return float(value)
