"""Embeddings from a client to the runtime and back: the `openai` package, real workers, deaths."""

from __future__ import annotations

import asyncio
import base64
import math
import os
import signal
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from superfluid_adapter_fake.orders import Moment, Orders, write_model
from superfluid_adapter_fake.runtime import vector_of
from superfluid_adapter_fake.tokenizer import BOS

from superfluid.supervisor.life import Limits
from superfluid.supervisor.states import WorkerState
from superfluid_compat.errors import Draining, WorkerDied
from superfluid_workerd.link.frames import Embedded, Text, Tokens
from support.house import SCRIPT, House, Open, continued, reaches
from support.llama_libraries import INSTALLED, library
from support.llama_models import write_encoder
from support.server import Server, serving
from support.tiny_models import TinyModel
from support.tiny_models import write_model as write_gguf_model

WIDTH = 8
TEXTS = ["hello the river", "run", "a stone in the sea"]


def of_text(text: str) -> NDArray[np.float32]:
    return vector_of([BOS, *text.encode()], WIDTH)


def same(found: Sequence[float], wanted: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(np.array(found, np.float32), wanted)


# Over HTTP.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("embeddings")
    model = write_model(folder / "both.fake", Orders(script=SCRIPT, context=512))
    with serving([str(model), "--lanes", "2"], folder / "home") as found:
        yield found


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_one_text_and_several_by_the_client(client: openai.OpenAI) -> None:
    one = client.embeddings.create(model="both", input="hello")
    assert one.model == "both"
    same(one.data[0].embedding, of_text("hello"))
    assert (one.usage.prompt_tokens, one.usage.total_tokens) == (6, 6)
    several = client.embeddings.create(model="both", input=TEXTS)
    assert [it.index for it in several.data] == [0, 1, 2]
    for text, found in zip(TEXTS, several.data, strict=True):
        same(found.embedding, of_text(text))
    assert several.usage.prompt_tokens == sum(1 + len(text) for text in TEXTS)


def test_token_ids_are_taken_as_they_are(client: openai.OpenAI) -> None:
    one = client.embeddings.create(model="both", input=[1, 2, 3])
    same(one.data[0].embedding, vector_of([1, 2, 3], WIDTH))
    several = client.embeddings.create(model="both", input=[[1, 2, 3], [9]])
    same(several.data[1].embedding, vector_of([9], WIDTH))


def test_numbers_and_base64_say_the_same(client: openai.OpenAI) -> None:
    numbers = client.embeddings.create(model="both", input="hi", encoding_format="float")
    coded = client.embeddings.with_raw_response.create(
        model="both", input="hi", encoding_format="base64", dimensions=WIDTH
    )
    told = coded.http_response.json()["data"][0]["embedding"]
    assert list(struct.unpack("<8f", base64.b64decode(told))) == numbers.data[0].embedding
    assert math.hypot(*numbers.data[0].embedding) == pytest.approx(1, abs=1e-6)


async def test_many_at_once_by_the_async_client(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        texts = [f"text {number}" for number in range(40)]
        asked = [client.embeddings.create(model="both", input=[text, "x"]) for text in texts]
        told = await asyncio.gather(
            *asked,
            client.completions.create(model="both", prompt="ab", max_tokens=20, temperature=0),
        )
    for text, found in zip(texts, told[:-1], strict=True):
        assert isinstance(found, openai.types.CreateEmbeddingResponse)
        same(found.data[0].embedding, of_text(text))


REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"input": ["fine", "x" * 600]}, "input.1", "context_length_exceeded", "at most 512"),
    ({"input": "x" * 600}, "input", "context_length_exceeded", "at most 512"),
    ({"input": []}, "input", "invalid_value", "at least one"),
    ({"input": [[]]}, "input", "invalid_value", "holds no token"),
    ({"input": ["a"] * 2049}, "input", "invalid_value", "wanted 1 to 2048"),
    ({"input": [["fine"]]}, "input", "invalid_value", "input"),
    ({"input": [1, -1]}, "input", "invalid_value", "wanted a token id"),
    ({"input": [[1], [700]]}, "input.1", "invalid_value", "token 700"),
    ({"input": "a", "dimensions": 4}, "dimensions", "invalid_value", "vectors have 8"),
    ({"input": "a", "dimensions": 0}, "dimensions", "invalid_value", "greater than"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_value", "'base64'"),
    ({}, "input", "invalid_value", "missing"),
    ({"input": "a", "model": "none"}, "model", "model_not_found", "both"),
]


@pytest.mark.parametrize(("body", "param", "code", "says"), REFUSED)
def test_what_does_not_do_is_a_line_of_its_own(
    server: Server, body: dict[str, Any], param: str, code: str, says: str
) -> None:
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=30)
    assert answer.status_code == (404 if code == "model_not_found" else 400)
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == (code, "invalid_request_error")
    assert error["param"].startswith(param)
    assert says in error["message"]
    assert "\n" not in error["message"]


def test_a_field_without_effect_is_named(server: Server) -> None:
    body = {"input": "a", "truncate": True, "user": "u"}
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=30)
    assert answer.headers["x-superfluid-unused"] == "truncate"


def test_the_list_of_models_says_what_each_can_do(server: Server) -> None:
    (row,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    capabilities = row["superfluid"]["capabilities"]
    assert capabilities["generates"] is True
    assert capabilities["embedding"]["width"] == WIDTH
    assert capabilities["embedding"]["tokens"] == 512


def test_a_model_that_embeds_alone_and_one_that_does_not(tmp_path: Path) -> None:
    alone = write_model(tmp_path / "alone.fake", Orders(generates=False))
    with serving([str(alone)], tmp_path / "a") as server:
        (row,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert row["superfluid"]["capabilities"]["generates"] is False
        embedded = httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}, timeout=30)
        assert embedded.status_code == 200
        for route, body in {
            "completions": {"prompt": "a"},
            "chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        }.items():
            refused = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=30)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "generation_unsupported"
            assert "/v1/embeddings" in refused.json()["error"]["message"]
        assert f"curl {server.url}/v1/embeddings" in server.stop().out
    text = write_model(tmp_path / "text.fake", Orders(width=0))
    with serving([str(text)], tmp_path / "t") as server:
        refused = httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}, timeout=30)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "embeddings_unsupported"
        (row,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert row["superfluid"]["capabilities"]["embedding"] is None


def test_llama_cpp_embeds_and_what_gives_text_on_it_does_not(tmp_path: Path) -> None:
    own = ["--llamacpp-lib", str(library(INSTALLED)), "--threads", "1"]
    encoder = write_encoder(tmp_path / "encoder.gguf")
    with (
        serving([str(encoder), *own, "--lanes", "2"], tmp_path / "home") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        together = client.embeddings.create(model="encoder", input=TEXTS * 5)
        for text, found in zip(TEXTS, together.data, strict=False):
            alone = client.embeddings.create(model="encoder", input=text).data[0]
            np.testing.assert_allclose(found.embedding, alone.embedding, atol=1e-3)
        lengths = [math.hypot(*it.embedding) for it in together.data]
        np.testing.assert_allclose(lengths, 1, atol=1e-5)
        with pytest.raises(openai.BadRequestError, match=r"input\.1 holds"):
            client.embeddings.create(model="encoder", input=["run", "run " * 600])
        with pytest.raises(openai.BadRequestError, match="gives embeddings and no text"):
            client.completions.create(model="encoder", prompt="run")
        (row,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert row["superfluid"]["capabilities"]["embedding"]["pooling"] == "mean"
        assert row["superfluid"]["record"]["got"]["pooling"] == "mean"
    model = write_gguf_model(tmp_path / "text.gguf", TinyModel())
    for words in (own, ["--runtime", "native"]):
        with serving([str(model), *words], tmp_path / "home") as server:
            refused = httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}, timeout=30)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "embeddings_unsupported"


# Workers that die.

POISON = "\x01"
PATIENT = Limits(backoff_s=0.01, backoff_most_s=0.05, failures=3)


async def embedded(served: House, *texts: str) -> list[NDArray[np.float32]]:
    found: Embedded = await served.supervisor.embed("m", [Text(text=text) for text in texts])
    vectors = np.frombuffer(found.vectors, "<f4").reshape(-1, found.width)
    return list(vectors)


async def test_a_worker_that_dies_over_it_is_followed_by_another_that_answers(
    house: Open, tmp_path: Path
) -> None:
    moment = Moment(act="signal", tokens=20, once=str(tmp_path / "once"))
    served = house(Orders(script=SCRIPT, moments=(moment,)))
    vectors = await embedded(served, *TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        np.testing.assert_array_equal(vector, of_text(text))
    assert served.host.spawned == 2
    assert served.dossiers() == 1


async def test_what_kills_two_workers_fails_and_costs_neither_server_nor_streams(
    house: Open,
) -> None:
    served = house(Orders(script=SCRIPT, poison=POISON, context=4096, step_s=0.001), limits=PATIENT)
    await embedded(served, "proven")
    for round_ in range(4):
        stream = asyncio.create_task(served.text(150))
        with pytest.raises(WorkerDied) as caught:
            await embedded(served, "fine", f"kill {round_}" + POISON)
        assert "a request that workers died over failed" in served.dossier().then
        assert caught.value.dossier == served.dossier().id
        assert await stream == continued(150)
    assert served.host.spawned == 9
    np.testing.assert_array_equal((await embedded(served, "fine"))[0], of_text("fine"))


async def test_an_answer_is_a_turn_served_as_far_as_failures_are_counted(house: Open) -> None:
    served = house(Orders(generates=False), limits=PATIENT)
    for _ in range(5):
        np.testing.assert_array_equal((await embedded(served, "a"))[0], of_text("a"))
        os.kill(served.note(), signal.SIGKILL)
        await reaches(served, *(set(WorkerState) - {WorkerState.SERVING}))
    np.testing.assert_array_equal((await embedded(served, "a"))[0], of_text("a"))


async def test_who_leaves_frees_the_worker(house: Open, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    served = house(Orders(gate=str(gate)))
    await served.supervisor.served()
    asking = asyncio.create_task(embedded(served, *TEXTS))
    while served.host.stats.embeds_waiting == 0:
        await served.host.fresh_stats()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    while served.host.stats.embeds_waiting:
        await served.host.fresh_stats()
    gate.touch()
    assert served.host.stats.embed_calls == 0
    np.testing.assert_array_equal((await embedded(served, "a"))[0], of_text("a"))


async def test_a_drain_waits_for_what_is_being_embedded(house: Open, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    served = house(Orders(gate=str(gate)))
    await served.supervisor.served()
    served.note()
    asking = asyncio.create_task(embedded(served, "a"))
    while served.host.stats.embeds_waiting == 0:
        await served.host.fresh_stats()
    served.supervisor.drain(30.0)
    with pytest.raises(Draining):
        await embedded(served, "late")
    gate.touch()
    np.testing.assert_array_equal((await asking)[0], of_text("a"))
    assert await served.supervisor.over() is None


async def waiting(served: House) -> asyncio.Task[Any]:
    """What embeds `a` and stands at the gate."""
    await served.supervisor.served()
    asking = asyncio.create_task(embedded(served, "a"))
    while served.host.stats.embeds_waiting == 0:
        await served.host.fresh_stats()
    return asking


async def test_a_death_in_a_drain_is_a_pause_for_what_is_being_embedded(
    house: Open, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    served = house(Orders(gate=str(gate)))
    asking = await waiting(served)
    served.supervisor.drain(60.0)
    os.kill(served.note(), signal.SIGSEGV)
    gate.touch()
    np.testing.assert_array_equal((await asking)[0], of_text("a"))
    assert await served.supervisor.over() is None
    assert served.host.spawned == 2


async def test_kills_from_outside_are_no_fault_of_what_is_being_embedded(
    house: Open, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    served = house(Orders(gate=str(gate)), limits=Limits(backoff_s=0.01, failures=9))
    asking = await waiting(served)
    for spawned in (2, 3, 4):
        os.kill(served.note(), signal.SIGKILL)
        while served.host.spawned != spawned or served.host.state is not WorkerState.SERVING:
            await asyncio.sleep(0.002)
    gate.touch()
    np.testing.assert_array_equal((await asking)[0], of_text("a"))


LYING = """
ready()
for message in messages:
    if isinstance(message, Embed):
        send(Embedded(request=message.request, width=2, vectors=b"1234", tokens=[1]))
"""


async def test_vectors_of_another_size_than_told_reach_no_client(house: Open) -> None:
    served = house(script=LYING)
    with pytest.raises(Exception, match="answered 4 bytes of vectors, wanted 1 vectors of 2"):
        await served.supervisor.embed("m", [Tokens(tokens=[1])])


async def test_an_answer_to_something_else_costs_its_worker(house: Open) -> None:
    script = LYING.replace("Embedded(", "Tokenized(").replace(
        'width=2, vectors=b"1234", tokens=[1]', "tokens=[1], pieces=[b'']"
    )
    served = house(script=script, limits=Limits(backoff_s=0.01, failures=9))
    with pytest.raises(WorkerDied, match="answered with a Tokenized, wanted a Embedded"):
        await served.supervisor.embed("m", [Tokens(tokens=[1])])
