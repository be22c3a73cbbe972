"""Many streams on a few lanes, over HTTP with the `openai` package."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from superfluid_adapter_fake.orders import Orders, write_model

from support.openai_streams import clients, idle, told
from support.server import Server, serving
from support.turn_loop import alone, request

LANES = 8
LONG = 1500
"""Tokens that a stream asks for whose client goes."""
ORDERS = Orders(context=2048, spare=10, step_s=0.002)
CLASSES = ("interactive", "completion", "agent", "background")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("lanes")
    model = write_model(folder / "m.fake", ORDERS)
    with serving([str(model), "--lanes", str(LANES)], folder / "home") as found:
        yield found


def _stats(server: Server) -> dict[str, Any]:
    (stats,) = httpx.get(f"{server.url}/v1/superfluid/stats").json()["models"].values()
    assert isinstance(stats, dict)
    return stats


async def _idle(server: Server) -> dict[str, Any]:
    return await idle(server, LANES)


async def test_sixty_four_streams_on_eight_lanes_a_third_of_them_dropped(server: Server) -> None:
    """Lanes facts, failure 1: generation goes on after its client is gone."""
    dice = random.Random(4)
    head = [dice.randrange(256) for _ in range(200)]
    leaves = {n: dice.randint(0, 19) for n in dice.sample(range(64), 21)}
    asks = [
        request(
            head[: dice.choice([0, 100, 200])] + [dice.randrange(256) for _ in range(30)],
            LONG if number in leaves else dice.randint(20, 60),
            CLASSES[number % 4],  # type: ignore[arg-type]  # a Class each
            seed=number,
        )
        for number in range(64)
    ]
    before = await _idle(server)
    async with clients(server) as client:
        texts = await asyncio.gather(
            *(told(client, ask, leaves.get(n)) for n, ask in enumerate(asks))
        )
    for number, (ask, text) in enumerate(zip(asks, texts, strict=True)):
        heard = msgspec.structs.replace(ask, max_tokens=leaves.get(number, ask.max_tokens))
        assert text == bytes(alone(heard, ORDERS, ORDERS.context)).decode()
    stats = await _idle(server)
    kept = sum(ask.max_tokens or 0 for n, ask in enumerate(asks) if n not in leaves)
    decoded = stats["decode_tokens"] - before["decode_tokens"]
    assert decoded < kept + 21 * LONG / 2, "the dropped ones went on"
    assert stats["parked"] == stats["parked_bytes"] == 0
    assert stats["mean_occupancy"] > 4
    assert stats["mean_occupancy"] <= stats["mean_ready"] <= LANES
    assert stats["failed_turns"] == 0


async def test_thirty_two_requests_with_one_prefix_prefill_it_once(server: Server) -> None:
    head = [(7 * i + i * i) % 251 for i in range(1500)]
    before = await _idle(server)
    async with clients(server) as client:
        await asyncio.gather(
            *(told(client, request([*head, *([n] * 5)], 8, seed=n)) for n in range(32))
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


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_are_started_all_or_none(tmp_path: Path, stream: bool) -> None:
    gate = tmp_path / "gate"
    model = write_model(tmp_path / "m.fake", Orders(gate=str(gate)))
    extra = {"SUPERFLUID_MAX_WAITING": "4"}
    with serving([str(model), "--lanes", "2"], tmp_path / "home", **extra) as found:
        async with httpx.AsyncClient(base_url=found.url, timeout=60) as http:

            async def ask(**fields: Any) -> httpx.Response:
                body = {"prompt": "a", "max_tokens": 3, "stream": stream, **fields}
                return await http.post("/v1/completions", json=body)

            for param, fields in (("n", {"n": 20}), ("prompt", {"prompt": ["a"] * 7})):
                answer = await ask(**fields)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, param)
                assert "at most 6 fit" in error["message"]

            def taken() -> int:
                stats = _stats(found)
                return int(stats["admitted"] + stats["waiting"])

            first = asyncio.create_task(ask(n=3))
            while taken() < 3:
                await asyncio.sleep(0)
            answer = await ask(n=4)
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert taken() == 3
            second = asyncio.create_task(ask(n=3))
            while taken() < 6:
                await asyncio.sleep(0)
            gate.touch()
            for answer in await asyncio.gather(first, second):
                assert answer.status_code == 200
            assert _stats(found)["admitted"] == 6


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
            while not _stats(found)["waiting"]:
                await asyncio.sleep(0)
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
