"""Kernels on disk between real processes, and threads that rest when idle."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from superfluid_adapter_native.kernels import cache
from superfluid_adapter_native.kernels.engine import Kernels
from superfluid_adapter_native.kernels.warm import warm
from superfluid_adapter_native.quants.types import BY_NAME

_READER = """
import json, sys
from pathlib import Path
import numpy as np
from numba.core import event

with event.install_recorder("numba:compile") as compiled:
    from superfluid_adapter_native.kernels.engine import Kernels
    from superfluid_adapter_native.quants.types import BY_NAME

    engine = Kernels(threads=2, exact=False, cache=Path(sys.argv[1]))
    kind = BY_NAME["Q8_0"]
    raw = np.zeros(kind.row_bytes(64) * 3000, np.uint8)
    weight = engine.weight(kind, raw, (3000, 64), resident=True)
    found = engine.linear(np.ones((2, 64), np.float32), weight)
    engine.prepare([kind], ["f32"])
events = len(compiled.buffer)
print(json.dumps([events, engine.store.compiled, engine.store.loaded, float(found.sum())]))
"""


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def read_elsewhere(folder: Path) -> tuple[int, int, int, float]:
    command = [sys.executable, "-c", _READER, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    events, compiled, loaded, total = json.loads(done.stdout)
    return events, compiled, loaded, total


def test_another_process_reads_and_neither_compiles_nor_writes(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    made = warm(
        [BY_NAME["Q8_0"]],
        exact=False,
        caches=["f32"],
        folder=tmp_path,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert steps[0][0] == 0
    assert steps[-1][0] == steps[-1][1] > 10
    before = snapshot(tmp_path)
    assert len(before) == made
    assert read_elsewhere(tmp_path) == (0, 0, made, 0.0)
    assert snapshot(tmp_path) == before
    assert warm([BY_NAME["Q8_0"]], exact=False, caches=["f32"], folder=tmp_path) == 0


def test_without_a_cache_a_reader_compiles_for_itself_and_leaves_nothing(tmp_path: Path) -> None:
    events, compiled, loaded, _ = read_elsewhere(tmp_path)
    assert events > 0
    assert (loaded, list(tmp_path.iterdir())) == (0, [])
    assert compiled > 10


def test_a_damaged_file_is_compiled_around(tmp_path: Path) -> None:
    store = cache.KernelCache(tmp_path, writable=True)
    assert store.folder is not None
    (store.folder / "half").write_bytes(b"\x80\x05\x95")
    (store.folder / "empty").write_bytes(b"")
    assert store.read("half") is store.read("empty") is store.read("missing") is None


def test_the_folder_is_named_by_what_the_code_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.version_key.cache_clear()
    here = cache.KernelCache(tmp_path, writable=True)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: "another")
    cache.version_key.cache_clear()
    elsewhere = cache.KernelCache(tmp_path, writable=True)
    cache.version_key.cache_clear()
    assert here.folder != elsewhere.folder


def test_idle_helpers_sleep_and_end_with_their_kernels() -> None:
    others = set(threading.enumerate())
    engine = Kernels(threads=3, exact=False, cache=None)
    helpers = set(threading.enumerate()) - others
    assert len(helpers) == 2
    raw = np.ones((20_000, 32), np.float32).view(np.uint8).reshape(-1)
    weight = engine.weight(BY_NAME["F32"], raw, (20_000, 32), resident=True)
    for _ in range(50):
        found = engine.linear(np.ones((1, 32), np.float32), weight)
        assert (found == 32).all()
    deadline = time.monotonic() + 120
    while _used_within(0.1) > 0.05:
        assert time.monotonic() < deadline, "helpers keep a processor busy"
    engine.close()
    assert not [helper for helper in helpers if helper.is_alive()]


def _used_within(seconds: float) -> float:
    """Processor seconds that this process uses while this thread waits."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    threading.Event().wait(seconds)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
