"""A request's body as a checked record."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request

from superfluid.http import errors
from superfluid_compat.errors import Cancelled

T = TypeVar("T")
Many: TypeAlias = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong item ends the check: a million of them would be a million errors."""


class Body(BaseModel):
    """Shapes are checked here, ranges where the request is validated.

    Fields we do not know are kept aside, not dropped unseen: `unused` names them.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    harmless: ClassVar[frozenset[str]] = frozenset(
        {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
    )

    @property
    def unused(self) -> list[str]:
        """Fields that were sent and have no effect, save those that never have one."""
        return sorted(set(self.model_extra or {}) - self.harmless)


_HEADER_CHARACTERS = 1024
B = TypeVar("B", bound=Body)


async def read(request: Request, kind: type[B]) -> B:
    """The body as `kind`. Raises `MalformedRequest`, `InvalidField`, `BodyTooLarge`."""
    try:
        raw = await request.body()
    except ClientDisconnect as error:
        raise Cancelled("the client is gone") from error
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise errors.of_validation(error) from error


def headers(body: Body) -> dict[str, str]:
    """Says which fields had no effect, so that a misspelt one is seen."""
    fields = [json.dumps(name)[1:-1] for name in body.unused]
    return {"x-superfluid-unused": ", ".join(fields)[:_HEADER_CHARACTERS]} if fields else {}


def present(**fields: Any) -> dict[str, Any]:
    """The fields that were given, so that defaults stay where they are declared."""
    return {name: value for name, value in fields.items() if value is not None}
