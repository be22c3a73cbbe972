"""A thread that brings the next streamed layer into memory while this one computes."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from typing import Final

from superfluid_adapter_native.memory import MemoryManager
from superfluid_adapter_native.scheduler import LayerDescriptor
from superfluid_compat.errors import ModelError

_END: Final[tuple[str, ...]] = ()


class ReadAhead:
    """`at(name)` says that the unit of tensors which begins with `name` is about to compute, and
    has the unit that follows it read meanwhile.

    A unit is a layer or a tile of the head; `units` are all that stream, in their order, the first
    following the last. The reader maps what it reads and holds it until it has read the next, so
    that beside the unit at work there is one more in memory. At most one request waits: a reader
    that falls behind skips to the newest. An unreadable file shows when the unit itself is mapped.
    """

    def __init__(self, manager: MemoryManager, units: Sequence[tuple[str, ...]]) -> None:
        self._manager = manager
        later = [*units[1:], *units[:1]]
        self._following = {unit[0]: after for unit, after in zip(units, later, strict=True)}
        self._wanted: queue.Queue[tuple[str, ...]] = queue.Queue(maxsize=1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="read-ahead", daemon=True)
        self._thread.start()

    def layer(self, layer: LayerDescriptor) -> None:
        """The scheduler's prefetch hook."""
        for name in layer.names:
            self.at(name)

    def at(self, name: str) -> None:
        names = self._following.get(name, _END)
        if names:
            self._put(names)

    def _put(self, names: tuple[str, ...]) -> None:
        while True:
            try:
                self._wanted.put_nowait(names)
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._wanted.get_nowait()

    def _read(self) -> None:
        held: list[str] = []
        while names := self._wanted.get():
            before, held = held, []
            try:
                for name in names:
                    handle = self._manager.acquire(name)
                    held.append(name)
                    self._manager.fetch(handle, stop=self._stop)
            except (OSError, ModelError):
                pass
            self._release(before)
        self._release(held)

    def _release(self, names: Sequence[str]) -> None:
        for name in names:
            self._manager.release(name)

    def close(self) -> None:
        """End the thread; returns when it has ended."""
        self._stop.set()
        self._put(_END)
        self._thread.join()
