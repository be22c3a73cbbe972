"""Maps of tensors: what is held, what is evicted, what is handed back."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from superfluid_adapter_native import memory
from superfluid_adapter_native.formats.open import open_source
from superfluid_adapter_native.formats.source import ModelSource
from superfluid_adapter_native.memory import DEFAULT_CACHE_BYTES, MemoryManager, default_probe
from superfluid_compat.errors import DoesNotFit, ModelDamaged, ModelNotFound
from support.gguf_writer import tensor, write_gguf

MIB = 1 << 20


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    """Three tensors of 2 MiB and one of 4 KiB, each filled with a number of its own."""
    tensors = [
        tensor(name, np.full((512, 1024), value, np.float32))
        for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))
    ]
    tensors.append(tensor("small", np.full((1024,), 4.0, np.float32)))
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, tensors)
    return open_source(path)


def first(manager: MemoryManager, name: str) -> float:
    return float(manager.acquire(name).view[:4].view(np.float32)[0])


def test_a_handle_shows_the_tensors_bytes_and_no_more(source: ModelSource) -> None:
    manager = MemoryManager(source)
    handle = manager.acquire("b")
    assert handle.view.dtype == np.uint8
    assert handle.view.nbytes == 2 * MIB
    assert not handle.view.flags.writeable
    assert (handle.view.view(np.float32) == 2.0).all()
    manager.close()


def test_acquiring_again_returns_the_map_that_is_there(source: ModelSource) -> None:
    manager = MemoryManager(source)
    assert manager.acquire("a") is manager.acquire("a")
    manager.close()


def test_the_default_cap_is_256_mib(source: ModelSource) -> None:
    manager = MemoryManager(source)
    assert manager.cache_bytes == DEFAULT_CACHE_BYTES == 256 * MIB
    manager.close()


def test_beyond_the_cap_the_least_recently_used_map_goes(source: ModelSource) -> None:
    manager = MemoryManager(source, cache_bytes=5 * MIB)
    for name in "ab":
        assert first(manager, name) == {"a": 1.0, "b": 2.0}[name]
        manager.release(name)
    manager.release(manager.acquire("a").tensor.name)
    manager.acquire("c")
    assert manager.mapped == ("a", "c")
    assert manager.resident_bytes <= 5 * MIB
    manager.close()


def test_a_map_in_use_is_never_closed(source: ModelSource) -> None:
    manager = MemoryManager(source, cache_bytes=0)
    held = manager.acquire("a")
    manager.release(manager.acquire("b").tensor.name)
    assert list(manager.mapped) == ["a"]
    assert held.view[0] == held.view[4096]
    manager.release("a")
    assert not manager.mapped
    manager.close()


def test_an_array_outlives_its_handle(source: ModelSource) -> None:
    manager = MemoryManager(source, cache_bytes=0)
    view = manager.acquire("a").view.view(np.float32)
    manager.release("a")
    assert manager.mapped == ()
    assert view.sum() == 512 * 1024
    manager.close()


def test_large_maps_are_handed_back_and_small_ones_are_not(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: list[int] = []

    class Map(mmap.mmap):
        def madvise(self, option: int, *rest: int) -> None:
            assert option == mmap.MADV_DONTNEED
            advised.append(len(self))

    monkeypatch.setattr("mmap.mmap", Map)
    manager = MemoryManager(source)
    for name in ("a", "small"):
        manager.release(manager.acquire(name).tensor.name)
    manager.drop(("a", "small"))
    assert len(advised) == 1
    assert advised[0] >= 2 * MIB
    manager.close()


def test_drop_and_close_leave_nothing_mapped(source: ModelSource) -> None:
    manager = MemoryManager(source)
    manager.acquire("a")
    manager.release(manager.acquire("b").tensor.name)
    assert manager.idle_bytes >= 2 * MIB
    manager.drop(("a", "b", "no such name"))
    assert manager.mapped == ("a",)
    manager.close()
    assert manager.resident_bytes == 0


def pages(view: NDArray[np.uint8]) -> tuple[int, int]:
    """How many of a map's pages are in memory, and how many there are, as the system says."""
    start = view.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    size = view.ctypes.data + view.nbytes - start
    found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), found) == 0
    return sum(one & 1 for one in found), len(found)


def forgotten(source: ModelSource) -> None:
    """Have the file's pages out of memory, where its file system lets go of them."""
    with source.path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_what_is_kept_by_a_map_is_brought_in(source: ModelSource) -> None:
    forgotten(source)
    manager = MemoryManager(source)
    handles = manager.keep(("a", "c"))
    for handle in handles.values():
        found, count = pages(handle.view)
        assert found == count
    assert manager.mapped == ("a", "c")
    assert manager.idle_bytes == 0
    manager.close()


@pytest.mark.parametrize("direct", [False, True])
def test_what_is_kept_in_reserved_memory_needs_no_file_afterwards(
    source: ModelSource, direct: bool
) -> None:
    manager = MemoryManager(source, cache_bytes=0, direct=direct)
    manager.reserve(6 * MIB)
    handles = manager.keep(("a", "c"))
    os.truncate(source.path, 0)
    for name, value in (("a", 1.0), ("c", 3.0)):
        assert not handles[name].view.flags.writeable
        assert (handles[name].view.view(np.float32) == value).all()
        assert manager.acquire(name) is handles[name]
    assert 4 * MIB <= manager.resident_bytes <= 6 * MIB
    manager.close()


def test_rows_are_read_without_a_map(source: ModelSource) -> None:
    manager = MemoryManager(source)
    rows = manager.read_rows("b", np.array([3, 0, 511]))
    assert rows.shape == (3, 4096)
    assert (rows.view(np.float32) == 2.0).all()
    assert manager.mapped == ()
    manager.close()


def test_a_matrix_splits_into_whole_rows(source: ModelSource) -> None:
    manager = MemoryManager(source, cache_bytes=0)
    whole = manager.acquire("c").view.copy()
    manager.release("c")
    parts = manager.split("c", 100 * 4096 + 5)
    shapes = [manager.acquire(part).tensor.shape for part in parts]
    assert shapes == [(100, 1024)] * 5 + [(12, 1024)]
    assert np.array_equal(np.concatenate([manager.acquire(part).view for part in parts]), whole)
    assert len(manager.split("c", 1)) == 512
    manager.close()


def test_an_unknown_tensor_and_a_missing_file_are_named(source: ModelSource) -> None:
    manager = MemoryManager(source)
    with pytest.raises(ModelDamaged, match=r"no tensor blk\.9"):
        manager.acquire("blk.9")
    manager.close()
    source.path.unlink()
    with pytest.raises(ModelNotFound, match=r"m\.gguf"):
        MemoryManager(source)


def test_a_file_that_shrank_after_its_header_was_read_is_damaged(source: ModelSource) -> None:
    with source.path.open("r+b") as file:
        file.truncate(MIB)
    manager = MemoryManager(source)
    with pytest.raises(ModelDamaged, match="tensor c"):
        manager.acquire("c")
    manager.close()


def test_a_limit_of_open_files_is_no_fault_of_the_model(source: ModelSource) -> None:
    manager = MemoryManager(source)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        with pytest.raises(DoesNotFit, match="too many open files") as caught:
            manager.acquire(next(iter(source.tensors)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "ulimit -n" in caught.value.line()


def test_peak_rss_keeps_the_largest_the_probe_saw(source: ModelSource) -> None:
    seen = iter((10, 30, 20))
    manager = MemoryManager(source, probe=lambda: next(seen))
    assert [manager.peak_rss for _ in range(3)] == [10, 30, 30]
    manager.close()


def test_the_probe_falls_back_from_psutil_to_proc_to_getrusage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_psutil = default_probe()
    monkeypatch.setattr(memory, "_psutil_rss", lambda: None)
    by_proc = default_probe()
    monkeypatch.setattr(memory, "_proc_rss", lambda: None)
    by_rusage = default_probe()
    for found in (by_psutil, by_proc, by_rusage):
        assert 10 * MIB < found < 100 * 1024 * MIB


def test_a_release_too_many_is_told_and_changes_nothing(source: ModelSource) -> None:
    manager = MemoryManager(source, cache_bytes=0)
    manager.acquire("a")
    manager.release("a")
    for name in ("a", "never"):
        with pytest.raises(ValueError, match=name):
            manager.release(name)
    assert first(manager, "a") == 1.0
