"""Many streams on a few lanes, over HTTP with the `openai` package."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from superfluid_adapter_fake.orders import Orders, write_model

from superfluid_workerd.link.frames import GenerationRequest
from support.server import Server, serving
from support.turn_loop import alone, request

LANES = 8
ORDERS = Orders(context=2048, spare=10, step_s=0.002)
CLASSES = ("interactive", "completion", "agent", "background")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("lanes")
    model = write_model(folder / "m.fake", ORDERS)
    with serving([str(model), "--lanes", str(LANES)], folder / "home") as found:
        yield found


@contextlib.asynccontextmanager
async def _clients(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


def _stats(server: Server) -> dict[str, Any]:
    (stats,) = httpx.get(f"{server.url}/v1/superfluid/stats").json()["models"].values()
    assert isinstance(stats, dict)
    return stats


async def _idle(server: Server) -> dict[str, Any]:
    """The counters once no stream is left; a cancel takes effect with the next turn."""
    async with asyncio.timeout(30), httpx.AsyncClient() as http:
        while True:
            answer = await http.get(f"{server.url}/v1/superfluid/stats")
            (stats,) = answer.json()["models"].values()
            if stats["free_lanes"] == LANES and not stats["waiting"]:
                return dict(stats)


async def _told(
    client: openai.AsyncOpenAI, ask: GenerationRequest, leave_after: int | None = None
) -> str:
    """The stream's text; up to `leave_after` pieces, when the client goes."""
    stream = await client.completions.create(
        model="m",
        prompt=list(ask.prompt.tokens),  # type: ignore[union-attr]  # all of them are token ids
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


async def test_sixty_four_streams_on_eight_lanes_a_third_of_them_dropped(server: Server) -> None:
    """Lanes facts, failure 1: generation goes on after its client is gone."""
    dice = random.Random(4)
    head = [dice.randrange(256) for _ in range(200)]
    asks = [
        request(
            head[: dice.choice([0, 100, 200])] + [dice.randrange(256) for _ in range(30)],
            dice.randint(20, 60),
            CLASSES[number % 4],  # type: ignore[arg-type]  # a Class each
            seed=number,
        )
        for number in range(64)
    ]
    leaves = {n: dice.randint(0, 19) for n in dice.sample(range(64), 21)}
    async with _clients(server) as client:
        texts = await asyncio.gather(
            *(_told(client, ask, leaves.get(n)) for n, ask in enumerate(asks))
        )
    for number, (ask, text) in enumerate(zip(asks, texts, strict=True)):
        whole = bytes(alone(ask, ORDERS, ORDERS.context)).decode()
        assert text == whole[: leaves.get(number)]
    stats = await _idle(server)
    assert stats["parked"] == stats["parked_bytes"] == 0
    assert stats["mean_occupancy"] > 4
    assert stats["mean_occupancy"] <= stats["mean_ready"] <= LANES
    assert stats["failed_turns"] == 0


async def test_thirty_two_requests_with_one_prefix_prefill_it_once(server: Server) -> None:
    head = [(7 * i + i * i) % 251 for i in range(1500)]
    before = await _idle(server)
    async with _clients(server) as client:
        await asyncio.gather(
            *(_told(client, request([*head, *([n] * 5)], 8, seed=n)) for n in range(32))
        )
    after = await _idle(server)
    assert after["prefill_tokens"] - before["prefill_tokens"] == 1500 + 32 * 5
    assert after["shared_tokens"] - before["shared_tokens"] == 31 * 1500


def test_cached_tokens_are_told_in_usage_and_in_a_header(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for cached in (0, 299):
            raw = client.completions.with_raw_response.create(
                model="m", prompt=[9] * 150 + [8] * 150, max_tokens=3
            )
            usage = raw.parse().usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            assert usage.prompt_tokens_details.cached_tokens == cached
            assert raw.headers["x-superfluid-cached-tokens"] == str(cached)
        with client.completions.with_streaming_response.create(
            model="m", prompt=[9] * 150 + [8] * 150, max_tokens=3, stream=True
        ) as streamed:
            assert streamed.headers["x-superfluid-cached-tokens"] == "299"


def test_headers_that_say_nothing_known_are_refused_by_name(server: Server) -> None:
    for header, value in (
        ("x-superfluid-qos", "urgent"),
        ("x-superfluid-deadline-s", "soon"),
        ("x-superfluid-deadline-s", "-1"),
    ):
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "a"}, headers={header: value}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == header
        assert value in answer.json()["error"]["message"]


def test_a_deadline_ends_a_stream_and_frees_its_lane(server: Server) -> None:
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json={"prompt": "a", "max_tokens": 1500, "ignore_eos": True},
        headers={"x-superfluid-deadline-s": "0.3"},
        timeout=30,
    )
    assert answer.json()["choices"][0]["finish_reason"] == "cancelled"
    assert 0 < answer.json()["usage"]["completion_tokens"] < 1500
    assert _stats(server)["free_lanes"] == LANES


def test_a_full_line_is_a_503_that_says_when_to_come_again(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    model = write_model(tmp_path / "m.fake", Orders(gate=str(gate)))
    extra = {"SUPERFLUID_MAX_WAITING": "1"}
    with serving([str(model), "--lanes", "1"], tmp_path / "home", **extra) as found:
        body = {"prompt": "a", "max_tokens": 2, "stream": True}
        with contextlib.ExitStack() as held:
            for _ in range(2):
                held.enter_context(
                    httpx.stream("POST", f"{found.url}/v1/completions", json=body, timeout=30)
                )
            answer = httpx.post(f"{found.url}/v1/completions", json=body)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "overloaded"
            assert int(answer.headers["retry-after"]) >= 1
            gate.touch()


async def test_the_servers_default_class_is_that_of_requests_without_one(tmp_path: Path) -> None:
    """One lane: what comes as interactive goes before the server's own background streams."""
    gate = tmp_path / "gate"
    model = write_model(tmp_path / "m.fake", Orders(gate=str(gate), step_s=0.01))
    arguments = [str(model), "--lanes", "1", "--qos", "background"]
    with serving(arguments, tmp_path / "home") as found:
        ended: list[str] = []

        async def ask(name: str, **headers: str) -> None:
            async with httpx.AsyncClient(timeout=60) as http:
                body = {"prompt": name, "max_tokens": 20}
                await http.post(f"{found.url}/v1/completions", json=body, headers=headers)
            ended.append(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(ask("low"))
            while _stats(found)["free_lanes"]:
                await asyncio.sleep(0)
            group.create_task(ask("chat", **{"x-superfluid-qos": "interactive"}))
            gate.touch()
        assert ended == ["chat", "low"]
        assert _stats(found)["preempted"] == 1


async def test_a_request_whose_client_went_while_it_waited_is_never_seated(tmp_path: Path) -> None:
    """Lanes facts, failure 2: the queued request of a gone client runs all the same."""
    gate = tmp_path / "gate"
    model = write_model(tmp_path / "m.fake", Orders(gate=str(gate)))
    with serving([str(model), "--lanes", "1"], tmp_path / "home") as found:
        async with httpx.AsyncClient(base_url=found.url, timeout=60) as http:

            async def ask(**fields: Any) -> httpx.Response:
                body = {"prompt": "a", "max_tokens": 5, "ignore_eos": True, **fields}
                return await http.post("/v1/completions", json=body)

            first = asyncio.create_task(ask())
            while _stats(found)["free_lanes"]:
                await asyncio.sleep(0)
            for stream in (False, True):
                waiting = asyncio.create_task(ask(stream=stream))
                while not _stats(found)["waiting"]:
                    await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            gate.touch()
            assert (await first).json()["usage"]["completion_tokens"] == 5
        stats = _stats(found)
        assert (stats["admitted"], stats["waiting"], stats["free_lanes"]) == (1, 0, 1)


async def test_an_answer_that_nobody_waits_for_ends_and_its_lane_is_free(server: Server) -> None:
    """Lanes facts, failure 1: generation goes on after its client is gone; not streamed here."""
    before = await _idle(server)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        body = {"prompt": "a", "max_tokens": 1900, "ignore_eos": True}
        asked = asyncio.create_task(http.post("/v1/completions", json=body))
        while _stats(server)["decode_tokens"] == before["decode_tokens"]:
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    after = await _idle(server)
    assert after["decode_tokens"] - before["decode_tokens"] < 1000
