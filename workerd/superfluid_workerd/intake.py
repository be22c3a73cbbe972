"""From a request to a stream that may run: rendered, tokenized, checked.

Everything that can be wrong with a request is refused here, so that no turn fails on it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from superfluid_compat.errors import ContextLengthExceeded, InvalidField
from superfluid_workerd.adapter import Tokenizer
from superfluid_workerd.codec.chat import ChatCodec
from superfluid_workerd.codec.text import TextStream
from superfluid_workerd.link.frames import (
    Detokenize,
    Detokenized,
    Generate,
    GenerationRequest,
    Messages,
    Tokenize,
    Tokenized,
    Tokens,
)
from superfluid_workerd.sampling import Sampler
from superfluid_workerd.stream import Stream

_UNASKED: Final = 512
"""Tokens of answer that room is kept for where a request names no number."""


@dataclass(frozen=True, slots=True)
class Intake:
    """The loaded model as far as requests are concerned. Thread-safe as its tokenizer is.

    `vocabulary` counts the logits of a row; ids that only pad it are never drawn.
    """

    tokenizer: Tokenizer
    codec: ChatCodec
    context: int
    vocabulary: int

    def stream(self, generate: Generate, deadline: float | None) -> Stream:
        """Raises `RequestError`s."""
        request, replay = generate.request, generate.replay
        prompt = (
            list(replay.prompt)
            if replay
            else self.codec.tokenize(request.prompt, most=self.context)
        )
        committed = replay.committed if replay else []
        chat = isinstance(request.prompt, Messages)
        self._check(prompt, committed, "messages" if chat else "prompt")
        stream = Stream(
            number=generate.stream,
            history=prompt,
            prompt_tokens=len(prompt),
            limit=self._limit(request, len(prompt)),
            stops=self._stops(request),
            sampler=self._sampler(request),
            text=TextStream(request.stop, sent=replay.sent.get("text", 0) if replay else 0),
            tokenizer=self.tokenizer,
            deadline=deadline,
            service_class=request.service_class,
            reserve=min(len(prompt) + (request.max_tokens or _UNASKED), self.context),
            arrived=time.monotonic(),
        )
        stream.restore(committed)
        return stream

    def tokenized(self, ask: Tokenize) -> Tokenized:
        """The answer to `ask`."""
        tokens = self.codec.tokenize(ask.prompt, special=ask.special)
        if isinstance(ask.prompt, Tokens):
            self._check_ids(tokens)
        pieces = [self.tokenizer.piece(token, special=True) for token in tokens]
        return Tokenized(request=ask.request, tokens=tokens, pieces=pieces)

    def detokenized(self, ask: Detokenize) -> Detokenized:
        """The answer to `ask`."""
        self._check_ids(ask.tokens, "tokens")
        text = self.tokenizer.decode(ask.tokens, special=True).decode(errors="replace")
        return Detokenized(request=ask.request, text=text)

    def _check(self, prompt: list[int], committed: Sequence[int], param: str) -> None:
        if not prompt:
            if self.tokenizer.bos is None:
                raise InvalidField(
                    "the prompt holds no token, and this model has none that opens a text",
                    fix="send a prompt that is not empty",
                    param=param,
                )
            prompt.append(self.tokenizer.bos)
        self._check_ids(prompt, param)
        self._check_ids(committed, param)
        if len(prompt) >= self.context:
            raise ContextLengthExceeded(
                f"the prompt holds {len(prompt)} tokens, the context is {self.context} for prompt "
                "and answer together",
                param=param,
            )

    def _check_ids(self, tokens: Sequence[int], param: str = "prompt") -> None:
        known = min(self.vocabulary, self.tokenizer.size)
        for token in tokens:
            if not 0 <= token < known:
                raise InvalidField(
                    f"token {token} is none of the model's, which are 0 to {known - 1}",
                    param=param,
                )

    def _limit(self, request: GenerationRequest, prompt_tokens: int) -> int:
        room = self.context - prompt_tokens
        if request.max_tokens is None:
            return room
        if request.max_tokens < 1:
            raise InvalidField(
                f"max_tokens is {request.max_tokens}, wanted at least 1", param="max_tokens"
            )
        return min(request.max_tokens, room)

    def _stops(self, request: GenerationRequest) -> frozenset[int]:
        own = frozenset() if request.ignore_eos else self.codec.stops
        self._check_ids(request.stop_token_ids, "stop_token_ids")
        return own | frozenset(request.stop_token_ids)

    def _sampler(self, request: GenerationRequest) -> Sampler:
        banned = set(range(self.tokenizer.size, self.vocabulary))
        if request.ignore_eos:
            banned |= {it for it in self.codec.stops if it < self.vocabulary}
        return Sampler(request.sampling, self.vocabulary, banned)
