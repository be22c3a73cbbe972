"""Whether a loaded model grants what was asked for."""

from __future__ import annotations

from superfluid_compat.errors import DoesNotFit
from superfluid_workerd.adapter import OpenRequest, RuntimeDescription


def granted_context(request: OpenRequest, described: RuntimeDescription, name: str) -> int:
    """The longest stream in tokens: within a sequence, and within what all hold together; of a
    model that gives no text, the longest input.

    Raises `DoesNotFit` where it falls short of what was asked, or where runtime `name` holds
    fewer sequences than lanes: no load falls short in silence.
    """
    if described.generates and described.sequences < request.lanes:
        raise DoesNotFit(
            f"{request.lanes} lanes were asked for, {name} holds {described.sequences} sequences "
            "at once",
            fix=f"serve with --lanes {max(1, described.sequences)}",
            param="lanes",
        )
    context = min(described.context, described.tokens or described.context)
    if context < request.context:
        raise DoesNotFit(
            f"a context of {request.context} tokens was asked for, {name} holds {context}",
            fix=f"serve with --context {context} or less, or leave it out",
            param="context",
        )
    return context


__all__ = ["granted_context"]
