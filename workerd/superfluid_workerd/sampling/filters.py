"""Choosing among a row's candidates without sorting the vocabulary."""

from __future__ import annotations

import math
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.floating[Any]]
Indices: TypeAlias = NDArray[np.intp]

_COLUMNS: Final = 4096
_FIRST_GUESSES: Final = (64, 2048)
_BINS: Final = 8192
_BINS_PER_NAT: Final = 256


def largest(values: Floats, count: int) -> Indices:
    """Indices of the `count` largest, descending; of equals the lower index is the larger."""
    count = min(count, values.size)
    found = np.flatnonzero(values >= _floor(values, count))
    order = np.argsort(-values[found], kind="stable")[:count]
    picked: Indices = found[order]
    return picked


def _floor(values: Floats, count: int) -> float:
    """A value that at least `count` of `values` reach, and not many more.

    The row is cut into columns; if `count` columns have a maximum of at least v, then `count`
    values are at least v. One pass, no copy of the row.
    """
    rows = values.size // _COLUMNS
    if count == values.size:
        return -math.inf
    if rows < 2 or count > _COLUMNS // 8:
        return float(np.partition(values, values.size - count)[values.size - count])
    body = rows * _COLUMNS
    maxima = values[:body].reshape(rows, _COLUMNS).max(axis=0)
    rest = values.size - body
    np.maximum(maxima[:rest], values[body:], out=maxima[:rest])
    return float(np.partition(maxima, _COLUMNS - count)[_COLUMNS - count])


def weights(logits: Floats, temperature: float = 1.0) -> Floats:
    """Softmax of `logits` at `temperature`, not divided by its sum; the largest weighs 1."""
    # Past the range of its type a distance becomes infinite, and its weight 0.
    with np.errstate(over="ignore"):
        shifted = logits - logits.max()
        if temperature != 1.0:
            shifted /= temperature
    exponentials: Floats = np.exp(shifted, out=shifted)
    return exponentials


def top_p(logits: Floats, mass: float) -> Indices:
    """The fewest likeliest candidates that hold `mass` of the probability."""
    return _nucleus(logits, weights(logits), mass)


def typical(logits: Floats, mass: float) -> Indices:
    """The fewest candidates, nearest to the expected information first, that hold `mass`.

    Meister et al., "Locally Typical Sampling", 2022: by |-log p - H|, H the entropy.
    """
    weight = weights(logits)
    probability = weight / weight.sum()
    information = np.full_like(probability, np.inf)
    np.log(probability, out=information, where=probability > 0)
    np.negative(information, out=information, where=probability > 0)
    share = np.zeros_like(probability)
    np.multiply(probability, information, out=share, where=probability > 0)
    entropy = share.sum()
    return _nucleus(-np.abs(information - entropy), probability, mass)


def min_p(logits: Floats, ratio: float) -> Indices:
    """Candidates at least `ratio` times as likely as the likeliest."""
    return np.flatnonzero(logits >= logits.max() + math.log(ratio))


def _nucleus(key: Floats, weight: Floats, mass: float) -> Indices:
    """The fewest candidates, by descending key, whose weights reach `mass` of all."""
    wanted = mass * float(weight.sum())
    for count in _FIRST_GUESSES:
        order = largest(key, count)
        reached = np.cumsum(weight[order], dtype=np.float64)
        if reached[-1] >= wanted or count >= key.size:
            return order[: int(np.searchsorted(reached, wanted)) + 1]
    return _binned_nucleus(key, weight, wanted)


def _binned_nucleus(key: Floats, weight: Floats, wanted: float) -> Indices:
    """The same for flat rows: only the bin in which the mass is reached gets sorted."""
    with np.errstate(over="ignore"):
        below = np.minimum((key.max() - key) * _BINS_PER_NAT, _BINS - 1).astype(np.intp)
    sums = np.cumsum(np.bincount(below, weight, _BINS))
    last = min(int(np.searchsorted(sums, wanted)), _BINS - 1)
    border = np.flatnonzero(below == last)
    border = border[np.argsort(-key[border], kind="stable")]
    before = float(sums[last - 1]) if last else 0.0
    reached = before + np.cumsum(weight[border], dtype=np.float64)
    cut = int(np.searchsorted(reached, wanted)) + 1
    return np.concatenate([np.flatnonzero(below < last), border[:cut]])


def pick(weight: Floats, u: float) -> int:
    """The first index at which the running sum of `weight` exceeds `u` of its total.

    `u` is in [0, 1). Sums by runs first, so that a vocabulary costs one pass.
    """
    run = 1 if weight.size <= _COLUMNS else 512
    sums = np.cumsum(np.add.reduceat(weight, np.arange(0, weight.size, run)), dtype=np.float64)
    goal = min(u * float(sums[-1]), math.nextafter(float(sums[-1]), 0.0))
    block = int(np.searchsorted(sums, goal, side="right"))
    before = float(sums[block - 1]) if block else 0.0
    part = weight[block * run : (block + 1) * run]
    inner = before + np.cumsum(part, dtype=np.float64)
    within = int(np.searchsorted(inner, goal, side="right"))
    # The run's sum was rounded: past its end, the last of it that can be drawn is meant.
    return block * run + (within if within < part.size else int(np.flatnonzero(part)[-1]))
