"""How close a runtime's predictions are to an oracle's, teacher-forced over real text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from superfluid_workerd.adapter import Feed, Runtime

Logits: TypeAlias = NDArray[np.float32]

CLEAR_MARGIN = 1.0
"""Between the oracle's two largest logits: there both should choose the same token."""


@dataclass(frozen=True, slots=True)
class Parity:
    """`kl` is the mean over positions of KL(oracle || runtime), in nats; `agreement` the share of
    the `clear` positions, where the oracle's margin exceeds 1, at which both choose alike."""

    positions: int
    kl: float
    clear: int
    agreement: float

    @property
    def disagreement(self) -> float:
        return 1.0 - self.agreement


def compare(found: Iterator[Logits], oracle: Logits) -> Parity:
    """Parity of logits that come in blocks of rows, in order, with the oracle's, all rows."""
    total = at = clear = agreed = 0
    divergence = 0.0
    for block in found:
        wanted = oracle[at : at + len(block)]
        divergence += float(_kl(wanted, block).sum())
        first, second = np.partition(wanted, -2, axis=1)[:, :-3:-1].T
        decided = first - second > CLEAR_MARGIN
        clear += int(decided.sum())
        agreed += int((wanted.argmax(axis=1) == block.argmax(axis=1))[decided].sum())
        at += len(block)
        total += len(block)
    return Parity(total, divergence / total, clear, agreed / clear)


def _kl(wanted: Logits, found: Logits) -> NDArray[np.float64]:
    p, q = _log_softmax(wanted), _log_softmax(found)
    divergence: NDArray[np.float64] = (np.exp(p) * (p - q)).sum(axis=1)
    return divergence


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def forced(
    runtime: Runtime, tokens: Sequence[int], *, first: int = 0, block: int = 32
) -> Iterator[Logits]:
    """Logits after each of `tokens` from `first` on, fed `block` at a time to a new sequence."""
    sequence = runtime.seq_create()
    for start in range(0, len(tokens), block):
        wanted = start + block > first
        feed = Feed(sequence, tokens[start : start + block], start, "all" if wanted else "none")
        (rows,) = runtime.step([feed], lambda: None)
        if wanted:
            assert rows is not None
            yield rows[max(0, first - start) :]
    runtime.seq_free(sequence)
