"""One generation as the daemon keeps it, apart from the worker that computes it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

import msgspec

from superfluid_compat.errors import SuperfluidError
from superfluid_workerd.link.frames import (
    Delta,
    Generate,
    GenerationRequest,
    Prompted,
    Replay,
    Tokens,
)

_QUEUED: Final = 256
"""Deltas that wait for a slow reader before neighbours are joined; nothing ever waits for it."""


class LiveStream:
    """Keeps what starting the stream again elsewhere needs: the request (with its seed), the
    prompt's ids, the committed ids, and how many characters went out per channel.

    `cancel` is called once if the stream is closed before it has ended. `number` is what its
    worker knows it by, `arrival` its place among all streams, `blame` what the deaths in a row
    come to that gave it nothing, `bare_deltas` how many came without a token.
    """

    def __init__(self, request: GenerationRequest, cancel: Callable[[LiveStream], None]) -> None:
        self.request: Final = request
        self.number = 0
        self.arrival = 0
        self.blame = 0
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.committed: list[int] = []
        self.sent: dict[str, int] = {}
        self.bare_deltas = 0
        self._cancel = cancel
        self._deadline = (
            None if request.deadline_s is None else time.monotonic() + request.deadline_s
        )
        self._had = 0
        self._prefilled = self._furthest = 0
        self._untouched = False
        self._prompt: list[int] = []
        self._cached: int | None = None
        self._waiting: deque[Delta] = deque()
        self._arrived = asyncio.Event()
        self._error: SuperfluidError | None = None
        self._ended = False

    @property
    def prompt(self) -> Sequence[int]:
        return self._prompt

    @property
    def cached(self) -> int | None:
        return self._cached

    @property
    def ended(self) -> bool:
        """Nothing more will come from a worker."""
        return self._ended

    def most_tokens(self, context: int) -> int:
        """How many it may be given in all, in a context of so many."""
        room = context - len(self._prompt)
        asked = self.request.max_tokens
        return room if asked is None else min(room, asked)

    def sent_as(self, number: int) -> Generate:
        """The frame that starts it under `number`, or continues it where it stands."""
        self.number, self._had, self._untouched = number, len(self.committed), False
        self._prefilled = 0
        left_s = None if self._deadline is None else self._deadline - time.monotonic()
        request = msgspec.structs.replace(self.request, deadline_s=left_s)
        if not self._prompt:
            return Generate(stream=number, request=request)
        return Generate(
            stream=number,
            request=msgspec.structs.replace(request, prompt=Tokens(tokens=[])),
            replay=Replay(prompt=self._prompt, committed=self.committed, sent=self.sent),
        )

    def bereave(self, blame: int) -> None:
        """Its worker died, which comes to so much `blame` unless it gained a token there, got
        further into its prompt than ever before, or never left the line for a lane."""
        if len(self.committed) > self._had:
            self.blame = 0
        elif self._prefilled <= self._furthest and not self._untouched:
            self.blame += blame
        self._furthest = max(self._furthest, self._prefilled)

    def prompted(self, message: Prompted) -> None:
        self._prompt = message.tokens
        self._untouched = message.cached is None
        if self._cached is None:
            self._cached = message.cached
        if not self.accepted.done():
            self.accepted.set_result(None)

    def prefilled(self, tokens: int) -> None:
        """So many of its tokens, of the prompt and after it, are computed."""
        self._prefilled = max(self._prefilled, tokens)

    def gained(self, delta: Delta) -> None:
        """What a turn committed for this stream."""
        if self._ended:
            return
        self.committed += delta.tokens
        self.bare_deltas += not delta.tokens
        self.sent[delta.channel] = self.sent.get(delta.channel, 0) + len(delta.text)
        if len(self._waiting) >= _QUEUED and self._waiting[-1].channel == delta.channel:
            delta = _joined(self._waiting.pop(), delta)
        self._waiting.append(delta)
        self._ended = delta.finish is not None
        self._arrived.set()

    def fail(self, error: SuperfluidError) -> None:
        """End it with `error`, after what it has gained."""
        if self._ended:
            return
        self._ended = True
        self._error = error
        if not self.accepted.done():
            self.accepted.set_exception(error)
        self._arrived.set()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            while self._waiting:
                delta = self._waiting.popleft()
                yield delta
                if delta.finish is not None:
                    return
            if self._error is not None:
                raise self._error
            if self._ended:
                return
            self._arrived.clear()
            await self._arrived.wait()

    async def close(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Stop caring; the worker is told when it still computes."""
        self._waiting.clear()
        if not self._ended:
            self._ended = True
            self._cancel(self)
            self._arrived.set()
        if not self.accepted.done():
            self.accepted.cancel()


def _joined(first: Delta, second: Delta) -> Delta:
    return msgspec.structs.replace(
        second,
        tokens=first.tokens + second.tokens,
        text=first.text + second.text,
        logprobs=first.logprobs + second.logprobs,
    )
