"""A worker that takes more memory than its control group has: what its client and user are told."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import httpx
import pytest
from superfluid_adapter_fake.orders import Moment, Orders, write_model

from bench.cgroups import limited
from support.house import SCRIPT, continued
from support.server import Server, run, serving

LIMIT_BYTES: Final = 400 << 20
GREEDY: Final = "!"


def _can_be_had() -> bool:
    with limited(LIMIT_BYTES) as group:
        return group is not None


GROUPS: Final = ("memory",) if _can_be_had() else ()
"""Empty where this user may make none; how counters are read is tested as data everywhere."""


@pytest.fixture(params=GROUPS)
def python(tmp_path: Path) -> Iterator[Path]:
    """An interpreter that joins a group of little memory."""
    with limited(LIMIT_BYTES) as group:
        path = tmp_path / "python"
        joins = f"echo $$ > {shlex.quote(str(group))}/cgroup.procs"
        path.write_text(f'#!/bin/sh\n{joins}\nexec {shlex.quote(sys.executable)} "$@"\n')
        path.chmod(0o755)
        yield path


def complete(server: Server, prompt: str = "ab", tokens: int = 13) -> httpx.Response:
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


@pytest.mark.parametrize("sandbox", ["strict", "none"])
def test_a_worker_killed_for_memory_is_a_pause_and_told_as_that(
    sandbox: str, python: Path, tmp_path: Path
) -> None:
    home, once = tmp_path / "home", str(tmp_path / "once")
    moment = Moment(act="hoard", tokens=8, once=None if sandbox == "strict" else once)
    model = str(write_model(tmp_path / "m.fake", Orders(script=SCRIPT, moments=(moment,))))
    with serving([model, "--sandbox", sandbox], home, str(python)) as server:
        answer = complete(server)
        kept = json.loads(run(["why", "--json"], home).out)
        told = run(["why"], home).out
        if sandbox == "none":
            assert answer.json()["choices"][0]["text"] == continued(13, after=3)
    assert (kept["code"], kept["stage"]) == (-9, "serving")
    assert kept["reason"] == "killed by SIGKILL (Killed), out of memory"
    assert "cgroup" in kept["out_of_memory"]
    assert "counted 1 killed for memory" in kept["out_of_memory"]
    assert f"; {kept['out_of_memory']}" in told
    if sandbox == "strict":
        # Its worker cannot note that it was killed, so each next one is: the stream is to blame.
        assert answer.status_code == 502
        assert answer.json()["error"]["dossier"] == kept["id"]


def test_the_prompt_that_takes_all_memory_fails_alone(python: Path, tmp_path: Path) -> None:
    home, others = tmp_path / "home", 7
    orders = Orders(script=SCRIPT, context=1024, step_s=0.001, greed=GREEDY)
    model = str(write_model(tmp_path / "m.fake", orders))
    with (
        serving([model, "--sandbox", "strict", "--lanes", "4"], home, str(python)) as server,
        ThreadPoolExecutor(others + 1) as clients,
    ):
        assert complete(server).status_code == 200
        answers = [clients.submit(complete, server, "ab", 600) for _ in range(others)]
        failed = complete(server, "ab" + GREEDY)
        texts = {answer.result().json()["choices"][0]["text"] for answer in answers}
        kept = [json.loads(path.read_text()) for path in home.rglob("dossiers/*.json")]
        assert complete(server).status_code == 200
    assert texts == {continued(600, after=3)}
    assert failed.status_code == 502
    assert failed.json()["error"]["dossier"] in {it["id"] for it in kept}
    assert {it["reason"] for it in kept} == {"killed by SIGKILL (Killed), out of memory"}
    assert sum("the one stream it had failed" in it["then"] for it in kept) == 1
    assert len(kept) == 3
