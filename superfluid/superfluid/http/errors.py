"""Errors as OpenAI clients expect them, and what becomes of foreign exceptions."""

from __future__ import annotations

import json
import logging
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from superfluid_compat.errors import (
    InvalidField,
    MalformedRequest,
    MethodNotAllowed,
    NoSuchRoute,
    NotFinite,
    Overloaded,
    RequestError,
    SuperfluidError,
)

_log = logging.getLogger(__name__)
RETRY_AFTER_S = 1
_LONGEST_SHOWN: Final = 60
_PLAIN: Final = frozenset({"str", "int", "float", "bool"})


def body(error: SuperfluidError) -> dict[str, Any]:
    """The error object of a response or of a stream's last event."""
    kind = "invalid_request_error" if isinstance(error, RequestError) else "server_error"
    found = {
        "message": error.line(),
        "type": kind,
        "param": error.param,
        "code": error.code,
    }
    if error.dossier is not None:
        found["dossier"] = error.dossier
    return {"error": found}


def response(error: SuperfluidError) -> JSONResponse:
    return JSONResponse(body(error), status_code=error.http_status, headers=_headers(error))


def _headers(error: SuperfluidError) -> dict[str, str] | None:
    match error:
        case Overloaded():
            return {"Retry-After": str(RETRY_AFTER_S)}
        case NotFinite():  # OpenAI's and Anthropic's clients ask again after a 500 that lacks it.
            return {"x-should-retry": "false"}
        case _:
            return None


def of_validation(error: ValidationError) -> RequestError:
    """The first complaint of pydantic, in our words."""
    complaints = error.errors(include_url=False)
    first = complaints[0]
    if first["type"] == "json_invalid":
        return MalformedRequest(f"the body is not JSON: {first.get('ctx', {}).get('error')}")
    # Of a union the branch that got furthest is the one that was meant.
    first = max((it for it in complaints if it["loc"][:1] == first["loc"][:1]), key=_depth)
    field = _field(first)
    if not field:
        return MalformedRequest(f"the body is {shown(first['input'])}, wanted an object")
    if first["type"] == "missing":
        return InvalidField(f"{field} is missing, wanted it", param=field)
    # A union complains once for each of its branches.
    wanted = dict.fromkeys(_wanted(each) for each in complaints if _field(each) == field)
    return InvalidField(
        f"{field} is {shown(first['input'])}, wanted {' or '.join(wanted)}", param=field
    )


def _field(complaint: ErrorDetails) -> str:
    return ".".join(str(part) for part in complaint["loc"] if not _is_branch(part))


def _depth(complaint: ErrorDetails) -> tuple[int, list[int]]:
    path = [part for part in complaint["loc"] if not _is_branch(part)]
    return len(path), [part for part in path if isinstance(part, int)]


def _is_branch(part: int | str) -> bool:
    """Pydantic names the branch of a union (`str`, `list[int]`, `function-before[...]`) in the
    path."""
    return isinstance(part, str) and (part in _PLAIN or not part.isidentifier())


def _wanted(complaint: ErrorDetails) -> str:
    return complaint["msg"].removeprefix("Input should be ")


def shown(value: Any) -> str:
    """A JSON value in a few words."""
    if isinstance(value, list | dict):
        return "an array" if isinstance(value, list) else "an object"
    text = json.dumps(value[:_LONGEST_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


async def on_superfluid(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, SuperfluidError):
        raise error
    if error.http_status >= 500:
        _log.warning("%s %s: %s", request.method, request.url.path, error.line())
    return response(error)


async def on_http(request: Request, error: Exception) -> JSONResponse:
    """Starlette's own refusals: no such route, no such method."""
    if not isinstance(error, HTTPException):
        raise error
    path = request.url.path
    if error.status_code == 405:
        return response(MethodNotAllowed(f"{request.method} is not allowed on {path}"))
    return response(NoSuchRoute(f"there is no {path} here"))


async def on_bug(request: Request, error: Exception) -> JSONResponse:
    """A fault of ours: the log gets it whole, the client one line."""
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return response(
        SuperfluidError(f"{type(error).__name__} in the server", fix="report this with the log")
    )
