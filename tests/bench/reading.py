"""How long this machine takes to read a part of a file, in a process of its own, by the quickest
way there is to have it in memory."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from bench.files import make_cold

_WARM_BYTES: Final = 1 << 20
_COLD_BYTES: Final = 8 << 20
_HUGE: Final = 2 << 20


def seconds(path: Path, count: int, group: Path | None, times: int = 5) -> list[float]:
    """Seconds to read `count` bytes of `path`, `times` over: from the page cache, or with a
    `group` in that cgroup and each time from the disk, past the cache where that can be done."""
    command = [sys.executable, "-m", "bench.reading", str(path), str(count), str(times)]
    command += [str(group)] if group else []
    done = subprocess.run(command, capture_output=True, check=True)
    return [float(one) for one in json.loads(done.stdout)]


def _read(path: str, count: int, memory: memoryview, flags: int) -> float:
    file = os.open(path, os.O_RDONLY | flags)
    start = time.perf_counter()
    at = 0
    while at < count:
        at += os.preadv(file, [memory], at)
    elapsed_s = time.perf_counter() - start
    os.close(file)
    return elapsed_s


def _memory(count: int) -> memoryview:
    """Whole huge pages, where the system has them, all in memory."""
    region = mmap.mmap(-1, count + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    lead = -ctypes.addressof(ctypes.c_char.from_buffer(region)) % _HUGE
    memory = memoryview(region)[lead : lead + count]
    memory[:] = bytes(count)
    return memory


def _direct(path: str) -> int:
    """The flag that opens `path` for reading past the page cache, if its file system has that."""
    flag = getattr(os, "O_DIRECT", 0)
    try:
        os.close(os.open(path, os.O_RDONLY | flag))
    except OSError:
        return 0
    return flag


def main(target: str, size: str, repeats: str, group: str = "") -> None:
    """Print the seconds as JSON."""
    if group:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    memory = _memory(_COLD_BYTES if group else _WARM_BYTES)
    flags = _direct(target) if group else 0
    found: list[float] = []
    # Once more than is counted: the first finds what is to be warm cold.
    for _ in range(int(repeats) + 1):
        if group:
            make_cold(Path(target))
        found.append(_read(target, int(size), memory, flags))
    print(json.dumps(found[1:]))


if __name__ == "__main__":
    main(*sys.argv[1:])
