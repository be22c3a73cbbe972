"""What the HTTP rooms may ask of the supervisor, and nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from superfluid_workerd.link.frames import (
    Delta,
    Description,
    Detokenized,
    Embedded,
    GenerationRequest,
    Prompt,
    Text,
    Tokenized,
    Tokens,
    TurnStats,
)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that clients may name. `description` is None until a worker has loaded it once."""

    name: str
    created: int
    state: str
    description: Description | None
    notes: Mapping[str, Any]


class Stream(Protocol):
    """One generation as its client sees it; it outlives a worker.

    Iterating yields `Delta`s until one carries `finish`, or raises a `SuperfluidError`. `close`
    cancels what still runs and may be called at any time, more than once.
    """

    @property
    def prompt(self) -> Sequence[int]:
        """The prompt's token ids."""
        ...

    @property
    def cached(self) -> int | None:
        """How many of them cost nothing, None while that is not known: the stream waits."""
        ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def close(self) -> None: ...


class Service(Protocol):
    """The models this server serves. Every call raises `UnknownModel` for another name."""

    def models(self) -> Sequence[ServedModel]: ...

    async def generate(self, model: str, request: GenerationRequest) -> Stream:
        """Starts a stream and returns once its prompt is accepted, or raises why it is not."""
        ...

    async def tokenize(self, model: str, prompt: Prompt, *, special: bool) -> Tokenized: ...

    async def detokenize(self, model: str, tokens: Sequence[int]) -> Detokenized: ...

    async def embed(
        self, model: str, inputs: Sequence[Text | Tokens], *, dimensions: int | None = None
    ) -> Embedded:
        """A vector for each input. Survives one worker; cancelling it frees the next."""
        ...

    async def stats(self, model: str) -> TurnStats:
        """Its turn loop's counters, asked for now; the last known ones while no worker serves."""
        ...

    def health(self) -> Mapping[str, Any]:
        """`status` is `ok` when every model can serve; else it says which cannot, and why."""
        ...
