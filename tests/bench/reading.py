"""How long this machine takes to read a part of a file, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

_BLOCK: Final = 1 << 20


def seconds(path: Path, count: int, group: Path | None = None, times: int = 3) -> list[float]:
    """Seconds to read `count` bytes of `path`, `times` over; in `group`, if one is given."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.reading", str(path), str(count), str(times)]
        + ([str(group)] if group else []),
        capture_output=True,
        check=True,
    )
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
    for one in groups:
        (Path(one) / "cgroup.procs").write_text(str(os.getpid()))
    print(json.dumps([_read(target, int(size)) for _ in range(int(repeats))]))
