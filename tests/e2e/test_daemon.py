"""`superfluid serve` as a process among processes: signals, names, ports, exit codes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from superfluid_adapter_fake.orders import Moment, Orders, write_model

from superfluid import control
from support.server import PATIENT, Ended, Server, environment, run, serving

SCRIPT = "Hello world. "


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def model(folder: Path, orders: Orders | None = None) -> str:
    return str(write_model(folder / "m.fake", orders or Orders(script=SCRIPT)))


def workers(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.pid).children()


def complete(server: Server, tokens: int = 13) -> httpx.Response:
    body = {"model": "m", "prompt": "a", "max_tokens": tokens, "temperature": 0}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def until_gone(processes: list[psutil.Process]) -> None:
    assert not psutil.wait_procs(processes, timeout=30)[1]


@contextlib.contextmanager
def streaming(server: Server, gate: Path) -> Iterator[Iterator[str]]:
    """Texts of a streamed completion of 200 tokens, stopped at the gate after its first."""
    body = {"model": "m", "prompt": "a", "max_tokens": 200, "temperature": 0, "stream": True}
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", f"{server.url}/v1/completions", json=body) as response,
    ):
        texts = _texts(response.iter_lines())
        first = next(texts)
        gate.unlink()
        yield itertools.chain([first], texts)


def _texts(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        if data.startswith("{"):
            yield json.loads(data)["choices"][0]["text"]
    pytest.fail("the stream ended without [DONE]")


def until_draining(server: Server) -> None:
    while httpx.get(f"{server.url}/health").json()["models"]["m"]["state"] != "draining":
        time.sleep(0.01)


def test_a_killed_daemon_takes_its_workers_with_it(tmp_path: Path, home: Path) -> None:
    with serving([model(tmp_path)], home) as server:
        left = workers(server)
        assert len(left) == 1
        server.stop(signal.SIGKILL)
        until_gone(left)
    with serving([model(tmp_path)], home) as again:
        assert complete(again).status_code == 200


@pytest.mark.parametrize("level", ["none", "basic"])
@pytest.mark.parametrize("end", ["killed worker", "ended daemon", "killed daemon"])
def test_nothing_that_a_worker_started_is_left(
    tmp_path: Path, home: Path, level: str, end: str
) -> None:
    """Nor what made a session of its own, though only the next start ends what a killed daemon
    left."""
    words = [model(tmp_path, Orders(script=SCRIPT, strays=2)), "--sandbox", level]
    with serving(words, home) as server:
        (worker,) = workers(server)
        orphans = worker.children()
        assert len(orphans) == 2
        if end == "killed worker":
            worker.kill()
            until_gone(orphans)
        server.stop(signal.SIGKILL if end == "killed daemon" else signal.SIGTERM)
    if end == "killed daemon":
        with serving([model(tmp_path)], home):
            until_gone(orphans)
    until_gone(orphans)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(tmp_path: Path, home: Path, number: signal.Signals) -> None:
    with serving([model(tmp_path)], home) as server:
        left = workers(server)
        ended = server.stop(number)
        assert (ended.code, "Traceback" in ended.err) == (0, False)
        until_gone(left)
    assert list(home.rglob("dossiers/*")) == []


STRUCK = """
import os, sys

_, module, number, *sys.argv[1:] = sys.argv

class Strike:
    def find_spec(self, name, *_):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), int(number))

sys.meta_path.insert(0, Strike())
from superfluid.cli import main
main()
"""
"""superfluid, sent a signal when it first imports a module."""


def struck(module: str, number: signal.Signals, arguments: list[str], home: Path) -> Ended:
    done = subprocess.run(
        [sys.executable, "-c", STRUCK, module, str(int(number)), *arguments],
        env=environment(home), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("module", "number"),
    [
        *itertools.product(
            ["typer.main", "superfluid.cli.serve", "superfluid.models.store", "superfluid.daemon",
             "superfluid.supervisor.host", "uvicorn"],
            [signal.SIGINT, signal.SIGTERM],
        ),
        ("superfluid.cli.app", signal.SIGHUP),
        ("superfluid.cli.app", signal.SIGUSR1),
    ],
)  # fmt: skip
def test_a_signal_before_it_serves_is_a_clean_and_quiet_end(
    tmp_path: Path, home: Path, module: str, number: signal.Signals
) -> None:
    arguments = ["serve", model(tmp_path), "--log-level", "error"]
    ended = struck(module, number, arguments, home)
    assert (ended.code, ended.err) == (0, "")
    assert list(home.rglob("workers/*.json")) == []


def test_another_command_is_interrupted_without_a_traceback(home: Path) -> None:
    ended = struck("typer.main", signal.SIGINT, ["models", "list"], home)
    assert (ended.code, ended.out, ended.err) == (130, "", "superfluid: interrupted\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_it_serves_whichever_of_its_streams_is_closed(
    tmp_path: Path, home: Path, closed: str
) -> None:
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    command = [sys.executable, "-m", "superfluid", "serve", model(tmp_path)]
    process = subprocess.Popen(
        [*shell, *command],
        env=environment(home),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with ended_after(process):
        url = until_served(process, home)
        assert httpx.get(f"{url}/models").json()["data"][0]["id"] == "m"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_it_serves_though_nobody_reads_what_it_prints(tmp_path: Path, home: Path) -> None:
    gone, output = os.pipe()
    os.close(gone)
    command = [sys.executable, "-m", "superfluid", "serve", model(tmp_path)]
    process = subprocess.Popen(command, env=environment(home), stdout=output, stderr=output)
    os.close(output)
    with ended_after(process):
        until_served(process, home)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@contextlib.contextmanager
def ended_after(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()


def until_served(process: subprocess.Popen[bytes], home: Path) -> str:
    """The URL of the one server of `home`, which `process` is, once it serves."""
    while process.poll() is None:
        for found in control.running(home / "state" / "servers"):
            if found.models[0].state == "serving":
                return found.url
        time.sleep(0.01)
    pytest.fail(f"it ended with {process.returncode}")


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate"
    path.touch()
    return path


@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGHUP, signal.SIGHUP), (signal.SIGUSR1, signal.SIGTERM), (signal.SIGTERM,)],
)
def test_what_ends_it_once_lets_a_running_answer_finish(
    tmp_path: Path, home: Path, gate: Path, numbers: tuple[signal.Signals, ...]
) -> None:
    orders = Orders(script=SCRIPT, gate=str(gate), step_s=0.01)
    with serving([model(tmp_path, orders)], home) as server, streaming(server, gate) as texts:
        for number in numbers:
            os.kill(server.pid, number)
            until_draining(server)
        assert complete(server).status_code == 503
        gate.touch()
        assert len("".join(texts)) == 200
        assert server.wait().code == 0


def test_a_hangup_is_ignored_where_it_was_told_to_be(tmp_path: Path, home: Path) -> None:
    program = (sys.executable, "-m", "superfluid")
    with serving([model(tmp_path)], home, python="nohup", program=program) as server:
        os.kill(server.pid, signal.SIGHUP)
        assert complete(server).status_code == 200
        assert httpx.get(f"{server.url}/health").json()["models"]["m"]["state"] == "serving"
        assert server.stop().code == 0


def test_a_second_signal_stops_at_once(tmp_path: Path, home: Path, gate: Path) -> None:
    orders = Orders(script=SCRIPT, gate=str(gate), step_s=0.01, ignore_term=True)
    words, program = [model(tmp_path, orders)], ("-c", PATIENT)
    with serving(words, home, program=program) as server, streaming(server, gate):
        left = workers(server)
        os.kill(server.pid, signal.SIGINT)
        until_draining(server)
        os.kill(server.pid, signal.SIGINT)
        assert server.wait().code == 0
        until_gone(left)


def test_a_signal_while_it_loads_ends_it(tmp_path: Path, home: Path) -> None:
    path = model(tmp_path, Orders(load_gate=str(tmp_path / "never")))
    process = subprocess.Popen(
        [sys.executable, "-m", "superfluid", "serve", "--port", "0", path],
        env=environment(home),
        stderr=subprocess.DEVNULL,
    )
    try:
        while not list(home.rglob("workers/*.json")):
            time.sleep(0.01)
        left = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        until_gone(left)
    finally:
        process.kill()
        process.wait()


def test_a_taken_port_is_named(tmp_path: Path, home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run(["serve", "--port", str(port), model(tmp_path)], home)
    assert ended.code == 1
    assert f"port {port} of 127.0.0.1 is taken" in ended.err
    assert "Traceback" not in ended.err


def test_a_name_serves_once_and_another_name_beside_it(tmp_path: Path, home: Path) -> None:
    path = model(tmp_path)
    with serving([path], home) as first:
        ended = run(["serve", "--port", "0", path], home)
        assert (ended.code, "another server called" in ended.err) == (1, True)
        with serving(["--name", "second", path], home) as second:
            assert complete(first).json()["choices"] == complete(second).json()["choices"]
        assert complete(first).status_code == 200


@pytest.mark.parametrize(
    ("content", "arguments", "code", "words"),
    [
        (b"PK\3\4", [], 3, "begins with 50 4b 03 04"),
        (b"SFFAKE1\n{", [], 3, "m.fake"),
        (b'SFFAKE1\n{"load_error": "does_not_fit"}', [], 3, "told to refuse"),
        (b'SFFAKE1\n{"load_error": "raise"}', [], 4, "ZeroDivisionError"),
        (b"SFFAKE1\n{}", ["--fake-broken", "yes"], 4, "told to be broken"),
        (b"SFFAKE1\n{}", ["--fake-mood", "plain"], 2, "did you mean --fake-mode"),
        (b"SFFAKE1\n{}", ["--fake-mode", "loud"], 2, "plain, odd"),
        (b"SFFAKE1\n{}", ["--runtime", "fakd"], 2, "did you mean fake"),
        (b"SFFAKE1\n{}", ["--runtime", "native"], 2, "native does not read"),
        (b"SFFAKE1\n{}", ["--host", "192.0.2.1"], 2, "cannot listen at 192.0.2.1"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_its_code(
    tmp_path: Path, home: Path, content: bytes, arguments: list[str], code: int, words: str
) -> None:
    path = tmp_path / "m.fake"
    path.write_bytes(content)
    ended = run(["serve", "--port", "0", *arguments, str(path), "--log-level", "error"], home)
    assert (ended.code, "Traceback" in ended.err) == (code, False)
    (line,) = ended.err.splitlines()
    assert words in line


def test_a_worker_that_dies_is_replaced_and_its_answer_goes_on(tmp_path: Path, home: Path) -> None:
    moment = Moment(act="signal", signal="SIGSEGV", tokens=20, once=str(tmp_path / "once"))
    mortal = model(tmp_path, Orders(script=SCRIPT, moments=(moment,)))
    with serving([mortal, "--sandbox", "none"], home) as server:
        whole = complete(server, tokens=60)
        assert whole.status_code == 200
        (dossier,) = home.rglob("dossiers/*.json")
        assert json.loads(dossier.read_text())["exit"].startswith("killed by SIGSEGV")
        assert complete(server, tokens=60).json()["choices"] == whole.json()["choices"]


def test_a_prompt_that_kills_the_engine_is_told_with_its_dossier(
    tmp_path: Path, home: Path
) -> None:
    with serving([model(tmp_path, Orders(script=SCRIPT, poison="!"))], home) as server:
        assert complete(server).status_code == 200
        body = {"model": "m", "prompt": "now!", "max_tokens": 5}
        failed = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert failed.status_code == 502
        newest = max(home.rglob("dossiers/*.json"), key=lambda path: path.stat().st_mtime)
        kept = json.loads(newest.read_text())
        assert kept["id"] in failed.text
        assert kept["sandbox"]["level"] == "strict"
        assert complete(server).status_code == 200
        assert len(workers(server)) == 1


def test_a_worker_that_gives_up_ends_the_server(tmp_path: Path, home: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    path = model(tmp_path, Orders(load_gate=str(gate)))
    with serving([path], home) as server:
        gate.unlink()
        killed: set[int] = set()
        while psutil.pid_exists(server.pid) and len(killed) < 5:
            for entry in home.rglob("workers/*.json"):
                if int(entry.stem) not in killed:
                    killed.add(int(entry.stem))
                    os.kill(int(entry.stem), signal.SIGKILL)
            time.sleep(0.01)
        ended = server.wait()
    assert ended.code == 1
    assert "failed 5 times, the last time: killed by SIGKILL" in ended.err
    assert "dossier" in ended.err


def test_a_fault_of_the_runtime_in_a_load_leaves_its_traceback(home: Path, tmp_path: Path) -> None:
    ended = run(["serve", model(tmp_path, Orders(load_error="raise")), "--port", "0"], home)
    assert ended.code == 4
    (record,) = home.rglob("dossiers/*.json")
    assert record.stem.rpartition("-")[2] in ended.err
    assert ended.err.count("\n") == 1
    assert any("ZeroDivisionError" in line for line in json.loads(record.read_text())["stderr"])


def test_a_sandbox_below_strict_that_nobody_asked_for_is_told(tmp_path: Path, home: Path) -> None:
    old = tmp_path / "old.py"
    old.write_text(
        "import superfluid_workerd.sandbox.landlock as landlock\n"
        "landlock.abi = lambda: 3\n"
        "from superfluid_workerd.entry import main\n"
        "main()\n"
    )
    command = f"{sys.executable} -P {old}"
    told = "sandbox: basic is the best here; missing: Landlock ABI 6 (scoped signals and sockets)"
    for arguments, worker, wanted in (
        ([], {"SUPERFLUID_WORKER_FAKE": command}, True),
        (["--sandbox", "basic"], {"SUPERFLUID_WORKER_FAKE": command}, False),
        ([], {}, False),
    ):
        with serving([model(tmp_path), *arguments], home, **worker) as server:
            assert (told in server.stop().out) is wanted


def test_a_debug_log_has_what_the_worker_printed(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = [model(tmp_path, Orders(stderr_bytes=1000)), "--log-level", "debug"]
    with serving([*arguments, "--log-file", str(log)], home) as server:
        assert complete(server).status_code == 200
    assert "superfluid.worker" in log.read_text()


def test_an_ordinary_log_says_little(home: Path, tmp_path: Path) -> None:
    with serving([model(tmp_path)], home) as server:
        assert complete(server).status_code == 200
        ended = server.stop()
    (line,) = ended.err.splitlines()
    assert "memory plan" in line


def test_more_connections_than_descriptors_wait_and_cost_no_worker(
    tmp_path: Path, home: Path
) -> None:
    program = ("-c", 'ulimit -Sn 100; exec "$@"', "sh", sys.executable, "-m", "superfluid")
    with serving([model(tmp_path)], home, python="sh", program=program) as server:
        (log,) = home.glob("stderr-*")
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with contextlib.ExitStack() as guests:
            for _ in range(200):
                guests.enter_context(socket.create_connection(address))
            while "connections wait to be taken" not in log.read_text():
                time.sleep(0.01)
            (first,) = workers(server)
            first.kill()
            while first.pid == (pid := serving_pid(home)) or pid == 0:
                time.sleep(0.01)
        assert complete(server).status_code == 200
        while "connections are taken again" not in log.read_text():
            time.sleep(0.01)
        ended = server.stop()
    assert (ended.code, "Traceback" in ended.err) == (0, False)
    assert ended.err.count("connections wait to be taken") == 1
    assert ended.err.count("connections are taken again") == 1


def serving_pid(home: Path) -> int:
    """The worker's process, 0 while none serves."""
    (found,) = control.running(home / "state" / "servers")[0].models
    return found.pid if found.state == "serving" else 0
