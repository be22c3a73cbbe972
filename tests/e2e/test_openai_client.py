"""The `openai` package against a real server, daemon and worker: sync and async, both ways."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from superfluid_adapter_fake.orders import Orders, write_model

from support.server import Server, serving

SCRIPT = "Grüße, 世界! "


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("clients")
    orders = Orders(script=SCRIPT, context=512, template="{{ messages[-1]['content'] }}|")
    model = write_model(folder / "told.fake", orders)
    with serving([str(model), "--lanes", "4"], folder / "home") as found:
        yield found


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def expected(start: int, tokens: int) -> str:
    """The script's bytes from position `start` of the stream on, without a torn character."""
    script = SCRIPT.encode()
    told = bytes(script[(start + i) % len(script)] for i in range(tokens))
    return told.decode(errors="ignore")


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id


def test_completion(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    told = client.completions.create(model=model, prompt="abc", max_tokens=20, temperature=0)
    assert told.choices[0].text.rstrip("\ufffd") == expected(4, 20)
    assert told.choices[0].finish_reason == "length"
    assert told.usage is not None
    assert (told.usage.prompt_tokens, told.usage.completion_tokens) == (4, 20)


def test_a_stream_is_the_whole_in_pieces(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    whole = client.completions.create(model=model, prompt="abc", max_tokens=40, temperature=0)
    with client.completions.create(
        model=model,
        prompt="abc",
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert sum(bool(c.choices) for c in chunks) > 5
    assert chunks[-1].usage == whole.usage


def test_chat_both_ways(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    ask = {"model": model, "max_completion_tokens": 13, "temperature": 0}
    whole = client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], **ask)  # type: ignore[call-overload]  # keywords shared below
    stream = client.chat.completions.create(
        messages=[{"role": "user", "content": "hi"}], stream=True, **ask
    )  # type: ignore[call-overload]  # as above
    pieces = [c.choices[0].delta.content or "" for c in stream]
    assert "".join(pieces) == whole.choices[0].message.content


def test_a_stop_string_ends_before_itself(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    told = client.completions.create(
        model=model, prompt="abc", max_tokens=60, temperature=0, stop=["世界"]
    )
    assert told.choices[0].finish_reason == "stop"
    assert "世" not in told.choices[0].text
    assert told.choices[0].text == expected(4, 60).split("世界")[0]


def test_seeds_repeat_and_differ(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id

    def drawn(seed: int) -> str:
        told = client.completions.create(
            model=model, prompt="z", max_tokens=24, temperature=1.5, seed=seed
        )
        return told.choices[0].text

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_refusals_are_the_packages_own_errors(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    with pytest.raises(openai.NotFoundError, match="told"):
        client.completions.create(model="absent", prompt="x")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=model, prompt="x", max_tokens=-3)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="x" * 600)
    assert caught.value.code == "context_length_exceeded"
    assert "601" in caught.value.message
    assert "512" in caught.value.message


async def test_async_streams_side_by_side(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id

        async def told(length: int) -> str:
            stream = await client.completions.create(
                model=model, prompt="y" * length, max_tokens=50, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*(told(length) for length in range(1, 17)))
    for length, text in enumerate(texts, start=1):
        assert text.strip("\ufffd") == expected_whole(length + 1, 50)


def expected_whole(start: int, tokens: int) -> str:
    script = SCRIPT.encode()
    told = bytes(script[(start + i) % len(script)] for i in range(tokens))
    return told.decode(errors="replace").strip("\ufffd")


async def test_a_dropped_stream_frees_its_lane(tmp_path: Path) -> None:
    """While the gate is shut no turn ends, so that no lane comes free by a stream's own end."""
    gate = tmp_path / "gate"
    model = write_model(tmp_path / "m.fake", Orders(gate=str(gate), context=4096, step_s=0.005))
    with serving([str(model), "--lanes", "2"], tmp_path / "home") as found:
        async with httpx.AsyncClient(base_url=found.url, timeout=30) as http:

            async def stats() -> dict[str, Any]:
                answer = await http.get("/v1/superfluid/stats")
                return dict(answer.json()["models"]["m"])

            body = {"prompt": "q", "max_tokens": 4000, "stream": True, "ignore_eos": True}
            for _ in range(6):
                gate.touch()
                async with http.stream("POST", "/v1/completions", json=body) as response:
                    pieces = response.aiter_bytes()
                    await anext(pieces)
                    gate.unlink()
                    before = await stats()
                    assert before["free_lanes"] == 1
                async with asyncio.timeout(30):
                    while (after := await stats())["free_lanes"] < 2:
                        await asyncio.sleep(0)
                assert after["decode_tokens"] - before["decode_tokens"] <= 1
            gate.touch()
            last = await http.post("/v1/completions", json={"prompt": "q", "max_tokens": 2})
    assert last.status_code == 200


def test_tokens_there_and_back(server: Server) -> None:
    body = {"prompt": "héllo", "return_token_strs": True}
    found = httpx.post(f"{server.url}/v1/tokenize", json=body).json()
    assert found["count"] == len(found["tokens"]) == 7
    back = httpx.post(f"{server.url}/v1/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"prompt": "<bos>héllo"}


def test_a_stopped_server_ends_well(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.fake")
    with serving([str(model)], tmp_path / "home") as found:
        ended = found.stop()
    assert ended.code == 0
    assert "Traceback" not in ended.err
