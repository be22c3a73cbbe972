"""The supervisor over real workers: the fake adapter's, and scripts that break the link's rules."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from superfluid_adapter_fake.orders import Act, Moment, Orders, write_model

from superfluid.catalog.workerd import Workerd
from superfluid.supervisor import host as host_module
from superfluid.supervisor import process as process_module
from superfluid.supervisor import worker as worker_module
from superfluid.supervisor.life import Limits
from superfluid.supervisor.states import LADDER, WorkerState
from superfluid_compat.errors import (
    ContractRefused,
    DoesNotFit,
    Draining,
    Fault,
    ModelError,
    Overloaded,
    RuntimeBroken,
    SuperfluidError,
    UnknownModel,
    WorkerDied,
    WorkerGaveUp,
)
from superfluid_workerd.link.frames import GenerationRequest, Text, Tokens
from support.house import GREEDY, QUICK, SCRIPT, Open, continued, fake_spec, reaches, runs


async def test_a_model_is_served_and_goes_cleanly(house: Open) -> None:
    served = house()
    await served.supervisor.served()
    assert served.supervisor.health()["status"] == "ok"
    (model,) = served.supervisor.models()
    assert (model.name, model.state) == ("m", "serving")
    assert model.description is not None
    assert model.description.context == 256
    assert await served.text() == "llo world. He"
    served.supervisor.drain(10.0)
    assert await served.supervisor.over() is None
    assert served.dossiers() == 0


async def test_tokens_there_and_back(house: Open) -> None:
    supervisor = house().supervisor
    ids = await supervisor.tokenize("m", Text(text="häß", add_special=False), special=False)
    assert b"".join(ids.pieces) == "häß".encode()
    assert (await supervisor.detokenize("m", ids.tokens)).text == "häß"
    with pytest.raises(SuperfluidError):
        await supervisor.detokenize("m", [1 << 30])


async def test_another_name_is_unknown_and_the_known_are_named(house: Open) -> None:
    request = GenerationRequest(prompt=Tokens(tokens=[1]))
    with pytest.raises(UnknownModel, match="no model is called x, here are m"):
        await house().supervisor.generate("x", request)


async def test_a_slow_start_is_waited_for_and_shown(house: Open, tmp_path: Path) -> None:
    served = house(Orders(script=SCRIPT, load_gate=str(tmp_path / "gate")))
    waiting = asyncio.create_task(served.text())
    await reaches(served, WorkerState.MAPPED)
    assert served.supervisor.health()["status"] == "loading"
    (tmp_path / "gate").touch()
    assert await waiting == "llo world. He"


async def test_a_request_waits_for_a_worker_within_a_bound(
    house: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = house(Orders(load_gate=str(tmp_path / "gate")))
    monkeypatch.setattr(served.host, "_wait_s", 0.2)
    with pytest.raises(Overloaded, match=r"m is not loaded after 0.2 s") as caught:
        await served.text()
    assert caught.value.http_status == 503


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL", "SIGABRT"])
async def test_a_death_mid_stream_is_a_pause_and_leaves_a_dossier(
    house: Open, tmp_path: Path, name: str
) -> None:
    once = str(tmp_path / "once")
    moment = Moment(act="signal", signal=name, tokens=10, once=once)
    served = house(Orders(script=SCRIPT, moments=(moment,)))
    assert await served.text(tokens=40) == continued(40)
    dossier = served.dossier()
    assert f"killed by {name}" in dossier.reason
    assert dossier.then == "another worker after 0.01 s; 1 streams kept"
    assert (dossier.stage, dossier.code) == ("serving", -getattr(signal, name))
    assert dossier.options == {"lanes": {"value": 4, "origin": "flag"}}
    assert dossier.peak_rss_bytes > 1 << 20
    assert served.host.pid != dossier.pid
    assert served.dossiers() == 1


async def test_an_exit_mid_stream_costs_no_stream_anything(house: Open, tmp_path: Path) -> None:
    moment = Moment(act="exit", exit=7, tokens=30, once=str(tmp_path / "once"))
    served = house(Orders(script=SCRIPT, moments=(moment,)))
    await served.supervisor.served()
    answers = await asyncio.gather(*(served.text(60) for _ in range(6)))
    assert set(answers) == {continued(60)}
    assert served.dossier().exit == "exited with code 7"


async def test_a_step_that_fails_costs_its_lanes_alone(house: Open, tmp_path: Path) -> None:
    moment = Moment(act="fault", tokens=10, once=str(tmp_path / "once"))
    served = house(Orders(script=SCRIPT, moments=(moment,)))
    with pytest.raises(Fault):
        await served.text(40)
    before = served.host.pid
    assert await served.text() == "llo world. He"
    assert served.host.pid == before
    assert served.dossiers() == 0


async def test_a_runtime_that_lost_its_state_is_replaced(house: Open, tmp_path: Path) -> None:
    moment = Moment(act="fatal", tokens=10, once=str(tmp_path / "once"))
    served = house(Orders(script=SCRIPT, moments=(moment,)))
    assert await served.text(40) == continued(40)
    assert served.dossiers() == 1


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("got={'sandbox': 'strict'}", "description of the model does not read"),
        ("got={'sandbox': {'level': ['strict']}}", "description of the model does not read"),
        ("got={'sandbox': {'level': 'none', 'missing': 5}}", "description of the model does not"),
        ("got={'x': msgspec.msgpack.Ext(1, b'x')}", "description of the model does not read"),
        ("got={'x': float('nan')}", "description of the model does not read"),
    ],
)
async def test_a_record_that_is_none_costs_its_worker_and_nothing_else(
    house: Open, lie: str, words: str
) -> None:
    """Every try ends in a dossier, and the server in giving up; nothing waits for ever."""
    served = house(
        script=f"""
        import msgspec
        greet()
        send(Ready(description=Description(facts=Facts(format="f", architecture="a"),
            adapter="fake", context=9, lanes=1, vocabulary=9, template="none",
            record=LoadRecord(asked={{}}, {lie}))))
        for _ in messages: pass
        """
    )
    with pytest.raises(WorkerGaveUp, match=words):
        await served.supervisor.served()
    assert served.dossiers() == QUICK.failures
    assert served.host.report().state == "gave-up"


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        ("Delta(stream=asked.stream, tokens=[1] * 9, text='x')", "committed 9 tokens"),
        ("Delta(stream=asked.stream, tokens=[1], text='x' * 9999)", "9999 characters"),
    ],
)
async def test_more_than_was_asked_for_costs_its_worker(house: Open, turn: str, words: str) -> None:
    served = house(
        script=f"""
        ready()
        for asked in messages:
            if isinstance(asked, Generate):
                send(Prompted(stream=asked.stream, tokens=[1], cached=0))
                send(Turn(deltas=[{turn}], stats=TurnStats()))
        """
    )
    with pytest.raises((WorkerDied, WorkerGaveUp)):
        await served.text(tokens=4)
    assert words in served.dossier().reason


async def test_a_loop_that_hangs_is_ended_though_its_threads_answer(
    house: Open, tmp_path: Path
) -> None:
    still = dict.fromkeys(LADDER, 60.0) | {WorkerState.SERVING: 4.0}
    moment = Moment(act="hang", tokens=10, once=str(tmp_path / "once"))
    served = house(
        Orders(script=SCRIPT, moments=(moment,)),
        limits=Limits(still_s=still, ping_s=0.1, backoff_s=0.01),
    )
    assert await served.text(40) == continued(40)
    assert "made no progress for 4 s while serving" in served.dossier().reason


async def test_a_stopped_worker_is_ended(house: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "TERM_GRACE_S", 0.2)
    still = dict.fromkeys(LADDER, 60.0) | {WorkerState.SERVING: 4.0}
    served = house(limits=Limits(still_s=still, ping_s=0.1, backoff_s=0.01))
    await served.supervisor.served()
    os.kill(served.note(), signal.SIGSTOP)
    assert await served.text() == continued(13)
    assert served.dossier().code == -signal.SIGKILL


@pytest.mark.parametrize(
    ("act", "words"), [("garbage", "frame"), ("half-frame", "into a frame|killed|exited")]
)
async def test_a_worker_that_writes_rubbish_is_ended_and_the_daemon_goes_on(
    house: Open, tmp_path: Path, act: Act, words: str
) -> None:
    moment = Moment(act=act, tokens=10, once=str(tmp_path / "once"))
    served = house(Orders(script=SCRIPT, moments=(moment,)))
    assert await served.text(40) == continued(40)
    assert served.dossier().stage == "serving"
    assert re.search(words, served.dossier().reason)


async def test_a_stderr_flood_stops_nothing_and_its_end_is_kept(
    house: Open, tmp_path: Path
) -> None:
    moment = Moment(act="signal", tokens=10, once=str(tmp_path / "once"))
    served = house(Orders(script=SCRIPT, moments=(moment,), stderr_bytes=8 << 20))
    assert await served.text(40) == continued(40)
    dossier = served.dossier()
    assert "x" * 63 in dossier.stderr
    assert sum(map(len, dossier.stderr)) < 20_000


async def test_a_dossier_holds_nothing_of_prompt_or_answer(house: Open, tmp_path: Path) -> None:
    moment = Moment(act="signal", tokens=30, once=str(tmp_path / "once"))
    served = house(Orders(script="very private answer ", moments=(moment,)))
    await served.text(60, prompt="a secret prompt")
    (path,) = served.folders.dossiers.iterdir()
    text = path.read_text()
    assert "secret" not in text
    assert "private" not in text
    assert path.stat().st_mode & 0o777 == 0o600


async def test_deaf_to_sigterm_with_a_grandchild_it_goes_all_the_same(
    house: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "TERM_GRACE_S", 0.2)
    note = tmp_path / "grandchild"
    served = house(Orders(script=SCRIPT, ignore_term=True, grandchild=str(note)))
    await served.supervisor.served()
    served.note()
    grandchild = int(note.read_text())
    assert runs(grandchild)
    served.supervisor.halt()
    await served.supervisor.over()
    while runs(grandchild):
        await asyncio.sleep(0.01)


async def test_a_refused_load_is_final_and_says_why(house: Open) -> None:
    served = house(Orders(load_error="does_not_fit"))
    with pytest.raises(DoesNotFit, match="told to refuse"):
        await served.supervisor.served()
    assert isinstance(await served.supervisor.over(), DoesNotFit)
    assert served.dossiers() == 0
    with pytest.raises(DoesNotFit):
        await served.text()


async def test_a_worker_that_dies_at_every_load_ends_in_giving_up(
    house: Open, tmp_path: Path
) -> None:
    served = house(Orders(load_gate=str(tmp_path / "gate")))
    for _ in range(QUICK.failures):
        await reaches(served, WorkerState.MAPPED)
        os.kill(served.note(), signal.SIGSEGV)
        await reaches(served, WorkerState.BACKOFF, WorkerState.GAVE_UP)
    with pytest.raises(WorkerGaveUp, match="failed 3 times, the last time: killed by SIGSEGV") as c:
        await served.supervisor.served()
    assert c.value.dossier == served.dossier().id
    assert served.dossier().stage == "mapped"
    assert len(served.pids) == served.dossiers() == QUICK.failures
    assert served.supervisor.health()["status"] == "unavailable"


@pytest.mark.parametrize(("code", "kind"), [(3, ModelError), (4, RuntimeBroken)])
async def test_an_exit_code_at_load_that_is_final_stops_the_loop(
    house: Open, code: int, kind: type[SuperfluidError]
) -> None:
    served = house(script=f"greet(); print('why not', file=sys.stderr); os._exit({code})")
    with pytest.raises(kind, match=f"exited with code {code}") as caught:
        await served.supervisor.served()
    assert served.dossiers() == 1
    assert served.dossier().stderr == ["why not"]
    assert caught.value.dossier == served.dossier().id


async def test_another_link_number_is_refused_by_number(house: Open) -> None:
    served = house(script="send(Hello(link=99)); time.sleep(3600)")
    with pytest.raises(ContractRefused, match="link 99, this build speaks link 2") as caught:
        await served.supervisor.served()
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("link.sendall(b'\\xff\\xff\\xff\\xff'); time.sleep(3600)", "4294967295 bytes was announ"),
        ("link.sendall(b'\\0\\0\\0\\1\\xc1'); time.sleep(3600)", "could not be read"),
        ("link.sendall(b'\\0\\0\\0\\x09half'); link.close(); time.sleep(3600)", "into a frame"),
        ("link.sendall(b'\\0\\0\\0\\x09half'); os._exit(1)", "into a frame"),
        ("send(Pong(number=1, ticks=1, stats=TurnStats()))\ntime.sleep(3600)", "while spawned"),
        ("greet(); send(Hello())\ntime.sleep(3600)", "second Hello while handshaken"),
        ("greet(); link.close(); time.sleep(3600)", "closed its link and stayed"),
        ("send(Shutdown()); time.sleep(3600)", "could not be read"),
    ],
)
async def test_a_breach_of_the_link_ends_that_worker(house: Open, script: str, reason: str) -> None:
    served = house(script=script, limits=Limits(failures=1))
    with pytest.raises(WorkerGaveUp, match=reason):
        await served.supervisor.served()
    assert reason in served.dossier().reason


async def test_a_worker_that_does_not_read_its_link_is_ended(
    house: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_MOST_UNSENT", 1 << 20)
    served = house(script="ready(); time.sleep(3600)")
    with pytest.raises(WorkerDied, match="did not read its link"):
        await served.supervisor.tokenize("m", Text(text="x" * (4 << 20)), special=False)


async def test_what_a_worker_runs_is_looked_at_while_all_else_goes_on(
    house: Open, tmp_path: Path
) -> None:
    """A restart whose recheck takes long holds up nobody but those who wait for the worker."""
    passed, gate = asyncio.Event(), asyncio.Event()
    asked = 0

    async def look() -> None:
        passed.set()
        await gate.wait()

    def recheck() -> Coroutine[Any, Any, None] | None:
        nonlocal asked
        asked += 1
        return look() if asked == 2 else None

    served = house(spec=replace(fake_spec(tmp_path), recheck=recheck))
    await served.supervisor.served()
    os.kill(served.note(), signal.SIGKILL)
    waiting = asyncio.create_task(served.text())
    await passed.wait()
    assert served.supervisor.health()["status"] != "ok"
    assert not waiting.done()
    gate.set()
    assert await waiting == "llo world. He"
    assert (asked, served.host.spawned) == (2, 2)


@pytest.mark.parametrize("way", ["drain", "kill"])
async def test_an_end_while_what_a_worker_runs_is_looked_at(
    way: str, house: Open, tmp_path: Path
) -> None:
    passed, left = asyncio.Event(), asyncio.Event()

    async def look() -> None:
        passed.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    served = house(spec=replace(fake_spec(tmp_path), recheck=look))
    await passed.wait()
    if way == "drain":
        served.supervisor.drain(10.0)
    else:
        served.supervisor.kill()
    await served.supervisor.over()
    assert left.is_set()
    assert served.host.pid is None


async def test_what_keeps_a_worker_from_starting_is_said_by_who_looked(
    house: Open, tmp_path: Path
) -> None:
    async def look() -> None:
        raise ContractRefused("the library has contract 1", fix="get another")

    served = house(spec=replace(fake_spec(tmp_path), recheck=look))
    problem = await served.supervisor.over()
    assert isinstance(problem, RuntimeBroken)
    assert "the library has contract 1" in problem.message
    assert problem.fix == "get another"


async def test_a_worker_that_cannot_be_started_is_final(house: Open, tmp_path: Path) -> None:
    served = house(workerd=Workerd((str(tmp_path / "none"),)))
    with pytest.raises(RuntimeBroken, match="could not be started") as caught:
        await served.supervisor.served()
    dossier = served.dossier()
    assert caught.value.dossier == dossier.id
    assert (dossier.pid, dossier.exit, dossier.code) == (0, "never started", None)
    assert (dossier.stage, dossier.then) == ("spawned", "no further try")
    assert "No such file or directory" in dossier.reason
    assert served.dossiers() == 1


async def test_each_try_to_start_a_worker_that_is_short_of_something_leaves_a_dossier(
    house: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", none_left)
    served = house()
    with pytest.raises(WorkerGaveUp, match="Too many open files") as caught:
        await served.supervisor.served()
    assert (
        caught.value.fix == "raise the limit of open files (ulimit -n), or end what holds so many"
    )
    assert served.dossiers() == QUICK.failures
    assert caught.value.dossier == served.dossier().id
    assert "gave up after failure 3" in served.dossier().then


async def test_streams_are_bounded_in_number(
    house: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "MOST_STREAMS", 2)
    served = house(Orders(script=SCRIPT, gate=str(tmp_path / "gate")))
    request = GenerationRequest(prompt=Text(text="ab"), sampling=GREEDY, max_tokens=5)
    streams = [await served.supervisor.generate("m", request) for _ in range(2)]
    with pytest.raises(Overloaded, match="2 streams run or wait"):
        await served.supervisor.generate("m", request)
    await streams[0].close()
    streams.append(await served.supervisor.generate("m", request))
    (tmp_path / "gate").touch()
    assert [delta.finish async for delta in streams[2]][-1] == "length"
    await streams[1].close()


async def test_a_load_without_progress_is_ended_at_its_stage(house: Open) -> None:
    limits = Limits(still_s=dict.fromkeys(LADDER, 60.0) | {WorkerState.PROBED: 0.3}, failures=1)
    served = house(script="greet(); send(Stage(stage='probed')); time.sleep(3600)", limits=limits)
    with pytest.raises(WorkerGaveUp, match=r"no progress for 0.3 s while probed"):
        await served.supervisor.served()


async def test_frames_of_unknown_streams_are_nobodys(house: Open) -> None:
    served = house(
        script="""
        ready()
        send(Prompted(stream=999, tokens=[1]))
        send(Turn(deltas=[Delta(stream=999, tokens=[1], finish="stop")], stats=TurnStats()))
        send(StreamFailed(stream=999, error=Refusal(code="fault", message="m")))
        send(Tokenized(request=999, tokens=[], pieces=[]))
        for message in messages:
            if isinstance(message, Tokenize):
                send(Tokenized(request=message.request, tokens=[5], pieces=[b"x"]))
            elif isinstance(message, Shutdown):
                os._exit(0)
        """
    )
    answer = await served.supervisor.tokenize("m", Text(text="t"), special=False)
    assert answer.tokens == [5]


async def test_a_closed_stream_is_cancelled_in_the_worker(house: Open, tmp_path: Path) -> None:
    served = house(Orders(script=SCRIPT, gate=str(tmp_path / "gate"), context=1 << 16))
    request = GenerationRequest(prompt=Text(text="ab"), sampling=GREEDY, max_tokens=60_000)
    starting = [asyncio.create_task(served.supervisor.generate("m", request)) for _ in range(4)]
    streams = await asyncio.gather(*starting)
    for stream in streams:
        await stream.close()
        await stream.close()
    (tmp_path / "gate").touch()
    assert await served.text() == "llo world. He"
    assert served.host.stats.free_lanes >= 3


async def test_a_caller_that_goes_away_before_its_prompt_is_accepted(house: Open) -> None:
    served = house(
        script="""
        ready()
        for message in messages:
            if isinstance(message, Cancel):
                send(Tokenized(request=message.stream + 1, tokens=[message.stream], pieces=[]))
            elif isinstance(message, Shutdown):
                os._exit(0)
        """
    )
    await served.supervisor.served()
    request = GenerationRequest(prompt=Text(text="t"))
    caller = asyncio.create_task(served.supervisor.generate("m", request))
    await asyncio.sleep(0)
    asking = asyncio.create_task(served.supervisor.tokenize("m", Text(text="t"), special=False))
    await asyncio.sleep(0)
    caller.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await caller
    assert (await asking).tokens == [1]


async def test_a_drain_lets_streams_finish_and_takes_no_new_ones(
    house: Open, tmp_path: Path
) -> None:
    served = house(Orders(script=SCRIPT, gate=str(tmp_path / "gate")))
    request = GenerationRequest(
        prompt=Text(text="ab", add_special=False), sampling=GREEDY, max_tokens=13
    )
    stream = await served.supervisor.generate("m", request)
    served.note()
    served.supervisor.drain(60.0)
    with pytest.raises(Draining):
        await served.text()
    (tmp_path / "gate").touch()
    assert "".join([delta.text async for delta in stream]) == "llo world. He"
    assert await served.supervisor.over() is None
    assert served.dossiers() == 0


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("first", ["drain", "death"])
async def test_a_death_beside_a_drain_is_a_pause_too(
    house: Open, tmp_path: Path, number: signal.Signals, first: str
) -> None:
    served = house(Orders(script=SCRIPT, gate=str(tmp_path / "gate")))
    request = GenerationRequest(
        prompt=Text(text="ab", add_special=False), sampling=GREEDY, max_tokens=13
    )
    stream = await served.supervisor.generate("m", request)
    if first == "drain":
        served.supervisor.drain(60.0)
    os.kill(served.note(), number)
    while not served.dossiers():
        await asyncio.sleep(0.002)
    if first == "death":
        served.supervisor.drain(60.0)
    with pytest.raises(Draining):
        await served.text()
    (tmp_path / "gate").touch()
    assert "".join([delta.text async for delta in stream]) == continued(13)
    assert await served.supervisor.over() is None
    assert served.dossier().then == "another worker after 0.01 s; 1 streams kept"
    assert served.host.spawned == 2


@pytest.mark.parametrize("ends", ["bound", "client"])
async def test_a_drain_while_no_worker_serves_ends_with_its_bound_or_its_last_client(
    house: Open, tmp_path: Path, ends: str
) -> None:
    load = tmp_path / "load"
    load.touch()
    served = house(Orders(script=SCRIPT, gate=str(tmp_path / "gate"), load_gate=str(load)))
    request = GenerationRequest(prompt=Text(text="ab"), sampling=GREEDY)
    stream = await served.supervisor.generate("m", request)
    load.unlink()
    os.kill(served.note(), signal.SIGKILL)
    await reaches(served, WorkerState.MAPPED)
    served.note()
    served.supervisor.drain(0.2 if ends == "bound" else 60.0)
    assert served.host.state is WorkerState.MAPPED
    if ends == "client":
        await stream.close()
    assert await served.supervisor.over() is None
    if ends == "bound":
        with pytest.raises(Draining):
            [delta async for delta in stream]


async def test_what_has_served_outlives_loads_that_are_refused(house: Open, tmp_path: Path) -> None:
    """As when memory is short, or files change, while a worker is replaced."""
    orders = Orders(script=SCRIPT, gate=str(tmp_path / "gate"))
    served = house(orders, limits=Limits(backoff_s=0.05, failures=9))
    (tmp_path / "gate").touch()
    assert await served.text() == continued(13)
    (tmp_path / "gate").unlink()
    waiting = asyncio.create_task(served.text())
    while not served.host.report().streams:
        await asyncio.sleep(0.002)
    model = write_model(tmp_path / "m.fake", Orders(load_error="does_not_fit"))
    os.kill(served.note(), signal.SIGKILL)
    while served.host.spawned < 4:
        await asyncio.sleep(0.002)
    assert "told to refuse" in served.dossier().reason
    write_model(model, orders)
    (tmp_path / "gate").touch()
    assert await waiting == continued(13)


async def test_a_drain_is_bounded(house: Open, tmp_path: Path) -> None:
    served = house(Orders(script=SCRIPT, gate=str(tmp_path / "gate")))
    request = GenerationRequest(prompt=Text(text="ab"), sampling=GREEDY)
    stream = await served.supervisor.generate("m", request)
    served.note()
    served.supervisor.drain(0.1)
    assert await served.supervisor.over() is None
    ends = []
    with contextlib.suppress(Draining):
        ends = [delta.finish async for delta in stream]
    assert ends in ([], ["cancelled"])


@pytest.mark.parametrize("busy", [True, False])
async def test_a_drain_beside_a_stopped_worker_ends_at_its_bound(
    house: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    """No grace is added to it, however long each would be."""
    monkeypatch.setattr(process_module, "TERM_GRACE_S", 3600.0)
    limits = Limits(shutdown_s=3600.0)
    served = house(Orders(script=SCRIPT, gate=str(tmp_path / "gate")), limits=limits)
    await served.supervisor.served()
    request = GenerationRequest(prompt=Text(text="ab"), sampling=GREEDY)
    stream = await served.supervisor.generate("m", request) if busy else None
    os.kill(served.note(), signal.SIGSTOP)
    served.supervisor.drain(0.1)
    assert await served.supervisor.over() is None
    assert served.dossiers() == 0
    if stream is not None:
        with pytest.raises(Draining):
            [delta async for delta in stream]


async def test_the_daemon_knows_no_engine() -> None:
    """In a process of its own: what serving imports."""
    code = (
        "import sys, superfluid.daemon, superfluid.http.app, uvicorn\n"
        "bad = {'numpy', 'numba', 'jinja2', 'tokenizers', 'superfluid_adapter_native',"
        " 'superfluid_workerd.adapter'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await child.wait() == 0
