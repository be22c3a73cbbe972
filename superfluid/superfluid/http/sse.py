"""Server-sent events whose source is closed the moment the client is gone."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from superfluid.http import errors
from superfluid.http.streams import unless_gone
from superfluid_compat.errors import Cancelled, SuperfluidError

ACCEPTED: Final = b": accepted\n\n"
"""Sent before the prompt is read, so that a client has its status at once."""
KEEP_ALIVE: Final = b": still working\n\n"
DONE: Final = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    """One event whose data is JSON."""
    return (
        b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


class EventStream(Response):
    """Sends the events that `source(headers)` yields; it may set headers until its first one.

    A `SuperfluidError` before the first event is raised, so that it becomes a response with its
    own status; a later one becomes the stream's last event.
    """

    media_type = "text/event-stream"

    def __init__(self, source: Callable[[MutableHeaders], AsyncGenerator[bytes, None]]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._source = source
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(Request(scope, receive), self._send_all(send))
        except Cancelled:
            return

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._source(self.headers)) as events:
            try:
                async for chunk in events:
                    await self._chunk(send, chunk)
            except SuperfluidError as error:
                if not self._begun:
                    raise
                await self._chunk(send, event(errors.body(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunk(self, send: Send, chunk: bytes) -> None:
        if not self._begun:
            self._begun = True
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
