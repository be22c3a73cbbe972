"""Time as far as this process saw it pass."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Monotonic seconds, of which no more than `gap_s` passes between two readings: a process
    that was stopped, together with those it watches, must not take that for their silence."""

    def __init__(self, gap_s: float, read: Callable[[], float] = time.monotonic) -> None:
        self._gap_s = gap_s
        self._read = read
        self._last = read()
        self._lost = 0.0

    def now(self) -> float:
        """Never less than before."""
        read = self._read()
        self._lost += max(0.0, read - self._last - self._gap_s)
        self._last = read
        return read - self._lost
