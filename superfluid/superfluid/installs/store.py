"""The installs below one data folder.

runtimes/ID/VERSION-BACKEND/        an install, with `install.json`: what it is and every digest
runtimes/ID/current                 its name, first the one in use, then those used before
runtimes/ID/pinned                  the name that `use` chose, until `use --auto`
runtimes/ID/.staging/               an attempt under way, or what a killed one left
runtimes/.locks/ID                  held by whoever installs, repairs, switches or removes
runtimes/.locks/ID@NAME             held, shared, by every server that runs it
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import msgspec
from packaging.version import InvalidVersion, Version

from superfluid.catalog.workerd import Place
from superfluid.models.pull import digest_of
from superfluid.paths import open_private, private_folder
from superfluid_compat.errors import InstallInUse, UnknownInstall
from superfluid_workerd.link.answers import InstallPlan
from superfluid_workerd.options import nearest

MANIFEST: Final = "install.json"
STAGING: Final = ".staging"
RECIPE: Final = "recipe"
"""Source of what was fetched as the adapter's recipe says."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")


class InstalledFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file by its path in the install; a link has its target in place of a digest."""

    path: str
    size: int = 0
    sha256: str = ""
    link: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What an install is. `source` is where it came from: the adapter's recipe, or what `--from`
    named. `interpreter` is the Python its workers run under, relative to its folder.

    `installed` is in seconds since the epoch; `adapter` the version of the adapter that made it.
    """

    runtime: str
    name: str
    version: str
    backend: str
    source: str
    plan: InstallPlan
    installed: int
    adapter: str
    abi: int | None = None
    sha256: str = ""
    untested: bool = False
    interpreter: str = ""
    files: tuple[InstalledFile, ...] = ()

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Install:
    """An install on disk. `manifest` is None when it does not read."""

    runtime: str
    name: str
    folder: Path
    manifest: Manifest | None

    @property
    def place(self) -> Place:
        """Where its workers find it."""
        interpreter = self.manifest.interpreter if self.manifest else ""
        return Place(self.folder, self.folder / interpreter if interpreter else None)

    @property
    def fetched(self) -> bool:
        """Whether it is what the adapter's recipe says, and not what `--from` named."""
        return self.manifest is not None and self.manifest.source == RECIPE

    def missing(self) -> str | None:
        """The first recorded file that is gone or of another size, in words; digests unread."""
        if self.manifest is None:
            return f"{MANIFEST} does not read"
        return next((said for file in self.manifest.files if (said := _gone(self, file))), None)

    def damaged(self) -> str | None:
        """Like `missing`, with every byte read."""
        found = self.missing()
        if found is not None or self.manifest is None:
            return found
        for file in self.manifest.files:
            if file.sha256 and digest_of(self.folder / file.path) != file.sha256:
                return f"{file.path} has other content than was installed"
        return None


def _gone(install: Install, file: InstalledFile) -> str | None:
    path = install.folder / file.path
    try:
        if file.link:
            same = str(path.readlink()) == file.link
        else:
            same = path.stat(follow_symlinks=False).st_size == file.size
    except OSError:
        return f"{file.path} is gone"
    return None if same else f"{file.path} is not what was installed"


def install_name(version: str, backend: str) -> str:
    """The folder of a version and backend."""
    return f"{version}-{backend}" if backend else version


def is_name(text: str) -> bool:
    """Whether an install may be called so: a folder's name that is none of ours."""
    return bool(_NAME.fullmatch(text)) and text not in ("current", "pinned")


class Installs:
    """The installs of every runtime below `root`; reading needs no lock."""

    def __init__(self, root: Path) -> None:
        self.root: Final = root

    def all(self, runtime: str) -> list[Install]:
        """Every install of `runtime`, newest version first."""
        folder = self.root / runtime
        found = [
            self._read(runtime, path)
            for path in (folder.iterdir() if folder.is_dir() else ())
            if path.is_dir() and not path.name.startswith(".")
        ]
        return sorted(found, key=_age, reverse=True)

    def find(self, runtime: str, name: str) -> Install | None:
        return next((each for each in self.all(runtime) if each.name == name), None)

    def get(self, runtime: str, name: str) -> Install:
        """The install of that name; a version alone will do when it is the only one of it.

        Raises `UnknownInstall` naming the nearest."""
        known = self.all(runtime)
        named = [each for each in known if each.name == name]
        named = named or [each for each in known if each.manifest and each.manifest.version == name]
        if len(named) == 1:
            return named[0]
        names = [each.name for each in known]
        near = nearest(name, names)
        raise UnknownInstall(
            f"runtime {runtime} has no install {name}; here are {', '.join(names) or 'none'}",
            fix=f"did you mean {near}?" if near else f"see superfluid runtime versions {runtime}",
        )

    def in_use(self, runtime: str) -> Install | None:
        """The pinned install, else the current one, else the newest that is tested."""
        known = {each.name: each for each in self._by_trust(runtime)}
        for name in (*self._pin(runtime), *self._history(runtime), *known):
            if name in known:
                return known[name]
        return None

    def _by_trust(self, runtime: str) -> list[Install]:
        """The tested installs, newest first, then the others."""
        return sorted(self.all(runtime), key=lambda it: it.manifest is None or it.manifest.untested)

    def pinned(self, runtime: str) -> Install | None:
        return next((it for n in self._pin(runtime) if (it := self.find(runtime, n))), None)

    def earlier(self, runtime: str) -> Install | None:
        """The install that was in use before this one and is still here."""
        used = self.in_use(runtime)
        names = (name for name in self._history(runtime) if used is None or name != used.name)
        return next((it for name in names if (it := self.find(runtime, name))), None)

    def put_to_use(self, install: Install) -> None:
        """Make it the current one; the caller holds the lock."""
        before = self._history(install.runtime)
        used = self.in_use(install.runtime)
        names = [install.name, *([used.name] if used else []), *before]
        self._write(install.runtime, "current", dict.fromkeys(names))

    def step_back(self, runtime: str, to: Install) -> None:
        """Put `to` to use and forget what was used since; a pin moves along."""
        before = self._history(runtime)
        rest = before[before.index(to.name) :] if to.name in before else [to.name]
        self._write(runtime, "current", dict.fromkeys(rest))
        if self._pin(runtime):
            self.pin(to)

    def pin(self, install: Install) -> None:
        self._write(install.runtime, "pinned", {install.name: None})

    def unpin(self, runtime: str) -> None:
        """Forget the pin; the newest tested version is put to use, the newest where none is."""
        (self.root / runtime / "pinned").unlink(missing_ok=True)
        newest = next(iter(self._by_trust(runtime)), None)
        if newest is not None:
            self.put_to_use(newest)

    def staging(self, runtime: str) -> Path:
        """An empty folder beside the installs; what a killed attempt left is cleaned up, and an
        install that it had set aside is put back. The caller holds the lock."""
        folder = private_folder(self.root / runtime) / STAGING
        for aside in sorted(folder.glob("aside/*")):
            target = self.root / runtime / aside.name
            if not target.exists():
                aside.replace(target)
        remove_tree(folder)
        return private_folder(folder)

    def place(self, staged: Path, manifest: Manifest, staging: Path) -> Install:
        """Give what is staged its name, in place of one that has it. The caller holds the lock."""
        target = self.root / manifest.runtime / manifest.name
        write_manifest(staged, manifest)
        aside = private_folder(staging / "aside") / manifest.name
        if target.exists():
            target.replace(aside)
        try:
            staged.replace(target)
        except BaseException:
            if aside.exists():
                aside.replace(target)
            raise
        _sync(target.parent)
        return Install(manifest.runtime, manifest.name, target, manifest)

    def remove(self, install: Install) -> None:
        """Delete it; the caller holds the lock. Raises `InstallInUse` while a server runs it."""
        with self._lock_file(f"{install.runtime}@{install.name}") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InstallInUse(
                    f"install {install.name} of {install.runtime} is in use by a server"
                ) from error
            staging = self.staging(install.runtime)
            install.folder.replace(private_folder(staging / "removed") / install.name)
            if install.name in self._pin(install.runtime):
                (self.root / install.runtime / "pinned").unlink()
            rest = [name for name in self._history(install.runtime) if name != install.name]
            self._write(install.runtime, "current", dict.fromkeys(rest))
            remove_tree(staging)

    @contextlib.contextmanager
    def lock(self, runtime: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold `runtime` against every other process; `waiting` is called once when one has it.

        The lock goes with its process, so none is ever stale."""
        with self._lock_file(runtime) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def held(self, install: Install) -> Iterator[None]:
        """Keep the install from being removed while the block runs."""
        with self._lock_file(f"{install.runtime}@{install.name}") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            yield

    def _lock_file(self, name: str) -> IO[bytes]:
        private_folder(self.root)
        return open(private_folder(self.root / ".locks") / name, "ab", opener=open_private)

    def _read(self, runtime: str, folder: Path) -> Install:
        manifest = None
        with contextlib.suppress(OSError, msgspec.DecodeError):
            manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        return Install(runtime, folder.name, folder, manifest)

    def _pin(self, runtime: str) -> list[str]:
        return self._names(runtime, "pinned")[:1]

    def _history(self, runtime: str) -> list[str]:
        return self._names(runtime, "current")

    def _names(self, runtime: str, file: str) -> list[str]:
        try:
            text = (self.root / runtime / file).read_text("utf-8", "replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if _NAME.fullmatch(line)]

    def _write(self, runtime: str, file: str, names: dict[str, None]) -> None:
        folder = private_folder(self.root / runtime)
        with open(folder / f".{file}.new", "w", opener=open_private) as out:
            out.write("".join(f"{name}\n" for name in names))
            out.flush()
            os.fsync(out.fileno())
        (folder / f".{file}.new").replace(folder / file)


def _age(install: Install) -> tuple[bool, Version, str]:
    text = install.manifest.version if install.manifest else install.name
    try:
        return True, Version(text), install.name
    except InvalidVersion:
        return False, Version("0"), install.name


def write_manifest(folder: Path, manifest: Manifest) -> None:
    with open(folder / MANIFEST, "wb", opener=open_private) as out:
        out.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
        out.flush()
        os.fsync(out.fileno())


def seal(folder: Path) -> None:
    """Keep `folder` and all in it from every other user."""
    for path in (folder, *folder.rglob("*")):
        mode = path.lstat().st_mode
        if not path.is_symlink() and mode & 0o077:
            path.chmod(mode & 0o700)


def files_below(folder: Path) -> tuple[InstalledFile, ...]:
    """Every file and link below `folder` with its digest, by path."""
    found = []
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found.append(InstalledFile(path=name, link=str(path.readlink())))
        elif path.is_file() and name != MANIFEST and "__pycache__" not in path.parts:
            size = path.stat().st_size
            found.append(InstalledFile(path=name, size=size, sha256=digest_of(path)))
    return tuple(found)


def remove_tree(folder: Path) -> None:
    """Delete `folder` with all in it, folders that nobody may write to included."""
    for path in [folder, *folder.rglob("*")] if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):
                path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
