"""What is known of each worker's death: one small private file, found by its id."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import secrets
from pathlib import Path
from typing import Any, Final

import msgspec

_LOG = logging.getLogger(__name__)
MOST: Final = 100


class Dossier(msgspec.Struct, frozen=True, kw_only=True):
    """One death, or a worker that could not be started: its `pid` is 0 and it has no `code`. Holds
    nothing of any prompt or answer.

    `time` is UTC; `stage` the last state the worker reached; `then` what was done about it;
    `code` as `subprocess` counts it; `out_of_memory` what counted a kill meanwhile; `install` the
    digest of what it ran.
    """

    id: str
    time: str
    model: str
    runtime: str
    pid: int
    stage: str
    reason: str
    then: str = ""
    exit: str
    code: int | None
    uptime_s: float
    peak_rss_bytes: int
    out_of_memory: str = ""
    install: str = ""
    sandbox: dict[str, Any] = {}
    options: dict[str, Any]
    stderr: list[str]


def new_id() -> str:
    """An id that is unlike any other on this machine."""
    return secrets.token_hex(4)


def now() -> str:
    """The time as a dossier holds it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class Dossiers:
    """The newest `most` dossiers of a folder."""

    def __init__(self, folder: Path, *, most: int = MOST) -> None:
        self._folder = folder
        self._most = most

    def write(self, dossier: Dossier) -> None:
        """Keep `dossier`. A disk that refuses is logged: a daemon does not die of a record."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # In order of writing: the wall clock may be set back between two.
            number = 1 + max(map(_number, self._paths()), default=0)
            self._place(self._folder / f"{number:08}-{dossier.id}.json", dossier)
            for path in self._paths()[: -self._most]:
                path.unlink(missing_ok=True)
        except OSError as error:
            _LOG.warning("dossier %s could not be kept: %s", dossier.id, error)

    def _place(self, path: Path, dossier: Dossier) -> None:
        part = path.with_suffix(".part")
        body = msgspec.json.format(msgspec.json.encode(dossier))
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(body)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def find(self, wanted: str) -> Dossier | None:
        """The dossier of an id, or the newest for `last`."""
        for path in reversed(self._paths()):
            if wanted == "last" or path.stem.endswith(f"-{wanted}"):
                with contextlib.suppress(OSError, msgspec.MsgspecError):
                    return msgspec.json.decode(path.read_bytes(), type=Dossier)
        return None

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob("*.json"), key=lambda path: (_number(path), path))


def _number(path: Path) -> int:
    number = path.stem.partition("-")[0]
    return int(number) if number.isdecimal() else 0
