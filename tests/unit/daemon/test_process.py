"""The process handle, its tail and its ledger, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluid.supervisor import process as process_module
from superfluid.supervisor.ledger import Entry, Ledger, started
from superfluid.supervisor.process import Exit, Process
from superfluid.supervisor.tail import KEEP_BYTES, LINE_CHARACTERS, LINES, Tail

FOREVER = "import time; time.sleep(3600)"


class Child:
    """A process of Python source, and its exit when it has come."""

    def __init__(self, folder: Path, source: str, *arguments: str) -> None:
        self.exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.folder = folder / "ledger"
        self.process = Process(
            [sys.executable, "-c", source, *arguments],
            environment={},
            inherit=(),
            ledger=Ledger(self.folder),
            on_exit=self.exit.set_result,
        )

    async def printed(self, text: str) -> None:
        while not any(text in line for line in self.process.tail.lines()):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("", 0, "exited with code 0 (ok)"),
        ("raise SystemExit(3)", 3, "exited with code 3 (model)"),
        ("raise SystemExit(77)", 77, "exited with code 77"),
        ("import os; os.kill(os.getpid(), 9)", -9, "killed by SIGKILL (Killed)"),
    ],
)
async def test_an_exit_is_told_in_words(tmp_path: Path, source: str, code: int, words: str) -> None:
    child = Child(tmp_path, source)
    found = await child.exit
    assert (found.code, found.words(), found.final) == (code, words, code == 3)
    assert found.peak_rss_bytes > 1 << 20
    assert not psutil.pid_exists(child.process.pid)
    assert list(child.folder.iterdir()) == []


async def test_a_real_time_signal_has_no_name_and_is_told_by_number() -> None:
    assert Exit(-40, 0).words() == "killed by signal 40"


async def test_a_child_has_its_own_session_and_nothing_on_stdin(tmp_path: Path) -> None:
    source = "import os, sys; print(os.getsid(0) == os.getpid(), sys.stdin.read() == '')"
    child = Child(tmp_path, source)
    await child.exit
    assert child.process.tail.lines() == ["True True"]


async def test_a_flood_is_read_and_its_end_kept(tmp_path: Path) -> None:
    source = "import sys\nfor i in range(400): sys.stderr.write('x' * 65535 + '\\n')\nprint('end')"
    child = Child(tmp_path, source)
    await child.exit
    lines = child.process.tail.lines()
    assert lines[-1] == "end"
    assert sum(map(len, lines)) <= KEEP_BYTES


async def test_asked_to_end_it_ends(tmp_path: Path) -> None:
    child = Child(tmp_path, FOREVER)
    child.process.end()
    child.process.end()
    assert (await child.exit).code == -signal.SIGTERM


async def test_deaf_to_the_request_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "TERM_GRACE_S", 0.2)
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True);"
    child = Child(tmp_path, deaf + FOREVER)
    await child.printed("deaf")
    child.process.end()
    assert (await child.exit).code == -signal.SIGKILL


async def test_a_stopped_child_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "TERM_GRACE_S", 0.2)
    child = Child(tmp_path, FOREVER)
    os.kill(child.process.pid, signal.SIGSTOP)
    while psutil.Process(child.process.pid).status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0.01)
    child.process.end()
    assert (await child.exit).code == -signal.SIGKILL


async def test_a_grandchild_goes_with_it_and_holds_nothing_up(tmp_path: Path) -> None:
    source = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {FOREVER!r}])\n"
        "print(child.pid)"
    )
    child = Child(tmp_path, source)
    assert (await child.exit).code == 0
    grandchild = int(child.process.tail.lines()[0])
    while _runs(grandchild):
        await asyncio.sleep(0.01)


async def test_no_descriptor_is_left(tmp_path: Path) -> None:
    await Child(tmp_path, "").exit
    before = _descriptors()
    for _ in range(5):
        await Child(tmp_path, "print('x' * 1000)").exit
    assert _descriptors() == before


async def test_what_cannot_be_started_is_a_broken_runtime(tmp_path: Path) -> None:
    before = _descriptors()
    with pytest.raises(FileNotFoundError):
        Process(
            [str(tmp_path / "none")],
            environment={},
            inherit=(),
            ledger=Ledger(tmp_path / "l"),
            on_exit=lambda how: None,
        )
    assert _descriptors() == before


def test_the_ledger_reaps_what_is_left_and_nobody_else(tmp_path: Path) -> None:
    left = subprocess.Popen([sys.executable, "-c", FOREVER], start_new_session=True)
    stranger = subprocess.Popen([sys.executable, "-c", FOREVER], start_new_session=True)
    gone = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    try:
        ledger = Ledger(tmp_path)
        ledger.add(left.pid)
        ledger.add(gone.pid)
        gone.wait()
        reused = Entry(stranger.pid, started(os.getpid()))
        (tmp_path / f"{stranger.pid}.json").write_bytes(msgspec.json.encode(reused))
        (tmp_path / "1.json").write_text("garbage")
        assert Ledger(tmp_path).reap(tmp_path) == [left.pid]
        assert left.wait(timeout=30) == -signal.SIGKILL
        assert stranger.poll() is None
        assert list(tmp_path.iterdir()) == []
    finally:
        for each in (left, stranger):
            each.kill()
            each.wait()


def test_a_step_of_the_wall_clock_hides_nobody_from_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system then counts its boot, and by that every start, from elsewhere."""
    with subprocess.Popen([sys.executable, "-c", FOREVER], start_new_session=True) as left:
        Ledger(tmp_path).add(left.pid)
        monkeypatch.setattr(psutil.Process, "create_time", lambda process: 1.0)
        assert Ledger(tmp_path).reap(tmp_path) == [left.pid]


@given(st.lists(st.binary(max_size=3 * KEEP_BYTES), max_size=6))
def test_a_tail_keeps_the_end_within_bounds(parts: list[bytes]) -> None:
    tail = Tail()
    for part in parts:
        tail.feed(part)
    lines = tail.lines()
    assert len(lines) <= LINES
    assert all(0 < len(line) <= LINE_CHARACTERS and line.isprintable() for line in lines)


def test_a_tail_holds_the_last_lines_in_order() -> None:
    tail = Tail()
    for number in range(10_000):
        tail.feed(f"line {number}\n".encode())
    assert tail.lines() == [f"line {number}" for number in range(10_000 - LINES, 10_000)]


def _descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def _runs(pid: int) -> bool:
    """Not counting a zombie that nobody has reaped yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
