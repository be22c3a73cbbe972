"""Which file of a folder is its libllama: a build's own folder, a checkout, an unpacked wheel.

What lies in the folder itself is taken before anything below it. Below it, every libllama counts
down to a depth that holds a virtual environment's: two that differ are a question for the user.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

DEEPEST: Final = 5
"""Folders below the named one, as in `lib/python3.11/site-packages/llama_cpp/lib`."""

MOST_ENTRIES: Final = 50_000
"""Files and folders that are looked at; a checkout with its build has a fifth."""

_MOST_NAMED: Final = 4
_PATTERNS: Final = (
    ("libllama.so", "libllama.dylib"),
    ("libllama.so.*", "libllama.[0-9]*.dylib", "libllama-????????.so*"),
    ("libllama*.so*", "libllama*.dylib"),
    ("xllamacpp*.so",),
    ("llama*.so",),
)
"""Names, the surest first. The second row is what versions and wheels make of the first."""

_SURE: Final = 2
"""So many rows of `_PATTERNS` name libllama itself; the others may name something else."""


class NotFound(Exception):
    """The folder holds none that may be taken; the message goes on from the folder's name."""


class SeveralFound(NotFound):
    """It holds some that differ."""


def library_in(folder: Path) -> Path:
    """The one libllama of `folder`, under its surest name. Raises `NotFound`, `OSError`."""
    root = os.path.realpath(folder)
    found, astray = [list[Path]() for _ in _PATTERNS], list[str]()
    for depth, names in _folders(folder):
        rank, fitting = _surest(names)
        for path in fitting:
            if _stays(path, root):
                found[rank].append(path)
            else:
                astray.append(str(path.relative_to(folder)))
        if depth == 0 and any(found):
            break
    sure = [path for row in found[:_SURE] for path in row]
    paths = sure or next(filter(None, found), [])
    if not paths:
        raise NotFound(_none(astray))
    return _only(paths, folder)


def _folders(root: Path) -> Iterator[tuple[int, list[Path]]]:
    """What each folder from `root` on holds that is no folder, the nearest folders first. Links to
    folders are neither followed nor among it. Raises `NotFound` for more than is looked at."""
    waiting, seen = deque([(0, root)]), 0
    while waiting:
        depth, folder = waiting.popleft()
        files, below = list[Path](), list[Path]()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    seen += 1
                    if seen > MOST_ENTRIES:
                        raise NotFound(f"a folder of more than {MOST_ENTRIES} files to look at")
                    if not entry.is_dir():
                        files.append(Path(entry.path))
                    elif not entry.is_symlink() and not _closed(entry.name):
                        below.append(Path(entry.path))
        except OSError:
            if depth == 0:
                raise
        yield depth, files
        if depth < DEEPEST:
            waiting.extend((depth + 1, path) for path in sorted(below))


def _closed(name: str) -> bool:
    """Folders whose files are no libraries, whatever they are called."""
    return name == ".git" or name.endswith(".dSYM")


def _surest(files: Sequence[Path]) -> tuple[int, list[Path]]:
    """The files of one folder that have the surest name among them, and its row."""
    for rank, patterns in enumerate(_PATTERNS):
        fitting = [path for path in files if any(fnmatchcase(path.name, one) for one in patterns)]
        if fitting:
            return rank, sorted(fitting)
    return 0, []


def _stays(path: Path, root: str) -> bool:
    """Whether `path` is there, and within `root` wherever links lead."""
    real = os.path.realpath(path)
    return os.path.lexists(real) and os.path.commonpath([real, root]) == root


def _only(paths: Sequence[Path], folder: Path) -> Path:
    """The first of `paths`, names of one file. Raises `SeveralFound`."""
    files: dict[tuple[int, int], Path] = {}
    for path in paths:
        stat = path.stat()
        files.setdefault((stat.st_dev, stat.st_ino), path)
    if len(files) == 1:
        return paths[0]
    names = [str(path.relative_to(folder)) for path in files.values()]
    raise SeveralFound(f"a folder with {len(names)} libraries that differ: {_listed(names)}")


def _none(astray: Sequence[str]) -> str:
    none = "a folder in which no libllama lies"
    if not astray:
        return none
    links = f"{_listed(astray)} {'is a link' if len(astray) == 1 else 'are links'}"
    return f"{none}: {links} out of it or to nothing"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMED])
    more = len(names) - _MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
