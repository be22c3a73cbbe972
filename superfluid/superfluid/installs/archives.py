"""Unpacking archives that nobody trusts: tar and zip, their names, links and sizes checked.

Nothing is written outside the target and nothing through a link; devices, pipes and what else is
neither file, folder nor link are refused. Of a member's mode only the executable bit is kept.
"""

from __future__ import annotations

import contextlib
import lzma
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Final, Literal

from superfluid.models.pull import size_text
from superfluid_compat.errors import BadArchive

MOST_MEMBERS: Final = 200_000
MOST_RATIO: Final = 200
LEAST_BOUND: Final = 64 << 20
"""What unpacks may be this many times larger than its archive, and this much in any case."""

_MOST_NAME: Final = 4096
_BLOCK_BYTES: Final = 1 << 18
_DAMAGED: Final = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, UnicodeError,
    NotImplementedError, RuntimeError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Member:
    """One entry. `target` is a link's; `open` gives a file's content."""

    name: str
    kind: Literal["file", "folder", "link", "hard link", "other"]
    executable: bool = False
    target: str = ""
    open: Callable[[], IO[bytes] | None] = lambda: None


def unpack(archive: Path, into: Path, *, strip: int = 0) -> None:
    """Unpack `archive` into the folder `into`, without the first `strip` folders of each name.

    Raises `BadArchive` naming the member at fault; what was unpacked by then stays.
    """
    into.mkdir(parents=True, exist_ok=True)
    bound = max(LEAST_BOUND, archive.stat().st_size * MOST_RATIO)
    try:
        with _members(archive) as members:
            _Unpacking(archive.name, into, strip, bound).all(members)
    except _DAMAGED as error:
        raise BadArchive(f"{archive.name} does not unpack: {error}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise BadArchive(f"{archive.name} does not unpack: {error}") from error


@contextlib.contextmanager
def _members(archive: Path) -> Iterator[Iterator[_Member]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            yield (_from_zip(opened, info) for info in opened.infolist())
    else:
        with _tar(archive) as tar:
            yield (_from_tar(tar, info) for info in tar)


def _tar(archive: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(archive, "r:*")
    except _DAMAGED as error:
        raise BadArchive(
            f"{archive.name} does not open as a tar or zip archive",
            fix="give a whole archive or wheel, a library's file, or a folder",
        ) from error


def _from_tar(tar: tarfile.TarFile, info: tarfile.TarInfo) -> _Member:
    executable = bool(info.mode & stat.S_IXUSR)
    if info.isreg():
        return _Member(info.name, "file", executable, open=lambda: tar.extractfile(info))
    if info.isdir():
        return _Member(info.name, "folder")
    if info.issym():
        return _Member(info.name, "link", target=info.linkname)
    if info.islnk():
        return _Member(info.name, "hard link", target=info.linkname)
    return _Member(info.name, "other")


def _from_zip(opened: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    mode = info.external_attr >> 16
    if info.is_dir():
        return _Member(info.filename, "folder")
    if stat.S_ISLNK(mode):
        if info.file_size > _MOST_NAME:
            return _Member(info.filename, "other")
        return _Member(info.filename, "link", target=opened.read(info).decode())
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        return _Member(info.filename, "other")
    executable = bool(mode & stat.S_IXUSR)
    return _Member(info.filename, "file", executable, open=lambda: opened.open(info))


class _Unpacking:
    """One archive on its way to disk."""

    def __init__(self, archive: str, into: Path, strip: int, bound: int) -> None:
        self._archive, self._into, self._strip, self._bound = archive, into, strip, bound
        self._root = into.resolve()
        self._bytes = 0
        self._links: list[Path] = []

    def all(self, members: Iterable[_Member]) -> None:
        for number, member in enumerate(members):
            if number >= MOST_MEMBERS:
                raise BadArchive(f"{self._archive} has more than {MOST_MEMBERS} members")
            parts = self._parts(member.name)
            if parts:
                self._one(member, self._into.joinpath(*parts))
        # Only now does every link have what it leads to, by way of other links too.
        for link in self._links:
            if not link.resolve().is_relative_to(self._root):
                raise self._bad(str(link.relative_to(self._into)), "is a link that leads out")

    def _parts(self, name: str) -> tuple[str, ...]:
        path = PurePosixPath(name)
        if path.is_absolute() or "\0" in name or "\\" in name or len(name) > _MOST_NAME:
            raise self._bad(name, "is no relative path")
        if ".." in path.parts:
            raise self._bad(name, "leads out by ..")
        return path.parts[self._strip :]

    def _one(self, member: _Member, path: Path) -> None:
        self._make_folder(member, path if member.kind == "folder" else path.parent)
        if member.kind == "folder":
            return
        if path.is_symlink() or path.exists():
            raise self._bad(member.name, "is in it twice")
        match member.kind:
            case "file":
                self._write(member, path)
            case "link":
                self._link(member, path)
            case "hard link":
                self._hard_link(member, path)
            case _:
                raise self._bad(member.name, "is neither file, folder nor link")

    def _make_folder(self, member: _Member, folder: Path) -> None:
        """`folder`, real all the way: nothing is written through a link."""
        for part in reversed(
            [folder, *folder.parents][: len(folder.parts) - len(self._into.parts)]
        ):
            if part.is_symlink() or (part.exists() and not part.is_dir()):
                raise self._bad(member.name, f"goes through {part.name}, which is no folder")
            part.mkdir(mode=0o700, exist_ok=True)

    def _write(self, member: _Member, path: Path) -> None:
        content = member.open()
        if content is None:
            raise self._bad(member.name, "has no content")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with content, open(descriptor, "wb") as out:
            while block := content.read(_BLOCK_BYTES):
                self._bytes += len(block)
                if self._bytes > self._bound:
                    raise BadArchive(
                        f"{self._archive} unpacks to more than {size_text(self._bound)}, which is "
                        "more than such an archive should hold"
                    )
                out.write(block)
        if member.executable:
            path.chmod(0o700)

    def _link(self, member: _Member, path: Path) -> None:
        if PurePosixPath(member.target).is_absolute() or not member.target:
            raise self._bad(member.name, f"is a link to {member.target or 'nothing'}")
        path.symlink_to(member.target)
        self._links.append(path)

    def _hard_link(self, member: _Member, path: Path) -> None:
        target = self._into.joinpath(*self._parts(member.target))
        if target.is_symlink() or not target.is_file():
            raise self._bad(
                member.name, f"is a link to {member.target}, which is no file before it"
            )
        if not target.resolve().is_relative_to(self._root):
            raise self._bad(member.name, "is a link that leads out")
        os.link(target, path)

    def _bad(self, name: str, what: str) -> BadArchive:
        return BadArchive(f"{self._archive}: {name[:200]!r} {what}")
