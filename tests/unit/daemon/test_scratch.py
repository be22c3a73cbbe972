"""What hostile workers leave in their scratch goes, and nothing else does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from superfluid.supervisor.scratch import Scratch, clear, remove

NOBODY = 65534


def _deep(folder: Path) -> None:
    """A chain of folders with a file in each, whose path is longer than the system takes."""
    parent = os.open(folder, os.O_RDONLY)
    for _ in range(1500):
        os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=parent))
        os.mkdir("d", dir_fd=parent)
        child = os.open("d", os.O_RDONLY, dir_fd=parent)
        os.close(parent)
        parent = child
    os.close(parent)


def _locked(folder: Path) -> None:
    """Folders in folders whose owner may not look, write, or enter."""
    for mode in (0o300, 0o500, 0o000):
        inner = folder / f"{mode:o}" / "inner"
        inner.mkdir(parents=True)
        (inner / "file").write_text("x")
        inner.chmod(mode)
        inner.parent.chmod(mode)
    folder.chmod(0o000)


def _many(folder: Path) -> None:
    for number in range(2_000):
        os.close(os.open(folder / f"{number}", os.O_CREAT | os.O_WRONLY))


def _odd(folder: Path) -> None:
    """No plain files, and names that are no text."""
    os.mkfifo(folder / "fifo")
    (folder / "0-0").mkdir()
    (folder / "dangling").symlink_to("nowhere")
    (folder / "\udcff\n").mkdir()
    (folder / "\udcff\n" / "x").write_text("x")
    (folder / ("n" * 255)).write_text("x")


@contextlib.contextmanager
def _as(who: str, folder: Path) -> Iterator[None]:
    """As a daemon that is not root too, which no mode keeps out."""
    if who == "root" or os.geteuid() != 0:
        yield
        return
    os.chown(folder, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("fill", [_deep, _locked, _many, _odd])
@pytest.mark.parametrize("who", ["root", "nobody"])
def test_whatever_is_left_goes(fill: Callable[[Path], None], who: str) -> None:
    limit = sys.getrecursionlimit()
    with tempfile.TemporaryDirectory() as top, _as(who, Path(top)):
        folder = Path(top) / "scratch"
        folder.mkdir()
        fill(folder)
        assert remove(folder)
        assert list(Path(top).iterdir()) == []
    assert sys.getrecursionlimit() == limit


@pytest.mark.parametrize("whole", [False, True])
def test_no_link_is_followed(tmp_path: Path, *, whole: bool) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "scratch"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    outside.chmod(0o500)
    before = sorted(it.name for it in outside.iterdir())
    if whole:
        folder.symlink_to(outside)
    else:
        (folder / "in").mkdir(parents=True)
        (folder / "link").symlink_to(outside)
        (folder / "in" / "link").symlink_to(outside)
        (folder / "in" / "up").symlink_to("..")
    assert remove(folder)
    assert sorted(it.name for it in outside.iterdir()) == before
    assert outside.stat().st_mode & 0o777 == 0o500


def test_it_ends_when_it_is_enough(tmp_path: Path) -> None:
    _many(tmp_path)
    looks = iter(range(100))
    assert not remove(tmp_path, lambda: next(looks) == 50)
    assert len(list(tmp_path.iterdir())) == 2_000 - 50


def test_what_is_not_there_is_gone(tmp_path: Path) -> None:
    assert remove(tmp_path / "none")
    assert remove(tmp_path / "none" / "none")


def test_what_a_killed_daemon_left_goes_before_the_next_serves(tmp_path: Path) -> None:
    root = tmp_path / "scratch"
    for name in ("left", "left too"):
        (root / name).mkdir(parents=True)
        _many(root / name)
    clear(root)
    assert not root.exists()


async def test_a_workers_folder_goes_beside_the_loop(tmp_path: Path) -> None:
    root = tmp_path / "scratch"
    scratch = Scratch(root)
    first = scratch.make()
    assert first.stat().st_mode & 0o777 == 0o700
    _deep(first)
    ticks = 0
    scratch.drop()
    second = scratch.make()
    assert scratch.current == second
    while list(root.iterdir()) != [second]:
        ticks += 1
        await asyncio.sleep(0)
    assert ticks > 10
    scratch.drop()
    await scratch.swept()
    assert list(root.iterdir()) == []


async def test_what_resists_is_tried_again_and_keeps_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = Scratch(tmp_path)
    first = scratch.make()
    (first / "in").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", _refuse)
        (first / "in" / "file").write_text("x")
        scratch.drop()
        while scratch._sweep is None or not scratch._sweep.done():
            await asyncio.sleep(0.001)
    assert first.exists()
    scratch.make()
    scratch.drop()
    await scratch.swept()
    assert list(tmp_path.iterdir()) == []


def _refuse(_: object) -> None:
    raise OSError(24, "Too many open files")
