"""POST /v1/completions."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from superfluid.http.openai.common import Choice, GenerationBody, Texts, texts
from superfluid.supervisor.service import Stream
from superfluid_compat.errors import InvalidField
from superfluid_workerd.link.frames import (
    Delta,
    GenerationRequest,
    TokenLogprob,
)

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this route."""


class CompletionBody(GenerationBody):
    prompt: Texts
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool = False
    suffix: str | None = None

    def generation_requests(self) -> list[GenerationRequest]:
        refused = {
            "echo": self.echo,
            "suffix": self.suffix is not None,
            "best_of": self.best_of is not None and self.best_of != (self.n or 1),
        }
        for name in (name for name, given in refused.items() if given):
            raise InvalidField(
                f"{name} is not served by this API", fix=f"leave {name} out", param=name
            )
        tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        prompts = texts(self.prompt, "prompt")
        return self._requests(prompts, max_tokens=tokens, logprobs=self.logprobs)

    def shape(self) -> CompletionShape:
        return CompletionShape(logprobs=self.logprobs is not None)


class CompletionShape:
    """OpenAI's `text_completion`. One for each answer: it counts the characters of its choices."""

    prefix = "cmpl"
    whole = "text_completion"
    part = "text_completion"

    def __init__(self, *, logprobs: bool) -> None:
        self._logprobs = logprobs
        self._offsets: dict[int, int] = {}

    def choice(self, index: int, choice: Choice, stream: Stream) -> dict[str, Any]:
        return self._choice(index, choice.text, choice.finish, choice.logprobs)

    def opening(self, index: int) -> None:
        return None

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        return self._choice(index, delta.text, delta.finish, delta.logprobs)

    def _choice(
        self, index: int, text: str, finish: str | None, logprobs: list[TokenLogprob]
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "finish_reason": finish,
            "logprobs": self._written(index, logprobs) if self._logprobs else None,
        }

    def _written(self, index: int, entries: list[TokenLogprob]) -> dict[str, Any]:
        """OpenAI's legacy shape. Offsets count the characters of all tokens before."""
        texts = [entry.chosen.text.decode(errors="replace") for entry in entries]
        offsets = list(accumulate(map(len, texts), initial=self._offsets.get(index, 0)))
        self._offsets[index] = offsets.pop()
        return {
            "tokens": texts,
            "token_logprobs": [entry.chosen.logprob for entry in entries],
            "top_logprobs": [
                {one.text.decode(errors="replace"): one.logprob for one in entry.top}
                for entry in entries
            ],
            "text_offset": offsets,
        }
