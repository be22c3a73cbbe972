"""The models kept on this machine: one folder each, with a manifest that says what is in it.

models/NAME/manifest.json + files      a model, whole and verified
models/.staging/NAME/                  a pull under way, or one that was cut short
models/.locks/NAME                     held by whoever pulls or removes it
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from superfluid.paths import FILE_MODE, Paths, open_private, private_folder
from superfluid_compat.errors import ModelDamaged, ModelNotFound
from superfluid_workerd.options import nearest

MANIFEST: Final = "manifest.json"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a model: its plain name, its size in bytes, the digest of its content."""

    name: str
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's folder holds. `entry` is the file to open, empty for the folder itself.

    `source` says where it came from, to the commit; `pulled` is in seconds since the epoch.
    """

    name: str
    source: str
    licence: str
    entry: str
    files: tuple[StoredFile, ...]
    pulled: int

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on disk."""

    manifest: Manifest
    folder: Path

    @property
    def path(self) -> Path:
        """What a runtime opens."""
        return self.folder / self.manifest.entry if self.manifest.entry else self.folder


def folder_name(name: str) -> str:
    """The folder of model `name`: readable, and never the same for two names."""
    repository, colon, selector = name.partition(":")
    return repository.replace("/", "--") + (f"--{quote(selector, safe='')}" if colon else "")


class Store:
    """The models below one data folder."""

    def __init__(self, paths: Paths) -> None:
        self._root = paths.models

    def list(self) -> list[StoredModel]:
        """Every whole model, by name. A damaged one is left out; `get` says what is wrong."""
        found = []
        for manifest in sorted(self._root.glob(f"[!.]*/{MANIFEST}")):
            with contextlib.suppress(ModelDamaged):
                found.append(_read(manifest.parent))
        return sorted(found, key=lambda model: model.manifest.name)

    def find(self, name: str) -> StoredModel | None:
        """The model, or None when it is not here. Raises `ModelDamaged`."""
        folder = self._root / folder_name(name)
        return _read(folder) if (folder / MANIFEST).is_file() else None

    def get(self, name: str) -> StoredModel:
        """The model. Raises `ModelNotFound` naming the nearest, and `ModelDamaged`."""
        found = self.find(name)
        if found is None:
            raise self._missing(name)
        return found

    def remove(self, name: str) -> int:
        """Delete the model, whole or half pulled; the bytes given back. Raises `ModelNotFound`.

        A server that has it open keeps what it mapped."""
        folder = self._root / folder_name(name)
        staged = self._root / ".staging" / folder.name
        # Hidden folders are the store's own.
        hidden = not name or name.startswith(".")
        if hidden or not (folder.is_dir() or staged.is_dir()):
            raise self._missing(name)
        with self.lock(name):
            freed = _bytes_below(folder) + _bytes_below(staged)
            (folder / MANIFEST).unlink(missing_ok=True)
            for path in (folder, staged):
                shutil.rmtree(path, ignore_errors=True)
        return freed

    def _missing(self, name: str) -> ModelNotFound:
        near = nearest(name, [model.manifest.name for model in self.list()])
        fix = f"did you mean {near}?" if near else "see superfluid models list"
        return ModelNotFound(f"no model {name} is stored here", fix=fix)

    def staging(self, name: str) -> Path:
        """The folder in which a pull of `name` gathers its files; what is in it is kept."""
        private_folder(self._root)
        return private_folder(private_folder(self._root / ".staging") / folder_name(name))

    def place(self, manifest: Manifest) -> StoredModel:
        """Give the staged files, all verified, their final place in one rename."""
        staged = self.staging(manifest.name)
        for file in manifest.files:
            (staged / file.name).chmod(FILE_MODE)
        for extra in set(staged.iterdir()) - {staged / file.name for file in manifest.files}:
            shutil.rmtree(extra) if extra.is_dir() else extra.unlink()
        with open(staged / MANIFEST, "wb", opener=open_private) as out:
            out.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
            out.flush()
            os.fsync(out.fileno())
        folder = self._root / folder_name(manifest.name)
        shutil.rmtree(folder, ignore_errors=True)
        staged.replace(folder)
        return StoredModel(manifest, folder)

    @contextlib.contextmanager
    def lock(self, name: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold `name` against every other process; `waiting` is called once when another has it.

        The lock goes with its process, so none is ever stale."""
        private_folder(self._root)
        path = private_folder(self._root / ".locks") / folder_name(name)
        with open(path, "ab", opener=open_private) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def stamp() -> int:
    """Now, as a manifest states it."""
    return int(time.time())


def _read(folder: Path) -> StoredModel:
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelDamaged(
            f"{folder / MANIFEST} does not read: {error}",
            fix="remove the folder and pull the model again",
        ) from error
    for file in manifest.files:
        path = folder / file.name
        size = path.stat().st_size if path.is_file() else None
        if size != file.size:
            found = "is not there" if size is None else f"has {size} bytes"
            raise ModelDamaged(
                f"{path} {found}, wanted {file.size} bytes",
                fix=f"run superfluid models remove {manifest.name} and pull it again",
            )
    return StoredModel(manifest, folder)


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
