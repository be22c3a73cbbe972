"""The HTTP face over scripted streams: shapes, statuses, refusals."""

from __future__ import annotations

import base64
import dataclasses
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from superfluid.http.app import build
from superfluid.http.openai.completions import CompletionBody
from superfluid.http.settings import HttpSettings
from superfluid_compat.errors import (
    ContextLengthExceeded,
    EmbeddingsUnsupported,
    Overloaded,
    WorkerDied,
)
from superfluid_workerd.link.frames import (
    Delta,
    Logprob,
    Sampling,
    Text,
    TokenLogprob,
    Tokens,
    TurnStats,
)
from support.service import ScriptedService, says

SETTINGS = HttpSettings(host="127.0.0.1", port=8453, body_bytes=1 << 16, keep_alive_s=0.05)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def client(service: ScriptedService, settings: HttpSettings = SETTINGS) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=build(service, settings), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8453")


def events(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_completion_whole() -> None:
    service = ScriptedService(says("Hel", "lo", finish="length"))
    async with client(service) as http:
        answer = (await http.post("/v1/completions", json={"prompt": "abc"})).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["choices"] == [
        {"index": 0, "text": "Hello", "finish_reason": "length", "logprobs": None}
    ]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["usage"]["total_tokens"] == 5
    assert service.requests[0].max_tokens == 16
    assert service.streams[0].closed.is_set()


async def test_chat_whole() -> None:
    service = ScriptedService(says("Hello"))
    async with client(service) as http:
        answer = (await http.post("/v1/chat/completions", json=CHAT)).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "Hello"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert service.requests[0].max_tokens is None


async def test_streams_end_with_usage_when_asked() -> None:
    service = ScriptedService(says("a", "", "b"))
    body = {"prompt": "xy", "stream": True, "stream_options": {"include_usage": True}}
    async with client(service) as http:
        response = await http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response.text)
    assert [e["choices"][0]["text"] for e in found[:-1]] == ["a", "b"]
    assert all(e["usage"] is None for e in found[:-1])
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 3
    assert len({e["id"] for e in found}) == 1


async def test_chat_stream_opens_with_the_role_and_has_no_usage_unasked() -> None:
    service = ScriptedService(says("a", "b"))
    async with client(service) as http:
        response = await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    found = events(response.text)
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in found) == "ab"
    assert found[-1]["choices"][0]["finish_reason"] == "stop"
    assert all("usage" not in e for e in found)


async def test_choices_have_their_own_seeds_and_prompts_count_once() -> None:
    service = ScriptedService(says("a"), says("b"), says("c"), says("d"))
    body = {"prompt": ["xx", "yyy"], "n": 2, "seed": 7}
    async with client(service) as http:
        answer = (await http.post("/v1/completions", json=body)).json()
    assert [c["text"] for c in answer["choices"]] == ["a", "b", "c", "d"]
    assert answer["usage"]["prompt_tokens"] == 5
    assert [r.sampling.seed for r in service.requests] == [7, 8, 9, 10]


async def test_unseeded_requests_differ() -> None:
    service = ScriptedService(says("a"))
    async with client(service) as http:
        for _ in range(2):
            await http.post("/v1/completions", json={"prompt": "x"})
    assert service.requests[0].sampling.seed != service.requests[1].sampling.seed


async def test_logprobs_in_both_shapes() -> None:
    chosen = Logprob(token=1, text="é".encode(), logprob=-0.5)
    delta = Delta(
        stream=0,
        tokens=[1],
        text="é",
        finish="stop",
        logprobs=[TokenLogprob(chosen=chosen, top=[chosen])],
    )
    async with client(ScriptedService([delta])) as http:
        legacy = (await http.post("/v1/completions", json={"prompt": "x", "logprobs": 1})).json()
        chat = (
            await http.post(
                "/v1/chat/completions", json={**CHAT, "logprobs": True, "top_logprobs": 1}
            )
        ).json()
    assert legacy["choices"][0]["logprobs"] == {
        "tokens": ["é"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"é": -0.5}],
        "text_offset": [0],
    }
    content = chat["choices"][0]["logprobs"]["content"]
    assert content[0]["bytes"] == list("é".encode())
    assert content[0]["top_logprobs"][0]["logprob"] == -0.5


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "model_not_found", "model"),
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}, 400, "invalid_value", "max_tokens"),
        ("/v1/completions", {"prompt": "x", "max_tokens": "5"}, 400, "invalid_value", "max_tokens"),
        ("/v1/completions", {"prompt": "x", "top_p": 2}, 400, "invalid_value", "top_p"),
        ("/v1/completions", {"prompt": "x", "top_k": -2}, 400, "invalid_value", "top_k"),
        ("/v1/completions", {"prompt": "x", "n": 0}, 400, "invalid_value", "n"),
        ("/v1/completions", {"prompt": []}, 400, "invalid_value", "prompt"),
        ("/v1/completions", {"prompt": 5}, 400, "invalid_value", "prompt"),
        ("/v1/completions", {}, 400, "invalid_value", "prompt"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "invalid_value", "suffix"),
        ("/v1/completions", {"prompt": "x", "echo": True}, 400, "invalid_value", "echo"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"a": 1}}, 400, "invalid_value", "logit_bias"),  # noqa: E501
        ("/v1/completions", {"prompt": "x", "stop": [""]}, 400, "invalid_value", "stop"),
        ("/v1/chat/completions", {"messages": "hi"}, 400, "invalid_value", "messages"),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}, 400, "invalid_value", "top_logprobs"),
        ("/v1/chat/completions", {**CHAT, "tools": [{}]}, 400, "invalid_value", "tools"),
        ("/v1/completions", {"prompt": "x", "n": 129}, 400, "invalid_value", "n"),
        ("/v1/completions", {"prompt": ["x"] * 65, "n": 2}, 400, "invalid_value", "n"),
        ("/v1/completions", {"prompt": ["x"] * 200}, 400, "invalid_value", "prompt"),
        ("/v1/completions", {"prompt": "x", "logprobs": 21}, 400, "invalid_value", "logprobs"),
        ("/v1/completions", {"prompt": "x", "stop": [5]}, 400, "invalid_value", "stop"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [-1]}, 400, "invalid_value", "stop_token_ids"),  # noqa: E501
        ("/v1/chat/completions", {**CHAT, "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 0, "max_completion_tokens": 5}, 400, "invalid_value", "max_tokens"),  # noqa: E501
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 0}, 400, "invalid_value", "max_completion_tokens"),  # noqa: E501
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 0, "max_tokens": 5}, 400, "invalid_value", "max_completion_tokens"),  # noqa: E501
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21}, 400, "invalid_value", "top_logprobs"),  # noqa: E501
        ("/v1/tokenize", {}, 400, "invalid_value", "prompt"),
        ("/v1/detokenize", {"tokens": ["a"]}, 400, "invalid_value", "tokens"),
    ],
)  # fmt: skip
async def test_bad_fields_are_named(
    path: str, body: dict[str, Any], status: int, code: str, param: str
) -> None:
    service = ScriptedService(says("a"))
    async with client(service) as http:
        response = await http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    assert error["param"].split(".")[0] == param
    assert "\n" not in error["message"]
    if param in body:
        assert error["message"].split()[0].split(".")[0] in (param, "a", "there")
    assert service.requests == []


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"stop": [5]}, "stop.0 is 5, wanted a valid string"),
        ({"stop": 5}, "stop is 5, wanted a valid string or a valid array"),
        ({"stop": ["a", None]}, "stop.1 is null, wanted a valid string"),
        ({"prompt": ["a", 5]}, "prompt.1 is 5, wanted a valid string"),
        ({"prompt": [[1, "a"]]}, 'prompt.0.1 is "a", wanted a valid integer'),
    ],
)
async def test_of_a_list_the_wrong_item_is_named(field: dict[str, Any], message: str) -> None:
    async with client(ScriptedService(says("a"))) as http:
        response = await http.post("/v1/completions", json={"prompt": "x", **field})
    assert response.json()["error"]["message"] == f"{message}; correct the request"


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "malformed_request"),
        (b"{", "malformed_request"),
        (b"[1]", "malformed_request"),
        (b"[" * 60_000, "malformed_request"),
        (b'{"prompt": "x", "temperature": NaN}', "invalid_value"),
        (b'{"prompt": "\xff"}', "malformed_request"),
    ],
)
async def test_malformed_bodies(raw: bytes, code: str) -> None:
    async with client(ScriptedService(says("a"))) as http:
        response = await http.post("/v1/completions", content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == code


async def test_offsets_of_a_stream_are_those_of_the_whole() -> None:
    texts = ("ab", "c", "def")
    deltas = [
        Delta(
            stream=0,
            tokens=[i],
            text=text,
            finish="stop" if i == 2 else None,
            logprobs=[
                TokenLogprob(chosen=Logprob(token=i, text=text.encode(), logprob=-1.0), top=[])
            ],
        )
        for i, text in enumerate(texts)
    ]
    body = {"prompt": "x", "logprobs": 1}
    async with client(ScriptedService(deltas)) as http:
        whole = (await http.post("/v1/completions", json=body)).json()
        streamed = await http.post("/v1/completions", json={**body, "stream": True})
    pieces = [e["choices"][0]["logprobs"]["text_offset"] for e in events(streamed.text)]
    assert whole["choices"][0]["logprobs"]["text_offset"] == [0, 2, 3]
    assert [offset for piece in pieces for offset in piece] == [0, 2, 3]


async def test_an_unknown_model_lists_the_known_ones() -> None:
    async with client(ScriptedService(says("a"), names=("one", "org/two"))) as http:
        response = await http.post("/v1/completions", json={"prompt": "x", "model": "three"})
        missing = await http.post("/v1/completions", json={"prompt": "x"})
        row = await http.get("/v1/models/org/two")
    assert response.status_code == missing.status_code == 404
    assert "one, org/two" in response.json()["error"]["message"]
    assert row.json()["id"] == "org/two"


@pytest.mark.parametrize("announced", [True, False])
async def test_a_large_body_is_refused(announced: bool) -> None:
    big = b"x" * (SETTINGS.body_bytes + 1)

    async def chunks() -> AsyncIterator[bytes]:
        yield big

    async with client(ScriptedService(says("a"))) as http:
        response = await http.post("/v1/completions", content=big if announced else chunks())
    assert response.status_code == 413
    assert str(SETTINGS.body_bytes) in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8453"}, 200),
        ({"host": "[::1]:8453"}, 200),
        ({"host": "127.9.9.9"}, 200),
        ({"host": "evil.example:8453"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"origin": "http://127.0.0.1:8453"}, 200),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "evil.example", "origin": "http://evil.example"}, 403),
    ],
)
async def test_foreign_pages_are_refused(headers: dict[str, str], status: int) -> None:
    async with client(ScriptedService(says("a"))) as http:
        response = await http.get("/v1/models", headers=headers)
    assert response.status_code == status


async def test_hosts_are_free_beyond_loopback() -> None:
    open_settings = HttpSettings(host="0.0.0.0", port=8453)
    async with client(ScriptedService(says("a")), open_settings) as http:
        named = await http.get("/v1/models", headers={"host": "box.lan:8453"})
        foreign = await http.get("/v1/models", headers={"origin": "http://evil.example"})
    assert (named.status_code, foreign.status_code) == (200, 403)


async def test_refusals_of_the_service_keep_their_status() -> None:
    service = ScriptedService(says("a"))
    service.refusal = ContextLengthExceeded("the prompt has 200 tokens, the context holds 128")
    for stream in (False, True):
        async with client(service) as http:
            body = {"prompt": "x", "stream": stream}
            response = await http.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
    service.refusal = Overloaded("8 requests wait, at most 8 may")
    async with client(service) as http:
        response = await http.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"


async def test_a_death_in_mid_stream_is_the_last_event() -> None:
    service = ScriptedService([*says("a", finish=None), WorkerDied("gone", dossier="d1")])
    async with client(service) as http:
        whole = await http.post("/v1/completions", json={"prompt": "x"})
        streamed = await http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert whole.status_code == 502
    assert whole.json()["error"]["dossier"] == "d1"
    last = json.loads(streamed.text.strip().split("\n\n")[-1][6:])
    assert last["error"]["code"] == "worker_died"
    assert "d1" in last["error"]["message"]
    assert all(stream.closed.is_set() for stream in service.streams)


async def test_fields_without_effect_are_named() -> None:
    async with client(ScriptedService(says("a"))) as http:
        body = {"prompt": "x", "temprature": 0, "user": "me"}
        response = await http.post("/v1/completions", json=body)
    assert response.headers["x-superfluid-unused"] == "temprature"


async def test_odd_names_without_effect_are_named_too() -> None:
    async with client(ScriptedService(says("a"))) as http:
        response = await http.post("/v1/completions", json={"prompt": "x", "é": 1, "a\nb": 2})
    assert response.headers["x-superfluid-unused"] == "a\\nb, \\u00e9"


async def test_tokens_there_and_back() -> None:
    async with client(ScriptedService(says("a"))) as http:
        body = {"prompt": "ab", "return_token_strs": True}
        found = (await http.post("/v1/tokenize", json=body)).json()
        back = (await http.post("/v1/detokenize", json={"tokens": found["tokens"]})).json()
    assert found == {"tokens": [97, 98], "count": 2, "max_model_len": 128, "token_strs": ["a", "b"]}
    assert back == {"prompt": "ab"}


async def test_routes_methods_and_health() -> None:
    service = ScriptedService(says("a"))
    async with client(service) as http:
        assert (await http.get("/nowhere")).json()["error"]["code"] == "not_found"
        wrong = await http.get("/v1/completions")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
        assert (await http.get("/health")).json() == {"status": "ok"}
        service.status = "loading"
        assert (await http.get("/health")).status_code == 503


async def test_a_bug_is_one_line() -> None:
    service = ScriptedService(says("a"))
    service.refusal = None
    service.models = None  # type: ignore[method-assign,assignment]  # any bug will do
    async with client(service) as http:
        response = await http.get("/v1/models")
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "Traceback" not in response.text


async def test_stats_have_every_counter_and_what_it_amounts_to() -> None:
    async with client(ScriptedService(says("a"))) as http:
        answer = (await http.get("/v1/superfluid/stats")).json()
    found = answer["models"]["tiny"]
    assert set(TurnStats.__struct_fields__) < set(found)
    assert (found["turns"], found["seats"], found["ready"]) == (4, 10, 12)
    assert (found["mean_occupancy"], found["mean_ready"]) == (2.5, 3.0)
    assert (found["window_occupancy"], found["window_mean_ready"]) == (1.5, 0.0)
    assert found["mean_queued_s"] == 0.0


@pytest.mark.parametrize("stream", [False, True])
async def test_class_deadline_and_cached_tokens_by_header(stream: bool) -> None:
    service = ScriptedService(says("a"))
    headers = {"X-Superfluid-Qos": " Interactive ", "x-superfluid-deadline-s": "2.5"}
    body = {"prompt": ["ab", "c"], "n": 2, "stream": stream}
    async with client(service) as http:
        answer = await http.post("/v1/completions", json=body, headers=headers)
    assert [it.service_class for it in service.requests] == ["interactive"] * 4
    assert [it.deadline_s for it in service.requests] == [2.5] * 4
    assert answer.headers["x-superfluid-cached-tokens"] == "0"


async def test_requests_without_a_class_have_the_servers() -> None:
    service = ScriptedService(says("a"))
    settings = dataclasses.replace(SETTINGS, service_class="background")
    async with client(service, settings) as http:
        await http.post("/v1/chat/completions", json=CHAT)
    assert service.requests[0].service_class == "background"
    assert service.requests[0].deadline_s is None


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-superfluid-qos", ""),
        ("x-superfluid-qos", "urgent"),
        ("x-superfluid-deadline-s", "0"),
        ("x-superfluid-deadline-s", "nan"),
        ("x-superfluid-deadline-s", "inf"),
        ("x-superfluid-deadline-s", "soon"),
    ],
)
async def test_a_header_of_ours_that_says_nothing_known_is_refused(header: str, value: str) -> None:
    service = ScriptedService(says("a"))
    async with client(service) as http:
        answer = await http.post("/v1/chat/completions", json=CHAT, headers={header: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == header
    assert service.requests == []


def test_every_sampling_field_of_a_body_goes_into_the_request() -> None:
    given: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125, "typical_p": 0.75,
        "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "seed": 7,
    }  # fmt: skip
    body = CompletionBody(prompt="x", repeat_last_n=9, logit_bias={"4": 2.0}, **given)
    assert body.sampling(1) == Sampling(penalty_window=9, logit_bias={4: 2.0}, logprobs=1, **given)
    assert msgspec.structs.replace(CompletionBody(prompt="x").sampling(None), seed=0) == Sampling()


async def test_the_penalties_window_is_set_and_checked() -> None:
    service = ScriptedService(says("a"))
    async with client(service) as http:
        await http.post("/v1/chat/completions", json={**CHAT, "repeat_last_n": 7})
        refused = await http.post("/v1/chat/completions", json={**CHAT, "repeat_last_n": -1})
    assert service.requests[0].sampling.penalty_window == 7
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "repeat_last_n"


async def test_embeddings_as_numbers() -> None:
    service = ScriptedService()
    async with client(service) as http:
        answer = await http.post("/v1/embeddings", json={"input": ["abc", "z"], "odd": 1})
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-superfluid-unused"] == "odd"
    assert answer.json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [97.0, 3.0]},
            {"object": "embedding", "index": 1, "embedding": [122.0, 1.0]},
        ],
        "model": "tiny",
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }
    assert service.embeds == [([Text(text="abc"), Text(text="z")], None)]


async def test_embeddings_as_base64_of_token_ids() -> None:
    service = ScriptedService()
    body = {"input": [[7, 8], [9]], "encoding_format": "base64", "dimensions": 2}
    async with client(service) as http:
        answer = (await http.post("/v1/embeddings", json=body)).json()
    vectors = [struct.unpack("<2f", base64.b64decode(it["embedding"])) for it in answer["data"]]
    assert vectors == [(7.0, 2.0), (9.0, 1.0)]
    assert service.embeds == [([Tokens(tokens=[7, 8]), Tokens(tokens=[9])], 2)]


async def test_why_nothing_is_embedded_is_told_as_everywhere() -> None:
    service = ScriptedService()
    service.refusal = EmbeddingsUnsupported("this one gives text", param="model")
    async with client(service) as http:
        answer = await http.post("/v1/embeddings", json={"input": "abc"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("embeddings_unsupported", "model")
