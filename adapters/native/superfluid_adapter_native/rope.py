"""Rotary position embedding: cosines and sines by position, with every scaling served.

Su et al. 2021 for the rotation, Peng et al. 2023 (YaRN) for the ramp between interpolated and
extrapolated frequencies and the attention factor, as llama.cpp combines them.
"""

from __future__ import annotations

import math
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from superfluid_adapter_native.config import RopeConfig

Array: TypeAlias = NDArray[np.float32]
_ROWS: Final = 256


def frequencies(
    rope: RopeConfig, factors: NDArray[np.float32] | None = None
) -> NDArray[np.float64]:
    """Radians per position of each rotated pair, shape (dimensions / 2,).

    `factors` divide them one by one (Llama 3, LongRoPE)."""
    pair = np.arange(rope.dimensions // 2, dtype=np.float64)
    plain = rope.base ** (-2.0 * pair / rope.dimensions)
    if factors is not None:
        plain = plain / factors.astype(np.float64)
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "yarn":
        kept = _yarn_kept(rope, pair)
        return plain / rope.factor * (1.0 - kept) + plain * kept
    return plain


def magnitude(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied by."""
    if rope.scaling == "yarn" and rope.factor > 1.0:
        return rope.attention_factor * (1.0 + 0.1 * math.log(rope.factor))
    return rope.attention_factor


def _yarn_kept(rope: RopeConfig, pair: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much of each frequency stays as trained: 1 for fast pairs, 0 for slow ones."""

    def turning(rotations: float) -> float:
        wavelength = rope.original_context / (rotations * 2.0 * math.pi)
        return rope.dimensions * math.log(wavelength) / (2.0 * math.log(rope.base))

    low = max(0.0, math.floor(turning(rope.beta_fast)))
    high = min(rope.dimensions - 1.0, math.ceil(turning(rope.beta_slow)))
    ramp = (pair - low) / max(0.001, high - low)
    kept: NDArray[np.float64] = 1.0 - np.clip(ramp, 0.0, 1.0)
    return kept


class RopeTable:
    """Cosines and sines of positions, computed once and grown as positions grow."""

    def __init__(self, rope: RopeConfig, factors: NDArray[np.float32] | None = None) -> None:
        self._frequencies = frequencies(rope, factors)
        self._magnitude = magnitude(rope)
        half = len(self._frequencies)
        self._rows = 0
        self._cos = np.empty((0, half), np.float32)
        self._sin = np.empty((0, half), np.float32)

    def upto(self, positions: int) -> tuple[Array, Array]:
        """Cosines and sines of at least the positions 0 to `positions` - 1, shape (n, half)."""
        while positions > self._rows:
            self._grow(max(_ROWS, 2 * self._rows))
        return self._cos, self._sin

    def _grow(self, rows: int) -> None:
        self._cos = np.resize(self._cos, (rows, self._cos.shape[1]))
        self._sin = np.resize(self._sin, (rows, self._sin.shape[1]))
        for first in range(self._rows, rows, _ROWS):
            span = slice(first, first + _ROWS)
            angles = np.arange(first, first + _ROWS, dtype=np.float64)[:, None] * self._frequencies
            self._cos[span] = np.cos(angles) * self._magnitude
            self._sin[span] = np.sin(angles) * self._magnitude
        self._rows = rows
