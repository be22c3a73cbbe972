"""One matrix of a model, and rows of x made ready to meet several of them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from superfluid_adapter_native.quants.types import TensorType

_POINTER_AT: Final = object.__basicsize__
"""NumPy's C API has an array's data pointer right behind the object's head."""
_word_at: Final = ctypes.c_int64.from_address


def address(array: NDArray[np.generic]) -> int:
    """Where its first byte lies; ten times as fast as asking its `__array_interface__`."""
    return _word_at(id(array) + _POINTER_AT).value


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix in its file's own arrangement, which the kernels read at memory speed as it is.

    `raw` is a contiguous view, usually of mapped memory, kept alive by this object; `shape` is
    (rows, columns).
    """

    type: TensorType
    shape: tuple[int, int]
    raw: NDArray[np.uint8]
    address: int
    row_bytes: int

    @property
    def bytes(self) -> int:
        return int(self.raw.nbytes)

    def holds(self, address: int) -> bool:
        """Whether the byte at `address` is one of its own."""
        return 0 <= address - self.address < self.bytes

    def rows(self, first: int, end: int) -> Weight:
        """The matrix of its rows `first` to `end`, over the same bytes."""
        start, stop = first * self.row_bytes, end * self.row_bytes
        shape = (end - first, self.shape[1])
        return Weight(self.type, shape, self.raw[start:stop], self.address + start, self.row_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """Rows of x, and on the int8 route their quantised form: make once, meet several weights.

    x ≈ codes * scales per thirty-two elements; `fours` are the sums of each four codes,
    `shares` those of each sixteen times their scale.
    """

    x: NDArray[np.float32]
    codes: NDArray[np.int8] | None = None
    scales: NDArray[np.float32] | None = None
    fours: NDArray[np.float32] | None = None
    shares: NDArray[np.float32] | None = None

    def addresses(self) -> list[int]:
        """Of codes, scales, fours and shares."""
        parts = (self.codes, self.scales, self.fours, self.shares)
        return [address(part) for part in parts if part is not None]
