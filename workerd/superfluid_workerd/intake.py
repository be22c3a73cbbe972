"""From a request to a stream that may run: rendered, tokenized, checked.

Everything that can be wrong with a request is refused here, so that no turn fails on it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from superfluid_compat.errors import (
    ContextLengthExceeded,
    EmbeddingsUnsupported,
    GenerationUnsupported,
    InvalidField,
)
from superfluid_workerd.adapter import Embedding, Tokenizer
from superfluid_workerd.codec.chat import ChatCodec
from superfluid_workerd.codec.text import TextStream
from superfluid_workerd.embedding import FLOAT_BYTES, MOST_ANSWER_BYTES, EmbedJob
from superfluid_workerd.link.frames import (
    Detokenize,
    Detokenized,
    Embed,
    Generate,
    GenerationRequest,
    Messages,
    Text,
    Tokenize,
    Tokenized,
    Tokens,
)
from superfluid_workerd.link.validate import input_name
from superfluid_workerd.sampling import Sampler
from superfluid_workerd.stream import Stream

_UNASKED: Final = 512
"""Tokens of answer that room is kept for where a request names no number."""


@dataclass(frozen=True, slots=True)
class Intake:
    """The loaded model as far as requests are concerned. Thread-safe as its tokenizer is.

    `vocabulary` counts the logits of a row; ids that only pad it are never drawn. `generates` and
    `embedding` are the runtime's own description.
    """

    tokenizer: Tokenizer
    codec: ChatCodec
    context: int
    vocabulary: int
    generates: bool = True
    embedding: Embedding | None = None

    def stream(self, generate: Generate, deadline: float | None) -> Stream:
        """Raises `RequestError`s."""
        if not self.generates:
            raise GenerationUnsupported("the model gives embeddings and no text", param="model")
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

    def embedding_job(self, ask: Embed) -> EmbedJob:
        """The inputs as rows of tokens, each of them checked. Raises `RequestError`s."""
        embedding = self.embedding
        if embedding is None:
            raise EmbeddingsUnsupported(
                "the model, as this runtime serves it, gives no embeddings", param="model"
            )
        self._check_answer(ask, embedding.width)
        count = len(ask.inputs)
        rows = [
            self._row(one, input_name(index, count), embedding.tokens)
            for index, one in enumerate(ask.inputs)
        ]
        return EmbedJob(ask.request, rows, embedding.width)

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

    def _check_answer(self, ask: Embed, width: int) -> None:
        if ask.dimensions not in (None, width):
            raise InvalidField(
                f"dimensions is {ask.dimensions}, this model's vectors have {width}",
                fix="leave it out; where the model was trained for it, cut the vectors yourself",
                param="dimensions",
            )
        most = MOST_ANSWER_BYTES // (FLOAT_BYTES * width)
        if len(ask.inputs) > most:
            raise InvalidField(
                f"input holds {len(ask.inputs)} texts, at most {most} vectors of {width} fit an "
                "answer",
                fix="send fewer at once",
                param="input",
            )

    def _row(self, one: Text | Tokens, name: str, most: int) -> array[int]:
        """The ids of one input. Raises `ContextLengthExceeded` and `InvalidField`."""
        longest = self.tokenizer.longest
        if isinstance(one, Text) and longest is not None:
            least = -(-len(one.text.encode()) // longest)
            self._check_length(least, f"at least {least}", name, most)
        tokens = self.codec.tokenize(one)
        if not tokens:
            raise InvalidField(f"{name} holds no token, wanted a text", param=name)
        self._check_length(len(tokens), str(len(tokens)), name, most)
        self._check_ids(tokens, name)
        return array("i", tokens)

    def _check_length(self, tokens: int, told: str, name: str, most: int) -> None:
        if tokens > most:
            raise ContextLengthExceeded(
                f"{name} holds {told} tokens, the model embeds at most {most}",
                fix="shorten it, or cut it into several",
                param=name,
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
