"""Clocks that jump and processes that were stopped: nobody is taken for dead."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Final

import httpx
import psutil
from superfluid_adapter_fake.orders import Orders, write_model

from support.house import SCRIPT, continued
from support.server import Server, run, serving

JUMPS: Final = """
    import datetime, random, time
    chance, year = random.Random(5), 365 * 86400.0
    time.time = lambda: 1.7e9 + chance.uniform(-5 * year, 5 * year)
    time.time_ns = lambda: int(1e9 * time.time())
    class Jumping(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(time.time(), tz)
    datetime.datetime = Jumping
"""
"""The wall clock of a process, set by years each time it is read."""

IMPATIENT: Final = """
    from superfluid import daemon
    from superfluid.supervisor.life import Limits
    from superfluid.supervisor.states import LADDER, WorkerState
    still = dict.fromkeys(LADDER, 60.0) | {WorkerState.SERVING: 6.0}
    host = daemon.ModelHost
    daemon.ModelHost = lambda spec, folders: host(spec, folders, Limits(still_s=still, ping_s=0.1))
"""
"""A daemon that takes a worker for dead after six seconds without a sign."""


def python(folder: Path, name: str, source: str) -> str:
    """An interpreter for `-m MODULE` that begins with `source`."""
    begins = folder / f"{name}.py"
    begins.write_text(
        textwrap.dedent(source)
        + "import runpy, sys\n"
        + "sys.argv = sys.argv[2:]\n"
        + "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
    )
    path = folder / name
    path.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P {shlex.quote(str(begins))} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


def complete(server: Server, tokens: int = 13) -> str:
    body = {"model": "m", "prompt": "ab", "max_tokens": tokens, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_a_wall_clock_that_jumps_by_years_changes_nothing(tmp_path: Path) -> None:
    home, model = tmp_path / "home", write_model(tmp_path / "m.fake", Orders(script=SCRIPT))
    jumping = python(tmp_path, "jumping", JUMPS)
    worker = {"SUPERFLUID_WORKER_FAKE": f"{jumping} -m superfluid_workerd"}
    with serving([str(model)], home, jumping, **worker) as server:
        for _ in range(3):
            assert complete(server) == continued(13, after=3)
            (child,) = psutil.Process(server.pid).children()
            child.send_signal(signal.SIGKILL)
            assert complete(server, 40) == continued(40, after=3)
        (state,) = json.loads(run(["status", "--json"], home).out)
        assert state["models"][0]["workers"] == 4
        reasons = [json.loads(it.read_text())["reason"] for it in home.rglob("dossiers/*.json")]
        assert reasons == ["killed by SIGKILL (Killed)"] * 3
        ended = server.stop()
    assert (ended.code, "Traceback" in ended.err) == (0, False)


def test_daemon_and_worker_stopped_together_go_on_as_if_nothing_was(tmp_path: Path) -> None:
    home, gate = tmp_path / "home", tmp_path / "gate"
    orders = Orders(script=SCRIPT, gate=str(gate))
    model = str(write_model(tmp_path / "m.fake", orders))
    with serving([model], home, python(tmp_path, "impatient", IMPATIENT)) as server:
        texts: list[str] = []
        client = threading.Thread(target=lambda: texts.append(complete(server)))
        client.start()
        (child,) = psutil.Process(server.pid).children()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(server.pid, number)
            child.send_signal(number)
            if number is signal.SIGSTOP:
                time.sleep(8.0)  # what is tried: more than the daemon's patience
        assert run(["status"], home).code == 0
        gate.touch()
        client.join()
        assert texts == [continued(13, after=3)]
        assert run(["why"], home).code == 2
        os.kill(child.pid, signal.SIGSTOP)
        assert complete(server) == continued(13, after=3)
        assert "no progress for 6 s" in run(["why"], home).out
