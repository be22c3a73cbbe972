"""Copying a folder that a user gave into an install."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

from superfluid.installs.archives import MOST_MEMBERS
from superfluid.models.pull import require_space
from superfluid_compat.errors import BadArchive

_FIX: Final = "give the folder of a build, which holds files, folders and links within it alone"


def copy_folder(source: Path, target: Path) -> None:
    """Copy what is below `source`, links as links. Nothing is copied of a folder that holds a link
    out of it, a device, pipe or socket, or more than an archive may.

    Raises `BadArchive` naming what is at fault, `DiskFull`, `OSError`.
    """
    paths = list(_below(source))
    root, size = source.resolve(), 0
    for path in paths:
        if path.is_symlink():
            if path.readlink().is_absolute() or not _within(path, root):
                raise BadArchive(f"{path} is a link that leads out of {source}", fix=_FIX)
        elif path.is_file():
            size += path.stat().st_size
        elif not path.is_dir():
            raise BadArchive(f"{path} is neither file, folder nor link", fix=_FIX)
    require_space(target.parent, size)
    for path in paths:
        _copy(path, target / path.relative_to(source))


def _below(source: Path) -> Iterator[Path]:
    """All below `source`, folders before what they hold."""
    seen = 0
    for folder, folders, files in os.walk(source, onerror=_unread):
        folders.sort()
        for name in sorted([*folders, *files]):
            seen += 1
            if seen > MOST_MEMBERS:
                raise BadArchive(f"{source} holds more than {MOST_MEMBERS} files", fix=_FIX)
            yield Path(folder, name)


def _copy(path: Path, to: Path) -> None:
    if path.is_symlink():
        to.symlink_to(path.readlink())
    elif path.is_dir():
        to.mkdir()
    else:
        try:
            shutil.copyfile(path, to)
        except PermissionError as error:
            _unread(error)
        to.chmod(path.stat().st_mode & 0o700)


def _within(path: Path, root: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(root)


def _unread(error: OSError) -> NoReturn:
    reason = (error.strerror or str(error)).lower()
    raise BadArchive(f"{error.filename} cannot be read: {reason}", fix=_FIX) from error
