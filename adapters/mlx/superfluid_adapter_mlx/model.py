"""A loaded model as the runtime uses it: caches, passes over them, nothing left uncomputed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from superfluid_adapter_mlx.batch import Batch
from superfluid_adapter_mlx.caches import Array, Cache, Part, held_arrays, live
from superfluid_adapter_mlx.engine import cache_module, mx

if TYPE_CHECKING:
    from superfluid_workerd.adapter import Logits


@dataclass(frozen=True, slots=True)
class Model:
    """mlx-lm's model. `ids` are the rows of its embedding: what it may be given."""

    module: Any
    vocabulary: int
    ids: int

    def fresh(self) -> list[Cache]:
        """Empty caches for one sequence. There may be more or fewer than layers."""
        caches: list[Cache] = cache_module.make_prompt_cache(self.module)
        return caches

    def grow(self, tokens: Sequence[int], caches: Sequence[Cache]) -> Array:
        """Extend one sequence by what is not computed yet; logits of shape (tokens, vocabulary)."""
        return self.module(mx.array([list(tokens)]), cache=caches)[0]

    def absorb(self, tokens: Sequence[int], caches: Sequence[Cache]) -> None:
        """Extend one sequence; the logits are never computed."""
        self.grow(tokens, caches)
        mx.eval(held_arrays(caches))

    def rows(self, tokens: Sequence[int], caches: Sequence[Cache]) -> Logits:
        """Extend one sequence; logits after each token, of shape (tokens, vocabulary)."""
        return self._computed(self.grow(tokens, caches), held_arrays(caches))

    def together(self, tokens: Sequence[int], batch: Batch) -> Logits:
        """Extend each row of a batch by one token; logits of shape (rows, vocabulary)."""
        logits = self.module(mx.array([[token] for token in tokens]), cache=batch.caches)[:, -1]
        return self._computed(logits, batch.arrays())

    def template(self) -> list[Part]:
        """The live view of the caches after one token. Raises `Unsupported`."""
        caches = self.fresh()
        self.absorb([0], caches)
        return [live(cache) for cache in caches]

    def _computed(self, logits: Array, state: Sequence[Any]) -> Logits:
        rows = logits.astype(mx.float32)
        mx.eval(rows, state)
        return np.array(rows)
