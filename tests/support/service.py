"""A service without workers: scripted streams for tests of the HTTP face."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from superfluid.supervisor.service import ServedModel
from superfluid_compat.errors import SuperfluidError, UnknownModel
from superfluid_workerd.link.answers import Facts
from superfluid_workerd.link.frames import (
    Delta,
    Description,
    Detokenized,
    Embedded,
    GenerationRequest,
    LoadRecord,
    Messages,
    Prompt,
    Text,
    Tokenized,
    Tokens,
    TurnStats,
)

DESCRIPTION = Description(
    facts=Facts(format="scripted", architecture="none"),
    adapter="scripted",
    context=128,
    lanes=2,
    vocabulary=256,
    template="none",
    record=LoadRecord(asked={"lanes": 2}, got={"lanes": 2}),
)


def ids(prompt: Prompt) -> list[int]:
    """A byte a token; a chat is its contents, one after another."""
    match prompt:
        case Tokens():
            return prompt.tokens
        case Text():
            return list(prompt.text.encode())
        case Messages():
            return list("".join(str(m.get("content")) for m in prompt.messages).encode())


@dataclass
class ScriptedStream:
    """Yields `deltas`, then waits for ever unless the last one carries `finish`."""

    prompt: Sequence[int]
    deltas: Sequence[Delta | SuperfluidError]
    cached: int | None = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for delta in self.deltas:
            if isinstance(delta, SuperfluidError):
                raise delta
            yield delta
            if delta.finish is not None:
                return
        await self.closed.wait()

    async def close(self) -> None:
        self.closed.set()


class ScriptedService:
    """Answers each `generate` with the next script; remembers what it was asked."""

    def __init__(
        self, *scripts: Sequence[Delta | SuperfluidError], names: Sequence[str] = ("tiny",)
    ) -> None:
        self._scripts = list(scripts)
        self._names = names
        self.requests: list[GenerationRequest] = []
        self.streams: list[ScriptedStream] = []
        self.embeds: list[tuple[list[Text | Tokens], int | None]] = []
        self.hold: Text | Tokens | None = None
        self.released = asyncio.Event()
        self.refusal: SuperfluidError | None = None
        self.status = "ok"

    def models(self) -> Sequence[ServedModel]:
        return [ServedModel(name, 1, "serving", DESCRIPTION, {}) for name in self._names]

    async def generate(self, model: str, request: GenerationRequest) -> ScriptedStream:
        self._known(model)
        if self.refusal is not None:
            raise self.refusal
        script = self._scripts[len(self.streams) % len(self._scripts)]
        stream = ScriptedStream(ids(request.prompt), script)
        self.requests.append(request)
        self.streams.append(stream)
        return stream

    async def tokenize(self, model: str, prompt: Prompt, *, special: bool) -> Tokenized:
        self._known(model)
        found = ids(prompt)
        return Tokenized(request=0, tokens=found, pieces=[bytes([i]) for i in found])

    async def detokenize(self, model: str, tokens: Sequence[int]) -> Detokenized:
        self._known(model)
        return Detokenized(request=0, text=bytes(tokens).decode())

    async def embed(
        self, model: str, inputs: Sequence[Text | Tokens], *, dimensions: int | None = None
    ) -> Embedded:
        """Of each input its first byte and its length; waits for ever for `hold`."""
        self._known(model)
        if self.refusal is not None:
            raise self.refusal
        found = [ids(one) for one in inputs]
        self.embeds.append((list(inputs), dimensions))
        if self.hold in inputs:
            try:
                await asyncio.Event().wait()
            finally:
                self.released.set()
        vectors = b"".join(struct.pack("<2f", one[0], len(one)) for one in found)
        return Embedded(request=0, width=2, vectors=vectors, tokens=[len(one) for one in found])

    async def stats(self, model: str) -> TurnStats:
        self._known(model)
        return TurnStats(turns=4, seats=10, ready=12, window_turns=2, window_seats=3)

    def health(self) -> Mapping[str, Any]:
        return {"status": self.status}

    def _known(self, model: str) -> None:
        if model not in self._names:
            raise UnknownModel(f"no {model}")


def says(*texts: str, finish: str | None = "stop") -> list[Delta]:
    """One delta a text, each of one token; the last carries `finish`."""
    last = len(texts) - 1
    return [
        Delta(stream=0, tokens=[i], text=text, finish=finish if i == last else None)  # type: ignore[arg-type]  # a Finish, by the caller's word
        for i, text in enumerate(texts)
    ]
