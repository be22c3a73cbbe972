"""Layers in order: prefetch, acquire, compute, release."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from superfluid_adapter_native.memory import MemoryManager, TensorHandle
from superfluid_compat.errors import BadOptionValue


@dataclass(frozen=True, slots=True)
class LayerDescriptor:
    """One layer: its index in the model and the tensors to map while it computes."""

    index: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LayerHandles:
    """A layer while it computes. The first selected one embeds, the last applies norm and head."""

    index: int
    tensors: Mapping[str, TensorHandle]
    is_first: bool
    is_last: bool


Compute: TypeAlias = Callable[[LayerHandles], None]
Prefetch: TypeAlias = Callable[[LayerDescriptor], None]


def select_layers(
    count: int, layers: tuple[int, ...] | None = None, max_layers: int | None = None
) -> tuple[int, ...]:
    """The layers to walk out of `count`: those named, of these the first `max_layers`.

    Raises `BadOptionValue` for an index the model does not have, or for none at all."""
    chosen = tuple(range(count)) if layers is None else layers
    beyond = [index for index in chosen if not 0 <= index < count]
    if beyond:
        raise BadOptionValue(
            f"layer {beyond[0]} was asked for, the model has layers 0 to {count - 1}",
            fix=f"give --native-layers indices from 0 to {count - 1}",
            param="layers",
        )
    chosen = chosen[:max_layers]
    if not chosen:
        raise BadOptionValue("no layer was selected, wanted at least one", param="layers")
    return chosen


class LayerScheduler:
    """Walks the selected layers once per `walk`, one after another, so that what is mapped at
    once is one layer's tensors and what `prefetch` brings in."""

    def __init__(
        self,
        manager: MemoryManager,
        layers: Sequence[LayerDescriptor],
        *,
        prefetch: Prefetch = lambda layer: None,
    ) -> None:
        self._manager = manager
        self._layers = tuple(layers)
        self._prefetch = prefetch

    @property
    def manager(self) -> MemoryManager:
        """What maps the layers; for tensors outside them, such as the head."""
        return self._manager

    @property
    def layers(self) -> tuple[LayerDescriptor, ...]:
        """The selected layers in order."""
        return self._layers

    def walk(self, compute: Compute) -> None:
        """Each layer in order: prefetch hook, acquire, `compute`, release, also when it raises."""
        last = len(self._layers) - 1
        for place, layer in enumerate(self._layers):
            self._prefetch(layer)
            held: dict[str, TensorHandle] = {}
            try:
                for name in layer.names:
                    held[name] = self._manager.acquire(name)
                compute(LayerHandles(layer.index, held, place == 0, place == last))
            finally:
                for name in held:
                    self._manager.release(name)
