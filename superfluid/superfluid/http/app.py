"""The whole HTTP face as one ASGI application."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from superfluid.http import errors
from superfluid.http.guard import Guard
from superfluid.http.openai.routes import OpenAI
from superfluid.http.settings import HttpSettings
from superfluid.supervisor.service import Service
from superfluid_compat.errors import SuperfluidError


def build(service: Service, settings: HttpSettings) -> Starlette:
    """The application that answers for `service`."""

    async def health(request: Request) -> Response:
        found = service.health()
        return JSONResponse(dict(found), status_code=200 if found["status"] == "ok" else 503)

    return Starlette(
        routes=[Route("/health", health, methods=["GET"]), *OpenAI(service, settings).routes()],
        middleware=[Middleware(Guard, settings=settings)],
        exception_handlers={
            SuperfluidError: errors.on_superfluid,
            HTTPException: errors.on_http,
            Exception: errors.on_bug,
        },
    )
