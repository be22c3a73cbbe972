"""Refuses what a web page of somebody else's could send, and bodies past the bound.

A page in the user's own browser reaches loopback: it is told by its `Origin`. A page whose name
was rebound to a loopback address sends no foreign `Origin` but its own name as `Host`.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from superfluid.http import errors
from superfluid.http.settings import HttpSettings, is_loopback
from superfluid_compat.errors import BodyTooLarge, ForeignHost, ForeignOrigin, SuperfluidError


class Guard:
    """ASGI middleware around everything."""

    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refused = self._refusal(headers)
        if refused is not None:
            await errors.response(refused)(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _refusal(self, headers: Headers) -> SuperfluidError | None:
        host, origin = headers.get("host"), headers.get("origin")
        if self._settings.loopback and host is not None and not is_loopback(_name(host)):
            return ForeignHost(f"Host is {host}, this server answers on loopback only")
        if origin is not None and urlsplit(origin).netloc != (host or ""):
            return ForeignOrigin(f"Origin is {origin}, this server is {host}")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._settings.body_bytes:
            return self._too_large(int(length))
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """A body that comes in chunks announces no length; count it."""
        seen = 0

        async def bounded() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._settings.body_bytes:
                raise self._too_large(seen)
            return message

        return bounded

    def _too_large(self, found: int) -> BodyTooLarge:
        return BodyTooLarge(f"the body has {found} bytes, at most {self._settings.body_bytes}")


def _name(host: str) -> str:
    """The host without its port; brackets of an IPv6 address stay."""
    if host.startswith("["):
        return host[: host.find("]") + 1]
    return host.rsplit(":", 1)[0]
