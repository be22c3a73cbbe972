"""What a model will take, by its header, the cache types and the context; and what to open it with.

Cells are positions of the KV cache, which all sequences share. Caches of their own would be split
by llama.cpp into a pass for every gap between the sequences of a step. Sliding-window layers keep
a window for each sequence, and a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import psutil

from superfluid_adapter_llamacpp.facts import check, embeds, vocabulary
from superfluid_adapter_llamacpp.gguf import Header
from superfluid_adapter_llamacpp.heads import head_widths, per_layer
from superfluid_adapter_llamacpp.settings import CACHE_TYPES, Settings, check_head
from superfluid_adapter_llamacpp.stretch import check_context
from superfluid_compat.errors import DoesNotFit
from superfluid_workerd.adapter import OpenRequest

MIB: Final = 1 << 20
MOST_SEQUENCES: Final = 256
CELL_STEP: Final = 256
SPARE_CELLS: Final = 256
"""Cells beyond the lanes' own, for copies."""

OUTPUT_BYTES: Final = 32 * MIB
"""Room for the logits of one call, or one row per sequence where that is more."""

_TOKEN_BYTES: Final = 256
_SCRATCH_BYTES: Final = 32 * MIB
_LEAST_CONTEXT: Final = 512
_GOOD_CONTEXT: Final = 4096
_GOOD_UBATCH: Final = 512
_MOST_CELLS: Final = (1 << 31) - 1
"""Positions are of 32 bits in llama.cpp."""

_SWAY_BYTES: Final = 16 * MIB
"""By less than this an interpreter's size differs from start to start: advice must hold."""

_AVAILABLE_SHARE: Final = 0.8
_PERIODS: Final = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "cohere2": 4}
"""Of so many layers one sees everything, where the header does not say."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides how it is opened: its window, its state, its use."""

    window: int
    recurrent: bool
    embeds: bool

    @classmethod
    def of(cls, header: Header) -> Shape:
        recurrent = ("ssm.state_size", "shortconv.l_cache", "wkv.head_size")
        return cls(
            window=header.number("attention.sliding_window"),
            recurrent=any(header.number(key) for key in recurrent),
            embeds=embeds(header),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes by part, and the sizes that make them so. `context` is per sequence, `cells` all.
    `spare` is what it leaves of the budget."""

    parts: Mapping[str, int]
    context: int
    cells: int
    sequences: int
    outputs: int
    batch: int
    ubatch: int
    embeds: bool = False
    spare: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def make_plan(
    header: Header,
    settings: Settings,
    request: OpenRequest,
    shape: Shape | None = None,
    interpreter: int | None = None,
) -> Plan:
    """The best plan within the budget: the context asked for, else the trained one or the largest
    of its halves that fits. `shape` is the loaded model's word, where it is loaded, and
    `interpreter` the bytes that this process held before.

    Raises `DoesNotFit`, `BadOptionValue`."""
    check(header)
    check_head(settings, *head_widths(header))
    trained, asked = header.number("context_length"), request.context
    check_context(header, settings, asked)
    held = interpreter or held_bytes()
    planner = _Planner(header, settings, request, shape or Shape.of(header), held)
    contexts = [asked] if asked else _halves(trained or _GOOD_CONTEXT)
    plans = [planner.plan(context) for context in contexts]
    if plans[-1].cells > _MOST_CELLS:
        raise DoesNotFit(
            f"{request.lanes} lanes of {plans[-1].context} tokens need {plans[-1].cells} cells, "
            f"llama.cpp counts to {_MOST_CELLS}",
            fix="give fewer --lanes, or less --context",
            param="context",
        )
    budget = _budget(request)
    for plan in plans:
        if plan.total <= budget and plan.cells <= _MOST_CELLS:
            return replace(plan, spare=budget - plan.total)
    raise planner.refusal(plans[-1], budget)


def _budget(request: OpenRequest) -> int:
    if request.memory_budget is not None:
        return request.memory_budget
    return int(held_bytes() + psutil.virtual_memory().available * _AVAILABLE_SHARE)


def held_bytes() -> int:
    """What this process holds."""
    return int(psutil.Process().memory_info().rss)


def _halves(most: int) -> list[int]:
    found = [most]
    while found[-1] // 2 >= _LEAST_CONTEXT:
        found.append(found[-1] // 2)
    return found


def _mib(size: int) -> str:
    return f"{-(-size // MIB)} MiB"


def _padded(cells: int) -> int:
    return -(-cells // CELL_STEP) * CELL_STEP


@dataclass(frozen=True, slots=True)
class _Planner:
    header: Header
    settings: Settings
    request: OpenRequest
    shape: Shape
    interpreter: int

    def refusal(self, least: Plan, budget: int) -> DoesNotFit:
        """Why not even `least` fits, and what would."""
        together, ample = "", f"--memory-budget {(least.total + _SWAY_BYTES) // MIB + 1}M"
        remedies, param = [ample, "fewer --lanes", "less --context"], "memory-budget"
        usual = Settings({**self.settings.values, "ubatch-size": _GOOD_UBATCH})
        if replace(self, settings=usual).plan(least.context).total + _SWAY_BYTES <= budget:
            param = "ubatch-size"
            together = f" with {least.ubatch} computed together"
            remedies.insert(0, f"--llamacpp-ubatch-size {_GOOD_UBATCH}")
        return DoesNotFit(
            f"the model needs {_mib(least.total)} at the least for {self.request.lanes} lanes of "
            f"{least.context} tokens{together}, the budget is {_mib(budget)}",
            fix=f"give {', or '.join(remedies)}",
            param=param,
        )

    def plan(self, context: int) -> Plan:
        lanes = self.request.lanes
        sequences = max(lanes, min(MOST_SEQUENCES, 2 * lanes + 2))
        cells, batch, ubatch = self._sizes(context, sequences)
        size = max(1, vocabulary(self.header))
        rows = min(ubatch, OUTPUT_BYTES // (4 * size))
        outputs = batch if self.shape.embeds else max(sequences, rows)
        parts = {
            "interpreter": self.interpreter,
            "tokenizer": size * _TOKEN_BYTES,
            "weights": self.header.size,
            "kv": self._kv_bytes(cells, sequences, ubatch),
            "transient": self._compute_bytes(cells, ubatch) + outputs * 4 * size + _SCRATCH_BYTES,
        }
        return Plan(
            parts, context, cells, sequences, outputs, batch, ubatch, embeds=self.shape.embeds
        )

    def _sizes(self, context: int, sequences: int) -> tuple[int, int, int]:
        """Cells, and tokens of a step and of a micro-batch: no more than cells, as llama.cpp has
        it. An encoder takes a whole text at once, and llama.cpp aborts on a pooling one whose
        sequences do not divide the micro-batch."""
        if self.shape.embeds:
            whole = -(-context // sequences) * sequences
            return _padded(whole), whole, whole
        cells = _padded(self.request.lanes * context + min(context, SPARE_CELLS))
        batch = min(self.settings.number("batch-size"), cells)
        return cells, batch, min(batch, self.settings.number("ubatch-size"))

    def _kv_bytes(self, cells: int, sequences: int, ubatch: int) -> int:
        total = self._state_bytes() * sequences
        window = 0 if self.settings.flag("swa-full") else self.shape.window
        kept = min(cells, _padded(window * sequences + ubatch))
        for layer, size in enumerate(self._cell_bytes()):
            total += int(size * (kept if window and self._slides(layer) else cells))
        return total

    def _cell_bytes(self) -> list[float]:
        """Bytes of one cell in each layer."""
        header, settings = self.header, self.settings
        heads = per_layer(header, "attention.head_count_kv", "attention.head_count")
        keys, values = head_widths(header)
        key, value = (CACHE_TYPES[settings.text(f"cache-type-{one}") or "f16"][1] for one in "kv")
        return [count * (keys * key + values * value) for count in heads]

    def _state_bytes(self) -> int:
        """Bytes of one sequence's recurrent state."""
        number = self.header.number
        inner, kernel = number("ssm.inner_size"), number("ssm.conv_kernel")
        each = inner * (max(0, kernel - 1) + number("ssm.state_size"))
        each += number("embedding_length") * number("shortconv.l_cache")
        heads = number("wkv.head_size")
        each += number("embedding_length") * (heads + 2 if heads else 0)
        return 4 * each * number("block_count")

    def _slides(self, layer: int) -> bool:
        pattern = self.header.own("attention.sliding_window_pattern")
        if isinstance(pattern, list):
            return layer < len(pattern) and bool(pattern[layer])
        period = pattern if isinstance(pattern, int) else _PERIODS.get(self.header.architecture, 0)
        return bool(period) and (layer + 1) % period != 0

    def _compute_bytes(self, reach: int, ubatch: int) -> int:
        """What a micro-batch computes in; a token attends to `reach` cells at the most."""
        number = self.header.number
        width = number("embedding_length")
        hidden = max(per_layer(self.header, "feed_forward_length"), default=0)
        heads = max(per_layer(self.header, "attention.head_count"), default=0)
        plain = self.settings.text("flash-attn") == "off"
        attention = 6 * reach + (4 * heads * reach if plain else 0)
        return ubatch * (4 * (8 * width + 3 * hidden) + attention)
