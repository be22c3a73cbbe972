"""Which worker processes one server has started, so that the next start reaps what was left.

A pid alone may be somebody else's by then; with the process's start time it is not.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Final

import msgspec
import psutil

_SLACK_S: Final = 2.0


class Entry(msgspec.Struct, frozen=True):
    """`started` is the process's start in seconds of the epoch, as the system reports it."""

    pid: int
    started: float


class Ledger:
    """One small file for each process, in a folder that only the holder of the name uses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def add(self, pid: int) -> None:
        """Enter a child that is not reaped yet."""
        entry = Entry(pid, psutil.Process(pid).create_time())
        self._file(pid).write_bytes(msgspec.json.encode(entry))

    def remove(self, pid: int) -> None:
        self._file(pid).unlink(missing_ok=True)

    def reap(self, scratch: Path) -> list[int]:
        """Kill what an earlier server left and forget it; the workers of which something ran.

        `scratch` holds the folders its workers had for temporary files.
        """
        left = []
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(msgspec.MsgspecError):
                entry = msgspec.json.decode(path.read_bytes(), type=Entry)
                if _runs(entry) or _left_children(entry, scratch):
                    _kill_group(entry.pid)
                    left.append(entry.pid)
            path.unlink(missing_ok=True)
        return left

    def _file(self, pid: int) -> Path:
        return self._folder / f"{pid}.json"


def _runs(entry: Entry) -> bool:
    try:
        return abs(psutil.Process(entry.pid).create_time() - entry.started) < _SLACK_S
    except psutil.NoSuchProcess:
        return False


def _left_children(entry: Entry, scratch: Path) -> bool:
    """Whether the worker is gone and its group is not: nobody else's, by its environment."""
    if psutil.pid_exists(entry.pid):
        return False
    return any(
        _group(process.pid) == entry.pid and _temporary(process).startswith(f"{scratch}/")
        for process in psutil.process_iter()
    )


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def _temporary(process: psutil.Process) -> str:
    try:
        return process.environ().get("TMPDIR", "")
    except (psutil.Error, OSError):
        return ""


def _kill_group(pid: int) -> None:
    # A worker leads a group of its own, so this pid as a group is never this daemon's.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
