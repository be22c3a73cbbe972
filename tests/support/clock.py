"""A clock for the turn loop that only the test moves, so that no test depends on the machine's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from superfluid_workerd import executor, intake


class Clock:
    """Time in seconds that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def pass_(self, seconds: float) -> None:
        self.now_s += seconds


@contextlib.contextmanager
def held(clock: Clock | None = None) -> Iterator[Clock]:
    """What reads the clock in the turn loop reads this one while the block runs."""
    clock = clock or Clock()
    with mock.patch.object(executor, "time", clock), mock.patch.object(intake, "time", clock):
        yield clock
