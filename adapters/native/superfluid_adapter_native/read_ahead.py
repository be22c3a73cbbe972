"""A thread that brings the next streamed layer into memory while this one computes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from superfluid_adapter_native.scheduler import LayerDescriptor
from superfluid_adapter_native.slots import Slots
from superfluid_adapter_native.units import Unit


class ReadAhead:
    """`at(name)` says that the unit which begins with `name` is about to compute, and has the unit
    that follows it read meanwhile.

    A unit is a layer or a tile of the head; `units` are all that stream, by their first names and
    in their order, the first following the last. An unreadable file shows when the unit itself is
    wanted.
    """

    def __init__(self, slots: Slots, units: Mapping[str, Unit]) -> None:
        self._slots = slots
        order: Sequence[Unit] = tuple(units.values())
        following = (*order[1:], *order[:1])
        self._steps = dict(zip(units, zip(order, following, strict=True), strict=True))
        self._thread = threading.Thread(target=self._read, name="read-ahead", daemon=True)
        self._thread.start()

    def layer(self, layer: LayerDescriptor) -> None:
        """The scheduler's prefetch hook."""
        for name in layer.names[:1]:
            self.at(name)

    def at(self, name: str) -> None:
        """The unit that begins with `name` is next to compute; what streams by no unit is not
        followed."""
        step = self._steps.get(name)
        if step is not None:
            self._slots.follow(*step)

    def _read(self) -> None:
        while self._slots.read_next():
            pass

    def close(self) -> None:
        """End the thread; returns when it has ended."""
        self._slots.close()
        self._thread.join()
