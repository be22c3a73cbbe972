"""Kernel calls written down, to be made again in one: between small products Python is what takes
the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from superfluid_adapter_native.kernels.weights import Weight

TAPE_ROWS: Final = 8
"""Rows of x that a tape's buffers hold."""
WORDS: Final = 24
"""Parameters that a kernel may have."""
HEAD: Final = 3
"""Words before them: the kernel, its tasks, and whether its caller does them alone."""
JOB: Final = HEAD + WORDS


class Tape:
    """The calls of one computation over the same buffers, in segments that others come between.

    `Kernels.recording` appends a segment, `Kernels.replay` makes its calls again. What the calls
    read and write is kept alive, but for weights: those of a call may lie elsewhere each time.
    """

    def __init__(self) -> None:
        self._jobs: list[Sequence[int]] = []
        self._ends = [0]
        self._products: list[int] = []
        self._places: list[tuple[int, str, int]] = []
        self._kept: dict[int, Any] = {}
        self._words = np.empty((0, JOB), np.int64)
        self.taken = 0
        """Buffers in use by what is written down so far."""

    def add(self, kernel: int, tasks: int, alone: bool, words: Sequence[int]) -> None:
        """The next call."""
        self._jobs.append((kernel, tasks, alone, *words))

    def keep(self, array: Any) -> None:
        self._kept[id(array)] = array

    def product(self) -> None:
        """The next call has a weight's address for its first parameter."""
        self._products.append(len(self._jobs))

    def end_segment(self) -> None:
        self._ends.append(len(self._jobs))

    def close(self, matrices: Mapping[str, Weight]) -> None:
        """Nothing more is added; every product so far is with one of `matrices`, or with rows of
        it."""
        self._words = np.zeros((len(self._jobs), JOB), np.int64)
        for at, job in enumerate(self._jobs):
            self._words[at, : len(job)] = job
        for product in self._products:
            address = int(self._words[product, HEAD])
            name = next(name for name, one in matrices.items() if one.holds(address))
            self._places.append((product * JOB + HEAD, name, address - matrices[name].address))
        self._jobs.clear()

    def bind(self, matrices: Mapping[str, Weight]) -> None:
        """Have the products be with `matrices`, of the shapes and types that were written down."""
        words = self._words.reshape(-1).data
        for place, name, offset in self._places:
            words[place] = matrices[name].address + offset

    def segment(self, number: int) -> tuple[int, int]:
        """The address of a segment's calls, and how many they are."""
        first, end = self._ends[number : number + 2]
        return int(self._words.ctypes.data) + 8 * JOB * first, end - first
