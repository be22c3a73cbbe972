"""The states of a worker's life and every way from one to another."""

from __future__ import annotations

import enum
import itertools
from typing import Final


class WorkerState(enum.StrEnum):
    """`gone` is also where a life begins: no process, and none wanted."""

    SPAWNED = "spawned"
    HANDSHAKEN = "handshaken"
    PROBED = "probed"
    MAPPED = "mapped"
    WARMED = "warmed"
    SERVING = "serving"
    DRAINING = "draining"
    GONE = "gone"
    FAILED = "failed"
    BACKOFF = "backoff"
    GAVE_UP = "gave-up"


_S = WorkerState

LADDER: Final = (_S.SPAWNED, _S.HANDSHAKEN, _S.PROBED, _S.MAPPED, _S.WARMED, _S.SERVING)
"""The way up, in order."""

LOADING: Final = frozenset(LADDER[:-1])
LIVE: Final = frozenset({*LADDER, _S.DRAINING})
"""A process runs and its frames count."""

WITH_PROCESS: Final = LIVE | {_S.FAILED}

TRANSITIONS: Final[frozenset[tuple[WorkerState, WorkerState]]] = frozenset(
    {
        (_S.GONE, _S.SPAWNED),
        *itertools.pairwise(LADDER),
        *((state, _S.DRAINING) for state in LADDER),
        *((state, _S.FAILED) for state in LADDER),
        (_S.DRAINING, _S.GONE),
        (_S.DRAINING, _S.FAILED),
        (_S.FAILED, _S.BACKOFF),
        (_S.FAILED, _S.GAVE_UP),
        (_S.FAILED, _S.GONE),
        (_S.BACKOFF, _S.SPAWNED),
        (_S.BACKOFF, _S.GONE),
        (_S.GAVE_UP, _S.GONE),
    }
)


def follow(before: WorkerState, after: WorkerState) -> WorkerState:
    """`after`; raises `ValueError` when no such transition exists, which is a bug in the caller."""
    if (before, after) not in TRANSITIONS:
        raise ValueError(f"a worker does not go from {before} to {after}")
    return after
