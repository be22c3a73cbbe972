"""A thread that brings the next streamed layer into memory while this one computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from typing import Final

from superfluid_adapter_native.memory import MemoryManager
from superfluid_adapter_native.scheduler import LayerDescriptor

_END: Final[tuple[str, ...]] = ()


class ReadAhead:
    """The scheduler's prefetch hook: at each layer it has the tensors of `following` read.

    At most one request waits: a reader that falls behind skips to the newest, so that no more
    than the next layer's bytes are brought in at once. Reading fills the page cache, which the
    maps then share; an unreadable file shows when the layer itself is mapped."""

    def __init__(self, manager: MemoryManager, following: Mapping[int, tuple[str, ...]]) -> None:
        self._manager = manager
        self._following = following
        self._wanted: queue.Queue[tuple[str, ...]] = queue.Queue(maxsize=1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="read-ahead", daemon=True)
        self._thread.start()

    def __call__(self, layer: LayerDescriptor) -> None:
        names = self._following.get(layer.index, _END)
        if names:
            self._put(names)

    def _put(self, names: tuple[str, ...]) -> None:
        while True:
            try:
                self._wanted.put_nowait(names)
                return
            except queue.Full:
                try:
                    self._wanted.get_nowait()
                except queue.Empty:
                    continue

    def _read(self) -> None:
        while names := self._wanted.get():
            try:
                self._manager.read_ahead(names, self._stop)
            except OSError:
                continue

    def close(self) -> None:
        """End the thread; returns when it has ended."""
        self._stop.set()
        self._put(_END)
        self._thread.join()
