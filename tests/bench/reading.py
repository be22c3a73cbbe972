"""How long this machine takes to read a part of a file, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from bench.files import make_cold

_BLOCK: Final = 1 << 20


def seconds(path: Path, count: int, group: Path | None, times: int = 3) -> list[float]:
    """Seconds to read `count` bytes of `path`, `times` over: from the page cache, or with a
    `group` in that cgroup and each time from the disk."""
    command = [sys.executable, "-m", "bench.reading", str(path), str(count), str(times)]
    command += [str(group)] if group else []
    done = subprocess.run(command, capture_output=True, check=True)
    return [float(one) for one in json.loads(done.stdout)]


def _read(path: str, count: int) -> float:
    scratch = memoryview(bytearray(_BLOCK))
    file = os.open(path, os.O_RDONLY)
    start = time.perf_counter()
    at = 0
    while at < count:
        at += os.preadv(file, [scratch[: min(_BLOCK, count - at)]], at)
    os.close(file)
    return time.perf_counter() - start


if __name__ == "__main__":
    target, size, repeats, *groups = sys.argv[1:]
    found: list[float] = []
    for one in groups:
        (Path(one) / "cgroup.procs").write_text(str(os.getpid()))
    for _ in range(int(repeats)):
        if groups:
            make_cold(Path(target))
        found.append(_read(target, int(size)))
    print(json.dumps(found))
