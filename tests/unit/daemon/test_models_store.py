"""Paths, the store, what a MODEL argument stands for, and disks that are too small."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from superfluid import cli
from superfluid.models.pull import Offer, Progress, RemoteFile, pull, require_space, size_text
from superfluid.models.resolve import locate
from superfluid.models.shelf import DEFAULT
from superfluid.models.store import Store, StoredModel
from superfluid.paths import Paths, private_folder
from superfluid_compat.errors import (
    BadConfig,
    DiskFull,
    ExitCode,
    ModelDamaged,
    ModelNotFound,
    Offline,
)


class Usage(NamedTuple):
    """What `shutil.disk_usage` answers."""

    total: int
    used: int
    free: int


class OneFile:
    """A source of one file without a digest."""

    def __init__(self, name: str, content: bytes, announced: int | None = None) -> None:
        self.name, self._content, self._announced = name, content, announced

    def offer(self) -> Offer:
        size = len(self._content) if self._announced is None else self._announced
        return Offer("test", "none", "model.gguf", (RemoteFile("model.gguf", size),))

    def staged(self, offer: Offer, folder: Path) -> int:
        return 0

    def fetch(self, offer: Offer, folder: Path, progress: Progress) -> None:
        (folder / "model.gguf").write_bytes(self._content)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Paths.under(tmp_path / "home"))


@pytest.fixture
def stored(store: Store) -> StoredModel:
    return pull(store, OneFile("org/model:q4", b"GGUF and more"))


def test_a_pulled_model_is_listed_found_and_removed(store: Store, stored: StoredModel) -> None:
    assert store.list() == [stored]
    assert store.find("org/model:q4") == stored
    assert store.remove("org/model:q4") > len(b"GGUF and more")
    assert store.list() == []
    with pytest.raises(ModelNotFound, match="no model org/model:q4"):
        store.remove("org/model:q4")


@pytest.mark.usefixtures("stored")
def test_a_name_nearly_right_is_answered_with_the_right_one(store: Store) -> None:
    with pytest.raises(ModelNotFound) as caught:
        store.get("org/model:q5")
    assert caught.value.fix == "did you mean org/model:q4?"


@pytest.mark.parametrize("content", [None, b"shorter"])
def test_a_file_lost_or_cut_is_damage(
    store: Store, stored: StoredModel, content: bytes | None
) -> None:
    if content is None:
        stored.path.unlink()
    else:
        stored.path.write_bytes(content)
    with pytest.raises(ModelDamaged, match="wanted 13 bytes"):
        store.find("org/model:q4")
    assert store.list() == []
    assert store.remove("org/model:q4") >= 0


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"name": 1}'])
def test_a_manifest_that_does_not_read_is_damage(
    store: Store, stored: StoredModel, content: bytes
) -> None:
    (stored.folder / "manifest.json").write_bytes(content)
    with pytest.raises(ModelDamaged, match="does not read"):
        store.find("org/model:q4")


def test_everything_kept_is_private(tmp_path: Path, stored: StoredModel) -> None:
    for path in (tmp_path / "home").rglob("*"):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    assert stored.path.is_file()


def test_home_puts_everything_under_one_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPERFLUID_HOME", "/somewhere")
    paths = Paths.find()
    assert {paths.config, paths.data, paths.cache, paths.state} == {
        Path("/somewhere", name) for name in ("config", "data", "cache", "state")
    }


def test_without_home_the_platform_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUPERFLUID_HOME", raising=False)
    paths = Paths.find()
    folders = (paths.config, paths.data, paths.cache, paths.state)
    assert all("superfluid" in folder.parts for folder in folders)


def test_a_home_that_is_no_utf8_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPERFLUID_HOME", "/h\udcff")
    with pytest.raises(BadConfig, match="is no UTF-8, wanted a path that is text"):
        Paths.find()


def test_a_home_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadConfig, match="cannot be written: not a directory") as caught:
        private_folder(tmp_path / "file" / "data")
    assert "SUPERFLUID_HOME" in caught.value.fix


def test_a_home_that_may_not_be_written(tmp_path: Path) -> None:
    """In a process without root's rights, since root may write everywhere."""
    tmp_path.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    code = (
        "import os, sys; from pathlib import Path;"
        "from superfluid.paths import private_folder;"
        "from superfluid_compat.errors import BadConfig;"
        "os.geteuid() or os.setuid(65534)\n"
        f"try: private_folder(Path({str(home)!r}) / 'data')\n"
        "except BadConfig as error: print(error.line())"
    )
    for folder in tmp_path.parents[:-1]:
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot be written: permission denied" in done.stdout


def test_a_disk_too_small_is_refused_before_fetching(store: Store) -> None:
    source = OneFile("big", b"", announced=1 << 60)
    with pytest.raises(DiskFull, match=r"iB free, wanted 1\.05e\+06 TiB"):
        pull(store, source)
    assert store.find("big") is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, in this test's own mount namespace where it may have one."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = tmp_path / "small"
    folder.mkdir()
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=256k") != 0:
        # Without the right to mount, a device that is always full stands in.
        yield Path("/dev/full")
        return
    yield folder
    libc.umount2(os.fsencode(folder), 2)


def test_the_command_refuses_a_disk_too_small(
    small_disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if small_disk == Path("/dev/full"):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 18, 0, 1 << 18))
    home = tmp_path if small_disk == Path("/dev/full") else small_disk
    monkeypatch.setenv("SUPERFLUID_HOME", str(home))
    assert cli.run(["models", "pull", DEFAULT]) == ExitCode.MODEL
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"has 256 KiB free, wanted 358 MiB; free disk space", line)


def test_a_disk_that_fills_up_meanwhile(small_disk: Path, tmp_path: Path) -> None:
    full = small_disk == Path("/dev/full")
    home = tmp_path / "home" if full else small_disk
    content = bytes(1 << 20)

    class Overflowing(OneFile):
        def fetch(self, offer: Offer, folder: Path, progress: Progress) -> None:
            (small_disk if full else folder / "model.gguf").write_bytes(content)

    with pytest.raises(DiskFull, match="filled up while fetching"):
        pull(Store(Paths.under(home)), Overflowing("x", content, announced=10))


def test_space_names_both_sizes(tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match=r"free, wanted 4\.19e\+06 TiB"):
        require_space(tmp_path, 1 << 62)
    require_space(tmp_path, 0)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (253113024, "241 MiB"),
        (1023 << 10, "0.999 MiB"), (5 << 40, "5 TiB"),
    ],
)  # fmt: skip
def test_sizes_in_words(size: int, text: str) -> None:
    assert size_text(size) == text


def test_a_path_is_served_under_its_stem(store: Store, tmp_path: Path) -> None:
    (tmp_path / "some.model.gguf").touch()
    located = locate(str(tmp_path / "some.model.gguf"), store)
    assert (located.name, located.path) == ("some.model", tmp_path / "some.model.gguf")


@pytest.mark.parametrize(
    ("files", "entry"),
    [
        (["m.gguf", "README.md"], "m.gguf"),
        (["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"], "m-00001-of-00002.gguf"),
        (["config.json", "a.safetensors"], ""),
        (["a.gguf", "b.gguf"], ""),
        (["manifest.song", "weights.song"], ""),
    ],
)
def test_a_folder_is_its_one_gguf_model_or_itself(
    store: Store, tmp_path: Path, files: list[str], entry: str
) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert locate(str(tmp_path), store).path == tmp_path / entry


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_path_that_is_no_utf8_is_no_model(store: Store, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "folder\udcff" if kind == "folder" else tmp_path
    folder.mkdir(exist_ok=True)
    path = folder / ("b.gguf" if kind == "folder" else "b\udcff.gguf")
    path.touch()
    if kind == "link":
        (tmp_path / "link.gguf").symlink_to(path)
        path = tmp_path / "link.gguf"
    with pytest.raises(ModelNotFound, match="is no UTF-8, wanted a path that is text") as caught:
        locate(str(path), store)
    assert caught.value.exit_code == 3


def test_an_empty_folder_is_no_model(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="is empty") as caught:
        locate(str(tmp_path), store)
    assert caught.value.exit_code is ExitCode.MODEL


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("/no/such.gguf", "there is no file /no/such.gguf"),
        ("./model", "there is no file"),
        ("such.gguf", "there is no file"),
        ("gemma-3-27m", "did you mean gemma-3-270m"),
        ("what is this", "is no file here"),
        ("/dev/null", "neither a file nor a folder"),
    ],
)
def test_what_names_no_model(store: Store, argument: str, message: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        locate(argument, store)
    assert message in caught.value.line()


@pytest.mark.parametrize("argument", [DEFAULT, "org/other"])
def test_offline_fetches_nothing(store: Store, argument: str) -> None:
    with pytest.raises(Offline, match="--offline fetches nothing"):
        locate(argument, store, offline=True)


@pytest.mark.usefixtures("stored")
def test_offline_serves_what_is_stored(store: Store) -> None:
    assert locate("org/model:q4", store, offline=True).path.read_bytes() == b"GGUF and more"
