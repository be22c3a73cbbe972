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
    following the last. The reader maps what it reads and holds it until the unit after it is about
    to compute, so that beside the unit at work there is one more in memory, whoever is ahead of
    the other: at most one request waits, and what is no longer next is given up. An unreadable file
    shows when the unit itself is mapped.
    """

    def __init__(self, manager: MemoryManager, units: Sequence[tuple[str, ...]]) -> None:
        self._manager = manager
        later = [*units[1:], *units[:1]]
        self._following = {unit[0]: after for unit, after in zip(units, later, strict=True)}
        self._lock = threading.Lock()
        self._useful: frozenset[str] = frozenset()
        self._held: dict[str, tuple[str, ...]] = {}
        self._wanted: queue.Queue[tuple[str, ...]] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._read, name="read-ahead", daemon=True)
        self._thread.start()

    def layer(self, layer: LayerDescriptor) -> None:
        """The scheduler's prefetch hook."""
        for name in layer.names:
            self.at(name)

    def at(self, name: str) -> None:
        following = self._following.get(name)
        if following is not None:
            self._give_up_all_but(frozenset((name, following[0])))
            self._put(following)

    def _give_up_all_but(self, useful: frozenset[str]) -> None:
        with self._lock:
            self._useful = useful
            stale = [self._held.pop(first) for first in self._held.keys() - useful]
        for names in stale:
            self._release(names)

    def _put(self, names: tuple[str, ...]) -> None:
        while True:
            try:
                self._wanted.put_nowait(names)
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._wanted.get_nowait()

    def _read(self) -> None:
        while names := self._wanted.get():
            mapped = self._fetch(names)
            with self._lock:
                keep = names[0] in self._useful and names[0] not in self._held
                if keep:
                    self._held[names[0]] = mapped
            if not keep:
                self._release(mapped)

    def _fetch(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those that could be mapped; all, but for an unreadable file."""
        mapped: list[str] = []
        with contextlib.suppress(OSError, ModelError):
            for name in names:
                handle = self._manager.acquire(name)
                mapped.append(name)
                self._manager.fetch(handle, stop=lambda: names[0] not in self._useful)
        return tuple(mapped)

    def _release(self, names: Sequence[str]) -> None:
        for name in names:
            self._manager.release(name)

    def close(self) -> None:
        """End the thread; returns when it has ended."""
        self._give_up_all_but(frozenset())
        self._put(_END)
        self._thread.join()
