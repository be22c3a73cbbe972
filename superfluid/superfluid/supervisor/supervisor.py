"""All served models behind the one door that the HTTP rooms know."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from superfluid.control import WorkerReport
from superfluid.supervisor.host import ModelHost
from superfluid.supervisor.service import ServedModel
from superfluid.supervisor.states import LOADING, WorkerState
from superfluid.supervisor.streams import LiveStream
from superfluid_compat.errors import SuperfluidError, UnknownModel
from superfluid_workerd.link.frames import (
    Detokenized,
    Embedded,
    GenerationRequest,
    Prompt,
    Text,
    Tokenized,
    Tokens,
    TurnStats,
)


class Supervisor:
    """Implements `service.Service` over one host for each model."""

    def __init__(self, hosts: Iterable[ModelHost]) -> None:
        self._hosts = {host.spec.name: host for host in hosts}

    def models(self) -> Sequence[ServedModel]:
        return [
            ServedModel(
                name=name,
                created=host.created,
                state=host.state.value,
                description=host.description,
                notes={"runtime": host.spec.runtime},
            )
            for name, host in self._hosts.items()
        ]

    async def generate(self, model: str, request: GenerationRequest) -> LiveStream:
        return await self._host(model).generate(request)

    async def tokenize(self, model: str, prompt: Prompt, *, special: bool) -> Tokenized:
        return await self._host(model).tokenize(prompt, special=special)

    async def detokenize(self, model: str, tokens: Sequence[int]) -> Detokenized:
        return await self._host(model).detokenize(tokens)

    async def embed(
        self, model: str, inputs: Sequence[Text | Tokens], *, dimensions: int | None = None
    ) -> Embedded:
        return await self._host(model).embed(inputs, dimensions)

    async def stats(self, model: str) -> TurnStats:
        return await self._host(model).fresh_stats()

    def health(self) -> Mapping[str, Any]:
        states = {name: _health(host) for name, host in self._hosts.items()}
        serving = all(host.state is WorkerState.SERVING for host in self._hosts.values())
        loading = any(host.state in LOADING for host in self._hosts.values())
        status = "ok" if serving else "loading" if loading else "unavailable"
        return {"status": status, "models": states}

    def start(self) -> None:
        """Start every model's worker."""
        for host in self._hosts.values():
            host.start()

    async def served(self) -> None:
        """Return when every model is served; raise why one never will be."""
        await asyncio.gather(*(host.served() for host in self._hosts.values()))

    async def over(self) -> SuperfluidError | None:
        """Return when no worker runs nor will: the first reason, None when asked to end."""
        reasons = await asyncio.gather(*(host.over() for host in self._hosts.values()))
        return next((reason for reason in reasons if reason is not None), None)

    def reports(self) -> list[WorkerReport]:
        """What there is to say of each model now."""
        return [host.report() for host in self._hosts.values()]

    def drain(self, bound_s: float, model: str | None = None) -> None:
        """Take no new streams, for `model` or for any, and end when those that run have, at
        latest after the bound. Raises `UnknownModel`."""
        hosts = self._hosts.values() if model is None else [self._host(model)]
        for host in hosts:
            host.drain(bound_s)

    def halt(self) -> None:
        """End every worker at once."""
        for host in self._hosts.values():
            host.halt()

    def kill(self) -> None:
        """End every worker without any grace."""
        for host in self._hosts.values():
            host.kill()

    def _host(self, model: str) -> ModelHost:
        if model not in self._hosts:
            known = ", ".join(self._hosts)
            raise UnknownModel(f"no model is called {model}, here are {known}", param="model")
        return self._hosts[model]


def _health(host: ModelHost) -> Mapping[str, Any]:
    found: dict[str, Any] = {"state": host.state.value}
    if host.error is not None:
        found["problem"] = host.error.line()
    return found
