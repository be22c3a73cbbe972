"""The worker as a real process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import psutil
import pytest
from superfluid_adapter_fake.orders import Moment, Orders
from superfluid_adapter_fake.tokenizer import VOCABULARY

from superfluid_compat.errors import FrameTooLarge, LinkClosed
from superfluid_workerd.link.frames import (
    Cancel,
    Detokenize,
    Detokenized,
    GenerationRequest,
    Hello,
    Load,
    LoadFailed,
    Messages,
    Ping,
    Pong,
    Prompt,
    Prompted,
    Ready,
    RequestFailed,
    Shutdown,
    Stage,
    StreamFailed,
    Text,
    Tokenize,
    Tokenized,
    Tokens,
    Turn,
)
from support.turn_loop import alone, request
from support.worker import Worker


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with Worker(tmp_path) as running:
        yield running


def test_hello_load_generate_shutdown(worker: Worker) -> None:
    worker.load(lanes=3)
    assert isinstance(worker.all[0], Hello)
    assert (worker.all[0].adapter, worker.all[0].pid) == ("fake", worker.process.pid)
    ready = worker.all[-1]
    assert isinstance(ready, Ready)
    assert ready.description.lanes == 3
    got = {"context": 256, "lanes": 3, "sandbox": {"level": "none"}}
    assert ready.description.record.got == got
    wanted = request("hello", 9)
    worker.generate(1, wanted)
    deltas = list(worker.deltas(1))
    assert [token for delta in deltas for token in delta.tokens] == alone(wanted, Orders())
    worker.send(Shutdown())
    assert worker.exit_code() == 0
    assert (worker.folder / "stdout").read_bytes() == b""


def test_another_link_number_is_refused_by_number(worker: Worker) -> None:
    worker.send(Hello(link=99))
    assert worker.exit_code() == 4
    assert "link 99" in worker.log.read_text()
    assert "link 2" in worker.log.read_text()


def test_a_first_frame_that_is_no_hello_ends_the_worker(worker: Worker) -> None:
    worker.send(Ping(number=1))
    assert worker.exit_code() == 1
    assert "wanted Hello" in worker.log.read_text()


@pytest.mark.parametrize(
    ("orders", "code", "exit_code"),
    [
        (Orders(load_error="model_damaged"), "model_damaged", 3),
        (Orders(load_error="does_not_fit"), "does_not_fit", 3),
        (Orders(load_error="raise"), "runtime_broken", 4),
        (Orders(max_sequences=1), "does_not_fit", 3),
    ],
)
def test_a_load_that_fails_says_why(
    worker: Worker, orders: Orders, code: str, exit_code: int
) -> None:
    worker.load(orders, wait=False)
    assert worker.until(LoadFailed).error.code == code
    assert worker.exit_code() == exit_code


@pytest.mark.parametrize(
    ("orders", "asked", "message"),
    [
        (Orders(silent=True, context=64), {"context": 65},
         "a context of 65 tokens was asked for, fake holds 64"),
        (Orders(context=256, tokens=100), {"context": 101},
         "a context of 101 tokens was asked for, fake holds 100"),
        (Orders(silent=True, max_sequences=3), {"lanes": 4},
         "4 lanes were asked for, fake holds 3 sequences at once"),
    ],
)  # fmt: skip
def test_a_load_that_falls_short_in_silence_is_refused(
    worker: Worker, orders: Orders, asked: dict[str, int], message: str
) -> None:
    worker.load(orders, wait=False, context=asked.get("context", 0), lanes=asked.get("lanes", 2))
    error = worker.until(LoadFailed).error
    assert (error.code, error.message, error.param) == ("does_not_fit", message, next(iter(asked)))
    assert worker.exit_code() == 3


@pytest.mark.parametrize(
    ("orders", "asked"),
    [
        (Orders(silent=True, context=64), {"context": 64}),
        (Orders(silent=True, context=64), {"context": 0}),
        (Orders(silent=True, max_sequences=3), {"lanes": 3}),
    ],
)
def test_a_load_that_grants_what_was_asked_serves(
    worker: Worker, orders: Orders, asked: dict[str, int]
) -> None:
    worker.load(orders, context=asked.get("context", 0), lanes=asked.get("lanes", 2))
    ready = worker.all[-1]
    assert isinstance(ready, Ready)
    assert ready.description.record.asked.items() >= {**asked, "mode": "plain"}.items()
    assert ready.description.record.got["context"] == orders.context


def test_a_foreign_exception_leaves_its_traceback_in_the_log(worker: Worker) -> None:
    worker.load(Orders(load_error="raise"), wait=False)
    assert "ZeroDivisionError" in worker.until(LoadFailed).error.message
    assert worker.exit_code() == 4
    assert "Traceback" in worker.log.read_text()


def test_an_unknown_option_is_refused_before_the_model_is_touched(worker: Worker) -> None:
    folder = str(worker.folder)
    options = {"mod": "odd"}
    worker.send(
        Hello(), Load(model="none", name="m", scratch=folder, shared=folder, options=options)
    )
    error = worker.until(LoadFailed).error
    assert (error.code, error.fix) == ("unknown_option", "did you mean mode?")
    assert worker.exit_code() == 2


def test_what_an_engine_prints_goes_to_the_log(worker: Worker) -> None:
    worker.load(Orders(print_stdout=True, stderr_bytes=300_000))
    assert (worker.folder / "stdout").read_bytes() == b""
    assert "chatters on stdout" in worker.log.read_text()
    assert worker.log.stat().st_size > 300_000


def test_progress_of_a_load_is_told(worker: Worker) -> None:
    worker.load()
    stages = [it for it in worker.all if isinstance(it, Stage)]
    assert [it.stage for it in stages] == ["probed", "mapped", "mapped", "warmed"]
    assert (stages[-2].done, stages[-2].total) == (10, 10)


def test_no_collection_during_a_turn_looks_at_what_the_load_made(worker: Worker) -> None:
    made = 200_000
    worker.load(Orders(load_objects=made, moments=(Moment(act="count", tokens=2),)))
    worker.generate(1, request("p", 3))
    assert len(list(worker.deltas(1))) == 3
    (looked_at,) = re.findall(r"^(\d+) objects to look at$", worker.log.read_text(), re.MULTILINE)
    assert int(looked_at) < made


def test_a_cancel_is_heard_within_the_prompt(worker: Worker) -> None:
    gate = worker.folder / "gate"
    worker.load(Orders(gate=str(gate)))
    worker.generate(1, request("p" * 100, 50))
    worker.until(Prompted)
    worker.send(Cancel(stream=1))
    (delta,) = worker.deltas(1)
    assert (delta.tokens, delta.finish) == ([], "cancelled")
    gate.touch()
    worker.generate(2, request("q", 3))
    assert len(list(worker.deltas(2))) == 3


def test_a_ping_is_answered_while_a_step_runs(worker: Worker) -> None:
    worker.load(Orders(gate=str(worker.folder / "gate")))
    worker.generate(1, request("p", 5))
    worker.until(Prompted)
    first = ticks = _ticks(worker, 0)
    for number in range(1, 1000):
        ticks = _ticks(worker, number)
        if ticks > first:
            break
    assert ticks > first


def _ticks(worker: Worker, number: int) -> int:
    worker.send(Ping(number=number))
    pong = worker.until(Pong)
    assert (pong.number, pong.stats.turns) == (number, 0)
    return pong.ticks


def test_a_deadline_counts_from_arrival(worker: Worker) -> None:
    worker.load(Orders(gate=str(worker.folder / "gate")))
    worker.generate(1, msgspec.structs.replace(request("p", 5), deadline_s=0.05))
    (delta,) = worker.deltas(1)
    assert (delta.tokens, delta.finish) == ([], "cancelled")


def test_many_streams_share_turns_and_each_gets_its_own(worker: Worker) -> None:
    gate = worker.folder / "gate"
    worker.load(Orders(gate=str(gate)), lanes=4)
    wanted = {n: request(f"stream {n}", 5 + n) for n in range(8)}
    for number, ask in wanted.items():
        worker.generate(number, ask)
    gate.touch()
    got: dict[int, list[int]] = {n: [] for n in wanted}
    left = set(wanted)
    while left:
        for delta in worker.until(Turn).deltas:
            got[delta.stream] += delta.tokens
            left -= {delta.stream} if delta.finish else set()
    assert got == {n: alone(ask, Orders()) for n, ask in wanted.items()}
    worker.send(Ping(number=1))
    stats = worker.until(Pong).stats
    assert stats.free_lanes == 4
    assert stats.seats / stats.turns > 2


def test_a_failed_step_costs_its_streams_and_serving_goes_on(worker: Worker) -> None:
    worker.load(Orders(moments=(Moment(act="raise", tokens=20),)))
    worker.generate(1, request("a" * 10, 50))
    assert worker.until(StreamFailed).error.code == "fault"
    wanted = request("b", 4)
    worker.generate(2, wanted)
    assert [t for delta in worker.deltas(2) for t in delta.tokens] == alone(wanted, Orders())


@pytest.mark.parametrize(
    ("moment", "code"),
    [
        (Moment(act="signal", tokens=9, signal="SIGSEGV"), -signal.SIGSEGV),
        (Moment(act="exit", tokens=9, exit=7), 7),
        (Moment(act="fatal", tokens=9), 1),
    ],
)
def test_the_fake_dies_as_ordered(worker: Worker, moment: Moment, code: int) -> None:
    worker.load(Orders(moments=(moment,)))
    worker.generate(1, request("abc", 50))
    assert sum(len(delta.tokens) for delta in worker.deltas(1)) == 6
    assert worker.exit_code() == code


@pytest.mark.parametrize(("act", "error"), [("garbage", FrameTooLarge), ("half-frame", LinkClosed)])
def test_the_fake_writes_what_no_daemon_can_read(
    worker: Worker, act: Literal["garbage", "half-frame"], error: type[Exception]
) -> None:
    worker.load(Orders(moments=(Moment(act=act, tokens=9),)))
    worker.generate(1, request("abc", 50))
    with pytest.raises(error):
        list(worker.deltas(1))


def test_requests_that_cannot_run_are_refused_alone(worker: Worker) -> None:
    worker.load()
    worker.generate(1, request("p" * 300))
    error = worker.until(StreamFailed).error
    assert error.code == "context_length_exceeded"
    assert "300" in error.message
    assert "256" in error.message
    worker.generate(
        2, GenerationRequest(prompt=Messages(messages=[{"role": "user", "content": "x"}]))
    )
    assert worker.until(StreamFailed).error.code == "chat_unsupported"
    worker.generate(3, request([7, 9999]))
    assert worker.until(StreamFailed).error.code == "invalid_value"


def test_tokenize_and_detokenize(worker: Worker) -> None:
    worker.load()
    worker.send(
        Tokenize(request=1, prompt=Text(text="hé")),
        Detokenize(request=2, tokens=[104, 0xC3, 0xA9]),
        Tokenize(request=3, prompt=Tokens(tokens=[-4])),
        Detokenize(request=4, tokens=[99999]),
    )
    tokenized = worker.until(Tokenized)
    assert tokenized.tokens == [256, 104, 0xC3, 0xA9]
    assert tokenized.pieces == [b"<bos>", b"h", b"\xc3", b"\xa9"]
    assert worker.until(Detokenized).text == "hé"
    for number, token, param in ((3, -4, "prompt"), (4, 99999, "tokens")):
        failed = worker.until(RequestFailed)
        assert (failed.request, failed.error.param) == (number, param)
        assert failed.error.message.startswith(f"token {token} is none of the model's")


def test_the_environment_bounds_the_seats(tmp_path: Path) -> None:
    with Worker(tmp_path, SUPERFLUID_MAX_SEATS="1") as worker:
        worker.load(lanes=4)
        for number in range(3):
            worker.generate(number, request("x", 4))
        for _ in range(3):
            worker.until(Turn, lambda turn: any(delta.finish for delta in turn.deltas))
        worker.send(Ping(number=1))
        stats = worker.until(Pong).stats
        assert stats.seats == stats.turns


@pytest.mark.parametrize("stage", ["hello", "loading", "serving", "stepping"])
def test_a_worker_exits_when_its_link_closes(worker: Worker, stage: str) -> None:
    gate = str(worker.folder / "gate")
    match stage:
        case "hello":
            worker.until(Hello)
        case "loading":
            worker.load(Orders(load_gate=gate), wait=False)
            worker.until(Stage)
        case "serving":
            worker.load()
        case _:
            worker.load(Orders(moments=(Moment(act="hang", tokens=2),)))
            worker.generate(1, request("abc"))
            worker.until(Prompted)
    worker.channel.close()
    assert worker.exit_code() == 0


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\0\0\0\x03abc", b"\0\0\0\x02\x91\x01"], ids=repr
)
def test_garbage_on_the_link_ends_the_worker(worker: Worker, data: bytes) -> None:
    worker.load()
    worker.channel.sendall(data)
    assert worker.exit_code() == 1
    assert "frame" in worker.log.read_text()


def test_a_worker_that_can_tell_nobody_why_ends_all_the_same(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with Worker(tmp_path, stderr=writing) as worker:
        os.close(writing)
        worker.load()
        worker.channel.sendall(b"\xff\xff\xff\xff")
        assert worker.exit_code() == 1


def test_half_a_frame_ends_the_worker(worker: Worker) -> None:
    worker.load()
    worker.channel.sendall(b"\0\0\0\x09half")
    worker.channel.close()
    assert worker.exit_code() == 1
    assert "8 bytes into a frame" in worker.log.read_text()


def test_shutdown_ends_a_load_and_a_step(tmp_path: Path) -> None:
    for orders in (Orders(load_gate=str(tmp_path / "no")), Orders(gate=str(tmp_path / "no"))):
        with Worker(tmp_path) as worker:
            worker.load(orders, wait=orders.gate is not None)
            if orders.gate:
                worker.generate(1, request("abc"))
                worker.until(Prompted)
            worker.send(Shutdown())
            assert worker.exit_code() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_worker_dies_with_its_parent(tmp_path: Path) -> None:
    """Its link stays open elsewhere, so that only the signal can end it."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom support.worker import Worker\n"
        "worker = Worker(Path(sys.argv[1]))\nworker.load()\n"
        "import os\nos.set_inheritable(worker.channel.fileno(), True)\n"
        "import subprocess\n"
        "keeper = subprocess.Popen([sys.executable, '-c', 'input()'], close_fds=False, stdin=0)\n"
        "print(worker.process.pid, keeper.pid, flush=True)\nimport signal\nsignal.pause()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    with parent:
        assert parent.stdout is not None
        worker, keeper = (psutil.Process(int(word)) for word in parent.stdout.readline().split())
        parent.kill()
        gone, alive = psutil.wait_procs([worker], timeout=30)
        assert (gone, alive) == ([worker], [])
        assert keeper.is_running()
        keeper.kill()


def test_a_runtime_of_one_stream_serves_one_lane_and_its_record_says_so(worker: Worker) -> None:
    worker.load(Orders(max_sequences=1), lanes=1)
    ready = worker.all[-1]
    assert isinstance(ready, Ready)
    assert ready.description.record.got["lanes"] == 1
    assert ready.description.record.got["serves"] == "one stream at a time"
    wanted = request("hello", 4)
    worker.generate(1, wanted)
    assert [t for delta in worker.deltas(1) for t in delta.tokens] == alone(wanted, Orders())


def test_the_context_told_is_what_a_stream_can_use(worker: Worker) -> None:
    """Lanes facts, failures 17 and 18: each lane is promised a whole context of one pool."""
    worker.load(Orders(context=256, tokens=100))
    ready = worker.all[-1]
    assert isinstance(ready, Ready)
    assert ready.description.context == 100
    worker.generate(1, request("p" * 99, 5))
    assert sum(len(delta.tokens) for delta in worker.deltas(1)) == 1
    worker.generate(2, request("p" * 100, 5))
    error = worker.until(StreamFailed).error
    assert error.code == "context_length_exceeded"
    assert "100" in error.message


@pytest.mark.parametrize(
    ("variable", "value"), [("TURN_LINGER_US", "soon"), ("PARKED_BYTES", "-1"), ("MAX_SEATS", "0")]
)
def test_a_bad_setting_of_the_environment_is_refused_by_name(
    tmp_path: Path, variable: str, value: str
) -> None:
    environment = {f"SUPERFLUID_{variable}": value}
    with Worker(tmp_path, stderr=None, **environment) as worker:
        worker.load(wait=False)
        error = worker.until(LoadFailed).error
        assert error.code == "bad_option_value"
        assert f"SUPERFLUID_{variable}" in error.message
        assert value in error.message
        assert worker.exit_code() == 2


def test_huge_text_is_refused_before_it_is_tokenized(worker: Worker) -> None:
    """The fake's longest piece has six bytes, its context is 256."""
    worker.load(Orders(template="{{ messages[-1]['content'] }}"))
    huge = "x" * 600_000
    chat = Messages(messages=[{"role": "user", "content": huge}])
    prompts: list[Prompt] = [Text(text=huge), chat]
    for number, prompt in enumerate(prompts):
        worker.generate(number, GenerationRequest(prompt=prompt))
        error = worker.until(StreamFailed).error
        assert error.code == "context_length_exceeded"
        assert "at least 100000 tokens" in error.message
        assert "256" in error.message
        assert error.param == ("prompt", "messages")[number]


def test_a_text_that_is_too_long_is_named_as_it_was_sent(worker: Worker) -> None:
    worker.load(Orders(template="{{ messages[-1]['content'] }}"))
    long = "x" * 300
    chat = Messages(messages=[{"role": "user", "content": long}])
    prompts: list[Prompt] = [Text(text=long), Tokens(tokens=[1] * 300), chat]
    for number, prompt in enumerate(prompts):
        worker.generate(number, GenerationRequest(prompt=prompt))
        error = worker.until(StreamFailed).error
        assert error.code == "context_length_exceeded"
        assert error.param == ("prompt", "prompt", "messages")[number]


@pytest.mark.parametrize("token", [VOCABULARY, (1 << 31) - 1])
def test_a_stop_token_outside_the_vocabulary_is_named(worker: Worker, token: int) -> None:
    worker.load()
    asked = GenerationRequest(prompt=Text(text="a"), stop_token_ids=(VOCABULARY - 1, token))
    worker.generate(1, asked)
    error = worker.until(StreamFailed).error
    assert (error.code, error.param) == ("invalid_value", "stop_token_ids")
    assert str(token) in error.message


def test_words_that_the_template_leaves_out_do_not_count(worker: Worker) -> None:
    worker.load(Orders(template="{{ messages[-1]['content'] }}"))
    long = {"role": "user", "content": "x" * 9000}
    prompt = Messages(messages=[long, {"role": "user", "content": "hi"}])
    worker.generate(1, GenerationRequest(prompt=prompt, max_tokens=2, ignore_eos=True))
    assert worker.until(Prompted).tokens == [256, *b"hi"]
