"""The default model in exact mode, its worker killed at random under load: the same text."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from support.kills import SOAK
from support.server import Server, serving

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

STREAMS = 8
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
KILLS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)


def worker(server: Server) -> psutil.Process | None:
    found = psutil.Process(server.pid).children()
    return found[0] if len(found) == 1 else None


async def answer(http: httpx.AsyncClient, number: int, gained: list[int]) -> str:
    body = {
        "prompt": TEXT[500 * number : 500 * number + 90 + 40 * number],
        "max_tokens": 24 + 5 * number,
        "temperature": 0.8,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
    }
    text = ""
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                choices = httpx.Response(200, content=line[6:]).json()["choices"]
                text += "".join(choice["text"] for choice in choices)
                gained[0] += 1
    return text


@pytest.mark.parametrize(("kills", "seed"), [(3, 8), *SOAK])
async def test_kills_under_load_change_no_answer(
    kills: int, seed: int, default_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.getbasetemp() / "lanes-native-home"
    arguments = [str(default_model), "--lanes", "4", "--context", "512", "--native-exact", "true"]
    chance, gained = random.Random(seed), [0]
    with serving(arguments, home) as server:
        daemon = psutil.Process(server.pid)
        async with httpx.AsyncClient(base_url=server.url, timeout=600) as http:
            wanted = [await answer(http, number, gained) for number in range(STREAMS)]
            descriptors = daemon.num_fds()
            killed: set[int] = set()
            ended = False

            async def client(number: int) -> int:
                rounds = 0
                while not ended or not rounds:
                    assert await answer(http, number, gained) == wanted[number]
                    rounds += 1
                return rounds

            clients = [asyncio.create_task(client(number)) for number in range(STREAMS)]
            while len(killed) < kills:
                goal = gained[0] + chance.randrange(5, 60)
                while gained[0] < goal and not any(task.done() for task in clients):
                    await asyncio.sleep(0.002)
                if any(task.done() for task in clients):
                    break
                found = worker(server)
                if found is not None and found.pid not in killed:
                    os.kill(found.pid, chance.choice(KILLS))
                    killed.add(found.pid)
            ended = True
            rounds = await asyncio.gather(*clients)
        assert len(killed) == kills
        assert min(rounds) >= 1
        assert [pid for pid in killed if psutil.pid_exists(pid)] == []
        assert len(daemon.children(recursive=True)) == 1
        while daemon.num_fds() > descriptors:
            await asyncio.sleep(0.05)
