"""One stream's way from a row of logits to a token."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from superfluid_compat.errors import Fault, InvalidField, NotFinite
from superfluid_workerd.link.frames import Sampling
from superfluid_workerd.sampling import filters
from superfluid_workerd.sampling.draws import uniform
from superfluid_workerd.sampling.filters import Floats, Indices

_COLD: Final = 0.01
_NO_WEIGHT: Final = 746.0
"""exp(-746) is 0 in float64."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A token and its log probability."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token; where asked for, its log probability and the likeliest tokens, best first."""

    token: int
    logprob: float | None = None
    top: tuple[Scored, ...] = ()


class Sampler:
    """Draws the tokens of one stream; holds settings only, so a stream may continue anywhere.

    In order: logit bias and `banned` tokens, repetition, presence and frequency penalties, then
    top-k, typical, top-p and min-p, each over what the one before left, renormalised, and the
    temperature last: the order of llama.cpp, whose formulas the penalties follow. Temperature 0
    takes the largest logit (the lowest id among equals). Log probabilities are those of the
    model's own distribution, before any of this.

    Raises `InvalidField` for a biased token outside the vocabulary.
    """

    def __init__(self, sampling: Sampling, vocabulary: int, banned: Collection[int] = ()) -> None:
        self._sampling = sampling
        self._vocabulary = vocabulary
        bias = {**sampling.logit_bias, **dict.fromkeys(banned, -math.inf)}
        for token in bias:
            if not 0 <= token < vocabulary:
                raise InvalidField(
                    f"logit_bias names token {token}, the model has 0 to {vocabulary - 1}",
                    param="logit_bias",
                )
        self._biased = np.fromiter(bias, dtype=np.intp, count=len(bias))
        self._bias = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
        self._filters = _filters(sampling)
        self._greedy = sampling.temperature <= 0 or sampling.top_k == 1
        lowers = not _penalises(sampling) and all(value <= 0 for value in bias.values())
        self._lowered = frozenset(bias) if lowers else None

    def draw(self, logits: NDArray[np.float32], position: int, history: Sequence[int]) -> Drawn:
        """The token at `position` of the answer (0 is its first), from its row of logits.

        `logits` has shape (vocabulary,) and is left as it is. `history` is the prompt and the
        answer so far; penalties count its last `penalty_window` tokens. Equal arguments draw
        equal tokens. Raises `NotFinite` for a row with NaN or +inf in it, `Fault` for one of
        another shape and one that leaves nothing to draw.
        """
        if logits.shape != (self._vocabulary,):
            raise Fault(f"logits of shape {logits.shape}, wanted ({self._vocabulary},)")
        best = int(np.argmax(logits))
        if not math.isfinite(logits[best]):
            raise NotFinite(
                f"the model's largest logit is {logits[best]}, wanted a finite one: its weights "
                "are damaged or its numbers overflow"
            )
        if self._greedy and self._stays(best):
            return self._scored(logits, best)
        row = self._adjusted(logits, history)
        if row is not logits:
            best = _left(row)
        if not self._greedy:
            best = self._choose(row, uniform(self._sampling.seed, position))
        return self._scored(logits, best)

    def _stays(self, best: int) -> bool:
        """Whether the largest logit is so after `_adjusted` too: others are lowered at the most."""
        return self._lowered is not None and best not in self._lowered

    def _adjusted(self, logits: NDArray[np.float32], history: Sequence[int]) -> NDArray[np.float32]:
        window = self._sampling.penalty_window
        recent = history[-window:] if window and _penalises(self._sampling) else ()
        if not len(recent) and not self._biased.size:
            return logits
        row = logits.copy()
        with np.errstate(over="ignore"):
            row[self._biased] += self._bias
            if len(recent):
                seen, counts = np.unique(np.asarray(recent, dtype=np.intp), return_counts=True)
                row[seen] = _penalised(self._sampling, row[seen], counts)
        return row

    def _choose(self, row: NDArray[np.float32], u: float) -> int:
        temperature = self._sampling.temperature
        if not self._filters and temperature >= _COLD:
            return filters.pick(filters.weights(row, temperature), u)
        ids = np.sort(_narrowed(row, self._filters or (_possible(temperature),)))
        weight = filters.weights(row[ids].astype(np.float64), temperature)
        return int(ids[filters.pick(weight, u)])

    def _scored(self, logits: NDArray[np.float32], token: int) -> Drawn:
        count = self._sampling.logprobs
        if count is None:
            return Drawn(token)
        peak = float(logits.max())
        total = peak + math.log(float(filters.weights(logits).sum()))
        likeliest = filters.largest(logits, count) if count else ()
        top = (Scored(int(i), float(logits[i]) - total) for i in likeliest)
        finite = tuple(entry for entry in top if entry.logprob > -math.inf)
        return Drawn(token, float(logits[token]) - total, finite)


_Filter = Callable[[Floats], Indices]


def _filters(sampling: Sampling) -> tuple[_Filter, ...]:
    """The filters that do something, in their order."""
    k, typical, top, least = (
        sampling.top_k,
        sampling.typical_p,
        sampling.top_p,
        sampling.min_p,
    )
    table: tuple[tuple[bool, _Filter], ...] = (
        (k > 0, lambda row: filters.largest(row, k)),
        (typical < 1, lambda row: filters.typical(row, typical)),
        (top < 1, lambda row: filters.top_p(row, top)),
        (least > 0, lambda row: filters.min_p(row, least)),
    )
    return tuple(one for wanted, one in table if wanted)


def _possible(temperature: float) -> _Filter:
    return lambda row: np.flatnonzero(row >= row.max() - _NO_WEIGHT * temperature)


def _narrowed(row: NDArray[np.float32], chain: Sequence[_Filter]) -> Indices:
    ids = chain[0](row)
    for one in chain[1:]:
        ids = ids[one(row[ids])]
    return ids


def _left(row: NDArray[np.float32]) -> int:
    token = int(np.argmax(row))
    if not math.isfinite(row[token]):
        raise Fault(
            f"bias, bans and penalties leave {row[token]} as the largest logit",
            fix="ask for less in logit_bias and the penalties",
        )
    return token


def _penalises(sampling: Sampling) -> bool:
    return (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )


def _penalised(
    sampling: Sampling, row: NDArray[np.float32], counts: NDArray[np.intp]
) -> NDArray[np.float32]:
    repetition = np.float32(sampling.repetition_penalty)
    scaled = np.where(row > 0, row / repetition, row * repetition)
    flat = sampling.presence_penalty + counts * sampling.frequency_penalty
    penalised: NDArray[np.float32] = (scaled - flat).astype(np.float32)
    return penalised
