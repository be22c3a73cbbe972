"""What is tried with a model before it serves: a token's price, and whether batches are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from superfluid_adapter_mlx.batch import Batch
from superfluid_adapter_mlx.caches import (
    FORMS,
    Cache,
    Part,
    copied,
    flat,
    held_arrays,
    live_bytes,
)
from superfluid_adapter_mlx.engine import mx
from superfluid_adapter_mlx.model import Model
from superfluid_compat.errors import Unsupported

if TYPE_CHECKING:
    from superfluid_workerd.adapter import Logits

_LENGTHS: Final = (3, 9, 17)
_ROUNDS: Final = 2
_MOST_APART: Final = {"float32": 0.01, "half": 0.1}
"""Most a batch's logits may differ from single decoding's, by root mean square, in units of the
logits' own deviation: a batch that mixes rows up differs by about 1, rounding by some thousandths
(in half precision by some hundredths)."""


def token_bytes(model: Model) -> int:
    """What one token more takes, by difference: the first also pays for recurrent state, and
    buffers grow by hundreds of rows at once. 0 where the caches do not tell. Nothing is computed:
    shapes tell."""
    caches = model.fresh()
    try:
        model.grow([0] * 8, caches)
        before = live_bytes(caches)
        model.grow([0], caches)
        return max(0, live_bytes(caches) - before)
    except Unsupported:
        return 0


def template(model: Model) -> list[Part] | None:
    """The live view of the caches after one token, None where they cannot be copied."""
    try:
        return model.template()
    except Unsupported:
        return None


def batching_fault(model: Model) -> str | None:
    """Why this model decodes one sequence per call, or None when a batch decodes like it."""
    for cache in flat(model.fresh()):
        form = FORMS.get(type(cache).__name__)
        if form is None or not form.batches:
            return f"{type(cache).__name__} does not batch"
        if getattr(cache, "keep", 0):
            return f"a batch of {type(cache).__name__} forgets the tokens it is to keep"
    try:
        apart = _apart(model)
    except Exception as error:  # noqa: BLE001  # whatever a batch runs into is why there is none
        return f"a batch fails with {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if apart > 1:
        return f"a batch decodes otherwise than its rows alone, by {apart:.3g} times the tolerance"
    return None


def _apart(model: Model) -> float:
    """How far a batch of unequal histories strays, in tolerances: merged, stepped, one row left
    out, one more put in."""
    random = np.random.default_rng(7)
    texts = [random.integers(0, model.ids, length + _ROUNDS + 1).tolist() for length in _LENGTHS]
    prompts = [text[:length] for text, length in zip(texts, _LENGTHS, strict=True)]
    singles = [_absorbed(model, prompt) for prompt in prompts]
    batch = Batch({row: copied(caches) for row, caches in enumerate(singles)})
    worst = 0.0
    at: list[int] = list(_LENGTHS)
    for turn in range(_ROUNDS + 1):
        if turn == _ROUNDS:
            # The middle row leaves with its own caches, and comes back behind the others.
            middle = batch.take(1)
            batch.keep([0, 2])
            batch.join({1: middle})
        tokens = [texts[row][at[row]] for row in batch.rows]
        rows = model.together(tokens, batch)
        for found, row, token in zip(rows, batch.rows, tokens, strict=True):
            worst = max(worst, _distance(found, model.rows([token], singles[row])[-1]))
            at[row] += 1
    return worst / _tolerance(singles[0])


def _absorbed(model: Model, tokens: Sequence[int]) -> list[Cache]:
    caches = model.fresh()
    model.absorb(tokens, caches)
    return caches


def _distance(found: Logits, wanted: Logits) -> float:
    apart = float(np.sqrt(np.mean(np.square(found - wanted))))
    return apart / (float(wanted.std()) or 1.0) if np.isfinite(apart) else float("inf")


def _tolerance(caches: Sequence[Cache]) -> float:
    floats = [it.dtype for it in held_arrays(caches) if mx.issubdtype(it.dtype, mx.floating)]
    single = all(kind == mx.float32 for kind in floats)
    return _MOST_APART["float32" if single else "half"]
