"""Several sequences decoded in one call: their caches merged, filtered, extended, taken out again.

Prompts never go in here: right-padded prefill corrupts recurrent state in both generations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from superfluid_adapter_mlx.caches import Array, Cache, copied, held_bytes
from superfluid_adapter_mlx.engine import mx
from superfluid_workerd.adapter import SequenceId


class Batch:
    """Merged caches, one row for each sequence in `rows`; never empty rows, never no rows."""

    def __init__(self, singles: Mapping[SequenceId, Sequence[Cache]]) -> None:
        self.rows: list[SequenceId] = list(singles)
        self.caches: list[Cache] = _merged(list(singles.values()))

    def join(self, singles: Mapping[SequenceId, Sequence[Cache]]) -> None:
        """Put more sequences behind those here."""
        for cache, other in zip(self.caches, _merged(list(singles.values())), strict=True):
            cache.extend(other)
        self.rows += singles

    def take(self, sequence: SequenceId) -> list[Cache]:
        """The sequence's own caches; its row stays."""
        row = self.rows.index(sequence)
        # What is taken out would keep the whole batch in memory, were it no copy.
        return copied([cache.extract(row) for cache in self.caches])

    def keep(self, sequences: Sequence[SequenceId]) -> None:
        """Drop every other row; one at least is kept."""
        rows = [row for row, sequence in enumerate(self.rows) if sequence in sequences]
        if len(rows) == len(self.rows):
            return
        for cache in self.caches:
            cache.filter(mx.array(rows))
        self.rows = [self.rows[row] for row in rows]
        mx.eval(self.arrays())

    def arrays(self) -> list[Array]:
        """Everything that a step leaves to be computed."""
        return [cache.state for cache in self.caches]

    @property
    def bytes(self) -> int:
        """Bytes held, padding and room to grow included."""
        return held_bytes(self.caches)


def _merged(singles: Sequence[Sequence[Cache]]) -> list[Cache]:
    return [type(layer[0]).merge(list(layer)) for layer in zip(*singles, strict=True)]
