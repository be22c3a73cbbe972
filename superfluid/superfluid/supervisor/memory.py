"""What the system says of memory: whether it killed for want of it, and whether enough is free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil

from superfluid.supervisor import cgroups

_VMSTAT: Final = Path("/proc/vmstat")


def kills() -> dict[str, int]:
    """How often processes were killed for want of memory, by who counted: this process's cgroup
    and the kernel, each where it can be read."""
    places = [(f"cgroup {path.parent}", path) for path in _counters()] + [("kernel", _VMSTAT)]
    found = {name: _count(path) for name, path in places}
    return {name: count for name, count in found.items() if count is not None}


def _counters() -> list[Path]:
    found = []
    for controllers, path in cgroups.own():
        if not controllers:
            places = [
                (mount, "memory.events") for mount in (cgroups.ROOT, cgroups.ROOT / "unified")
            ]
        elif "memory" in controllers:
            places = [(cgroups.ROOT / "memory", "memory.oom_control")]
        else:
            continue
        for mount, name in places:
            own = mount / path / name
            # A container may see its own group as the mount and the host's path all the same.
            found.append(own if own.exists() else mount / name)
    return found


def _count(path: Path) -> int | None:
    try:
        text = path.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return None


def evidence(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Which counters grew, in words; empty when none did."""
    grown = {name: count - before.get(name, count) for name, count in after.items()}
    told = [f"{name} counted {more} killed for memory" for name, more in grown.items() if more > 0]
    return "; ".join(told)


def available() -> int:
    """Bytes that a new process could have; 0 where that cannot be read now."""
    try:
        return int(psutil.virtual_memory().available)
    except (psutil.Error, OSError):
        return 0


def resident(pid: int) -> int:
    """Bytes that a process has in memory; 0 when it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except (psutil.Error, OSError):
        return 0
