"""Archives that nobody trusts: what they may hold, and that nothing lands outside."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from superfluid.installs import archives
from superfluid.installs.archives import unpack
from superfluid_compat.errors import BadArchive

Entry = tuple[str, bytes, str]
"""Name, tar type, and content or link's target."""


def tar(path: Path, *entries: Entry, mode: int = 0o644) -> Path:
    with tarfile.open(path, "w:gz") as made:
        for name, kind, text in entries:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, mode
            if kind == tarfile.REGTYPE:
                info.size = len(text)
            else:
                info.linkname = text
            made.addfile(info, io.BytesIO(text.encode()))
    return path


def zipped(path: Path, *entries: tuple[str, int, str]) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        for name, mode, text in entries:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            made.writestr(info, text)
    return path


FILE, LINK, HARD, FOLDER = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): f"-> {path.readlink()}"
        if path.is_symlink()
        else path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([("/etc/x", FILE, "")], "is no relative path"),
        ([("../x", FILE, "")], "leads out by .."),
        ([("a/../../x", FILE, "")], "leads out by .."),
        ([("a\\..\\x", FILE, "")], "is no relative path"),
        ([("l", LINK, "/etc/passwd")], "is a link to /etc/passwd"),
        ([("l", LINK, "..")], "is a link that leads out"),
        ([("d/l", LINK, "../../x")], "is a link that leads out"),
        ([("d/e", LINK, ".."), ("x", LINK, "d/e/../..")], "is a link that leads out"),
        ([("l", LINK, "d"), ("d", FOLDER, ""), ("l/x", FILE, "")], "goes through l"),
        ([("x", FILE, "1"), ("x/y", FILE, "2")], "goes through x"),
        ([("x", FILE, "1"), ("x", FILE, "2")], "is in it twice"),
        ([("x", LINK, "y"), ("x", FILE, "2")], "is in it twice"),
        ([("h", HARD, "../../etc/passwd")], "leads out by .."),
        ([("h", HARD, "/etc/passwd")], "is no relative path"),
        ([("h", HARD, "later"), ("later", FILE, "")], "no file before it"),
        ([("l", LINK, "x"), ("x", FILE, "1"), ("h", HARD, "l")], "no file before it"),
        ([("d", tarfile.CHRTYPE, "")], "neither file, folder nor link"),
        ([("d", tarfile.BLKTYPE, "")], "neither file, folder nor link"),
        ([("d", tarfile.FIFOTYPE, "")], "neither file, folder nor link"),
        ([("n" * 5000, FILE, "")], "is no relative path"),
    ],
)
def test_a_hostile_tar_is_refused_and_nothing_lands_outside(
    tmp_path: Path, entries: list[Entry], words: str
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BadArchive, match=words):
        unpack(tar(tmp_path / "x.tar.gz", *entries), place / "into")
    assert sorted(path for path in tmp_path.iterdir() if path.name != "x.tar.gz") == before
    assert [path.name for path in place.iterdir()] == ["into"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (("../x", 0o644, ""), "leads out by .."),
        (("/x", 0o644, ""), "is no relative path"),
        (("l", stat.S_IFLNK | 0o777, "/etc"), "is a link to /etc"),
        (("l", stat.S_IFLNK | 0o777, "../x"), "is a link that leads out"),
        (("d", stat.S_IFCHR | 0o644, ""), "neither file, folder nor link"),
    ],
)
def test_a_hostile_zip_is_refused(tmp_path: Path, entry: tuple[str, int, str], words: str) -> None:
    with pytest.raises(BadArchive, match=words):
        unpack(zipped(tmp_path / "x.zip", entry), tmp_path / "into")


def test_what_is_good_unpacks_with_modes_and_links_and_without_its_first_folder(
    tmp_path: Path,
) -> None:
    path = tar(
        tmp_path / "x.tar.gz",
        ("top", FOLDER, ""),
        ("top/lib/a.so", FILE, "a"),
        ("top/lib/b.so", LINK, "a.so"),
        ("top/lib/c.so", HARD, "top/lib/a.so"),
        mode=0o6755,
    )
    unpack(path, tmp_path / "into", strip=1)
    found = tmp_path / "into"
    assert tree(found) == {"lib/a.so": "a", "lib/b.so": "-> a.so", "lib/c.so": "a"}
    assert stat.S_IMODE((found / "lib/a.so").stat().st_mode) == 0o700
    unpack(zipped(tmp_path / "y.zip", ("p/x", 0o644, "1"), ("p/y", 0o755, "2")), tmp_path / "zip")
    assert tree(tmp_path / "zip") == {"p/x": "1", "p/y": "2"}
    assert stat.S_IMODE((tmp_path / "zip/p/x").stat().st_mode) == 0o600


def test_a_bomb_and_a_crowd_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "LEAST_BOUND", 1 << 16)
    monkeypatch.setattr(archives, "MOST_MEMBERS", 10)
    bomb = tar(tmp_path / "bomb.tar.gz", ("x", FILE, "0" * (1 << 20)))
    with pytest.raises(BadArchive, match="unpacks to more than"):
        unpack(bomb, tmp_path / "into")
    crowd = tar(tmp_path / "crowd.tar.gz", *((str(n), FILE, "") for n in range(11)))
    with pytest.raises(BadArchive, match="more than 10 members"):
        unpack(crowd, tmp_path / "crowd")


Damage = Callable[[bytes], bytes]


@pytest.mark.parametrize("kind", ["x.tar.gz", "x.zip"])
@given(data=st.data())
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_damaged_archive_is_refused_or_whole(
    tmp_path: Path, kind: str, data: st.DataObject
) -> None:
    good = tmp_path / kind
    if not good.exists():
        text = "".join(str(n) for n in range(500))
        if kind.endswith("zip"):
            zipped(good, ("a/b", 0o644, text))
        else:
            tar(good, ("a/b", FILE, text))
    content = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    name = os.urandom(4).hex()
    bad = tmp_path / f"{name}-{kind}"
    bad.write_bytes(content[:cut])
    with contextlib.suppress(BadArchive):
        unpack(bad, tmp_path / name)
    outside = {path.name for path in tmp_path.iterdir()} - {kind, bad.name, name}
    assert all(len(left) == 8 or left.endswith(kind) for left in outside)


def test_a_text_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("no archive at all")
    with pytest.raises(BadArchive, match=r"^x does not open as a tar or zip archive$") as refused:
        unpack(tmp_path / "x", tmp_path / "into")
    assert "a library's file, or a folder" in refused.value.fix
