"""What a step answered, checked before anything is drawn from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from superfluid_compat.errors import Fault
from superfluid_workerd.adapter import Feed

if TYPE_CHECKING:
    from superfluid_workerd.adapter import Logits


def checked(answer: object, feeds: Sequence[Feed], vocabulary: int) -> list[Logits | None]:
    """`answer` itself, an entry for each feed as `Runtime.step` promises it.

    Raises `Fault` naming the feed, what was found and what was wanted.
    """
    if not isinstance(answer, list | tuple):
        raise Fault(f"the step answered a {type(answer).__name__}, wanted a list of rows")
    if len(answer) != len(feeds):
        raise Fault(f"the step answered {len(answer)} entries, wanted {len(feeds)}")
    for at, (entry, feed) in enumerate(zip(answer, feeds, strict=True)):
        rows = _rows(feed)
        if rows == 0 and entry is None:
            continue
        fits = isinstance(entry, np.ndarray) and entry.dtype == np.float32
        if rows == 0 or not fits or entry.shape != (rows, vocabulary):
            wanted = _words("float32", (rows, vocabulary)) if rows else "None"
            raise Fault(f"entry {at} of the step is {_shown(entry)}, wanted {wanted}")
    return list(answer)


def _rows(feed: Feed) -> int:
    return len(feed.tokens) if feed.logits == "all" else int(feed.logits == "last")


def _shown(entry: Any) -> str:
    if entry is None:
        return "None"
    if not isinstance(entry, np.ndarray):
        return f"a {type(entry).__name__}"
    return _words(str(entry.dtype), entry.shape)


def _words(kind: str, shape: tuple[int, ...]) -> str:
    return f"{kind} of shape ({', '.join(map(str, shape))})"
