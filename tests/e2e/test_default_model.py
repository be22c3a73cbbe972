"""The default model through the whole house: command, daemon, worker, native runtime, clients.

llama.cpp says what is right.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import openai
import psutil
import pytest

from support.llamacpp import LlamaCpp
from support.server import PATIENT, Server, serving

pytestmark = pytest.mark.model

NAME: Final = "gemma-3-270m"
FRANCE: Final = "The capital of France is"
CONTEXT: Final = 8192


@pytest.fixture(scope="module")
def model(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model under the name that the shelf gives it."""
    path = tmp_path_factory.mktemp("model") / f"{NAME}.gguf"
    path.symlink_to(default_model)
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("default") / "home"


@pytest.fixture(scope="module")
def server(model: Path, home: Path) -> Iterator[Server]:
    with serving([str(model), "--lanes", "4", "--context", str(CONTEXT)], home) as found:
        yield found


@pytest.fixture(scope="module")
def oracle(default_model: Path) -> Iterator[LlamaCpp]:
    with LlamaCpp(default_model, vocab_only=False) as found:
        yield found


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def complete(url: str, prompt: str, tokens: int = 16) -> str:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    found = httpx.post(f"{url}/v1/completions", json=body, timeout=150)
    assert found.status_code == 200, found.text
    text: str = found.json()["choices"][0]["text"]
    return text


# What it says


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("The Eiffel Tower is in the city of", " Paris"),
        ("Paris is the capital of", " France"),
        ("The quick brown fox jumps over the lazy", " dog"),
        ("1, 2, 3, 4, 5, 6, 7, 8,", " 9, 10"),
    ],
)
def test_what_anyone_would_say(client: openai.OpenAI, prompt: str, text: str) -> None:
    told = client.completions.create(model=NAME, prompt=prompt, max_tokens=6, temperature=0)
    assert told.choices[0].text.startswith(text)


@pytest.mark.parametrize("prompt", [FRANCE, "def fibonacci(n):\n", "Es war einmal ein"])
def test_every_greedy_token_is_llama_cpps_choice_or_close_to_it(
    server: Server, oracle: LlamaCpp, prompt: str
) -> None:
    ids = tokenize(server, prompt)
    told = tokenize(server, prompt + complete(server.url, prompt, 24))
    assert told[: len(ids)] == ids
    rows = oracle.logits(told)[len(ids) - 1 : -1]
    picked = rows[np.arange(len(rows)), told[len(ids) :]]
    assert len(rows) >= 20
    assert float((rows.max(axis=1) - picked).max()) < 1.0


def test_a_stream_equals_the_whole_and_its_usage(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": NAME, "prompt": FRANCE, "max_tokens": 32, "temperature": 0}
    whole = client.completions.create(**ask)
    chunks = list(
        client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert whole.usage is not None
    counted = (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens)
    assert counted == (6, 32, 38)
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == counted
    # Tokens come one by one, not in one piece at the end.
    assert sum(bool(c.choices and c.choices[0].text) for c in chunks) > 16


def test_a_seed_repeats_through_a_stream(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": NAME, "prompt": "Once", "max_tokens": 24, "temperature": 1}
    whole = client.completions.create(**ask, seed=7).choices[0].text

    def streamed(seed: int) -> str:
        told = client.completions.create(**ask, seed=seed, stream=True)
        return "".join(chunk.choices[0].text for chunk in told)

    assert streamed(7) == whole != streamed(8)


def test_chat_by_the_familys_template(
    server: Server, client: openai.OpenAI, oracle: LlamaCpp
) -> None:
    (row,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert (row["id"], row["superfluid"]["template"]) == (NAME, "fallback:gemma")
    ask: dict[str, Any] = {
        "model": NAME,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_completion_tokens": 16,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**ask)
    pieces = [c.choices[0].delta.content or "" for c in client.chat.completions.create(
        **ask, stream=True)]  # fmt: skip
    assert whole.choices[0].message.content
    assert "".join(pieces) == whole.choices[0].message.content
    rendered = (
        "<bos><start_of_turn>user\nWhat is the capital of France?<end_of_turn>\n"
        "<start_of_turn>model\n"
    )
    body = {"messages": ask["messages"]}
    found = httpx.post(f"{server.url}/v1/tokenize", json=body).json()
    assert found["tokens"] == oracle.tokenize(rendered, add_special=False, parse_special=True)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == found["count"]


# Text and tokens


def tokenize(server: Server, text: str) -> list[int]:
    found = httpx.post(f"{server.url}/v1/tokenize", json={"prompt": text})
    assert found.status_code == 200, found.text
    ids: list[int] = found.json()["tokens"]
    return ids


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  two  spaces   three\t\ttabs\n\n\n",
        "Grüße, 世界! नमस्ते שלום مرحبا",
        "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u200b\ufeff",
        "<bos><start_of_turn>user<end_of_turn>",
        "a\r\nb\0c\x7f",
        "0123456789 3.14159e-10 0xDEADBEEF",
        "def f(x):\n    return x ** 2  # ▁▁ <0x41>",
        "\U0010ffff \ud7ff \ue000",
        "x" * 3000,
        "word " * 500,
    ],
)
def test_ids_are_llama_cpps(server: Server, oracle: LlamaCpp, text: str) -> None:
    ids = tokenize(server, text)
    assert ids == oracle.tokenize(text)
    back = httpx.post(f"{server.url}/v1/detokenize", json={"tokens": ids}).json()
    assert back == {"prompt": oracle.detokenize(ids, special=True).decode()}
    # The vocabulary writes spaces as this sign, so that a text's own come back as spaces.
    assert back == {"prompt": "<bos>" + text.replace("▁", " ")}


def test_characters_are_never_torn(client: openai.OpenAI) -> None:
    prompt = "🎉🎊🥳🦩🪿🫠🏳️‍🌈👩‍👩‍👧‍👦 " * 4
    ask: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": 48, "temperature": 0}
    whole = client.completions.create(**ask).choices[0].text
    pieces = [c.choices[0].text for c in client.completions.create(**ask, stream=True)]
    # Only the very end may be torn, by the limit.
    assert not [piece for piece in pieces[:-1] if "\ufffd" in piece]
    assert "".join(pieces) == whole
    emoji = [piece for piece in pieces if any(ord(each) > 0xFFFF for each in piece)]
    assert len(emoji) > 8


def test_a_prompt_past_the_window_names_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="word " * 9000, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert "9002" in caught.value.message
    assert str(CONTEXT) in caught.value.message


# Many at once, and clients that go


async def test_eight_clients_on_four_lanes(server: Server) -> None:
    prompts = [f"{number} bottles of beer on the wall," for number in range(91, 99)]
    alone = [await asyncio.to_thread(complete, server.url, prompt, 24) for prompt in prompts]
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as client:

        async def told(prompt: str) -> str:
            stream = await client.completions.create(
                model=NAME, prompt=prompt, max_tokens=24, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        together = await asyncio.gather(*(told(prompt) for prompt in prompts))
    assert together == alone


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_during_its_prompt_frees_the_lane(
    model: Path, home: Path, stream: bool
) -> None:
    arguments = [str(model), "--name", "one", "--lanes", "1"]
    with serving(arguments, home) as server:
        (worker,) = psutil.Process(server.pid).children()
        since = worker.cpu_times().user
        complete(server.url, "one two " * 300, 1)
        each_s = (worker.cpu_times().user - since) / 600
        body = {"prompt": "three four " * 12_000, "max_tokens": 1, "stream": stream}
        busy = worker.cpu_times().user
        _send_and_go(
            f"{server.url}/v1/completions", body, lambda: worker.cpu_times().user > busy + 3
        )
        since = worker.cpu_times().user
        assert complete(server.url, "The opposite of hot is", 1) == " cold"
        # The whole prompt would have taken 24,000 of them, a turn takes at most 512.
        assert worker.cpu_times().user - since < 6_000 * each_s


def _send_and_go(url: str, body: dict[str, Any], begun: Callable[[], bool]) -> None:
    """Post `body` and close the connection as soon as its work has begun."""
    parts = httpx.URL(url)
    data = json.dumps(body).encode()
    head = (
        f"POST {parts.path} HTTP/1.1\r\nHost: {parts.host}:{parts.port}\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection((parts.host, parts.port or 80), timeout=60) as connection:
        connection.sendall(head.encode() + data)
        while not begun():
            time.sleep(0.02)


# Signals


def streaming(url: str, tokens: int) -> Generator[dict[str, Any], None, None]:
    body = {"prompt": FRANCE, "max_tokens": tokens, "temperature": 0, "stream": True,
            "ignore_eos": True}  # fmt: skip
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=150) as told:
        for line in told.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=30)[1]


def test_a_killed_daemon_leaves_no_worker(model: Path, home: Path) -> None:
    with serving([str(model), "--name", "killed"], home) as server:
        left = psutil.Process(server.pid).children(recursive=True)
        assert len(left) >= 1
        told = streaming(server.url, 2000)
        next(told)
        os.kill(server.pid, signal.SIGKILL)
        assert gone(left)
        with pytest.raises(httpx.HTTPError):
            list(told)
        assert server.wait().code == -signal.SIGKILL


def test_ctrl_c_drains(model: Path, home: Path) -> None:
    """A terminal's Ctrl-C reaches every process of its foreground group."""
    with serving([str(model), "--name", "drained"], home) as server:
        told = streaming(server.url, 200)
        pieces = [next(told)]
        os.killpg(server.pid, signal.SIGINT)
        pieces += told
        ended = server.wait()
    assert (ended.code, "Traceback" in ended.err) == (0, False)
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"
    assert sum(bool(piece["choices"][0]["text"]) for piece in pieces) > 50


def test_a_second_ctrl_c_stops_at_once(model: Path, home: Path) -> None:
    with serving([str(model), "--name", "stopped"], home, program=("-c", PATIENT)) as server:
        left = psutil.Process(server.pid).children()
        told = streaming(server.url, 8000)
        next(told)
        os.killpg(server.pid, signal.SIGINT)
        while state(server) != "draining":
            next(told)
        os.killpg(server.pid, signal.SIGINT)
        ended = server.wait()
        assert (ended.code, "Traceback" in ended.err) == (0, False)
        assert gone(left)
        told.close()


def state(server: Server) -> str:
    found: str = httpx.get(f"{server.url}/health").json()["models"][NAME]["state"]
    return found
