"""Opening what a user named as a model: regular files only, never one that blocks."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from superfluid_compat.errors import ModelDamaged, ModelNotFound

_KINDS: Final = {
    stat.S_IFIFO: "FIFO",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
    stat.S_IFSOCK: "socket",
    stat.S_IFDIR: "folder",
}


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A read-only descriptor of the regular file `path`. Raises `ModelNotFound`."""
    try:
        # A FIFO without a writer would block an open for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ModelNotFound(f"{path}: cannot be opened: {reason}") from error
    try:
        mode = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if mode != stat.S_IFREG:
            found = _KINDS.get(mode, "special file")
            raise ModelNotFound(f"{path}: is a {found}, a regular file was wanted")
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """The bytes of `path`, mapped read-only. Raises `ModelNotFound`, `ModelDamaged` when empty."""
    with opened(path) as descriptor:
        if os.fstat(descriptor).st_size == 0:
            raise ModelDamaged(f"{path}: is empty, a model file was wanted")
        try:
            view = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        except OSError as error:
            raise ModelNotFound(f"{path}: cannot be mapped: {error.strerror}") from error
        with view:
            yield view


def read_small(path: Path, limit_bytes: int) -> bytes:
    """All of `path`, which may hold at most `limit_bytes`.

    Raises `ModelNotFound`, `ModelDamaged` when it is larger."""
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit_bytes:
            raise ModelDamaged(f"{path}: has {size} bytes, at most {limit_bytes} were wanted")
        with os.fdopen(os.dup(descriptor), "rb") as stream:
            return stream.read(limit_bytes)


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder; what cannot be looked at is none."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def is_there(path: Path) -> bool:
    """Whether there is anything by that name, be it a link that leads nowhere."""
    try:
        path.lstat()
    except (OSError, ValueError):
        return False
    return True
