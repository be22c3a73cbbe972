"""Who holds a sequence that begins as a prompt does.

Tokens are hashed block by block, each block with all before it, so that equal hashes at a depth
mean equal beginnings. A hash only finds; whoever uses what it found compares the tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Final, Generic, TypeVar

BLOCK: Final = 32
"""Tokens in a block; what is shared counts from the first whole one."""

H = TypeVar("H")


def extend(chain: list[bytes], tokens: Sequence[int]) -> None:
    """Add to `chain` the hashes of the blocks of `tokens` that it lacks."""
    for start in range(len(chain) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
        block = array("Q", tokens[start : start + BLOCK]).tobytes()
        before = chain[-1] if chain else b""
        chain.append(hashlib.blake2b(before + block, digest_size=16).digest())


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    most = min(len(first), len(second))
    if first[:most] == second[:most]:
        return most
    same = 0
    while most - same > 1:
        middle = (same + most) // 2
        if first[same:middle] == second[same:middle]:
            same = middle
        else:
            most = middle
    return same


class PrefixIndex(Generic[H]):
    """Holders by the hashes of what they hold."""

    def __init__(self) -> None:
        self._holders: dict[bytes, dict[H, None]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, holder: H, chain: Sequence[bytes]) -> None:
        """`holder` holds the blocks of `chain`."""
        for digest in chain:
            self._holders.setdefault(digest, {})[holder] = None

    def remove(self, holder: H, chain: Sequence[bytes]) -> None:
        """Undo `add` of the same two."""
        for digest in chain:
            holders = self._holders[digest]
            del holders[holder]
            if not holders:
                del self._holders[digest]

    def sharing(self, chain: Sequence[bytes]) -> Iterator[tuple[int, H]]:
        """Each holder that begins as `chain` does, with the blocks in common, the most first."""
        seen: set[H] = set()
        for depth in range(self._depth(chain), 0, -1):
            for holder in self._holders[chain[depth - 1]]:
                if holder not in seen:
                    seen.add(holder)
                    yield depth, holder

    def _depth(self, chain: Sequence[bytes]) -> int:
        """Blocks that some holder has; who has one has all before it."""
        known, unknown = 0, len(chain) + 1
        while unknown - known > 1:
            middle = (known + unknown) // 2
            if chain[middle - 1] in self._holders:
                known = middle
            else:
                unknown = middle
        return known


__all__ = ["BLOCK", "PrefixIndex", "common", "extend"]
