"""How a request wants to be served, by its headers, and what the answer's headers tell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from superfluid.supervisor.service import Stream
from superfluid_compat.errors import InvalidField
from superfluid_workerd.link.frames import CLASSES, Class, GenerationRequest

CLASS: Final = "x-superfluid-qos"
DEADLINE: Final = "x-superfluid-deadline-s"
CACHED: Final = "x-superfluid-cached-tokens"


def classed(
    requests: Iterable[GenerationRequest], headers: Mapping[str, str], default: Class
) -> list[GenerationRequest]:
    """`requests` with the class of service and the deadline that the headers name.

    Raises `InvalidField`, its `param` the header."""
    service_class = _class(headers.get(CLASS), default)
    deadline_s = _deadline_s(headers.get(DEADLINE))
    return [
        msgspec.structs.replace(one, service_class=service_class, deadline_s=deadline_s)
        for one in requests
    ]


def cached(streams: Sequence[Stream]) -> dict[str, str]:
    """The header that tells how many prompt tokens cost nothing; none while a stream waits."""
    found = [stream.cached for stream in streams]
    known = [count for count in found if count is not None]
    return {CACHED: str(sum(known))} if len(known) == len(found) else {}


def _class(text: str | None, default: Class) -> Class:
    if text is None:
        return default
    found = CLASSES.get(text.strip().lower())
    if found is None:
        raise InvalidField(f"{CLASS} is {text!r}, wanted {' or '.join(CLASSES)}", param=CLASS)
    return found


def _deadline_s(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise InvalidField(f"{DEADLINE} is {text!r}, wanted seconds above 0", param=DEADLINE)
    return found
