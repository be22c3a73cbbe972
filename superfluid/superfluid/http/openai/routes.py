"""The routes below /v1."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from superfluid.http import bodies, quality, stats, streams
from superfluid.http.openai.chat import ChatBody
from superfluid.http.openai.common import Answer, GenerationBody, served
from superfluid.http.openai.completions import CompletionBody
from superfluid.http.openai.embeddings import EmbeddingBody
from superfluid.http.openai.tokens import DetokenizeBody, TokenizeBody
from superfluid.http.settings import HttpSettings
from superfluid.supervisor.service import ServedModel, Service


class OpenAI:
    """The handlers, over one service."""

    def __init__(self, service: Service, settings: HttpSettings) -> None:
        self._service = service
        self._settings = settings

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/superfluid/stats", self.stats, methods=["GET"]),
            Route("/v1/tokenize", self.tokenize, methods=["POST"]),
            Route("/v1/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        rows = [_row(model) for model in self._service.models()]
        return JSONResponse({"object": "list", "data": rows})

    async def model(self, request: Request) -> Response:
        return JSONResponse(_row(served(self._service, request.path_params["name"])))

    async def stats(self, request: Request) -> Response:
        names = [model.name for model in self._service.models()]
        found = {name: stats.told(await self._service.stats(name)) for name in names}
        return JSONResponse({"models": found})

    async def completions(self, request: Request) -> Response:
        return await self._generated(request, CompletionBody)

    async def chat(self, request: Request) -> Response:
        return await self._generated(request, ChatBody)

    async def _generated(self, request: Request, kind: type[GenerationBody]) -> Response:
        body = await bodies.read(request, kind)
        model = served(self._service, body.model).name
        shape = body.shape()
        requests = quality.classed(
            body.generation_requests(), request.headers, self._settings.service_class
        )
        answer = Answer(self._service, self._settings, model, body, requests, shape)
        return await answer.respond(request)

    async def embeddings(self, request: Request) -> Response:
        body = await bodies.read(request, EmbeddingBody)
        model = served(self._service, body.model).name
        found = await streams.unless_gone(
            request, self._service.embed(model, body.inputs(), dimensions=body.dimensions)
        )
        return Response(
            await body.answer(found, model),
            headers=bodies.headers(body),
            media_type="application/json",
        )

    async def tokenize(self, request: Request) -> Response:
        body = await bodies.read(request, TokenizeBody)
        model = served(self._service, body.model)
        found = await self._service.tokenize(
            model.name, body.as_prompt(), special=body.parse_special
        )
        context = model.description.context if model.description else 0
        return JSONResponse(body.answer(found, context), headers=bodies.headers(body))

    async def detokenize(self, request: Request) -> Response:
        body = await bodies.read(request, DetokenizeBody)
        model = served(self._service, body.model)
        found = await self._service.detokenize(model.name, body.tokens)
        return JSONResponse({"prompt": found.text}, headers=bodies.headers(body))


def _row(model: ServedModel) -> dict[str, Any]:
    detail = {} if model.description is None else msgspec.to_builtins(model.description)
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "superfluid",
        "superfluid": {"state": model.state, **detail, **model.notes},
    }
