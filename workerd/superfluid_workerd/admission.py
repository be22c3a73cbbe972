"""Who gets a lane next, and who gives one up: plain data, no runtime."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Iterator
from typing import Final

from superfluid_workerd.options import SERVICE_CLASSES
from superfluid_workerd.stream import Stream
from superfluid_workerd.turns import Policy

MOST_PASSED: Final = 16
"""Streams that may go before one that does not fit; then memory is kept for it."""

MOST_PARKED: Final = 4
"""How often a stream gives up its lane; then it keeps it to its end."""


def due(stream: Stream, policy: Policy) -> float:
    """A stream's place in line, the lower the sooner: since when it would wait had it waited
    without a break.

    A class further down counts as having come later by `class_ageing_ms`, so that whoever waits
    long enough is before every newcomer. Time on a lane counts for nothing.
    """
    return stream.queued - stream.waited + _rank(stream) * policy.class_ageing_ms / 1000


def gives_way(stream: Stream) -> tuple[bool, int, float]:
    """Who of those that run gives up a lane: the greatest, the lowest class that came last."""
    return stream.parkings < MOST_PARKED, _rank(stream), stream.arrived


def _rank(stream: Stream) -> int:
    return SERVICE_CLASSES.index(stream.service_class)


class Waiting:
    """The streams without a lane, in line. `pool` is the tokens that all lanes hold together, 0
    when each has room of its own.

    A stream that does not fit is passed by those that do, `MOST_PASSED` times; one whose class
    holds its most lanes, or that waits for a prefix, keeps nobody waiting.
    """

    def __init__(self, lanes: int, policy: Policy, pool: int) -> None:
        self._lanes = lanes
        self._policy = policy
        self._pool = pool
        self._line: list[Stream] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._line)

    def add(self, stream: Stream) -> None:
        """Into the line, at its place; one that had a lane goes before its equals."""
        equals = self._line if stream.parkings else ()
        ahead = (it.due for it in equals if it.service_class == stream.service_class)
        stream.due = min(due(stream, self._policy), *ahead, math.inf)
        bisect.insort(self._line, stream, key=lambda it: (it.due, it.arrived))

    def remove(self, stream: Stream) -> None:
        """Out of the line."""
        self._line.remove(stream)

    def next(self, running: Collection[Stream], follows: Callable[[Stream], bool]) -> Stream | None:
        """The stream whose turn it is, still in line, or None. `follows` says who waits for
        another's prefill."""
        if len(running) >= self._lanes:
            return None
        passed: list[Stream] = []
        for stream in self._line:
            if self._capped(stream, running):
                continue
            if self._fits(stream, running):
                if follows(stream):
                    continue
                for other in passed:
                    other.passed += 1
                return stream
            if stream.passed >= MOST_PASSED:
                return None
            passed.append(stream)
        return None

    def preemption(
        self, running: Collection[Stream], follows: Callable[[Stream], bool]
    ) -> tuple[Stream, list[Stream]] | None:
        """An interactive stream that found no room, and who makes it: the lowest class, and of
        that who came last, however long it ran; as many as it takes. The room is that stream's.

        Spared are those that went before it while it waited, and those that gave way
        `MOST_PARKED` times. None where nobody is blocked or giving way would not do.
        """
        arrival = next((it for it in self._line if self._blocked(it, running, follows)), None)
        if arrival is None:
            return None
        below = sorted((it for it in running if _yields(it, arrival)), key=gives_way)
        staying, leaving = list(running), list[Stream]()
        while below and not self._has_room(arrival, staying):
            leaving.append(below.pop())
            staying.remove(leaving[-1])
        return (arrival, leaving) if self._has_room(arrival, staying) else None

    def _blocked(
        self, stream: Stream, running: Collection[Stream], follows: Callable[[Stream], bool]
    ) -> bool:
        if stream.service_class != SERVICE_CLASSES[0] or self._capped(stream, running):
            return False
        return not self._has_room(stream, running) and not follows(stream)

    def _has_room(self, stream: Stream, running: Collection[Stream]) -> bool:
        return len(running) < self._lanes and self._fits(stream, running)

    def _capped(self, stream: Stream, running: Collection[Stream]) -> bool:
        most = self._policy.most_lanes(stream.service_class)
        if not most:
            return False
        return sum(it.service_class == stream.service_class for it in running) >= most

    def _fits(self, stream: Stream, running: Collection[Stream]) -> bool:
        if not self._pool:
            return True
        return stream.reserve + sum(it.reserve for it in running) <= self._pool


def _yields(stream: Stream, arrival: Stream) -> bool:
    if stream.service_class == arrival.service_class or stream.parkings >= MOST_PARKED:
        return False
    return stream.began <= arrival.arrived or stream.due > arrival.due


__all__ = ["MOST_PARKED", "MOST_PASSED", "Waiting", "due", "gives_way"]
