"""A server's name on one home: held by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from superfluid.paths import open_private, private_folder
from superfluid_compat.errors import NameInUse


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Path]:
    """`folder`, which is named after the server, made and held while the block runs.

    Raises `NameInUse`, `BadConfig` (cannot be written).
    """
    private_folder(folder)
    with open(folder / "lock", "w", opener=open_private) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise NameInUse(
                f"another server called {folder.name} runs on this home", param="name"
            ) from error
        yield folder
