"""What a worker may do: from what its adapter declares, and from where things really lie."""

from __future__ import annotations

import contextlib
import os
import platform
import pwd
import re
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import psutil

from superfluid_workerd.link.answers import Rights as Declared
from superfluid_workerd.options import MOST_THREADS
from superfluid_workerd.sandbox import landlock, seccomp
from superfluid_workerd.sandbox.linux import STRICT_ABI
from superfluid_workerd.sandbox.rights import Level, Rights

FILE_BYTES: Final = 4 << 30
"""The largest file a worker may write, into its scratch."""
THREADS: Final = 2 * MOST_THREADS
_SLACK_BYTES: Final = 2 << 30
_UNPRIVILEGED: Final = "nobody"
_PART: Final = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.\w+)")


def rights(
    level: Level,
    declared: Declared,
    model: Path,
    readable: Iterable[Path],
    *,
    memory_budget: int = 0,
) -> Rights:
    """For a worker of `model`. `readable` is its install, its shared folder, whatever options
    name. Its scratch is added for each worker."""
    paths = [*model_paths(model), *(str(_real(path)) for path in readable), *declared.read]
    budget = memory_budget + _SLACK_BYTES if memory_budget else psutil.virtual_memory().total
    return Rights(
        level=level,
        read=tuple(dict.fromkeys(paths)),
        devices=declared.devices,
        spawn=declared.spawn,
        user=unprivileged((sys.executable, sys.prefix, *paths)),
        file_bytes=FILE_BYTES,
        data_bytes=budget,
        threads=THREADS,
    )


@contextlib.contextmanager
def handed(rights: Rights | None) -> Iterator[list[int]]:
    """The descriptor of an open file without a name that holds `rights`, if there are any."""
    if rights is None:
        yield []
        return
    with tempfile.TemporaryFile() as file:
        file.write(rights.encode())
        file.seek(0)
        yield [file.fileno()]


def words(descriptors: Iterable[int]) -> list[str]:
    """How a worker is told of what was `handed`."""
    return [word for each in descriptors for word in ("--rights", str(each))]


def opened(model: Path) -> Path:
    """What a worker opens: the model's real path, save that a part which is a link to another name
    keeps its own, by which the other parts are found."""
    real = _real(model)
    linked = _PART.fullmatch(model.name) and real.name != model.name
    return _real(model.parent) / model.name if linked else real


def model_paths(model: Path) -> list[str]:
    """Everything that belongs to the model, as real paths: the file and its other parts where it
    lies, or the folder and what a hub's cache keeps of it elsewhere. What else a link points at
    does not."""
    real = _real(model)
    if real.is_dir():
        return [str(real), *_blobs(real)]
    found, name = [str(real)], opened(model)
    if match := _PART.fullmatch(name.name):
        prefix, total, suffix = match.groups()
        parts = sorted(name.parent.glob(f"*-of-{total}{suffix}"))
        targets = [_real(it) for it in parts if _is_part(it, prefix)]
        found += [str(it) for it in targets if it.parent == real.parent]
    return list(dict.fromkeys(found))


def _real(path: Path) -> Path:
    # `Path.resolve` raises for a loop of links, which is no file and refused as such.
    return Path(os.path.realpath(path))


def _is_part(path: Path, prefix: str) -> bool:
    match = _PART.fullmatch(path.name)
    return match is not None and match[1] == prefix


def _blobs(folder: Path) -> Iterator[str]:
    """Targets of a snapshot's links, where they lie in the blobs of the same model."""
    if folder.parent.name != "snapshots":
        return
    blobs = folder.parent.parent / "blobs"
    for path in sorted(folder.rglob("*")):
        target = _real(path)
        if path.is_symlink() and target.parent == blobs:
            yield str(target)


def unprivileged(paths: Iterable[str]) -> tuple[int, int] | None:
    """For a daemon that is root: the user and group to run workers as, None where that user
    cannot read all that a worker reads."""
    if os.geteuid() != 0:
        return None
    try:
        user = pwd.getpwnam(_UNPRIVILEGED)
    except KeyError:
        return None
    readable = all(can_read(Path(path), user.pw_uid, user.pw_gid) for path in paths)
    return (user.pw_uid, user.pw_gid) if readable else None


def can_read(path: Path, user: int, group: int) -> bool:
    """Whether that user may reach and read `path`, by mode bits alone."""
    real = _real(path)
    try:
        return all(_has(folder, user, group, stat.S_IXOTH) for folder in real.parents) and _has(
            real, user, group, stat.S_IROTH | (stat.S_IXOTH if real.is_dir() else 0)
        )
    except OSError:
        return False


def _has(path: Path, user: int, group: int, bits: int) -> bool:
    found = path.stat()
    shift = 6 if found.st_uid == user else 3 if found.st_gid == group else 0
    return found.st_mode >> shift & bits == bits


def best() -> str:
    """The best level that this machine gives, without trying it."""
    if sys.platform == "darwin":
        return "strict"
    if sys.platform != "linux":
        return "none"
    known = platform.machine() in seccomp.ARCHITECTURES
    return "strict" if known and landlock.abi() >= STRICT_ABI else "basic"
