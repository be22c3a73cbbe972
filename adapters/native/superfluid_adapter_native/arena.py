"""Memory of the process's own for weights that are read rather than mapped."""

from __future__ import annotations

import mmap
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]

PAGE: Final = 4096
"""What direct reads want files, memory and lengths to be multiples of; most disks want less."""
_HUGE: Final = 2 << 20


def whole_pages(count: int) -> int:
    """`count` rounded up to pages."""
    return -(-count // PAGE) * PAGE


class Arena:
    """`count` bytes, handed out in parts. It takes memory as it is written.

    Huge pages where the system has them: a disk then writes two megabytes in one piece instead of
    512, which here is three times as fast, and kernels look up fewer addresses."""

    def __init__(self, count: int) -> None:
        room = whole_pages(count) + _HUGE
        self._region = mmap.mmap(-1, room, **_private())
        whole = np.frombuffer(self._region, np.uint8)
        lead = -whole.ctypes.data % _HUGE
        self._left = whole[lead : lead + whole_pages(count)]
        self._start = int(whole.ctypes.data)
        if hasattr(mmap, "MADV_HUGEPAGE") and count >= _HUGE:
            self._region.madvise(mmap.MADV_HUGEPAGE, lead, count // _HUGE * _HUGE)

    def take(self, count: int) -> Bytes:
        """The next `count` bytes, from a page's beginning. Raises `ValueError` beyond the end."""
        size = whole_pages(count)
        if size > len(self._left):
            raise ValueError(f"{size} bytes were asked of an arena that has {len(self._left)} left")
        part, self._left = self._left[:count], self._left[size:]
        return part

    def hand_back(self, part: Bytes) -> None:
        """Return the memory of a part that was taken; what is read there next is zero."""
        if hasattr(self._region, "madvise") and part.nbytes:
            at = part.ctypes.data - self._start
            self._region.madvise(mmap.MADV_DONTNEED, at, whole_pages(part.nbytes))

    def close(self) -> None:
        """Return the memory of every part."""
        if hasattr(self._region, "madvise"):
            self._region.madvise(mmap.MADV_DONTNEED)


def _private() -> dict[str, int]:
    """Shared memory, which `mmap` gives of its own accord, has no huge pages on most systems."""
    return {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
