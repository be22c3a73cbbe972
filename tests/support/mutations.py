"""Damage to small files, at random by a seed."""

from __future__ import annotations

import random
import struct
from typing import Final

EXTREMES: Final = (0, 1 << 31, 1 << 32, 1 << 60, (1 << 63) - 1, (1 << 64) - 1)
NOT_A_NUMBER: Final = (
    b"\xff\xff",
    b"\x00\x7e",
    b"\x00\x7c",
    b"\x00\x00\xc0\x7f",
    b"\x00\x00\x80\xff",
)
"""NaN and infinity in halves and floats, as scales and weights have them."""


def mutated(whole: bytes, rng: random.Random) -> bytes:
    """One to three of: flipped bits, another byte, a cut, a run removed or doubled, a length or
    count replaced by an extreme one, no number in the place of one; mostly within the header."""
    raw = bytearray(whole)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(min(len(raw), rng.choice([64, 4096, len(raw)])))
        match rng.randrange(7):
            case 0:
                raw[at] ^= 1 << rng.randrange(8)
            case 1:
                raw[at] = rng.choice([0, 1, 34, 45, 57, 92, 123, 127, 128, 255])
            case 2:
                del raw[max(at, 1) :]
            case 3:
                del raw[at : at + rng.randint(1, 16)]
            case 4:
                raw[at:at] = raw[at : at + rng.randint(1, 16)]
            case 5:
                raw[at : at + 8] = struct.pack("<Q", rng.choice(EXTREMES))
            case _:
                value = rng.choice(NOT_A_NUMBER)
                at = rng.randrange(len(raw))
                raw[at : at + len(value)] = value
        if not raw:
            return b""
    return bytes(raw)
