"""Whether sequences that decode go through llama.cpp in one call or one by one, by what each took.

One call reads the weights once. But some builds multiply a few tokens by other kernels than one
token, and slower: with AVX2 and Q8_0 two tokens in a call took 3.5 times as long as one, three
took 6 times as long.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from typing import Final

_SAMPLES: Final = 4
_EVERY: Final = 1024
"""Steps between two looks at the way that is not taken, once it is known."""

_FIRST: Final = frozenset((1, 4, 16, 64, 256))
"""Steps after which it is looked at before that."""

_GAIN: Final = 0.9
"""One by one must take less than this of together to be chosen."""


class Batching:
    """Seconds that steps took either way, by how many sequences decoded: the least of the last
    few, since what disturbs a measurement only adds to it."""

    def __init__(self) -> None:
        samples = partial(deque[float], maxlen=_SAMPLES)
        self._together_s: defaultdict[int, deque[float]] = defaultdict(samples)
        self._apart_s: defaultdict[int, deque[float]] = defaultdict(samples)
        self._steps: defaultdict[int, int] = defaultdict(int)

    def sizes(self, count: int) -> list[int]:
        """Sequences in each call, in order, of a step in which `count` of them decode.

        Now and then the other way is looked at: of one by one by a single call, so that it costs
        little however many they are."""
        step, apart = self._steps[count], self._is_faster_apart(count)
        self._steps[count] += 1
        if count > 1 and (step in _FIRST or (step and step % _EVERY == 0)):
            return [count] if apart else [1, count - 1]
        return [1] * count if apart else [count]

    def took(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """The calls of a step took so long each."""
        count = sum(sizes)
        if len(sizes) == 1:
            self._together_s[count].append(seconds[0])
        else:
            alone = [it for size, it in zip(sizes, seconds, strict=True) if size == 1]
            self._apart_s[count].append(count * sum(alone) / len(alone))

    def _is_faster_apart(self, count: int) -> bool:
        apart, together = self._apart_s[count], self._together_s[count]
        return bool(apart and together) and min(apart) < _GAIN * min(together)


__all__ = ["Batching"]
