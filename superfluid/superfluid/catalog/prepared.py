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
import platform
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from packaging.requirements import Requirement

from superfluid.catalog.catalog import Catalog, Row
from superfluid.catalog.entries import Entry
from superfluid.paths import private_folder, unwritable

QUIET_S: Final = 2.0
_POLL_S: Final = 0.1


class Preparations:
    """The adapters' shared folders below `cache`, with their stamps."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache

    def shared(self, adapter: str) -> Path:
        """The folder that this adapter's workers share, made when missing."""
        return private_folder(self._cache / "shared" / adapter)

    async def ensure(
        self,
        catalog: Catalog,
        row: Row,
        model: Path,
        options: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        """Check the runtime and prepare it for `model`, in workers that hold no model, unless
        that was done before; `say` hears of it when it takes long.

        Raises what `Catalog.check`, `facts` and `prepare` raise, and `BadConfig` when the cache
        cannot be written.
        """
        try:
            await self._ensure(catalog, row, model, options, say)
        except OSError as error:
            raise unwritable(self._cache, error) from error

    async def _ensure(
        self,
        catalog: Catalog,
        row: Row,
        model: Path,
        options: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        shared = self.shared(row.id)
        stamp = private_folder(self._cache / "prepared") / _key(row.entry, model, options, shared)
        if stamp.exists():
            return
        line = f"preparing the {row.id} runtime for this model, which happens once"
        notice = asyncio.get_running_loop().call_later(QUIET_S, say, line)
        try:
            async with _alone(stamp.parent / f"{row.id}.lock"):
                if stamp.exists():
                    return
                facts = await catalog.facts(row.id, model)
                await catalog.check(row.id, options, shared)
                await catalog.prepare(row.id, facts, options, shared)
                stamp.touch(mode=0o600)
        finally:
            notice.cancel()


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


def _key(entry: Entry, model: Path, options: Mapping[str, Any], shared: Path) -> str:
    file = model.stat()
    facts = {
        "entry": (entry.id, entry.distribution, entry.version),
        "code": max(_changes(entry.package), default=0),
        "needs": sorted(_needs(entry.distribution)),
        "python": (sys.version, sys.executable),
        "machine": (platform.machine(), platform.node()),
        "model": (str(model), file.st_size, file.st_mtime_ns),
        "options": sorted(options.items()),
        # A folder that was emptied or made anew was filled by nobody.
        "shared": shared.stat().st_ino,
    }
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()


def _changes(package: str) -> Iterator[int]:
    """When each source file of `package` changed; nothing is imported."""
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in Path(folder).rglob("*.py"):
            yield path.stat().st_mtime_ns


def _needs(distribution: str) -> Iterator[str]:
    """The versions here of what `distribution` requires."""
    for text in importlib.metadata.requires(distribution) or ():
        name = Requirement(text).name
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"{name} {importlib.metadata.version(name)}"
