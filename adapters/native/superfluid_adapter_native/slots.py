"""Buffers that units of weights are read into, one unit after another, ahead of need."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from superfluid_adapter_native.arena import Arena, Bytes
from superfluid_adapter_native.units import Unit
from superfluid_adapter_native.weight_files import WeightFiles
from superfluid_compat.errors import ModelError


@dataclass(slots=True, eq=False)
class _Slot:
    """`unit` is what `memory` holds or, while `filling`, what is being read into it."""

    memory: Bytes
    arena: Arena
    extra: bool = False
    unit: Unit | None = None
    users: int = 0
    filling: bool = False
    stop: bool = False


class Slots:
    """A few buffers, of `rooms` bytes each, that pass from one unit to the next.

    `hold` gives a unit, whole, until `leave`; one that is nowhere yet is read meanwhile. What is
    read ahead is what `follow` named last: `read_next` reads it, in a thread of the caller's, as
    soon as a buffer is free that does not hold the unit at work. Holding more units than there are
    buffers for takes memory beside them. Thread-safe.
    """

    def __init__(self, files: WeightFiles, arena: Arena, rooms: Sequence[int]) -> None:
        self._files = files
        self._changed = threading.Condition()
        # Least recently filled first.
        self._slots = [_Slot(arena.take(room), arena) for room in rooms]
        self._now: Unit | None = None
        self._next: Unit | None = None
        self._closed = False

    def hold(self, unit: Unit) -> Bytes:
        """The unit's memory, its bytes in place. Raises `ModelDamaged` where its file lacks any."""
        while True:
            with self._changed:
                slot, mine = self._claim(unit)
                slot.users += 1
            if mine:
                try:
                    self._fill(slot, unit)
                except BaseException:
                    self._left(slot)
                    raise
                return slot.memory
            with self._changed:
                while slot.filling:
                    self._changed.wait()
                if slot.unit is unit:
                    return slot.memory
            # Who read it has failed: it is read again here, and fails where it is wanted.
            self._left(slot)

    def leave(self, unit: Unit) -> None:
        """Give back one `hold`; another unit may now take the memory."""
        with self._changed:
            slot = next(one for one in self._slots if one.unit is unit and one.users)
        self._left(slot)

    def _left(self, slot: _Slot) -> None:
        with self._changed:
            slot.users -= 1
            if not slot.users:
                if slot.extra:
                    self._slots.remove(slot)
                self._changed.notify_all()

    def follow(self, now: Unit, after: Unit) -> None:
        """`now` is about to be held, `after` is wanted next; other reading ahead is given up."""
        with self._changed:
            self._now, self._next = now, after
            self._give_up(now, after)
            self._changed.notify_all()

    def read_next(self) -> bool:
        """Wait for something to read ahead, and read it; False once closed. What cannot be read
        shows when the unit is held."""
        with self._changed:
            while (slot := self._for_next()) is None:
                if self._closed:
                    return False
                self._changed.wait()
            unit, self._next = slot.unit, None
        if unit is not None:
            with contextlib.suppress(OSError, ModelError):
                self._fill(slot, unit)
        return True

    def drop(self) -> None:
        """Hand back the memory of buffers that nobody holds."""
        with self._changed:
            for slot in self._slots:
                if not slot.users and not slot.filling:
                    slot.unit = None
                    slot.arena.hand_back(slot.memory)

    @property
    def bytes(self) -> int:
        """Memory of buffers that have something in them."""
        with self._changed:
            return sum(slot.memory.nbytes for slot in self._slots if slot.unit)

    @property
    def idle_bytes(self) -> int:
        """Of these, what nobody holds."""
        with self._changed:
            return sum(s.memory.nbytes for s in self._slots if s.unit and not s.users)

    def close(self) -> None:
        """Give up reading; `read_next` then returns False."""
        with self._changed:
            self._closed = True
            self._give_up()
            self._changed.notify_all()

    def _claim(self, unit: Unit) -> tuple[_Slot, bool]:
        """The slot that has `unit` or will have it, or one that is the caller's to fill."""
        while (slot := self._with(unit)) is None:
            free = self._free(unit.bytes)
            if free is None and self._give_up(unit):
                self._changed.wait()
                continue
            return self._begin(free or self._extra(unit.bytes), unit), True
        return slot, False

    def _for_next(self) -> _Slot | None:
        """A slot begun for what is wanted next, if it is nowhere yet and one is free."""
        unit = self._next
        if self._closed or unit is None or self._with(unit) is not None:
            return None
        free = self._free(unit.bytes)
        return self._begin(free, unit) if free is not None else None

    def _with(self, unit: Unit) -> _Slot | None:
        return next((one for one in self._slots if one.unit is unit and not one.stop), None)

    def _free(self, count: int) -> _Slot | None:
        """The smallest that does, the least recently filled of these."""
        free = [
            one
            for one in self._slots
            if not one.users and not one.filling and one.memory.nbytes >= count
            and (one.unit is None or one.unit is not self._now)
        ]  # fmt: skip
        return min(free, key=lambda one: one.memory.nbytes, default=None)

    def _extra(self, count: int) -> _Slot:
        arena = Arena(count)
        slot = _Slot(arena.take(count), arena, extra=True)
        self._slots.append(slot)
        return slot

    def _begin(self, slot: _Slot, unit: Unit) -> _Slot:
        slot.unit, slot.filling, slot.stop = unit, True, False
        self._slots.remove(slot)
        self._slots.append(slot)
        return slot

    def _give_up(self, *useful: Unit) -> bool:
        """Have the reading of units that nobody holds or will end; whether there was any."""
        stale = [one for one in self._slots if one.filling and not one.users]
        stale = [one for one in stale if all(one.unit is not unit for unit in useful)]
        for slot in stale:
            slot.stop = True
        return bool(stale)

    def _fill(self, slot: _Slot, unit: Unit) -> None:
        whole = False
        try:
            whole = self._files.fill(unit, slot.memory, lambda: slot.stop)
        finally:
            with self._changed:
                if slot.stop or not whole:
                    slot.unit = None
                slot.filling = slot.stop = False
                self._changed.notify_all()
