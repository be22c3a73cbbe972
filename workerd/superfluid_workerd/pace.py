"""How long turns take, learned from those that were."""

from __future__ import annotations

from typing import Final

_WEIGHT: Final = 0.1
_LEAST: Final = 32
"""Tokens of prompts that a turn always takes, so that none waits for ever."""

_FIRST: Final = 128
"""Those of the first turn: more of a large model might take long enough to be taken for a hang."""


class Pace:
    """A turn's time as a fixed part and a part for each token: least squares over past turns,
    each counting a tenth less than the one after it."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = self._seconds = self._squares = self._products = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A turn of so many tokens took so long."""
        keep = 1 - _WEIGHT
        self._weight = keep * self._weight + 1
        self._tokens = keep * self._tokens + tokens
        self._seconds = keep * self._seconds + seconds
        self._squares = keep * self._squares + tokens * tokens
        self._products = keep * self._products + tokens * seconds

    def tokens_within(self, target_s: float) -> int | None:
        """Tokens of prompts that a turn may take beside streams that decode; None where a token
        more costs nothing. Not many while nothing is known yet.

        As many as fit in `target_s`, or where the fixed part (reading the weights, say) is longer
        than half of that, as many as double it: fewer would cost those who wait for a prompt more
        than they save those who decode.
        """
        if not self._weight:
            return _FIRST
        fixed_s, each_s = self._fit()
        if each_s <= 0:
            return None
        return max(_LEAST, int((max(target_s, 2 * fixed_s) - fixed_s) / each_s))

    def _fit(self) -> tuple[float, float]:
        """Seconds of a turn without tokens, and of each token."""
        mean_tokens, mean_s = self._tokens / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - mean_tokens**2
        if spread < 1:
            return 0.0, mean_s / mean_tokens
        each_s = max(0.0, (self._products / self._weight - mean_tokens * mean_s) / spread)
        return max(0.0, mean_s - each_s * mean_tokens), each_s


__all__ = ["Pace"]
