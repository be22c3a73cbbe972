"""What the turn loop counts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from superfluid_workerd.link.frames import TurnStats

WINDOW_TURNS: Final = 256
"""Turns over which the recent occupancy is taken."""


@dataclass(slots=True)
class Counters:
    """Since the load; see `link.frames.TurnStats` for each. `window` has (seats, ready) of the
    last turns."""

    turns: int = 0
    failed_turns: int = 0
    seats: int = 0
    ready: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    busy_s: float = 0.0
    admitted: int = 0
    queued_s: float = 0.0
    lingered_s: float = 0.0
    shared_tokens: int = 0
    refed_tokens: int = 0
    preempted: int = 0
    embed_calls: int = 0
    embedded_inputs: int = 0
    embedded_tokens: int = 0
    window: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW_TURNS))
    window_seats: int = 0
    window_ready: int = 0

    def turn(self, seats: int, ready: int) -> None:
        """A turn ended that seated so many of those that were ready."""
        self.turns += 1
        self.seats += seats
        self.ready += ready
        if len(self.window) == WINDOW_TURNS:
            gone = self.window.popleft()
            self.window_seats -= gone[0]
            self.window_ready -= gone[1]
        self.window.append((seats, ready))
        self.window_seats += seats
        self.window_ready += ready

    def stats(self, **gauges: int) -> TurnStats:
        """The counters, with what else `TurnStats` has of now."""
        counted = dict(zip(_COUNTED, _values(self), strict=True))
        return TurnStats(window_turns=len(self.window), **counted, **gauges)


_COUNTED: Final = tuple(
    name for name in TurnStats.__struct_fields__ if name in Counters.__dataclass_fields__
)
_values: Final = attrgetter(*_COUNTED)
