"""A control group for each worker that bounds its processes and threads, where one may be made.

What a limit of the process itself cannot: that one counts a whole user, and never binds root.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import Final

import psutil

_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")
_PREFIX: Final = "superfluid-"
_numbers = itertools.count()


def make(most: int) -> str:
    """The folder of a new group of at most `most` tasks; empty where that cannot be had."""
    for parent in _parents():
        folder = parent / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        try:
            _sweep(parent)
            folder.mkdir()
            (folder / "pids.max").write_text(str(most))
        except OSError:
            remove(str(folder))
        else:
            return str(folder)
    return ""


def remove(folder: str) -> None:
    """Forget a group; one that still holds a process goes at the next `make` of any daemon."""
    if folder:
        with contextlib.suppress(OSError):
            Path(folder).rmdir()


def _parents() -> list[Path]:
    """This process's own groups that may bound tasks, in either version's hierarchy."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "pids" in controllers.split(","):
            found.append(_CGROUPS / "pids" / path.lstrip("/"))
        elif controllers == "" and (_CGROUPS / "cgroup.controllers").exists():
            found.append(_CGROUPS / path.lstrip("/"))
    return found


def _sweep(parent: Path) -> None:
    """Remove what killed daemons left."""
    for folder in parent.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            remove(str(folder))
