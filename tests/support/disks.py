"""A small file system, where this process may mount one."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[bool]:
    """A tmpfs of `size` over `folder`; False where this process has no right to mount."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder.mkdir(exist_ok=True)
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode()) != 0:
        yield False
        return
    try:
        yield True
    finally:
        libc.umount2(os.fsencode(folder), 2)
