"""Bringing a model here: one pull of a thing at a time, verified before it counts."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from superfluid.models.store import Manifest, Store, StoredFile, StoredModel, stamp
from superfluid_compat.errors import DigestMismatch, DiskFull

Progress: TypeAlias = Callable[[int, int], None]
"""`progress(done, total)` in bytes."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as its source announces it, at `path` there; `sha256` may be empty."""

    name: str
    size: int
    sha256: str = ""
    path: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a source will bring. `scratch` is what it needs on disk beside the files, in bytes."""

    source: str
    licence: str
    entry: str
    files: tuple[RemoteFile, ...]
    scratch: int = 0

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


class Source(Protocol):
    """Something that brings a model's files into a folder, taking up what is there already."""

    @property
    def name(self) -> str:
        """The model's name in the store."""
        ...

    def offer(self) -> Offer:
        """What there is to bring; may ask the network. Raises `ModelError`."""
        ...

    def staged(self, offer: Offer, folder: Path) -> int:
        """How many of the offer's bytes `folder` holds from an earlier pull."""
        ...

    def fetch(self, offer: Offer, folder: Path, progress: Progress) -> None:
        """Bring every file of the offer under its name. Raises `ModelError`, `OSError`."""
        ...


@dataclass(frozen=True, slots=True)
class Reports:
    """Whom a pull tells: `offered` once before anything is fetched, `progress` as bytes come in,
    `waiting` when another process has the same pull under way."""

    offered: Callable[[Offer], None] = lambda offer: None
    progress: Progress = lambda done, total: None
    waiting: Callable[[], None] = lambda: None


SILENT: Final = Reports()


def pull(store: Store, source: Source, reports: Reports = SILENT) -> StoredModel:
    """The model in the store, fetched if it is not there yet.

    When another process pulls it already, its result is taken. Raises `FetchFailed`,
    `DigestMismatch`, `DiskFull` and `ModelNotFound`; what was fetched is kept for the next pull.
    """
    with store.lock(source.name, reports.waiting):
        found = store.find(source.name)
        if found is not None:
            return found
        offer = source.offer()
        reports.offered(offer)
        folder = store.staging(source.name)
        require_space(folder, offer.size - source.staged(offer, folder) + offer.scratch)
        with disk_errors(folder):
            source.fetch(offer, folder, reports.progress)
            files = tuple(_verified(folder, file) for file in offer.files)
            return store.place(
                Manifest(
                    name=source.name,
                    source=offer.source,
                    licence=offer.licence,
                    entry=offer.entry,
                    files=files,
                    pulled=stamp(),
                )
            )


def require_space(folder: Path, needed: int) -> None:
    """Raise `DiskFull`, naming both sizes, unless `needed` bytes are free where `folder` is."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskFull(
            f"the disk of {folder} has {size_text(free)} free, wanted {size_text(needed)}"
        )


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Map a disk that fills up meanwhile to `DiskFull`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = size_text(shutil.disk_usage(folder).free)
        raise DiskFull(f"the disk of {folder} filled up while fetching, {free} free") from error


def digest_of(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verified(folder: Path, file: RemoteFile) -> StoredFile:
    path = folder / file.name
    found = digest_of(path)
    if file.sha256 and found != file.sha256:
        path.unlink()
        raise DigestMismatch(f"{file.name} has SHA-256 {found}, wanted {file.sha256}")
    return StoredFile(name=file.name, size=path.stat().st_size, sha256=found)


def size_text(size: int) -> str:
    """`241 MiB`: binary units as in options, three digits."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
