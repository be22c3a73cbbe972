"""What completions and chat completions share: sampling fields, choices, usage, answers."""

from __future__ import annotations

import abc
import functools
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypeAlias

from pydantic import Field
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from superfluid.http import bodies, errors, quality, sse, streams
from superfluid.http.settings import HttpSettings
from superfluid.supervisor.service import ServedModel, Service, Stream
from superfluid_compat.errors import InvalidField, UnknownModel
from superfluid_workerd.link import validate
from superfluid_workerd.link.frames import (
    Choices,
    Delta,
    GenerationRequest,
    Prompt,
    Sampling,
    Text,
    TokenLogprob,
    Tokens,
)

MOST_CHOICES = 128
_SEEDS = 1 << 63
Texts: TypeAlias = str | bodies.Many[str] | bodies.Many[int] | bodies.Many[bodies.Many[int]]
"""One text or several, as such or as token ids."""


class StreamOptions(bodies.Body):
    include_usage: bool = False


class GenerationBody(bodies.Body, abc.ABC):
    """The fields that both kinds of completion take; those OpenAI lacks carry llama.cpp's or
    vLLM's names."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    logit_bias: dict[str, Any] | None = None
    seed: int | None = None
    stop: str | bodies.Many[str] | None = None
    stop_token_ids: bodies.Many[int] | None = None
    ignore_eos: bool = False

    def sampling(self, logprobs: int | None) -> Sampling:
        seed = secrets.randbelow(_SEEDS) if self.seed is None else self.seed
        bias = {_token(key): _bias(key, value) for key, value in (self.logit_bias or {}).items()}
        return Sampling(
            seed=seed,
            logprobs=logprobs,
            **bodies.present(
                logit_bias=bias or None,
                **{field: getattr(self, name) for name, field in _sampling_fields().items()},
            ),
        )

    @abc.abstractmethod
    def generation_requests(self) -> list[GenerationRequest]:
        """What the body asks for. Raises `InvalidField`."""

    def names(self) -> dict[str, str]:
        """What this kind of body calls a request's field, where that differs."""
        return {}

    @abc.abstractmethod
    def shape(self) -> Shape:
        """How the answer is written."""

    def _requests(
        self, prompts: Sequence[Prompt], *, max_tokens: int | None, logprobs: int | None
    ) -> list[GenerationRequest]:
        """`n` checked requests for each prompt, prompt by prompt, each with its own seed."""
        count = 1 if self.n is None else self.n
        wanted, param = count * len(prompts), "prompt" if count == 1 else "n"
        if not 1 <= wanted <= MOST_CHOICES:
            raise InvalidField(
                f"{param} asks for {wanted} choices, wanted 1 to {MOST_CHOICES}", param=param
            )
        group = secrets.randbelow(_SEEDS)
        choices = Choices(group=group, count=wanted, param=param) if wanted > 1 else None
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        sampling = self.sampling(logprobs)
        made = []
        for index in range(wanted):
            request = GenerationRequest(
                prompt=prompts[index // count],
                sampling=_seeded(sampling, index),
                max_tokens=max_tokens,
                stop=tuple(stop),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                ignore_eos=self.ignore_eos,
                choices=choices,
            )
            validate.check_request(request, {"penalty_window": "repeat_last_n", **self.names()})
            made.append(request)
        return made


@functools.cache
def _sampling_fields() -> dict[str, str]:
    """Fields of a body that go into `Sampling` as they are, with their names there."""
    renamed = {"repeat_last_n": "penalty_window"}
    own = {"seed", "logprobs", "logit_bias"}
    known = set(Sampling.__struct_fields__) - own
    fields = {name: renamed.get(name, name) for name in GenerationBody.model_fields}
    return {name: field for name, field in fields.items() if field in known}


def _token(key: str) -> int:
    if not (key.isascii() and key.isdigit()):
        raise InvalidField(f"logit_bias names token {key!r}, wanted a token id", param="logit_bias")
    return int(key)


def _bias(key: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or abs(value) > sys.float_info.max:
        raise InvalidField(
            f"logit_bias.{key} is {errors.shown(value)}, wanted a number", param="logit_bias"
        )
    return float(value)


def _seeded(sampling: Sampling, index: int) -> Sampling:
    """Choices of one request differ; the first has the seed that was given."""
    if index == 0:
        return sampling
    fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    return Sampling(**{**fields, "seed": (sampling.seed + index) % _SEEDS})


def texts(given: Texts, name: str) -> list[Text | Tokens]:
    """What field `name` gives, one by one. Raises `InvalidField` when that is nothing."""
    match given:
        case str():
            return [Text(text=given)]
        case [int(), *_]:
            return [Tokens(tokens=[i for i in given if isinstance(i, int)])]
        case [_, *_]:
            return [
                Text(text=one) if isinstance(one, str) else Tokens(tokens=list(one))
                for one in given
                if not isinstance(one, int)
            ]
    raise InvalidField(f"{name} is an empty list, wanted at least one {name}", param=name)


def served(service: Service, name: str | None) -> ServedModel:
    """The served model of that name; without a name, the only one. Raises `UnknownModel`."""
    known = {model.name: model for model in service.models()}
    if name is None and len(known) == 1:
        return next(iter(known.values()))
    if name is None or name not in known:
        found = "no model was named" if name is None else f"there is no model {name!r}"
        raise UnknownModel(f"{found}, this server has {', '.join(known)}", param="model")
    return known[name]


@dataclass(slots=True)
class Choice:
    """One answer as it grows."""

    text: str = ""
    finish: str | None = None
    tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += len(delta.tokens)
        self.logprobs += delta.logprobs
        self.finish = delta.finish or self.finish


class Shape(Protocol):
    """How one kind of completion writes its answers."""

    prefix: str
    whole: str
    part: str

    def choice(self, index: int, choice: Choice, stream: Stream) -> dict[str, Any]:
        """A finished choice."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of the first event, if this kind has one."""
        ...

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        """The choice of an event."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP request on its way: what to generate and how to write it."""

    service: Service
    settings: HttpSettings
    model: str
    body: GenerationBody
    requests: Sequence[GenerationRequest]
    shape: Shape

    async def respond(self, request: Request) -> Response:
        if self.body.stream:
            response: Response = sse.EventStream(self._events)
        else:
            told, headers = await streams.unless_gone(request, self._collected())
            response = JSONResponse(told, headers=headers)
        response.headers.update(bodies.headers(self.body))
        return response

    async def _collected(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The body, and the headers that only the streams know."""
        async with streams.started(self.service, self.model, self.requests) as running:
            choices = [Choice() for _ in running]
            async with aclosing(streams.merged(running, self.settings.keep_alive_s)) as events:
                async for event in events:
                    if event.delta is not None:
                        choices[event.index].add(event.delta)
            written = [
                self.shape.choice(i, choice, stream)
                for i, (choice, stream) in enumerate(zip(choices, running, strict=True))
            ]
            told = {
                **self._head(self.shape.whole),
                "choices": written,
                "usage": self._usage(running, sum(choice.tokens for choice in choices)),
            }
            return told, quality.cached(self._firsts(running))

    async def _events(self, headers: MutableHeaders) -> AsyncGenerator[bytes, None]:
        options = self.body.stream_options
        with_usage = options is not None and options.include_usage
        head = {**self._head(self.shape.part), **({"usage": None} if with_usage else {})}
        tokens = 0
        async with streams.started(self.service, self.model, self.requests) as running:
            headers.update(quality.cached(self._firsts(running)))
            yield sse.ACCEPTED
            for index in range(len(running)):
                opening = self.shape.opening(index)
                if opening is not None:
                    yield sse.event({**head, "choices": [opening]})
            async with aclosing(streams.merged(running, self.settings.keep_alive_s)) as events:
                async for event in events:
                    if event.delta is None:
                        yield sse.KEEP_ALIVE
                        continue
                    tokens += len(event.delta.tokens)
                    if event.delta.text or event.delta.finish or event.delta.logprobs:
                        piece = self.shape.piece(event.index, event.delta)
                        yield sse.event({**head, "choices": [piece]})
            if with_usage:
                usage = self._usage(running, tokens)
                yield sse.event({**head, "choices": [], "usage": usage})
            yield sse.DONE

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.shape.prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
        }

    def _firsts(self, running: Sequence[Stream]) -> Sequence[Stream]:
        """One stream for each prompt: a prompt with several choices counts once."""
        return running[:: 1 if self.body.n is None else self.body.n]

    def _usage(self, running: Sequence[Stream], completion: int) -> dict[str, Any]:
        firsts = self._firsts(running)
        prompt = sum(len(stream.prompt) for stream in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(stream.cached or 0 for stream in firsts)
            },
        }
