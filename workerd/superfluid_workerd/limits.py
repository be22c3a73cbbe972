"""What of the machine this process may use: memory by the machine's, its control groups' and its
own limits, and cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from superfluid_workerd.options import MOST_THREADS

_CGROUPS: Final = Path("/sys/fs/cgroup")
_SELF: Final = Path("/proc/self")
_MEMORY: Final = Path("/proc/meminfo")
_UNLIMITED: Final = 1 << 60
"""Version 1 writes a number near 2^63 for no limit."""


def available_bytes() -> int:
    """The least of what the machine can give, what each control group above this process has
    left, and what `ulimit -v` and `ulimit -d` leave."""
    return max(0, min([_machine(), *groups_left(), *_rlimits()]))


def cores() -> int:
    """Cores that this process may use, as far as it may have threads for them."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), MOST_THREADS)
    return min(os.cpu_count() or 1, MOST_THREADS)


def _machine() -> int:
    """What the machine can give, or half of the whole where it does not say."""
    try:
        import psutil

        return int(psutil.virtual_memory().available)
    except (ImportError, OSError, RuntimeError):
        stated = _table(_MEMORY).get("MemAvailable")
        return stated or os.sysconf("SC_PHYS_PAGES") // 2 * os.sysconf("SC_PAGE_SIZE")


def groups_left(process: Path = _SELF, root: Path = _CGROUPS) -> Iterator[int]:
    """Bytes left in each memory control group of the process and those above it, for versions 1
    and 2. Page cache that can go at once counts as left."""
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for mount in (root, root / "unified"):
                yield from _climb(mount, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _climb(root / "memory", path, *names)


def _climb(mount: Path, path: str, limit: str, usage: str, idle: str) -> Iterator[int]:
    """From the group up to the mount, which inside a container is the group itself."""
    inside = Path(path.lstrip("/"))
    for folder in (mount / inside, *(mount / parent for parent in inside.parents)):
        most = _number(folder / limit)
        if most is None or most >= _UNLIMITED:
            continue
        yield most - (_number(folder / usage) or 0) + _statistic(folder / "memory.stat", idle)


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _statistic(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for key, value in map(str.split, lines) if key == name), 0)


def _rlimits() -> Iterator[int]:
    try:
        import resource
    except ImportError:
        return
    held = _table(_SELF / "status")
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY:
            yield soft - held.get(name, 0)


def _table(file: Path) -> dict[str, int]:
    """Bytes by name in one of the kernel's tables of kilobytes."""
    try:
        rows = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if row and row[-1] == "kB"}
