"""The control groups that this process is in, of either version (cgroups(7))."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")


def own() -> list[tuple[frozenset[str], str]]:
    """Each group's controllers, none for that of version 2, and its path below their mount; none
    where the system has no control groups."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return []
    fields = (line.split(":", 2) for line in lines)
    return [
        (frozenset(filter(None, controllers.split(","))), path.lstrip("/"))
        for _, controllers, path in fields
    ]
