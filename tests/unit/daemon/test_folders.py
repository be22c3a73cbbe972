"""Folders that a user gives: what is copied of them, and the words for what is not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from superfluid.installs import folders
from superfluid.installs.folders import copy_folder
from superfluid_compat.errors import BadArchive, DiskFull


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A folder with a file and a link to it."""
    given = tmp_path / "given"
    (given / "lib").mkdir(parents=True)
    (given / "lib" / "libx.so").write_text("x")
    (given / "lib" / "libx.so").chmod(0o755)
    (given / "x").symlink_to("lib/libx.so")
    (given / "latest").symlink_to("lib")
    return given


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def test_a_folder_is_copied_with_its_links(given: Path, target: Path) -> None:
    copy_folder(given, target)
    assert (target / "x").readlink() == Path("lib/libx.so")
    assert (target / "latest").readlink() == Path("lib")
    assert (target / "lib" / "libx.so").read_text() == "x"
    assert (target / "lib" / "libx.so").stat().st_mode & 0o777 == 0o700


def out(folder: Path) -> None:
    (folder / "far").symlink_to("../outside")


def absolute(folder: Path) -> None:
    (folder / "far").symlink_to(folder / "x")


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "far")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (out, "/far is a link that leads out of "),
        (absolute, "/far is a link that leads out of "),
        (pipe, "/far is neither file, folder nor link"),
    ],
)
def test_what_is_wrong_with_a_folder_is_told_of_a_folder(
    spoil: Callable[[Path], None], words: str, given: Path, target: Path
) -> None:
    spoil(given)
    with pytest.raises(BadArchive) as refused:
        copy_folder(given, target)
    assert words in refused.value.message
    assert "archive" not in refused.value.line()
    assert "give the folder of a build" in refused.value.fix
    assert list(target.iterdir()) == []


def test_a_folder_of_too_many_files_is_not_begun(
    given: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MOST_MEMBERS", 3)
    with pytest.raises(BadArchive, match="holds more than 3 files"):
        copy_folder(given, target)
    assert list(target.iterdir()) == []


def test_a_folder_that_has_no_room_is_not_begun(given: Path, target: Path) -> None:
    with (given / "sparse").open("wb") as file:
        file.truncate(shutil.disk_usage(given).free + (1 << 40))
    with pytest.raises(DiskFull, match="free, wanted"):
        copy_folder(given, target)
    assert list(target.iterdir()) == []


def test_a_file_that_may_not_be_read_is_named(
    given: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, _target: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(source))

    monkeypatch.setattr(shutil, "copyfile", refuse)
    with pytest.raises(BadArchive, match=r"libx\.so cannot be read: permission denied"):
        copy_folder(given, target)
