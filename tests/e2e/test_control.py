"""What a running server tells its own user, and how it is drained."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from superfluid_adapter_fake.orders import Orders, write_model

from superfluid import cli, control
from superfluid_compat.errors import NotRunning
from support.house import SCRIPT, continued
from support.server import Server, run, serving


def model(folder: Path, orders: Orders | None = None) -> str:
    return str(write_model(folder / "m.fake", orders or Orders(script=SCRIPT)))


def complete(server: Server, tokens: int, prompt: str = "ab") -> str:
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    text = answer.json()["choices"][0]["text"]
    assert isinstance(text, str)
    return text


def test_status_and_ps_of_a_running_server(tmp_path: Path) -> None:
    home = tmp_path / ("deep" * 30) / "home"
    with serving([model(tmp_path), "--name", "one"], home) as server:
        (socket_path,) = home.rglob(control.SOCKET)
        assert socket_path.stat().st_mode & 0o777 == 0o600
        (report,) = json.loads(run(["status", "--json"], home).out)
        assert (report["name"], report["pid"]) == ("one", server.pid)
        assert report["url"] == f"{server.url}/v1"
        (worker,) = report["models"]
        assert (worker["model"], worker["state"], worker["workers"]) == ("m", "serving", 1)
        assert worker["sandbox"]["asked"] == "auto"
        assert psutil.Process(worker["pid"]).ppid() == server.pid
        assert worker["rss_bytes"] > 1 << 20
        shown = run(["ps"], home).out.splitlines()
        assert shown[0].split() == ["pid", "server", "model", "runtime", "state", "memory", "up"]
        assert shown[1].split()[:5] == [str(worker["pid"]), "one", "m", "fake", "serving"]
        assert "m on fake: serving, 0 streams, 4 lanes" in run(["status"], home).out
    ended = run(["status"], home)
    assert (ended.code, ended.out) == (1, "")
    assert "no server runs on this home" in ended.err


def test_why_says_what_happened(tmp_path: Path) -> None:
    home = tmp_path / "home"
    none = run(["why"], home)
    assert (none.code, none.out) == (2, "")
    assert "no worker has died here" in none.err
    with serving([model(tmp_path)], home) as server:
        (report,) = control.running(home / "state" / "servers")
        os.kill(report.models[0].pid, signal.SIGSEGV)
        assert complete(server, 13) == continued(13, after=3)
    said = run(["why", "last"], home).out
    kept = json.loads(run(["why", "--json"], home).out)
    for words in (
        f"dossier {kept['id']}",
        f"m on fake, worker {report.models[0].pid}: killed by SIGSEGV (Segmentation fault)",
        "while: serving",
        "then: another worker after 0.1 s",
        "no kill for memory was counted",
        "sandbox: strict (asked: auto)",
        "lanes 4 (default)",
    ):
        assert words in said
    assert run(["why", kept["id"]], home).out == said
    assert run(["why", "ffffffff"], home).code == 2


@pytest.mark.parametrize("how", ["command", "signal"])
def test_a_drain_finishes_what_runs_and_ends(tmp_path: Path, how: str) -> None:
    home, gate = tmp_path / "home", tmp_path / "gate"
    with serving([model(tmp_path, Orders(script=SCRIPT, gate=str(gate)))], home) as server:
        texts: list[str] = []
        client = threading.Thread(target=lambda: texts.append(complete(server, 13)))
        client.start()
        servers = home / "state" / "servers"
        while not control.running(servers)[0].models[0].streams:
            pass
        if how == "command":
            assert "m: draining, 1 streams to finish" in run(["drain", "m"], home).out
        else:
            os.kill(server.pid, signal.SIGUSR1)
            os.kill(server.pid, signal.SIGUSR1)
            while control.running(servers)[0].models[0].state != "draining":
                pass
        gate.touch()
        client.join()
        assert texts == [continued(13, after=3)]
        assert server.wait().code == 0


def test_a_drain_of_another_model_or_server_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with serving([model(tmp_path)], home) as server:
        refused = run(["drain", "x"], home)
        assert (refused.code, "no model is called x" in refused.err) == (1, True)
        assert "no server called two" in run(["drain", "--name", "two"], home).err
        assert complete(server, 5) == continued(5, after=3)


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"{}\n", b'{"ask": "die"}\n', b"\xff" * 4096, b"[" * 9]
)
def test_rubbish_on_the_socket_costs_that_connection_alone(tmp_path: Path, line: bytes) -> None:
    home = tmp_path / "home"
    with serving([model(tmp_path)], home) as server:
        folder = home / "state" / "servers" / "default"
        with socket.socket(socket.AF_UNIX) as channel, contextlib.chdir(folder):
            channel.connect(control.SOCKET)
            channel.sendall(line)
            channel.shutdown(socket.SHUT_WR)
            assert b"does not read" in channel.recv(4096)
        assert control.ask(folder, control.Request("status")).pid == server.pid


def test_a_socket_that_nobody_answers_is_no_server(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left, contextlib.chdir(tmp_path):
        left.bind(control.SOCKET)
    with pytest.raises(NotRunning):
        control.ask(tmp_path, control.Request("status"))
    assert control.running(tmp_path / "none") == []


@contextlib.contextmanager
def answering(folder: Path, answer: bytes | None) -> Iterator[None]:
    """What stands where a server of that folder does, and says `answer`, or nothing until the
    end."""
    folder.mkdir(parents=True)
    over = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        with contextlib.chdir(folder):
            listener.bind(control.SOCKET)
        listener.listen()

        def talk() -> None:
            while True:
                channel, _ = listener.accept()
                with channel:
                    if over.is_set():
                        return
                    channel.recv(4096)
                    channel.sendall(answer) if answer is not None else over.wait()

        thread = threading.Thread(target=talk)
        thread.start()
        try:
            yield
        finally:
            over.set()
            with socket.socket(socket.AF_UNIX) as waker, contextlib.chdir(folder):
                waker.connect(control.SOCKET)
            thread.join()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b'{"server": 5}\n', "what it says does not read"),
        (b'{"server": {"name": "bad", "models": [{"model": 1}]}}\n', "does not read"),
        (b"\xff\n", "does not read"),
        (b'{"problem": "ZeroDivisionError in the\\u001b[2J server"}\n', "ZeroDivisionError in the"),
        (None, "it is silent for 0.2 s"),
    ],
)
def test_a_server_that_gives_no_answer_hides_no_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: bytes | None,
    words: str,
) -> None:
    monkeypatch.setattr(control, "_PATIENCE_S", 0.2 if answer is None else 60.0)
    monkeypatch.setenv("SUPERFLUID_HOME", str(tmp_path))
    servers = tmp_path / "state" / "servers"
    good = b'{"server": {"name": "good", "pid": 7, "url": "http://127.0.0.1:1/v1"}}\n'
    with answering(servers / "bad", answer), answering(servers / "good", good):
        assert cli.run(["status"]) == 0
        bad, other = capsys.readouterr().out.splitlines()
        assert (bad.startswith("bad  problem: "), words in bad) == (True, True)
        assert bad.isprintable()
        assert other == "good  http://127.0.0.1:1/v1  pid 7"
        assert cli.run(["ps"]) == 0
        assert words in capsys.readouterr().err
        assert cli.run(["status", "--json"]) == 0
        assert [it["name"] for it in json.loads(capsys.readouterr().out)] == ["bad", "good"]
        assert cli.run(["drain", "--name", "bad"]) == 1
        assert words in capsys.readouterr().err


async def test_a_report_that_fails_is_told_to_who_asked(tmp_path: Path) -> None:
    def fails(_: control.Request) -> control.Reply:
        raise ZeroDivisionError("a secret")

    async with control.listening(tmp_path, fails):
        with pytest.raises(NotRunning, match="ZeroDivisionError in the server") as caught:
            await asyncio.to_thread(control.ask, tmp_path, control.Request("status"))
    assert "secret" not in caught.value.line()


def test_a_name_with_control_characters_moves_no_cursor(tmp_path: Path) -> None:
    home = tmp_path / "home"
    path = write_model(tmp_path / "a\nb\x1b[2J\u202e.fake", Orders(script=SCRIPT))
    with serving([str(path)], home) as server:
        (row,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert row["id"] == path.stem
        body = {"model": row["id"], "prompt": "ab", "max_tokens": 5, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["text"] == continued(5, after=3)
        os.kill(control.running(home / "state" / "servers")[0].models[0].pid, signal.SIGKILL)
        while not list(home.rglob("dossiers/*.json")):
            time.sleep(0.01)
        for command in ("status", "ps", "drain"):
            said = run([command], home)
            assert (said.code, said.err) == (0, "")
            assert all(line.isprintable() for line in said.out.splitlines())
            assert "a b\ufffd[2J\ufffd" in said.out
        ended = server.wait()
    for text in (ended.out, ended.err, run(["why"], home).out):
        assert all(line.isprintable() for line in text.splitlines())
        assert "a b\ufffd[2J\ufffd" in text
