"""The tensor types we read, by GGML's names, ids and block layouts (ggml.h, ggml-common.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type whose weights come in blocks of `elements` along a row, each of `bytes` bytes."""

    name: str
    ggml: int
    elements: int
    bytes: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` weights. Raises ValueError unless blocks divide it."""
        blocks, rest = divmod(columns, self.elements)
        if rest:
            raise ValueError(f"{columns} columns are no multiple of {self.name}'s {self.elements}")
        return blocks * self.bytes


TYPES: Final = (
    TensorType("F32", 0, 1, 4),
    TensorType("F16", 1, 1, 2),
    TensorType("Q4_0", 2, 32, 18),
    TensorType("Q4_1", 3, 32, 20),
    TensorType("Q5_0", 6, 32, 22),
    TensorType("Q5_1", 7, 32, 24),
    TensorType("Q8_0", 8, 32, 34),
    TensorType("Q2_K", 10, 256, 84),
    TensorType("Q3_K", 11, 256, 110),
    TensorType("Q4_K", 12, 256, 144),
    TensorType("Q5_K", 13, 256, 176),
    TensorType("Q6_K", 14, 256, 210),
    TensorType("IQ4_NL", 20, 32, 18),
    TensorType("IQ4_XS", 23, 256, 136),
    TensorType("BF16", 30, 1, 2),
    TensorType("MXFP4", 39, 32, 17),
)

BY_NAME: Final = {kind.name: kind for kind in TYPES}
BY_GGML: Final = {kind.ggml: kind for kind in TYPES}
