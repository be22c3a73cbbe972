"""Counter-based draws: number i of a stream is a function of the seed and i alone."""

from __future__ import annotations

from typing import Final

import numpy as np

_MASK: Final = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """Draw `position` of the stream `seed`, in [0, 1) with 53 random bits.

    Philox 4x64 with 10 rounds (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
    2011): key (seed modulo 2^64, 0), counter (position + 1, 0, 0, 0); the upper 53 bits of the
    block's first word. Part of what a resumed stream relies on: changing it changes streams.
    """
    word = np.random.Philox(key=seed & _MASK, counter=position).random_raw()
    return (int(word) >> 11) * 2.0**-53
