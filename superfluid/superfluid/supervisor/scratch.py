"""The folders that workers have for temporary files, and their removal, whatever is in them.

A worker that was broken into leaves there what it likes: folders in folders without end, modes
that keep their owner out, links, files by the hundred thousand. So nothing recurses, no link is
followed, no path is built, and all of it happens beside the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from superfluid.paths import FOLDER_MODE

_LOG = logging.getLogger(__name__)
_MOST_S: Final = 20.0
"""For one sweep; what is left then goes with the next."""
_LEAVE_S: Final = 5.0
_CHUNK: Final = 4096
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Scratch:
    """Folders below one root that belongs to one server. Used from the event loop's thread."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._doomed: set[str] = set()
        self._sweep: asyncio.Future[None] | None = None
        self._leaving = threading.Event()
        self.current: Path | None = None

    def make(self) -> Path:
        """A new one, `current` until it is dropped. Raises `OSError`."""
        self._root.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        self.current = Path(tempfile.mkdtemp(dir=self._root))
        return self.current

    def drop(self) -> None:
        """The current one is not needed any more; never raises."""
        if self.current is not None:
            self._doomed.add(self.current.name)
            self.current = None
            self._start()

    async def swept(self) -> None:
        """Return when all that was dropped is gone, or after a bound."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                while self._sweep is not None and not self._sweep.done():
                    await asyncio.wait({self._sweep})
        self._leaving.set()

    def _start(self) -> None:
        if not self._doomed or (self._sweep is not None and not self._sweep.done()):
            return
        names = frozenset(self._doomed)
        try:
            self._sweep = asyncio.get_running_loop().run_in_executor(None, self._remove, names)
        except RuntimeError as error:  # no thread to be had: it goes with the next
            _LOG.warning("%s is not swept now: %s", self._root, error)
            return
        self._sweep.add_done_callback(lambda _: self._swept(names))

    def _remove(self, names: frozenset[str]) -> None:
        until = time.monotonic() + _MOST_S
        for name in names:
            remove(self._root / name, lambda: self._leaving.is_set() or time.monotonic() > until)

    def _swept(self, names: frozenset[str]) -> None:
        gone = {name for name in names if not os.path.lexists(self._root / name)}
        self._doomed -= gone
        if self._doomed - names:  # dropped meanwhile
            self._start()


def clear(root: Path) -> None:
    """Remove what a killed server left below its root, as far as that goes in a bounded time."""
    until = time.monotonic() + _MOST_S
    remove(root, lambda: time.monotonic() > until)


def remove(folder: Path, enough: Callable[[], bool] = lambda: False) -> bool:
    """Remove a folder whatever is in it, until it is `enough`; whether it is gone. Never raises.

    Sub-folders that hold something are emptied into the top one, so that a chain of them is as
    cheap as a row; one that keeps its owner out is opened first.
    """
    with contextlib.suppress(OSError), _opened(str(folder.parent)) as parent:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            _unlock(folder.name, parent)
            with _opened(folder.name, parent) as top:
                _empty(top, enough)
        _unlinked(folder.name, parent)
    return not os.path.lexists(folder)


def _empty(top: int, enough: Callable[[], bool]) -> None:
    tag, moved = secrets.token_hex(8), itertools.count()
    going = True
    while going:
        going = False
        for name in _names(top):
            if enough():
                return
            going |= _unlinked(name, top) or _spilled(name, top, lambda: f"{tag}-{next(moved)}")


def _spilled(name: str, top: int, free: Callable[[], str]) -> bool:
    """Empty a folder of `top`, what resists moving up into `top`; whether anything left it."""
    going = False
    with contextlib.suppress(OSError):
        _unlock(name, top)
        with _opened(name, top) as folder:
            for child in _names(folder):
                going |= _unlinked(child, folder) or _lifted(child, folder, free(), top)
        _unlinked(name, top)
    return going


def _lifted(name: str, folder: int, free: str, top: int) -> bool:
    with contextlib.suppress(OSError):
        _unlock(name, folder)  # its `..` changes, so that it must be writable
        os.rename(name, free, src_dir_fd=folder, dst_dir_fd=top)
        return True
    return False


def _unlinked(name: str, folder: int) -> bool:
    """Remove a file, a link or an empty folder; whether it was."""
    for take in (os.unlink, os.rmdir):
        with contextlib.suppress(OSError):
            take(name, dir_fd=folder)
            return True
    return False


def _unlock(name: str, parent: int) -> None:
    """Let the owner into a folder, and through no link."""
    if os.chmod in os.supports_follow_symlinks:
        os.chmod(name, FOLDER_MODE, dir_fd=parent, follow_symlinks=False)
        return
    with _opened(name, parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC) as held:
        Path(f"/proc/self/fd/{held}").chmod(FOLDER_MODE)


def _names(folder: int) -> list[str]:
    """Some names of it, none where it is empty: at most `_CHUNK`, since there may be any number."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in itertools.islice(entries, _CHUNK)]


@contextlib.contextmanager
def _opened(name: str, parent: int | None = None, flags: int = _FOLDER) -> Iterator[int]:
    held = os.open(name, flags, dir_fd=parent)
    try:
        yield held
    finally:
        os.close(held)
