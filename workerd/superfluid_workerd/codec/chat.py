"""A client's prompt as token ids."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from superfluid_compat.errors import (
    ChatUnsupported,
    ContextLengthExceeded,
    InvalidField,
    MalformedRequest,
)
from superfluid_workerd.adapter import Tokenizer
from superfluid_workerd.codec.families import Family, fallback
from superfluid_workerd.codec.messages import normalised, strings, with_strings
from superfluid_workerd.codec.templates import Template
from superfluid_workerd.link.frames import Messages, Prompt, Text, Tokens

_PLACEHOLDERS: Final = range(0xF0000, 0xFFFFE)
"""Supplementary Private Use Area A."""

_OWN: Final = frozenset({"messages", "tools", "bos_token", "eos_token"})


class ChatCodec:
    """Renders and tokenizes what clients send. Thread-safe.

    `template` is the model's own Jinja source or None, `architecture` names the fallback then.

    Only the template writes special tokens. A special token that is spelled out in a client's
    words is replaced by a placeholder before rendering and tokenized as plain text after it, on
    its own; all else between two of them is tokenized in one go, so a prompt without such words
    has exactly the ids of the rendered text.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None, architecture: str = "") -> None:
        self._tokenizer = tokenizer
        self._family = None if template else fallback(architecture, self._knows)
        self._source = template or (self._family.source if self._family else "")
        self._template, self._problem = _compiled(self._source)

    @property
    def origin(self) -> str:
        """Where the template came from: `model`, `fallback:FAMILY`, or `none`."""
        if self._family:
            return f"fallback:{self._family.name}"
        return "model" if self._source else "none"

    @property
    def stops(self) -> frozenset[int]:
        """Every token that ends an answer, the fallback's end of turn among them."""
        return self._tokenizer.stops | _stop(self._family, self._tokenizer)

    def tokenize(
        self, prompt: Prompt, *, special: bool = False, most: int | None = None
    ) -> list[int]:
        """The ids of `prompt`; `special` reads special tokens in a `Text` as such.

        Ids are taken as they are. Raises for a chat `InvalidField`, `ChatUnsupported` and
        `MalformedRequest`. Text whose
        bytes alone show that it holds `most` ids or more is refused with `ContextLengthExceeded`
        before it is tokenized.
        """
        match prompt:
            case Text(text=text, add_special=add):
                self._check_size(text, most, "prompt")
                return self._tokenizer.encode(text, add_special=add, special=special)
            case Tokens(tokens=tokens):
                return list(tokens)
            case Messages():
                rendered, plain = self._rendered(prompt, most)
                return self._opened(self._encoded(rendered, plain))

    def render(self, chat: Messages) -> str:
        """The prompt's text as the model sees it. Raises as `tokenize`."""
        rendered, plain = self._rendered(chat)
        return rendered.translate({ord(mark): word for mark, word in plain.items()})

    def _rendered(self, chat: Messages, most: int | None = None) -> tuple[str, Mapping[str, str]]:
        template = self._usable()
        _check_arguments(chat, template)
        try:
            client = [normalised(chat.messages), chat.tools, chat.template_arguments]
            if self._least(sum(map(_bytes, strings(client)))) >= (most or math.inf):
                # The template may leave words out: only what it wrote is counted.
                self._check_size(self._filled(template, client, {}), most, "messages")
            plain = self._spelled(client)
            return self._filled(template, client, plain), plain
        except RecursionError as error:
            raise MalformedRequest(
                "the messages are nested too deeply", fix="send flatter ones", param="messages"
            ) from error

    def _filled(self, template: Template, client: Any, plain: Mapping[str, str]) -> str:
        """The template's text, with a placeholder for each of the client's words in `plain`."""
        messages, tools, arguments = with_strings(client, lambda text: _marked(text, plain))
        own = {
            "messages": messages,
            "tools": tools or None,
            "bos_token": self._text(self._tokenizer.bos),
            "eos_token": self._text(self._tokenizer.eos),
        }
        return template.render({"add_generation_prompt": True, **arguments, **own})

    def _check_size(self, text: str, most: int | None, param: str) -> None:
        least = self._least(_bytes(text))
        if most is not None and least >= most:
            raise ContextLengthExceeded(
                f"the prompt holds at least {least} tokens, the context is {most} for prompt and "
                "answer together",
                param=param,
            )

    def _least(self, size: int) -> int:
        """The fewest ids that so many bytes of text can be."""
        longest = self._tokenizer.longest
        return 0 if longest is None else -(-size // longest)

    def _usable(self) -> Template:
        if self._template is None:
            raise self._problem
        return self._template

    def _spelled(self, client: object) -> dict[str, str]:
        """Special tokens spelled out in the client's words, by the placeholder of each."""
        words = "\n".join(strings(client))
        free = (chr(code) for code in _PLACEHOLDERS)
        free = (mark for mark in free if mark not in words and mark not in self._source)
        plain: dict[str, str] = {}
        # A round may uncover tokens that overlapped those of the round before.
        while found := self._specials_in(_marked(words, plain)):
            plain |= {next(free): literal for literal in found}
        return plain

    def _specials_in(self, text: str) -> list[str]:
        ids = set(self._tokenizer.encode(text, add_special=False, special=True))
        silent = (token for token in ids if not self._tokenizer.piece(token))
        literals = {self._text(token) for token in silent}
        return sorted((one for one in literals if one and one in text), key=len, reverse=True)

    def _encoded(self, rendered: str, plain: Mapping[str, str]) -> list[int]:
        encode = self._tokenizer.encode
        if not plain:
            return encode(rendered, add_special=False, special=True)
        tokens: list[int] = []
        for part in re.split(f"([{''.join(plain)}])", rendered):
            text = plain.get(part, part)
            if text:
                tokens += encode(text, add_special=False, special=part not in plain)
        return tokens

    def _opened(self, tokens: list[int]) -> list[int]:
        """With the BOS token where the model expects one and the template wrote none."""
        bos = self._tokenizer.bos
        expected = bos is not None and self._tokenizer.encode("", add_special=True)[:1] == [bos]
        return [bos, *tokens] if bos is not None and expected and tokens[:1] != [bos] else tokens

    def _text(self, token: int | None) -> str:
        if token is None:
            return ""
        return self._tokenizer.piece(token, special=True).decode("utf-8", "replace")

    def _knows(self, marker: str) -> bool:
        return _id(marker, self._tokenizer) is not None


def _compiled(source: str) -> tuple[Template | None, ChatUnsupported]:
    problem = ChatUnsupported(
        "the model has no chat template, and its family has none to fall back on"
    )
    if not source:
        return None, problem
    try:
        return Template(source), problem
    except ChatUnsupported as error:
        return None, error


def _bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def _check_arguments(chat: Messages, template: Template) -> None:
    if chat.tools and not template.takes("tools"):
        raise InvalidField("tools were given, the model's chat template takes none", param="tools")
    for name in _OWN & chat.template_arguments.keys():
        raise InvalidField(
            f"template argument {name} is set by the server", param=f"template_arguments.{name}"
        )


def _marked(text: str, plain: Mapping[str, str]) -> str:
    for mark, literal in plain.items():
        text = text.replace(literal, mark)
    return text


def _stop(family: Family | None, tokenizer: Tokenizer) -> frozenset[int]:
    token = _id(family.stop, tokenizer) if family and family.stop else None
    return frozenset() if token is None else frozenset({token})


def _id(text: str, tokenizer: Tokenizer) -> int | None:
    """The one token that `text` is, or None."""
    tokens = tokenizer.encode(text, add_special=False, special=True)
    whole = len(tokens) == 1 and tokenizer.piece(tokens[0], special=True) == text.encode()
    return tokens[0] if whole else None
