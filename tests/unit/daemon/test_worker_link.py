"""The daemon's end of a worker's link, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from superfluid.supervisor.ledger import Ledger
from superfluid.supervisor.process import Exit
from superfluid.supervisor.worker import Worker
from superfluid_workerd.link.frames import Pong, ToDaemon, TurnStats
from superfluid_workerd.link.framing import encode

PONG = encode(Pong(number=1, ticks=1, stats=TurnStats()))
ENDLESS = 1000


class Echo:
    """Holds the worker's end of the link too, as a process that it started may, and writes a frame
    there for each that is heard. `longest` is the most heard without a turn of the event loop."""

    def __init__(self) -> None:
        self.over: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.longest = 0
        self._in_a_row = 0
        self._end = -1

    def command(self, link: int) -> Sequence[str]:
        self._end = os.dup(link)
        return [sys.executable, "-c", "import time; time.sleep(3600)"]

    def write(self) -> None:
        os.write(self._end, PONG)

    def close(self) -> None:
        os.close(self._end)

    def frame(self, message: ToDaemon) -> None:
        self._in_a_row += 1
        self.longest = max(self.longest, self._in_a_row)
        if self._in_a_row == 1:
            asyncio.get_running_loop().call_soon(self._turned)
        if self._in_a_row < ENDLESS:
            self.write()

    def _turned(self) -> None:
        self._in_a_row = 0

    def broken(self, reason: str) -> None:
        self.over.set_exception(RuntimeError(reason))

    def exited(self, how: Exit) -> None:
        self.over.set_result(how)


async def test_who_goes_on_writing_to_a_dead_workers_link_is_not_read_for_ever(
    tmp_path: Path,
) -> None:
    echo = Echo()
    worker = Worker(echo.command, environment={}, ledger=Ledger(tmp_path / "l"), listener=echo)
    echo.write()
    worker.process.kill()
    assert (await echo.over).code == -signal.SIGKILL
    echo.close()
    assert 1 < echo.longest < ENDLESS
