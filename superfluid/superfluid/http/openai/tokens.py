"""POST /v1/tokenize and /v1/detokenize, in vLLM's shape."""

from __future__ import annotations

from typing import Any

from superfluid.http.bodies import Body, Many
from superfluid_compat.errors import InvalidField
from superfluid_workerd.link import frames


class TokenizeBody(Body):
    """Either `prompt` or `messages`. Special tokens in a prompt are text unless asked for."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    parse_special: bool = False
    return_token_strs: bool = False

    def as_prompt(self) -> frames.Prompt:
        if self.prompt is not None and self.messages is None:
            return frames.Text(text=self.prompt, add_special=self.add_special_tokens)
        if self.messages is not None and self.prompt is None:
            return frames.Messages(messages=self.messages)
        raise InvalidField("wanted either prompt or messages", param="prompt")

    def answer(self, found: frames.Tokenized, context: int) -> dict[str, Any]:
        answer = {"tokens": found.tokens, "count": len(found.tokens), "max_model_len": context}
        if self.return_token_strs:
            answer["token_strs"] = [piece.decode(errors="replace") for piece in found.pieces]
        return answer


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Many[int]
