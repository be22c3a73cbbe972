"""The memory plan: what a model will take, computed from its header before anything loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from superfluid_adapter_native.arena import PAGE, whole_pages
from superfluid_adapter_native.config import ModelConfig
from superfluid_adapter_native.formats.source import ModelSource
from superfluid_adapter_native.kernels.tape import TAPE_ROWS
from superfluid_adapter_native.kv_cache import KVType, LayerShape
from superfluid_adapter_native.units import unit_bytes
from superfluid_adapter_native.weights import (
    EMBEDDING,
    expert_bytes,
    head_name,
    read_names,
    streamed_names,
)
from superfluid_compat.errors import DoesNotFit
from superfluid_workerd.limits import available_bytes

MIB: Final = 1 << 20
PASS_ROWS: Final = 512
"""Most rows that go through the layers together."""

LOGIT_BYTES: Final = 32 * MIB
"""Room for the logits of one step: this, less in a small budget, a row per lane at the least."""

SPARE_ROWS: Final = 256
"""KV rows beyond the lanes' own, for copies."""

_LEAST_ROWS: Final = 32
_SHARE: Final = 16
"""What a pass's rows, and what a step's logits, may take of the budget: this part of it."""
_LEAST_TILE: Final = 4 * MIB
_KERNEL_BYTES: Final = 64 * MIB
_SCRATCH_BYTES: Final = 16 * MIB
_TOKEN_BYTES: Final = 320
_LEAST_CONTEXT: Final = 512
_GOOD_CONTEXT: Final = 4096
_AVAILABLE_SHARE: Final = 0.8
RSS_VARIES_BYTES: Final = 16 * MIB
"""By how much what an interpreter holds may differ in the next process."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What the plan is to hold. None for `cache_bytes` and 0 for `context`: as much as fits."""

    context: int
    lanes: int
    kv_type: KVType
    selected: tuple[int, ...]
    cache_bytes: int | None = None
    read_ahead: bool = True


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by part, and the choices that make them so.

    `resident` are the layers and `matrices` the embedding and head that stay in memory. A step
    computes `pass_rows` rows at a time and gives `logit_rows` rows of logits at most. A head that
    is not among the matrices passes through memory in tiles of `tile_bytes`. What streams takes
    turns in buffers of `rooms` bytes; `walk_bytes` are read for each walk, experts counted whole,
    0 where everything stays; of what stays `kept_bytes` are read rather than mapped."""

    parts: Mapping[str, int]
    context: int
    kv_rows: int
    resident: tuple[int, ...]
    matrices: tuple[str, ...]
    pass_rows: int
    logit_rows: int
    tile_bytes: int
    rooms: tuple[int, ...] = ()
    walk_bytes: int = 0
    kept_bytes: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def budget_bytes(memory_budget: int | None, rss: int) -> int:
    """The bound for a plan: what was granted, else most of what is free beside this process."""
    if memory_budget is not None:
        return memory_budget
    return rss + int(available_bytes() * _AVAILABLE_SHARE)


def kv_shapes(config: ModelConfig, selected: Sequence[int]) -> tuple[LayerShape, ...]:
    """What a sequence's cache keeps, for the selected layers in order."""
    return tuple(LayerShape(config.layers[i].kv_heads, config.head_dim) for i in selected)


class _Sizes:
    """The header in bytes, by what can stay in memory and what can stream."""

    def __init__(self, source: ModelSource, config: ModelConfig, ask: Ask) -> None:
        tensors = source.tensors
        self.layers: dict[int, int] = {}
        # In memory of our own, where neighbours in the file take whole pages together.
        self.kept: dict[int, int] = {}
        # What a step reads of a layer for sure; of experts only some.
        self.read: dict[int, int] = {}
        self.expert = 0
        for layer in ask.selected:
            whole = [tensors[name] for name in streamed_names(source, layer)]
            self.layers[layer] = sum(tensor.bytes for tensor in whole)
            self.kept[layer] = unit_bytes(whole)
            self.read[layer] = unit_bytes([tensors[n] for n in read_names(source, layer)])
            self.expert = max(self.expert, expert_bytes(source, layer))
        head = head_name(source)
        self.matrices = {name: tensors[name].bytes for name in dict.fromkeys((head, EMBEDDING))}
        self.head = unit_bytes([tensors[head]])
        self.tile = min(tensors[head].bytes, max(_LEAST_TILE, max(self.read.values()) // 4))
        # Vectors are decoded to F32 and kept, whatever their type.
        self.vectors = sum(4 * t.shape[0] for t in tensors.values() if len(t.shape) == 1)
        self.kv_row = sum(shape.row_bytes(ask.kv_type) for shape in kv_shapes(config, ask.selected))

    @property
    def weights(self) -> int:
        return sum(self.layers.values()) + sum(self.matrices.values())

    def walk(self, streamed: Iterable[int], *, head: bool) -> int:
        """What a walk reads at most, with these layers streaming, and the head if it does."""
        layers = sum(self.layers[layer] for layer in streamed)
        return layers + (next(iter(self.matrices.values())) if head else 0)


def make_plan(
    source: ModelSource, config: ModelConfig, ask: Ask, *, budget: int, rss: int
) -> MemoryPlan:
    """The best plan within `budget` bytes; `rss` is what the process holds already.

    Everything resident and the whole trained context if that fits; else less context, but not
    below 4096; then layers stream, and with the trained context again if that fits, else with
    less, but not below 512. Raises `DoesNotFit` with the budget that would do."""
    logits = min(LOGIT_BYTES, budget // _SHARE)
    planner = _Planner(_Sizes(source, config, ask), config, ask, rss, logits)
    frugal = replace(planner, logit_bytes=0)
    most = ask.context or config.context
    contexts = [most] if ask.context else _halves(most)
    good = [context for context in contexts if context >= _GOOD_CONTEXT] or contexts[:1]
    rows = _pass_rows(config, budget)
    plans = [
        *(planner.resident(context, rows) for context in good),
        *(planner.streaming(context, rows, budget) for context in contexts),
        frugal.streaming(contexts[-1], _LEAST_ROWS, budget),
    ]
    for plan in plans:
        if plan is not None and plan.total <= budget:
            return plan
    least = frugal.streaming(contexts[-1], _LEAST_ROWS, 0).total
    would = least + RSS_VARIES_BYTES
    raise DoesNotFit(
        f"the model needs {_mib(least)} at the least for {ask.lanes} lanes of {contexts[-1]} "
        f"tokens, the budget is {_mib(budget)}",
        fix=f"give --memory-budget {would // MIB}M, or fewer --lanes, or less --context",
        param="memory-budget",
    )


def _halves(most: int) -> list[int]:
    """The trained context and its halves, down to a useful least."""
    found = [most]
    while found[-1] // 2 >= _LEAST_CONTEXT:
        found.append(found[-1] // 2)
    return found


def _mib(size: int) -> str:
    return f"{-(-size // MIB)} MiB"


@dataclass(frozen=True, slots=True)
class _Planner:
    sizes: _Sizes
    config: ModelConfig
    ask: Ask
    rss: int
    logit_bytes: int

    def resident(self, context: int, rows: int) -> MemoryPlan | None:
        """Every weight in memory, or None where `cache_bytes` forbids it."""
        cap = self.ask.cache_bytes
        if cap is not None and self.sizes.weights > cap:
            return None
        whole = (self.ask.selected, tuple(self.sizes.matrices), self.sizes.weights)
        return self._plan(context, rows, *whole)

    def streaming(self, context: int, rows: int, budget: int) -> MemoryPlan:
        """As many layers in memory as the cap, or what the rest leaves of the budget, holds. The
        head is the first to stay."""
        sizes, cap = self.sizes, self.ask.cache_bytes
        if cap is None:
            cap = budget - self._plan(context, rows, (), (), 0).total
            cap -= sum(self._rooms(tiles=False)) + self._expert_room()
        if sizes.head <= cap:
            return self._streaming(context, rows, cap, head=True)
        if self.ask.cache_bytes is None:
            cap -= sum(self._rooms(tiles=True)) - sum(self._rooms(tiles=False))
        return self._streaming(context, rows, cap, head=False)

    def _streaming(self, context: int, rows: int, cap: int, *, head: bool) -> MemoryPlan:
        sizes = self.sizes
        matrices, kept = (tuple(sizes.matrices)[:1], sizes.head) if head else ((), 0)
        layers = self._choose(cap - kept)
        kept += sum(sizes.kept[layer] for layer in layers)
        plan = self._plan(context, rows, layers, matrices, kept)
        walk = sizes.walk(set(self.ask.selected) - set(layers), head=not head)
        rooms = self._rooms(tiles=not head) if walk else ()
        ahead = rooms[-1] if rooms and self.ask.read_ahead else 0
        streamed = sum(rooms) - ahead + (self._expert_room() if walk else 0)
        parts = {**plan.parts, "streamed weights": streamed, "read-ahead": ahead}
        return replace(plan, parts=parts, rooms=rooms, walk_bytes=walk, kept_bytes=kept)

    def _rooms(self, *, tiles: bool) -> tuple[int, ...]:
        """Buffers: for the layer at work, for a tile of the head, which computes while the last
        layer's turn lasts, and, the last of them, for what is read ahead."""
        layer = max(self.sizes.read.values())
        tile = whole_pages(self.sizes.tile) + PAGE
        rooms = (layer, tile) if tiles else (layer,)
        return (*rooms, max(rooms)) if self.ask.read_ahead else rooms

    def _expert_room(self) -> int:
        """For one expert's matrices, and as much as an allocator may keep of the one before."""
        return 2 * self.sizes.expert

    def _choose(self, cap: int) -> tuple[int, ...]:
        """A fixed set of layers to keep, spread evenly, so that reading the others always has
        computing beside it."""
        selected = self.ask.selected
        count = len(selected)
        for kept in range(count, 0, -1):
            chosen = tuple(selected[i * count // kept] for i in range(kept))
            if sum(self.sizes.kept[layer] for layer in chosen) <= cap:
                return chosen
        return ()

    def _plan(
        self,
        context: int,
        rows: int,
        layers: tuple[int, ...],
        matrices: tuple[str, ...],
        kept: int,
    ) -> MemoryPlan:
        config, sizes = self.config, self.sizes
        kv_rows = self.ask.lanes * context + min(context, SPARE_ROWS)
        most = max(_LEAST_ROWS, self.ask.lanes * context)
        rows = min(rows, most)
        logit_rows = min(most, max(self.ask.lanes, self.logit_bytes // (4 * config.vocabulary), 1))
        # What tapes write into stays beside a pass's own, and is never used twice in a layer.
        transient = (rows + 2 * TAPE_ROWS) * _row_bytes(config) + logit_rows * 4 * config.vocabulary
        # Growing a layer's buffers holds the old ones beside the new for a moment.
        transient += context * sizes.kv_row // len(self.ask.selected)
        parts = {
            "interpreter": self.rss + _KERNEL_BYTES,
            "tokenizer": config.vocabulary * _TOKEN_BYTES,
            "resident weights": sizes.vectors + kept,
            "streamed weights": 0,
            "read-ahead": 0,
            "kv": kv_rows * sizes.kv_row,
            "transient": transient + _rope_bytes(config, context) + _SCRATCH_BYTES,
        }
        return MemoryPlan(parts, context, kv_rows, layers, matrices, rows, logit_rows, sizes.tile)


def _row_bytes(config: ModelConfig) -> int:
    """Bytes that one row of a pass takes while a layer computes."""
    layer = max(config.layers, key=lambda one: one.ff + one.heads)
    heads = 2 * (layer.heads + layer.kv_heads) * config.head_dim
    inner = max(3 * layer.ff, (config.experts_used + 1) * config.width + 3 * config.expert_ff)
    return 4 * (4 * config.width + 2 * heads + inner)


def _pass_rows(config: ModelConfig, budget: int) -> int:
    """As many rows as a small share of the budget holds, 32 to 512."""
    rows = PASS_ROWS
    while rows > _LEAST_ROWS and rows * _row_bytes(config) > budget // _SHARE:
        rows //= 2
    return rows


def _rope_bytes(config: ModelConfig, context: int) -> int:
    """Cosines and sines; the tables grow by doubling."""
    tables = len({layer.rope for layer in config.layers})
    rows: int = 1 << max(8, (context - 1).bit_length())
    return tables * rows * config.rotary_dims * 4
