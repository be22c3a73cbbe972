"""What a worker says, judged before anybody acts on it: what breaks a rule ends the worker.

Shapes are the link's to check; here is what they leave open: values that no record of the house
holds, words that a terminal obeys, and more than was asked for.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from superfluid.supervisor.streams import LiveStream
from superfluid_compat.errors import BadFrame, one_line
from superfluid_workerd.link.frames import Delta, Description, Prompted

PIECE_CHARACTERS: Final = 1024
"""Most of one token's text; the longest of known vocabularies have about a hundred."""

_DEEPEST: Final = 16
_WORD_CHARACTERS: Final = 4096
_SPARE_DELTAS: Final = 16


class _Sandbox(msgspec.Struct, frozen=True):
    level: str
    by: list[str] = []
    missing: list[str] = []


def description(told: Description) -> Description:
    """`told` with every word printable. Raises `BadFrame`."""
    try:
        clean = msgspec.convert(_plain(msgspec.to_builtins(told)), Description)
        msgspec.convert(clean.record.got.get("sandbox", {"level": ""}), _Sandbox)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise BadFrame(f"its description of the model does not read: {error}") from error
    if min(clean.context, clean.lanes, clean.vocabulary, *clean.plan.values(), 1) < 0:
        raise BadFrame("its description of the model counts less than nothing")
    return clean


def _plain(value: Any, depth: int = 0) -> Any:
    """A copy that JSON holds. Raises `ValueError`."""
    if depth > _DEEPEST:
        raise ValueError(f"nested more than {_DEEPEST} deep")
    match value:
        case str():
            return one_line(value[:_WORD_CHARACTERS])
        case None | bool() | int():
            return value
        case float() if math.isfinite(value):
            return value
        case list() | tuple():
            return [_plain(each, depth + 1) for each in value]
        case dict():
            return {_key(name): _plain(each, depth + 1) for name, each in value.items()}
    raise ValueError(f"it holds a {type(value).__name__}")


def _key(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"it has a {type(name).__name__} for a name")  # its rule
    return one_line(name[:_WORD_CHARACTERS])


def prompted(stream: LiveStream, message: Prompted, context: int) -> None:
    """Raises `BadFrame`."""
    tokens, cached = len(message.tokens), message.cached
    if tokens > context:
        raise BadFrame(f"it told of a prompt of {tokens} tokens, the context has {context}")
    if cached is not None and not 0 <= cached <= tokens:
        raise BadFrame(f"it told of {cached} cached tokens of a prompt of {tokens}")
    if stream.prompt and stream.prompt != message.tokens:
        raise BadFrame("it told of another prompt than before")


def prefilled(stream: LiveStream, tokens: int) -> None:
    """Raises `BadFrame`."""
    held = len(stream.prompt) + len(stream.committed)
    if not 0 <= tokens < held:
        raise BadFrame(f"it computed {tokens} tokens of {held} and has no next one")


def delta(stream: LiveStream, gained: Delta, context: int) -> None:
    """Raises `BadFrame` for more than the request and its tokens account for."""
    tokens = len(stream.committed) + len(gained.tokens)
    if tokens > (most := stream.most_tokens(context)):
        raise BadFrame(f"it committed {tokens} tokens to a stream of at most {most}")
    characters = sum(stream.sent.values()) + len(gained.text)
    if characters > PIECE_CHARACTERS * (tokens + 1):
        raise BadFrame(f"it sent {characters} characters of text for {tokens} tokens")
    if stream.bare_deltas + (not gained.tokens) > tokens + _SPARE_DELTAS:
        raise BadFrame(f"it sent {stream.bare_deltas + 1} deltas that no token accounts for")
    if gained.stopped_by is not None and gained.stopped_by not in stream.request.stop:
        raise BadFrame("it stopped at what is no stop string")
    _logprobs(stream.request.sampling.logprobs, gained)


def _logprobs(asked: int | None, gained: Delta) -> None:
    told = gained.logprobs
    if len(told) > (0 if asked is None else len(gained.tokens)):
        raise BadFrame(f"it sent {len(told)} log probabilities for {len(gained.tokens)} tokens")
    for each in told:
        words = [len(one.text) for one in (each.chosen, *each.top)]
        if len(each.top) > (asked or 0) or max(words) > 4 * PIECE_CHARACTERS:
            raise BadFrame(f"it sent {len(each.top)} alternatives, {asked} were asked for")
