"""Which lanes are taken: plain data, no model and no device.

A lane handed on still holds what its last stream left; clearing belongs to the executor that owns
the state.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Lane:
    """A place for one stream's state; `generation` tells its holders apart."""

    index: int
    generation: int


class StaleLane(LookupError):
    """A lane that is not taken, or was handed on since."""


class LaneTable:
    """Lanes 0 to `count` - 1, the lowest free one first."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"{count} lanes were asked for, at least 1 is needed")
        self._free = list(range(count))
        self._generations = [0] * count
        self._taken: dict[int, Lane] = {}

    def __len__(self) -> int:
        return len(self._generations)

    @property
    def free(self) -> int:
        """How many lanes nobody holds."""
        return len(self._free)

    @property
    def taken(self) -> list[Lane]:
        """The lanes somebody holds, by index."""
        return sorted(self._taken.values())

    def take(self) -> Lane | None:
        """The lowest free lane, or None when all are held."""
        if not self._free:
            return None
        index = heapq.heappop(self._free)
        self._taken[index] = Lane(index, self._generations[index])
        return self._taken[index]

    def give_back(self, lane: Lane) -> None:
        """Raises `StaleLane` unless `lane` is held; it is stale from then on."""
        self.check(lane)
        del self._taken[lane.index]
        self._generations[lane.index] += 1
        heapq.heappush(self._free, lane.index)

    def check(self, lane: Lane) -> None:
        """Raises `StaleLane` unless `lane` is held under this generation."""
        if self._taken.get(lane.index) != lane:
            raise StaleLane(
                f"lane {lane.index} of generation {lane.generation} is not held by its caller"
            )

    def seat(self, lanes: Sequence[Lane]) -> tuple[Lane, ...]:
        """`lanes` in their order, for one turn. Raises `StaleLane`, or `ValueError` for a lane
        that is named twice."""
        for lane in lanes:
            self.check(lane)
        if len(set(lanes)) != len(lanes):
            raise ValueError("a lane takes one seat in a turn, and one was named twice")
        return tuple(lanes)
