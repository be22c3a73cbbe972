"""Streams of the `openai` package against a server, dropped where a test says so."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai

from superfluid_workerd.link.frames import GenerationRequest, Text, Tokens
from support.server import Server


@contextlib.asynccontextmanager
async def clients(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client that never tries again."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=170
    ) as client:
        yield client


async def told(
    client: openai.AsyncOpenAI, ask: GenerationRequest, leave_after: int | None = None
) -> str:
    """The text of model `m`'s stream; up to `leave_after` pieces, when the client goes."""
    assert isinstance(ask.prompt, Text | Tokens)
    stream = await client.completions.create(
        model="m",
        prompt=ask.prompt.text if isinstance(ask.prompt, Text) else ask.prompt.tokens,
        max_tokens=ask.max_tokens,
        seed=ask.sampling.seed,
        temperature=ask.sampling.temperature,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={"x-superfluid-qos": ask.service_class},
    )
    text, pieces = "", 0
    async with stream:
        async for chunk in stream:
            if pieces == leave_after:
                break
            text += chunk.choices[0].text
            pieces += 1
    return text


async def idle(server: Server, lanes: int) -> dict[str, Any]:
    """The counters once no stream is left; a cancel takes effect with the next turn."""
    async with asyncio.timeout(30), httpx.AsyncClient() as http:
        while True:
            answer = await http.get(f"{server.url}/v1/superfluid/stats", timeout=30)
            (stats,) = answer.json()["models"].values()
            if stats["free_lanes"] == lanes and not stats["waiting"]:
                return dict(stats)
