"""A model's files, read past the page cache or through it."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from superfluid_adapter_native.arena import PAGE, Bytes, whole_pages
from superfluid_adapter_native.units import Run, Unit
from superfluid_compat.errors import ModelDamaged, ModelNotFound

_REQUEST_BYTES: Final = 8 << 20
"""Of one read: the system cuts it into what the disk takes and has these under way together."""
_DIRECT_BYTES: Final = 64 << 10
"""Less than this is read through the page cache in any case."""
_LINUX: Final = sys.platform == "linux"

Stop = Callable[[], bool]


class WeightFiles:
    """Reads parts of files into memory. Short of what was asked it raises, so that memory it was
    given holds either the file's bytes or is known not to.

    With `direct` large reads go past the page cache: where memory cannot keep a file until its next
    reading, the cache costs time and, in a control group, room. Where the file system cannot do
    that, they go through it and the pages are forgotten afterwards. Thread-safe but for `close`."""

    def __init__(self, paths: Sequence[Path], *, direct: bool = False) -> None:
        self._paths = tuple(paths)
        self._files: list[int] = []
        self._direct: list[int | None] = []
        self._open: list[int] = []
        self._seen: set[Run] = set()
        self._forget = direct and _LINUX
        try:
            for path in paths:
                self._files.append(self._opened(path))
                self._direct.append(self._opened_direct(path) if direct else None)
        except BaseException:
            self.close()
            raise

    def _opened(self, path: Path, flags: int = 0) -> int:
        try:
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        except OSError as error:
            raise ModelNotFound(f"{path} cannot be opened: {error.strerror}") from error
        self._open.append(number)
        return number

    def _opened_direct(self, path: Path) -> int | None:
        try:
            return self._opened(path, os.O_DIRECT) if hasattr(os, "O_DIRECT") else None
        except ModelNotFound:
            return None

    def number(self, file: int) -> int:
        """The descriptor of a file, to be mapped."""
        return self._files[file]

    def fill(self, unit: Unit, memory: Bytes, stop: Stop = lambda: False) -> bool:
        """Read a unit into `memory`, which begins at a page and has whole pages; False when
        `stop()` said so before it was whole. Raises `ModelDamaged` where a file ends early or
        cannot be read."""
        return all(self._run(run, memory[run.place :], stop) for run in unit.runs)

    def read(self, file: int, start: int, count: int) -> Bytes:
        """Some bytes in memory of their own. Raises `ModelDamaged` as `fill` does."""
        lead = start % PAGE
        room = whole_pages(lead + count)
        memory = np.empty(room + PAGE, np.uint8)
        memory = memory[-memory.ctypes.data % PAGE :][:room]
        if count < _DIRECT_BYTES:
            self._read_all(file, start, memory[lead : lead + count])
        else:
            self._run(Run(file, start - lead, lead + count, 0), memory, lambda: False)
        return memory[lead : lead + count]

    def _run(self, run: Run, memory: Bytes, stop: Stop) -> bool:
        past = self._direct[run.file] is not None
        if not past and (self._forget or run not in self._seen):
            # Asked for whole, so that the disk is busy throughout. Later on the cache has it.
            _advise(self._files[run.file], run, "POSIX_FADV_WILLNEED")
            self._seen.add(run)
        for at in range(0, run.count, _REQUEST_BYTES):
            if stop():
                return False
            count = min(_REQUEST_BYTES, run.count - at)
            got = self._past_the_cache(run, at, memory[at : at + whole_pages(count)])
            if got < count:
                self._read_all(run.file, run.start + at + got, memory[at + got : at + count])
        if self._forget and not past:
            _advise(self._files[run.file], run, "POSIX_FADV_DONTNEED")
        return True

    def _past_the_cache(self, run: Run, at: int, memory: Bytes) -> int:
        """How many bytes of a run, from its byte `at`, one direct read has brought."""
        number = self._direct[run.file]
        if number is None:
            return 0
        try:
            return os.preadv(number, [memory.data], run.start + at)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise self._unreadable(run.file, error) from error
            # This file system cannot after all. Another thread may be reading: it stays open.
            self._direct[run.file] = None
            return 0

    def _read_all(self, file: int, start: int, memory: Bytes) -> None:
        done = 0
        while done < len(memory):
            try:
                got = os.preadv(self._files[file], [memory[done:].data], start + done)
            except OSError as error:
                raise self._unreadable(file, error) from error
            if not got:
                name, wanted = self._paths[file].name, start + len(memory)
                raise ModelDamaged(f"{name} ends at byte {start + done}, {wanted} were wanted")
            done += got

    def _unreadable(self, file: int, error: OSError) -> ModelDamaged:
        return ModelDamaged(f"{self._paths[file].name} cannot be read: {error.strerror}")

    def close(self) -> None:
        """Close every file."""
        while self._open:
            os.close(self._open.pop())


def _advise(number: int, run: Run, advice: str) -> None:
    """It is advice: a file system that takes none still reads."""
    if hasattr(os, advice):
        with contextlib.suppress(OSError):
            os.posix_fadvise(number, run.start, run.count, getattr(os, advice))
