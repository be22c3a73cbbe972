"""A server's name on one home: held by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from superfluid.paths import FILE_MODE, private_folder, unwritable
from superfluid_compat.errors import NameInUse


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Path]:
    """`folder`, which is named after the server, made and held while the block runs.

    Raises `NameInUse`, `BadConfig` (cannot be written).
    """
    private_folder(folder)
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, FILE_MODE)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        _lock(lock, folder)
        yield folder
    finally:
        os.close(lock)


def _lock(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise NameInUse(
            f"another server called {folder.name} runs on this home", param="name"
        ) from error
