"""What the suite is run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from superfluid_workerd.adapter import (
    Adapter,
    Feed,
    LoadedModel,
    OpenRequest,
    Runtime,
    SequenceId,
)
from superfluid_workerd.registry import checked_options

if TYPE_CHECKING:
    from superfluid_workerd.adapter import Logits

TEXTS: Final = (
    "Hello, world",
    " leading and trailing ",
    "a\n\nb\tc",
    "naïve café — Ωμέγα",
    "日本語のテキスト",
    "👩‍👩‍👧 family",
    "<eos> </s> <|im_end|>",
    "0123456789 3.14",
)
"""Texts that any tokenizer gives back as they were."""


@dataclass(frozen=True, slots=True)
class Case:
    """An adapter and a model of it, small and quick.

    `tolerance` bounds the difference of any logit between ways of feeding the same tokens; 0
    wants them equal. `lanes` is 3 or more. `options` are the adapter's own. `texts` are given
    back unchanged by the model's tokenizer.
    """

    adapter: Adapter
    model: Path
    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    context: int = 0
    lanes: int = 3
    tolerance: float = 0.0
    texts: Sequence[str] = TEXTS

    def checked(self) -> dict[str, Any]:
        """Every option of the adapter with its value."""
        return checked_options(self.adapter, self.options)

    def request(self, *, context: int | None = None, lanes: int | None = None) -> OpenRequest:
        """What a worker would ask, with another context or other lanes than the case's."""
        return OpenRequest(
            model=self.model,
            scratch=self.folder,
            shared=self.folder,
            context=self.context if context is None else context,
            lanes=self.lanes if lanes is None else lanes,
            options=self.checked(),
        )

    def load(self) -> LoadedModel:
        """The model, opened as a worker opens it."""
        return self.adapter.open(self.request())

    @contextmanager
    def opened(self) -> Iterator[Opened]:
        """The model's runtime, closed at the end."""
        loaded = self.load()
        try:
            yield Opened(loaded.runtime)
        finally:
            loaded.runtime.close()


class Opened:
    """A runtime and shorthand for feeding it."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.describe = runtime.describe()

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        """Token ids that look like nothing in particular, the same for a seed."""
        drawn = np.random.default_rng(seed).integers(0, self.describe.vocabulary, count)
        return [int(token) for token in drawn]

    def feed(
        self,
        sequence: SequenceId,
        tokens: Sequence[int],
        logits: Literal["none", "last", "all"] = "last",
    ) -> Feed:
        """A feed at the end of the sequence."""
        return Feed(sequence, tokens, self.runtime.seq_length(sequence), logits)

    def step(
        self, feeds: Sequence[Feed], tick: Callable[[], None] = lambda: None
    ) -> Sequence[Logits | None]:
        """One step of the runtime, its rows copied so that they may be kept."""
        rows = self.runtime.step(feeds, tick)
        return [None if row is None else row.copy() for row in rows]

    def extend(self, sequence: SequenceId, tokens: Sequence[int]) -> Logits:
        """The last row after `tokens`, of shape (vocabulary,), fed alone and in as few steps as
        the runtime allows."""
        most = self.describe.step_tokens
        row: Logits | None = None
        for start in range(0, len(tokens), most):
            (row,) = self.step([self.feed(sequence, tokens[start : start + most])])
        if row is None:
            raise ValueError("no tokens were given")
        last: Logits = row[-1]
        return last

    def alone(self, tokens: Sequence[int]) -> Logits:
        """The last row after `tokens` in a sequence of their own, freed again."""
        sequence = self.runtime.seq_create()
        row = self.extend(sequence, tokens)
        self.runtime.seq_free(sequence)
        return row
