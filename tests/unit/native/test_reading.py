"""Weights that are read: whichever ranges, however short the reads, whoever holds what meanwhile,
bytes served are the file's or an error is."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superfluid_adapter_native import loading, weight_files
from superfluid_adapter_native.arena import PAGE, Arena, Bytes
from superfluid_adapter_native.formats.source import Tensor
from superfluid_adapter_native.quants.types import BY_NAME
from superfluid_adapter_native.slots import Slots
from superfluid_adapter_native.units import Unit, unit_of
from superfluid_adapter_native.weight_files import WeightFiles
from superfluid_compat.errors import Fault, ModelDamaged, ModelNotFound
from superfluid_workerd.adapter import Feed
from support.native_models import ignore, opened, whole
from support.tiny_models import Architecture, TinyModel, write_model

FILE_BYTES = 300_000
CONTENT = np.random.default_rng(7).integers(0, 256, FILE_BYTES, np.uint8).tobytes()
PROMPT = list(range(5, 25))


def span(name: str, start: int, count: int, file: int = 0) -> Tensor:
    return Tensor(name, BY_NAME["F32"], (count,), file, start, count)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two files of the same length, the second the first one's bytes backwards."""
    folder = tmp_path_factory.mktemp("files")
    first, second = folder / "first", folder / "second"
    first.write_bytes(CONTENT)
    second.write_bytes(CONTENT[::-1])
    return first, second


def bytes_of(tensor: Tensor) -> bytes:
    content = CONTENT[::-1] if tensor.file else CONTENT
    return content[tensor.offset : tensor.offset + tensor.bytes]


@st.composite
def ranges(draw: st.DrawFn) -> tuple[Tensor, ...]:
    """Up to six ranges of two files, adjacent, apart or overlapping."""
    found = []
    for number in range(draw(st.integers(1, 6))):
        start = draw(
            st.integers(0, FILE_BYTES - 1) | st.sampled_from((0, 4095, 4096, 4097, 65_536))
        )
        count = draw(st.integers(1, FILE_BYTES - start))
        found.append(span(f"t{number}", start, count, draw(st.integers(0, 1))))
    return tuple(found)


def fragmented(rng: random.Random) -> Callable[..., int]:
    """`os.preadv` that gives less than it was asked for, as the system may: whole pages of what is
    read past the page cache, any number of bytes else."""
    right = os.preadv

    def preadv(number: int, buffers: Sequence[memoryview], at: int) -> int:
        count = len(buffers[0])
        if count > PAGE and rng.random() < 0.5:
            count = rng.randrange(1, count // PAGE + 1) * PAGE if at % PAGE == 0 else count // 3
        return right(number, [buffers[0][:count]], at)

    return preadv


@settings(deadline=None)
@given(ranges(), st.booleans(), st.integers(0, 1 << 30))
def test_every_range_is_read_as_it_is_in_its_file(
    paths: tuple[Path, Path], wanted: tuple[Tensor, ...], direct: bool, seed: int
) -> None:
    unit = unit_of(wanted)
    memory = Arena(unit.bytes).take(unit.bytes)
    files = WeightFiles(paths, direct=direct)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", fragmented(random.Random(seed)))
        patch.setattr(weight_files, "_REQUEST_BYTES", 8 * PAGE)
        assert files.fill(unit, memory)
        for tensor in wanted:
            at = unit.places[tensor.name]
            assert memory[at : at + tensor.bytes].tobytes() == bytes_of(tensor)
            alone = files.read(tensor.file, tensor.offset, tensor.bytes)
            assert alone.tobytes() == bytes_of(tensor)
    files.close()


@settings(deadline=None)
@given(ranges(), st.booleans(), st.integers(0, FILE_BYTES))
def test_a_file_that_was_cut_gives_its_bytes_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, wanted: tuple[Tensor, ...], direct: bool, length: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    first, second = folder / "first", folder / "second"
    first.write_bytes(CONTENT)
    second.write_bytes(CONTENT[::-1])
    unit = unit_of(wanted)
    memory = Arena(unit.bytes).take(unit.bytes)
    files = WeightFiles((first, second), direct=direct)
    os.truncate(first, length)
    lacking = any(t.file == 0 and t.offset + t.bytes > length for t in wanted)
    if lacking:
        with pytest.raises(ModelDamaged, match="first ends at byte"):
            files.fill(unit, memory)
    else:
        files.fill(unit, memory)
        for tensor in wanted:
            at = unit.places[tensor.name]
            assert memory[at : at + tensor.bytes].tobytes() == bytes_of(tensor)
    files.close()


@given(ranges())
def test_a_unit_takes_little_more_than_its_tensors(wanted: tuple[Tensor, ...]) -> None:
    unit = unit_of(wanted)
    assert unit.bytes % PAGE == 0
    most = sum(one.bytes for one in wanted) + len(wanted) * (2 * PAGE + (64 << 10))
    assert unit.bytes <= most
    for run in unit.runs:
        assert run.start % PAGE == run.place % PAGE == 0
    for one in wanted:
        assert unit.places[one.name] % PAGE == one.offset % PAGE


def test_a_file_system_that_cannot_read_past_its_cache_is_read_through_it(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = os.preadv
    refused: list[int] = []

    def preadv(number: int, buffers: Sequence[memoryview], at: int) -> int:
        if len(buffers[0]) % PAGE == 0 and not refused:
            refused.append(number)
            raise OSError(errno.EINVAL, "Invalid argument")
        return right(number, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)
    files = WeightFiles(paths, direct=True)
    assert files.read(0, 5, 200_000).tobytes() == CONTENT[5:200_005]
    assert files.read(0, 70_000, 200_000).tobytes() == CONTENT[70_000:270_000]
    files.close()


def test_a_disk_error_is_a_damaged_model(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def preadv(number: int, buffers: object, at: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    for direct in (False, True):
        files = WeightFiles(paths, direct=direct)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", preadv)
            with pytest.raises(ModelDamaged, match="first cannot be read: Input/output error"):
                files.read(0, 0, 100_000)
        files.close()


def _open_files() -> int:
    return sum(1 for number in range(4096) if _is_open(number))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def test_a_missing_file_is_named_and_leaves_nothing_open(
    paths: tuple[Path, Path], tmp_path: Path
) -> None:
    before = _open_files()
    with pytest.raises(ModelNotFound, match="nowhere cannot be opened"):
        WeightFiles((paths[0], tmp_path / "nowhere"), direct=True)
    assert _open_files() == before


def test_an_arena_hands_out_whole_pages_and_takes_them_back() -> None:
    arena = Arena(5 * PAGE)
    first, second = arena.take(PAGE + 1), arena.take(3 * PAGE)
    assert first.ctypes.data % PAGE == second.ctypes.data % PAGE == 0
    assert second.ctypes.data - first.ctypes.data == 2 * PAGE
    first[:], second[:] = 1, 2
    arena.hand_back(second)
    assert (first == 1).all()
    assert (second == 0).all()
    with pytest.raises(ValueError, match="has 0 left"):
        arena.take(1)


UNITS = [
    unit_of(span(f"u{number}.{part}", 30_000 * number + part * 9_000, 9_000) for part in range(2))
    for number in range(8)
]


class Gated(WeightFiles):
    """Reads a unit in halves, and waits in between until it may go on."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(paths)
        self.half = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.filled: list[Unit] = []

    def fill(self, unit: Unit, memory: Bytes, stop: weight_files.Stop = lambda: False) -> bool:
        memory[:] = 0
        self.half.release()
        assert self.go.acquire(timeout=60)
        if stop():
            return False
        self.filled.append(unit)
        return super().fill(unit, memory, stop)


def check(unit: Unit, memory: Bytes) -> None:
    for tensor in unit.tensors:
        at = unit.places[tensor.name]
        assert memory[at : at + tensor.bytes].tobytes() == bytes_of(tensor)


@pytest.fixture
def gated(paths: tuple[Path, Path]) -> Iterator[Gated]:
    files = Gated(paths)
    yield files
    files.close()


def slots_of(files: WeightFiles, count: int = 2) -> Slots:
    rooms = [max(unit.bytes for unit in UNITS)] * count
    return Slots(files, Arena(sum(rooms)), rooms)


def test_a_unit_half_read_ahead_is_waited_for(gated: Gated) -> None:
    slots = slots_of(gated)
    slots.follow(UNITS[0], UNITS[1])
    reader = threading.Thread(target=slots.read_next)
    reader.start()
    assert gated.half.acquire(timeout=60)
    got: list[Bytes] = []
    holder = threading.Thread(target=lambda: got.append(slots.hold(UNITS[1])))
    holder.start()
    assert not got
    gated.go.release()
    for thread in (reader, holder):
        thread.join(60)
    check(UNITS[1], got[0])
    assert gated.filled == [UNITS[1]]


def test_what_is_no_longer_next_is_given_up_and_never_served(gated: Gated) -> None:
    slots = slots_of(gated)
    slots.follow(UNITS[0], UNITS[1])
    reader = threading.Thread(target=slots.read_next)
    reader.start()
    assert gated.half.acquire(timeout=60)
    slots.follow(UNITS[4], UNITS[5])
    gated.go.release()
    reader.join(60)
    assert gated.filled == []
    gated.go.release()
    check(UNITS[1], slots.hold(UNITS[1]))
    assert gated.filled == [UNITS[1]]


def test_a_unit_at_work_is_not_read_over(gated: Gated) -> None:
    slots = slots_of(gated)
    gated.go.release(8)
    slots.follow(UNITS[0], UNITS[1])
    first = slots.hold(UNITS[0])
    slots.read_next()
    slots.follow(UNITS[1], UNITS[2])
    second = slots.hold(UNITS[1])
    waiting = threading.Thread(target=slots.read_next)
    waiting.start()
    third = slots.hold(UNITS[3])
    for unit, memory in ((UNITS[0], first), (UNITS[1], second), (UNITS[3], third)):
        check(unit, memory)
        slots.leave(unit)
    waiting.join(60)
    assert gated.filled == [UNITS[0], UNITS[1], UNITS[3], UNITS[2]]
    check(UNITS[2], slots.hold(UNITS[2]))
    assert len(gated.filled) == 4


def test_a_failed_reading_ahead_shows_where_the_unit_is_wanted(
    paths: tuple[Path, Path], tmp_path: Path
) -> None:
    path = tmp_path / "first"
    path.write_bytes(CONTENT)
    files = WeightFiles((path,))
    slots = slots_of(files)
    os.truncate(path, 31_000)
    slots.follow(UNITS[0], UNITS[1])
    assert slots.read_next()
    check(UNITS[0], slots.hold(UNITS[0]))
    for _ in range(3):
        with pytest.raises(ModelDamaged, match="ends at byte 31000"):
            slots.hold(UNITS[1])
    path.write_bytes(CONTENT)
    check(UNITS[1], slots.hold(UNITS[1]))
    files.close()


def test_idle_buffers_are_handed_back_and_filled_anew(paths: tuple[Path, Path]) -> None:
    files = WeightFiles(paths)
    slots = slots_of(files)
    held, idle = slots.hold(UNITS[0]), slots.hold(UNITS[1])
    slots.leave(UNITS[1])
    assert slots.bytes == held.nbytes + idle.nbytes
    assert slots.idle_bytes == idle.nbytes
    slots.drop()
    check(UNITS[0], held)
    assert not idle.any()
    assert slots.bytes == held.nbytes
    check(UNITS[1], slots.hold(UNITS[1]))
    files.close()


@pytest.mark.parametrize("direct", [False, True])
def test_holders_and_a_reader_at_once_see_nothing_but_the_file(
    paths: tuple[Path, Path], direct: bool
) -> None:
    files = WeightFiles(paths, direct=direct)
    slots = slots_of(files)
    wrong: list[BaseException] = []

    def read() -> None:
        while slots.read_next():
            pass

    def hold(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(150):
                now, after, more = rng.sample(UNITS, 3)
                slots.follow(now, after)
                for unit in (now, more)[: rng.randint(1, 2)]:
                    memory = slots.hold(unit)
                    check(unit, memory)
                    slots.leave(unit)
                memory, again = slots.hold(after), slots.hold(after)
                assert memory is again
                slots.leave(after)
                check(after, memory)
                slots.leave(after)
                if rng.random() < 0.1:
                    slots.drop()
        except BaseException as error:
            wrong.append(error)
            raise

    reader = threading.Thread(target=read)
    holders = [threading.Thread(target=hold, args=(seed,)) for seed in range(3)]
    for thread in (reader, *holders):
        thread.start()
    for thread in holders:
        thread.join(150)
    slots.close()
    reader.join(60)
    assert not wrong
    assert not reader.is_alive()
    assert slots.idle_bytes == slots.bytes
    files.close()


ARCHITECTURES: tuple[Architecture, ...] = ("llama", "qwen3moe")
SPEC = TinyModel("llama", layers=5, width=64, ff=256)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_past_the_page_cache_a_model_serves_the_same_bits(
    architecture: Architecture, tmp_path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.gguf", TinyModel(architecture, layers=3))
    with opened(path, kernels) as loaded:
        wanted = whole(loaded.runtime, PROMPT)
    made: list[bool] = []

    class Watched(WeightFiles):
        def __init__(self, paths: Sequence[Path], *, direct: bool = False) -> None:
            made.append(direct)
            super().__init__(paths, direct=direct)

    monkeypatch.setattr("superfluid_adapter_native.memory.WeightFiles", Watched)
    for free in (0, 1 << 60):
        monkeypatch.setattr(loading, "available_bytes", lambda free=free: free)
        with opened(path, kernels, cache_bytes=0) as loaded:
            assert np.array_equal(whole(loaded.runtime, PROMPT), wanted)
    assert made == [True, False]


def test_a_walk_reads_what_streams_once_and_what_stays_never(
    tmp_path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.gguf", SPEC)
    read: list[str] = []
    right = WeightFiles.fill

    def fill(self: WeightFiles, unit: Unit, *rest: Any) -> bool:
        read.extend(tensor.name for tensor in unit.tensors)
        return right(self, unit, *rest)

    with opened(path, kernels, cache_bytes=600_000, read_ahead=False) as loaded:
        kept = loaded.record.got["layers-resident"]
        assert 0 < kept < SPEC.layers
        assert loaded.record.got["head-resident"]
        runtime = loaded.runtime
        sequence = runtime.seq_create()
        whole(runtime, PROMPT, sequence)
        monkeypatch.setattr(WeightFiles, "fill", fill)
        for turn in range(3):
            runtime.step([Feed(sequence, [7], len(PROMPT) + turn)], ignore)
    assert len(read) == 3 * len(set(read))
    assert len({name.split(".")[1] for name in read}) == SPEC.layers - kept


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("read_ahead", [False, True])
def test_a_model_cut_while_it_serves_is_a_fault_until_it_is_whole_again(
    architecture: Architecture, read_ahead: bool, tmp_path: Path, kernels: Path
) -> None:
    path = write_model(tmp_path / "m.gguf", TinyModel(architecture, layers=4))
    content = path.read_bytes()
    with opened(path, kernels, cache_bytes=0, read_ahead=read_ahead) as loaded:
        runtime = loaded.runtime
        sequence = runtime.seq_create()
        whole(runtime, PROMPT, sequence)
        wanted = whole(runtime, [*PROMPT, 7])[-1:]
        os.truncate(path, len(content) // 3)
        for _ in range(2):
            with pytest.raises(Fault, match=r"m\.gguf ends at byte"):
                runtime.step([Feed(sequence, [7], len(PROMPT))], ignore)
            assert runtime.seq_length(sequence) == len(PROMPT)
        path.write_bytes(content)
        assert np.array_equal(whole(runtime, [7], sequence), wanted)
