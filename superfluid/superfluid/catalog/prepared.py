"""What must be done once before a runtime serves a model here, and the stamp that it was done.

A stamp is a file named by a digest of everything the outcome depends on, so a warm start asks
nothing and a changed one asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
from packaging.requirements import Requirement

from superfluid.catalog.catalog import Catalog, Row
from superfluid.catalog.entries import override
from superfluid.catalog.workerd import HERE, Place
from superfluid.installs.store import MANIFEST
from superfluid.paths import open_private, private_folder, unwritable
from superfluid_compat.errors import BadConfig
from superfluid_compat.verdicts import Verdict
from superfluid_workerd.link.answers import Facts, Probe

Say: TypeAlias = Callable[[str], None]
"""Told one line at a time, for a person at a terminal."""

QUIET_S: Final = 2.0
_POLL_S: Final = 0.1


class _Checked(msgspec.Struct, frozen=True):
    probe: Probe
    files: list[tuple[str, int, int]]


def stamps(probe: Probe) -> list[tuple[str, int, int]]:
    """What shows that the files which a check went by are as they were."""
    return [_stamp(Path(file)) for file in probe.files]


def unchanged(files: Iterable[tuple[str, int, int]]) -> bool:
    """Whether files are as `stamps` found them."""
    return all(_stamp(Path(file[0])) == file for file in files)


class Preparations:
    """The adapters' shared folders below `cache`, with what is known of each runtime there."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache

    def shared(self, adapter: str) -> Path:
        """The folder that this adapter's workers share, made when missing."""
        return private_folder(self._cache / "shared" / adapter)

    async def probe(
        self,
        catalog: Catalog,
        row: Row,
        options: Mapping[str, Any],
        place: Place = HERE,
        say: Say = lambda line: None,
    ) -> Probe:
        """What checking the runtime found; a check that found no problem is not done again while
        the files that it went by are as they were.

        Raises what `Catalog.check` raises. A home that cannot be written keeps nothing of it.
        """
        try:
            shared = self.shared(row.id)
        except BadConfig:
            with tempfile.TemporaryDirectory(prefix="superfluid-") as folder:
                return await catalog.check(row.id, options, Path(folder), place)
        known = private_folder(self._cache / "checked") / _key(row, options, shared, place)
        with contextlib.suppress(OSError, msgspec.DecodeError):
            kept = msgspec.json.decode(known.read_bytes(), type=_Checked)
            if unchanged(kept.files):
                return kept.probe
        line = f"checking the {row.id} runtime on this machine; once it works, not again"
        notice = asyncio.get_running_loop().call_later(QUIET_S, say, line)
        try:
            found = await catalog.check(row.id, options, shared, place)
        finally:
            notice.cancel()
        if found.problem is None:
            _keep(known, _Checked(found, stamps(found)))
        return found

    async def facts(
        self, catalog: Catalog, row: Row, model: Path, options: Mapping[str, Any], place: Place
    ) -> Facts:
        """What the model's header says and the engine says to it, read by workers of the runtime
        once.

        Raises what `Catalog.facts` and `check` raise. A home that cannot be written keeps nothing
        of it, and there the engine is not asked.
        """
        try:
            shared, folder = self.shared(row.id), private_folder(self._cache / "facts")
        except BadConfig:
            return await catalog.facts(row.id, model, place)
        known = folder / _key(row, options, shared, place, model)
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(known.read_bytes(), type=Facts)
        probe = await self.probe(catalog, row, options, place)
        found = await catalog.facts(
            row.id,
            model,
            place,
            options=options,
            shared=shared,
            readable=[Path(file) for file in probe.files],
        )
        with contextlib.suppress(BadConfig):
            _keep(known, found)
        return found

    async def ensure(
        self,
        catalog: Catalog,
        row: Row,
        model: Path,
        options: Mapping[str, Any],
        say: Say,
        *,
        place: Place = HERE,
    ) -> None:
        """Check the runtime and prepare it for `model`, in workers that hold no model, unless
        that was done before; `say` hears of it when it takes long.

        Raises what `Catalog.facts` and `prepare` raise, the runtime's verdict when it does not
        work here, and `BadConfig` when the cache cannot be written.
        """
        try:
            await self._ensure(catalog, row, model, options, say, place=place)
        except OSError as error:
            raise unwritable(self._cache, error) from error

    async def _ensure(
        self,
        catalog: Catalog,
        row: Row,
        model: Path,
        options: Mapping[str, Any],
        say: Say,
        *,
        place: Place,
    ) -> None:
        shared, folder = self.shared(row.id), private_folder(self._cache / "prepared")
        stamp = folder / _key(row, options, shared, place, model)
        if stamp.exists():
            return
        line = f"preparing the {row.id} runtime for this model, which happens once"
        notice = asyncio.get_running_loop().call_later(QUIET_S, say, line)
        try:
            async with _alone(stamp.parent / f"{row.id}.lock"):
                if stamp.exists():
                    return
                probe = await self.probe(catalog, row, options, place)
                if probe.problem is not None:
                    raise of_problem(row, probe).error(row.id)
                facts = await self.facts(catalog, row, model, options, place)
                await catalog.prepare(row.id, facts, options, shared, place)
                stamp.touch(mode=0o600)
        finally:
            notice.cancel()


def of_problem(row: Row, probe: Probe) -> Verdict:
    """The verdict that a probe's problem is; without a fix of its own, whoever provides it."""
    fix = probe.fix or row.entry.remedy
    return Verdict(probe.state, probe.rule, str(probe.problem), "", fix)


def _keep(path: Path, answer: msgspec.Struct) -> None:
    new = path.with_suffix(f".{os.getpid()}")
    try:
        with open(new, "wb", opener=open_private) as out:
            out.write(msgspec.json.encode(answer))
        new.replace(path)
    except OSError as error:
        raise unwritable(path, error) from error


@contextlib.asynccontextmanager
async def _alone(path: Path) -> AsyncIterator[None]:
    """Hold a lock that other servers on this home may hold too; waits without blocking."""
    with path.open("w") as file:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            await asyncio.sleep(_POLL_S)
        yield


def _key(
    row: Row, options: Mapping[str, Any], shared: Path, place: Place, model: Path | None = None
) -> str:
    entry, info = row.entry, row.info
    own = options.get(info.own_option) if info and info.own_option else None
    facts = {
        "entry": (entry.id, entry.distribution, entry.version),
        "code": max(_changes(entry.package), default=0) if entry.package else 0,
        "needs": sorted(_needs(entry.distribution)),
        "worker": (override(entry.id), *(_stamp(Path(word)) for word in _words(entry.id))),
        "python": (sys.version, sys.executable, str(place.interpreter)),
        "machine": (platform.machine(), platform.node()),
        "model": _stamp(model) if model else None,
        "options": sorted(options.items()),
        "own": _stamp(Path(own)) if isinstance(own, str) else None,
        "install": _stamp(place.folder / MANIFEST) if place.folder else None,
        # A folder that was emptied or made anew was filled by nobody.
        "shared": shared.stat().st_ino,
    }
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()


def _words(adapter: str) -> list[str]:
    return shlex.split(override(adapter) or "")


def _stamp(path: Path) -> tuple[str, int, int]:
    """What changes when a file does; zeros for one that is not there."""
    try:
        found = path.stat()
    except OSError:
        return str(path), 0, 0
    return str(path), found.st_size, found.st_mtime_ns


def _changes(package: str) -> Iterator[int]:
    """When each source file of `package`, or the one file it is, changed; nothing is imported."""
    found = importlib.util.find_spec(package)
    if found is None:
        return
    if found.submodule_search_locations is None and found.has_location and found.origin:
        yield Path(found.origin).stat().st_mtime_ns
    for folder in found.submodule_search_locations or ():
        for path in Path(folder).rglob("*.py"):
            yield path.stat().st_mtime_ns


def _needs(distribution: str) -> Iterator[str]:
    """The versions here of what `distribution` requires."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
        for text in importlib.metadata.requires(distribution) or ():
            name = Requirement(text).name
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                yield f"{name} {importlib.metadata.version(name)}"
