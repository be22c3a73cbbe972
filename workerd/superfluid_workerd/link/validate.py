"""What a generation request may say; the daemon refuses the rest before a worker sees it.

Message types only, so that both sides of the link can import this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from superfluid_compat.errors import InvalidField
from superfluid_workerd.link.frames import (
    GenerationRequest,
    Messages,
    Prompt,
    Sampling,
    Text,
    Tokens,
)

MOST_LOGPROBS: Final = 20
MOST_BIASED: Final = 1024
MOST_STOPS: Final = 64
LONGEST_STOP: Final = 1024
"""Characters of one stop string."""

MOST_INPUTS: Final = 2048
"""Texts that one request has embedded; OpenAI's bound."""

_LARGEST_TOKEN: Final = (1 << 31) - 1
_LARGEST_COUNT: Final = 1 << 31

_RANGES: Final[dict[str, tuple[float, float]]] = {
    "temperature": (0, 100),
    "top_k": (0, _LARGEST_COUNT),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "penalty_window": (0, _LARGEST_COUNT),
    "seed": (-(1 << 63), (1 << 64) - 1),
    "logprobs": (0, MOST_LOGPROBS),
}
_POSITIVE: Final = frozenset({"top_p", "typical_p"})
_BIAS: Final = 100.0
_AS_THEY_ARE: Final[Mapping[str, str]] = MappingProxyType({})


def check(sampling: Sampling, names: Mapping[str, str] = _AS_THEY_ARE) -> None:
    """Raises `InvalidField`, its `param` the setting, for a value outside what it takes; `names`
    has what the client calls a setting where that differs."""
    for name, (least, most) in _RANGES.items():
        value = getattr(sampling, name)
        if name in _POSITIVE and not 0 < value <= most:
            raise InvalidField(f"{name} is {value}, wanted more than 0 and at most 1", param=name)
        if value is not None:
            _within(names.get(name, name), value, least, most)
    if len(sampling.logit_bias) > MOST_BIASED:
        raise InvalidField(
            f"logit_bias has {len(sampling.logit_bias)} entries, at most {MOST_BIASED} are taken",
            param="logit_bias",
        )
    for token, bias in sampling.logit_bias.items():
        _token("logit_bias", token)
        _within("logit_bias", bias, -_BIAS, _BIAS)


def check_request(request: GenerationRequest, names: Mapping[str, str] = _AS_THEY_ARE) -> None:
    """Raises `InvalidField` for anything in `request` that no model could serve; `names` as in
    `check`.

    What depends on the model (the context, its vocabulary) is the worker's to check.
    """
    check(request.sampling, names)
    check_prompt(request.prompt)
    if request.max_tokens is not None:
        check_max_tokens(request.max_tokens, names.get("max_tokens", "max_tokens"))
    _check_stops(request.stop)
    for token in request.stop_token_ids:
        _token("stop_token_ids", token)
    if request.deadline_s is not None and not 0 < request.deadline_s < math.inf:
        raise InvalidField(
            f"deadline_s is {request.deadline_s}, wanted a positive number of seconds",
            param="deadline_s",
        )


def check_max_tokens(tokens: int, name: str = "max_tokens") -> None:
    """Raises `InvalidField`, its `param` the `name`."""
    _within(name, tokens, 1, _LARGEST_COUNT)


def check_prompt(prompt: Prompt, name: str = "prompt") -> None:
    """Raises `InvalidField` for an empty chat, text that is no Unicode, or a negative token; its
    `param` is the `name`."""
    match prompt:
        case Messages(messages=messages):
            if not messages:
                raise InvalidField("messages is empty, wanted at least one", param="messages")
        case Text(text=text):
            _unicode(name, text)
        case Tokens(tokens=tokens):
            for token in tokens:
                _token(name, token)


def check_inputs(inputs: Sequence[Text | Tokens]) -> None:
    """Raises `InvalidField` for inputs that no model could embed."""
    if not 1 <= len(inputs) <= MOST_INPUTS:
        raise InvalidField(
            f"input holds {len(inputs)} texts, wanted 1 to {MOST_INPUTS}", param="input"
        )
    for index, one in enumerate(inputs):
        check_prompt(one, input_name(index, len(inputs)))


def input_name(index: int, count: int) -> str:
    """What one of `count` inputs is called in an error: its place, where there are several."""
    return "input" if count == 1 else f"input.{index}"


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MOST_STOPS:
        raise InvalidField(
            f"stop has {len(stops)} strings, at most {MOST_STOPS} are taken", param="stop"
        )
    for stop in stops:
        if not 0 < len(stop) <= LONGEST_STOP:
            raise InvalidField(
                f"a stop string has {len(stop)} characters, wanted 1 to {LONGEST_STOP}",
                param="stop",
            )
        _unicode("stop", stop)


def _within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise InvalidField(f"{name} is {value}, wanted {least} to {most}", param=name)


def _token(name: str, token: int) -> None:
    if not 0 <= token <= _LARGEST_TOKEN:
        raise InvalidField(f"{name} holds {token}, wanted a token id", param=name)


def _unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidField(
            f"{name} has a lone surrogate at character {error.start}, wanted Unicode text",
            param=name,
        ) from error
