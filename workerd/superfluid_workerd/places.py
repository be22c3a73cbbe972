"""How many streams are taken in: those with a lane, those that may wait, and no more."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from superfluid_compat.errors import BadFrame, InvalidField, Overloaded
from superfluid_workerd.link.frames import Choices


@dataclass(slots=True)
class _Group:
    """Choices of one request: how many are still to come, and how many run or wait."""

    coming: int
    alive: int = 0


class Places:
    """The numbers of the streams that run or wait. Thread-safe.

    The first of several choices takes places for all of them, so that none starts where not all
    can; what they do not use is free again when the last of those that came is gone.
    """

    def __init__(self, lanes: int, most_waiting: int) -> None:
        self._lanes = lanes
        self._most_waiting = most_waiting
        self._lock = threading.Lock()
        self._taken: dict[int, int | None] = {}
        self._groups: dict[int, _Group] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def __contains__(self, number: int) -> bool:
        return number in self._taken

    def numbers(self) -> list[int]:
        """The streams that run or wait."""
        with self._lock:
            return list(self._taken)

    def take(self, number: int, choices: Choices | None = None) -> None:
        """Raises `InvalidField` for more choices than there are places, `Overloaded` when too few
        are free, `BadFrame` when the number is in use."""
        with self._lock:
            if number in self._taken:
                raise BadFrame(f"stream {number} was started while it runs")
            group = self._groups.get(choices.group) if choices else None
            if group is None or group.coming == 0:
                self._require(choices)
            if choices is not None:
                group = self._groups.setdefault(choices.group, _Group(choices.count))
                group.coming = max(0, group.coming - 1)
                group.alive += 1
            self._taken[number] = choices.group if choices else None

    def give_back(self, number: int) -> None:
        """The stream is over; an unknown number is ignored."""
        with self._lock:
            name = self._taken.pop(number, None)
            if name is not None:
                group = self._groups[name]
                group.alive -= 1
                if not group.alive:
                    del self._groups[name]

    def _require(self, choices: Choices | None) -> None:
        most = self._lanes + self._most_waiting
        wanted = 1 if choices is None else choices.count
        if choices is not None and wanted > most:
            raise InvalidField(
                f"{choices.param} asks for {wanted} choices, at most {most} fit: {self._lanes} "
                f"lanes and {self._most_waiting} that wait",
                fix="ask for fewer choices, or serve more lanes or a longer line",
                param=choices.param,
            )
        free = most - len(self._taken) - sum(group.coming for group in self._groups.values())
        if wanted > free:
            found = f"{self._lanes} streams run and {self._most_waiting} wait, no more are taken"
            if wanted > 1:
                found = f"{wanted} choices were asked for, there is room for {free} now"
            raise Overloaded(found)


__all__ = ["Places"]
