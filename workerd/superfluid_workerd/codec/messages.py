"""A client's messages, in OpenAI's shape, as chat templates expect them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from superfluid_compat.errors import InvalidField

ROLES: Final = ("system", "developer", "user", "assistant", "tool")


def normalised(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, each with a role that templates know and its content as one text.

    Text parts are joined by line ends, `developer` becomes `system`, an assistant's missing
    content becomes empty. Raises `InvalidField` naming the place of anything else.
    """
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise _invalid(f"{place}.role", role, "one of " + ", ".join(ROLES))
    known = "system" if role == "developer" else role
    content = _content(message.get("content"), role == "assistant", f"{place}.content")
    return {**message, "role": known, "content": content}


def _content(content: object, optional: bool, place: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part(part, f"{place}[{i}]") for i, part in enumerate(content))
    if content is None and optional:
        return ""
    raise _invalid(place, content, "a text or a list of text parts")


def _part(part: object, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else part
    if not isinstance(part, dict) or kind != "text":
        raise _invalid(f"{place}.type", kind, "text, the only type this server reads")
    text = part.get("text")
    if not isinstance(text, str):
        raise _invalid(f"{place}.text", text, "a text")
    return text


def _invalid(place: str, found: object, wanted: str) -> InvalidField:
    shown = repr(found)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return InvalidField(f"{place} is {shown}, wanted {wanted}", param=place)


def strings(value: object) -> Iterator[str]:
    """Every text within a JSON value, keys of objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from strings(key)
            yield from strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings(inner)


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with `change` applied to every text."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {with_strings(k, change): with_strings(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [with_strings(inner, change) for inner in value]
    return value
