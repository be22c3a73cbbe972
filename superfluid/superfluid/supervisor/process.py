"""The handle of one worker process: start, watch, end, reap.

Everything here runs on the event loop's thread, which must be one that lives as long as the
daemon: a parent-death signal follows the thread that forked.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from superfluid.supervisor import strays
from superfluid.supervisor.ledger import Ledger
from superfluid.supervisor.tail import Tail
from superfluid_compat.errors import ExitCode

_LOG = logging.getLogger(__name__)
TERM_GRACE_S: Final = 3.0
_READ_BYTES: Final = 64 << 10
_REST_READS: Final = 64
_MAXRSS_UNIT: Final = 1 if sys.platform == "darwin" else 1024
_FINAL: Final = frozenset({ExitCode.USAGE, ExitCode.MODEL, ExitCode.RUNTIME})


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended: `code` as `subprocess` counts it, negative for a signal.

    The system counts the peak from the fork on, so it is never less than the daemon's own size.
    """

    code: int
    peak_rss_bytes: int

    @property
    def final(self) -> bool:
        """The code says that another try would end alike."""
        return self.code in _FINAL

    def words(self) -> str:
        """`killed by SIGSEGV (Segmentation fault)`, `exited with code 3 (model)`."""
        if self.code >= 0:
            known = {member.value: member.name.lower() for member in ExitCode}
            meaning = f" ({known[self.code]})" if self.code in known else ""
            return f"exited with code {self.code}{meaning}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            return f"killed by signal {-self.code}"
        return f"killed by {name} ({signal.strsignal(-self.code)})"


class Process:
    """A child in a session of its own, its output kept as a tail, entered in the ledger.

    `on_exit` is called once, on the loop's thread, after the child and all that it started are
    dead; `group` is the control group that it joins, if there is one.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        inherit: Sequence[int],
        ledger: Ledger,
        on_exit: Callable[[Exit], None],
        group: str = "",
    ) -> None:
        """Starts it. Raises `OSError` when the system cannot."""
        self._loop = asyncio.get_running_loop()
        self._ledger = ledger
        self._on_exit = on_exit
        self._kill_timer: asyncio.TimerHandle | None = None
        self._gone = False
        self._family = (group, environment.get("TMPDIR", ""))
        self.tail = Tail()
        self._output, output = os.pipe()
        try:
            os.set_blocking(self._output, False)
            self._loop.add_reader(self._output, self._pump)
            self._child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=tuple(inherit),
                env=dict(environment),
                start_new_session=True,
            )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(output)
        self.pid: Final = self._child.pid
        try:
            ledger.add(self.pid)
        except OSError as error:
            _LOG.warning("worker %s could not be entered in the ledger: %s", self.pid, error)
        try:
            name = f"worker-{self.pid}-exit"
            threading.Thread(target=self._watch, name=name, daemon=True).start()
        except RuntimeError as error:  # nobody would hear of its end
            self.kill()
            self._gather()
            raise OSError(errno.EAGAIN, f"{error}") from error

    def end(self) -> None:
        """Ask the group to end, and kill it when it has not within the grace."""
        if self._gone or self._kill_timer is not None:
            return
        self._signal(signal.SIGTERM)
        self._kill_timer = self._loop.call_later(TERM_GRACE_S, self.kill)

    def kill(self) -> None:
        """Kill the group now."""
        if not self._gone:
            self._signal(signal.SIGKILL)

    def alone(self) -> bool:
        """Kill what the child started, and not itself; False where it starts more than can be."""
        return strays.end(*self._family, spare=self.pid)

    def _signal(self, number: signal.Signals) -> None:
        # The child is not reaped before `_reap`, so the group's id cannot be another's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _pump(self) -> bool:
        """Take what was printed; False when there is nothing more for now."""
        try:
            data = os.read(self._output, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._output)
            return False
        self.tail.feed(data)
        return True

    def _watch(self) -> None:
        _await_exit(self.pid)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._reap)

    def _reap(self) -> None:
        self.kill()  # what the child left in its session
        strays.end(*self._family)
        self._gone = True
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self._on_exit(self._gather())

    def _gather(self) -> Exit:
        """Reap the child, which is dead or being killed."""
        _, status, usage = os.wait4(self.pid, 0)
        self._child.returncode = os.waitstatus_to_exitcode(status)
        for _ in range(_REST_READS):
            if not self._pump():
                break
        self._close()
        with contextlib.suppress(OSError):  # an entry that stays names nobody at the next start
            self._ledger.remove(self.pid)
        return Exit(self._child.returncode, usage.ru_maxrss * _MAXRSS_UNIT)

    def _close(self) -> None:
        self._loop.remove_reader(self._output)
        os.close(self._output)


def _await_exit(pid: int) -> None:
    """Return when the child is dead, leaving it to be reaped."""
    if sys.platform == "darwin":
        with select.kqueue() as queue, contextlib.suppress(ProcessLookupError):
            watch = select.kevent(
                pid,
                filter=select.KQ_FILTER_PROC,
                flags=select.KQ_EV_ADD,
                fflags=select.KQ_NOTE_EXIT,
            )
            queue.control([watch], 1)
    else:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
