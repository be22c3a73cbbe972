"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from superfluid.http import bodies
from superfluid.http.openai.common import Choice, GenerationBody
from superfluid.supervisor.service import Stream
from superfluid_compat.errors import InvalidField
from superfluid_workerd.link import validate
from superfluid_workerd.link.frames import (
    Delta,
    GenerationRequest,
    Logprob,
    Messages,
    TokenLogprob,
)


class ChatBody(GenerationBody):
    messages: bodies.Many[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: bodies.Many[dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None

    def generation_requests(self) -> list[GenerationRequest]:
        self._refuse_unserved()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidField("top_logprobs goes with logprobs true", param="top_logprobs")
        prompt = Messages(
            messages=self.messages, template_arguments=self.chat_template_kwargs or {}
        )
        limits = (self.max_completion_tokens, self.max_tokens)
        if self.max_tokens is not None:
            validate.check_max_tokens(self.max_tokens)
        return self._requests(
            [prompt],
            max_tokens=next((limit for limit in limits if limit is not None), None),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    def names(self) -> dict[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"max_tokens": limit, "logprobs": "top_logprobs"}

    def shape(self) -> ChatShape:
        return ChatShape(logprobs=self.logprobs)

    def _refuse_unserved(self) -> None:
        """What would be answered wrongly if it were passed over is refused."""
        if self.tools:
            raise InvalidField("tools are not served yet", fix="leave tools out", param="tools")
        kind = (self.response_format or {}).get("type", "text")
        if kind != "text":
            raise InvalidField(f"response_format is {kind!r}, wanted text", param="response_format")


class ChatShape:
    """OpenAI's `chat.completion`."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    part = "chat.completion.chunk"

    def __init__(self, *, logprobs: bool) -> None:
        self._logprobs = logprobs

    def choice(self, index: int, choice: Choice, stream: Stream) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "finish_reason": choice.finish,
            "logprobs": self._written(choice.logprobs),
        }

    def opening(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "finish_reason": None,
            "logprobs": None,
        }

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"content": delta.text} if delta.text else {},
            "finish_reason": delta.finish,
            "logprobs": self._written(delta.logprobs),
        }

    def _written(self, entries: list[TokenLogprob]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {
            "content": [
                {**_one(entry.chosen), "top_logprobs": [_one(top) for top in entry.top]}
                for entry in entries
            ],
            "refusal": None,
        }


def _one(logprob: Logprob) -> dict[str, Any]:
    return {
        "token": logprob.text.decode(errors="replace"),
        "logprob": logprob.logprob,
        "bytes": list(logprob.text),
    }
