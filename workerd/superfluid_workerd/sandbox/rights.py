"""Rights as the daemon hands them over, and what became of them, as plain records."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Level = Literal["auto", "strict", "basic", "none"]


@dataclass(frozen=True, slots=True)
class Rights:
    """What a worker may touch. Paths are absolute and real; a folder stands for all beneath it.

    `auto` asks for the best level that can be had. `file_bytes` bounds each file it writes,
    `data_bytes` its memory that no file backs, `threads` its threads where the system can, and
    `group` is the folder of a control group that does; 0 is no bound. `user` is the (uid, gid) to
    become. `spawn` lets it start processes until its model is loaded.
    """

    level: Level = "auto"
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    spawn: bool = False
    user: tuple[int, int] | None = None
    file_bytes: int = 0
    data_bytes: int = 0
    threads: int = 0
    group: str = ""

    def encode(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Rights:
        """Raises `ValueError` or `TypeError` for anything that is no rights."""
        found = json.loads(data)
        lists = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
        return cls(**{**found, **lists})


@dataclass(frozen=True, slots=True)
class Reached:
    """The level that was reached, by which means, and what of the best is missing.

    `problem` says why what was asked for cannot be had; the process then serves nothing.
    """

    asked: str
    level: str
    means: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    problem: str = ""

    def told(self) -> dict[str, Any]:
        """For the load record."""
        found: dict[str, Any] = {"level": self.level}
        if self.means:
            found["by"] = list(self.means)
        if self.missing:
            found["missing"] = list(self.missing)
        return found


def interpreter() -> Iterator[str]:
    """What this Python reads to run: itself, its modules, the system's libraries."""
    try:
        private = Path.home()
    except RuntimeError:  # a user without an entry has no home to keep closed
        private = Path(os.sep)
    for entry in (sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path):
        path = Path(os.path.realpath(entry or os.sep))
        # A path that holds the home would open all of it.
        if path.exists() and path != private and path not in private.parents:
            yield str(path)


SYSTEM = (
    "/usr",
    "/lib",
    "/lib64",
    "/opt",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/nix/store",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/self",
    "/sys/devices/system",
    "/sys/fs/cgroup",
    "/sys/kernel/mm",
    "/dev/null",
    "/dev/urandom",
    "/dev/random",
    "/dev/zero",
)
"""Read by libraries, an engine's included; none of it is anybody's secret."""
