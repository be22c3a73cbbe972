"""Which worker processes one server has started, so that the next start reaps what was left.

A pid alone may be somebody else's by then; with the process's start it is not. Where the system
counts starts from its own boot that is what is kept, which no step of the wall clock moves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Final

import msgspec
import psutil

from superfluid.supervisor import strays

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_START: Final = 19
"""Where /proc/PID/stat has the start, in ticks since boot, after the name (proc_pid_stat(5))."""


class Entry(msgspec.Struct, frozen=True):
    """`started` is unlike that of any other process that ever has this pid."""

    pid: int
    started: str


class Ledger:
    """One small file for each process, in a folder that only the holder of the name uses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def add(self, pid: int) -> None:
        """Enter a child that is not reaped yet."""
        entry = Entry(pid, started(pid))
        self._file(pid).write_bytes(msgspec.json.encode(entry))

    def remove(self, pid: int) -> None:
        self._file(pid).unlink(missing_ok=True)

    def reap(self, scratch: Path) -> list[int]:
        """Kill what an earlier server left and forget it; the processes that were killed.

        `scratch` holds the folders its workers had for temporary files, and so what they started.
        """
        left = []
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(msgspec.MsgspecError):
                entry = msgspec.json.decode(path.read_bytes(), type=Entry)
                if _runs(entry):
                    _kill_group(entry.pid)
                    left.append(entry.pid)
            path.unlink(missing_ok=True)
        return [*left, *(pid for pid in strays.below(str(scratch)) if pid not in left)]

    def _file(self, pid: int) -> Path:
        return self._folder / f"{pid}.json"


def started(pid: int) -> str:
    """When a process that is not reaped began, in this boot. Raises `OSError` when it is gone."""
    if sys.platform == "linux":
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        return f"{_BOOT.read_text().strip()} {after_name.split()[_START]}"
    try:
        return str(psutil.Process(pid).create_time())
    except psutil.Error as error:
        raise ProcessLookupError(pid) from error


def _runs(entry: Entry) -> bool:
    try:
        return started(entry.pid) == entry.started
    except OSError:
        return False


def _kill_group(pid: int) -> None:
    # A worker leads a group of its own, so this pid as a group is never this daemon's.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
