"""A control group for each worker that bounds its processes and threads and holds what it started,
where one may be made.

A limit of the process itself counts a whole user, and never binds root; a session is left by
`setsid`, a control group is not.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from pathlib import Path
from typing import Final

import psutil

from superfluid.supervisor import cgroups

_PREFIX: Final = "superfluid-"
_ROUNDS: Final = 100
_numbers = itertools.count()
_pending: set[str] = set()


def make(most: int) -> str:
    """The folder of a new group of at most `most` tasks, 0 for any number; empty where that
    cannot be had."""
    _retry()
    for parent in _parents():
        folder = parent / f"{_PREFIX}{_namespace()}-{os.getpid()}-{next(_numbers)}"
        try:
            _sweep(parent)
            folder.mkdir()
            if most:
                (folder / "pids.max").write_text(str(most))
        except OSError:
            remove(str(folder))
        else:
            return str(folder)
    return ""


def members(folder: str) -> list[int]:
    """The processes in a group, as far as this process can see them."""
    try:
        found = (Path(folder) / "cgroup.procs").read_text().split()
    except OSError:
        return []
    return [int(pid) for pid in found if pid != "0"]


def end(folder: str, spare: int = 0) -> bool:
    """Kill whatever is in the group but `spare`; whether everything was.

    What forks all the while is caught up with: what is killed starts nothing more.
    """
    killed = {spare}
    for _ in range(_ROUNDS):
        others = set(members(folder)) - killed if folder else set()
        if not others:
            return True
        for pid in others:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= others
    return False


def remove(folder: str) -> None:
    """End what is left in a group and forget it. One whose dead are not reaped yet goes with the
    next."""
    if folder:
        end(folder)
        _pending.add(folder)
        _retry()


def _retry() -> None:
    for folder in map(Path, tuple(_pending)):
        with contextlib.suppress(OSError):
            folder.rmdir()
        if not folder.exists():
            _pending.discard(str(folder))


def _namespace() -> int:
    """What this process's ids are counted in: the owner in a group's name means nothing to a
    daemon of another namespace."""
    return Path("/proc/self/ns/pid").stat().st_ino


def _parents() -> list[Path]:
    """This process's own groups that may bound tasks, in either version's hierarchy."""
    found = []
    for controllers, path in cgroups.own():
        if "pids" in controllers:
            found.append(cgroups.ROOT / "pids" / path)
        elif not controllers and (cgroups.ROOT / "cgroup.controllers").exists():
            found.append(cgroups.ROOT / path)
    return found


def _sweep(parent: Path) -> None:
    """End and remove what killed daemons left."""
    prefix = f"{_PREFIX}{_namespace()}-"
    for folder in parent.glob(f"{prefix}*"):
        owner = folder.name.removeprefix(prefix).partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            remove(str(folder))
