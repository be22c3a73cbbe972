"""A memory cgroup for a child process, where this system and its rights allow one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup")
_FORMS: Final = (
    (_ROOT / "memory", "memory.limit_in_bytes"),
    (_ROOT, "memory.max"),
)
"""Versions 1 and 2: where groups are made, and the file that takes the limit."""


@contextlib.contextmanager
def limited(limit_bytes: int) -> Iterator[Path | None]:
    """A group of at most `limit_bytes`, page cache counted; None where none can be had.

    A process joins by writing its id into the yielded folder's `cgroup.procs`.
    """
    folder = _make(limit_bytes)
    try:
        yield folder
    finally:
        if folder is not None:
            _remove(folder)


def _make(limit_bytes: int) -> Path | None:
    for parent, limit in _FORMS:
        folder = parent / f"superfluid-bench-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(str(limit_bytes))
            return folder
        except OSError:
            folder.rmdir()
    return None


def _remove(folder: Path) -> None:
    for _ in range(50):
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.1)
