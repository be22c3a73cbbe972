"""Which adapters exist: names and distributions, by entry point; nothing is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from superfluid_compat.entrypoints import ADAPTERS
from superfluid_compat.errors import RuntimeBroken

_ID: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
OVERRIDE: Final = "SUPERFLUID_WORKER_"
"""`SUPERFLUID_WORKER_<ID>` is the command that answers for the adapter of that id."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One adapter id and who provides it, in which top-level package; `problem` when it cannot
    be asked."""

    id: str
    distribution: str
    version: str
    package: str
    problem: RuntimeBroken | None = None

    @property
    def remedy(self) -> str:
        """What may mend an adapter that does not work: its command, or whoever provides it."""
        if self.distribution.startswith(OVERRIDE):
            return f"check the command in {self.distribution}"
        return f"reinstall {self.distribution}"


def override(adapter: str) -> str | None:
    """The command that the environment names as this adapter's worker."""
    return os.environ.get(f"{OVERRIDE}{adapter.replace('-', '_').upper()}") or None


def find(points: Iterable[EntryPoint] | None = None) -> tuple[Entry, ...]:
    """Every adapter by id. An id that two distributions claim is one entry with that problem; one
    that only the environment names a worker for is an entry like others."""
    by_id: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ADAPTERS) if points is None else points:
        by_id.setdefault(point.name, []).append(point)
    found = {name: _entry(name, claims) for name, claims in by_id.items()}
    if points is None:
        for variable, command in os.environ.items():
            id_ = variable.removeprefix(OVERRIDE).replace("_", "-").lower()
            if variable.startswith(OVERRIDE) and command:
                found[id_] = Entry(id_, variable, "", "")
    return tuple(found[name] for name in sorted(found))


def _entry(name: str, claims: list[EntryPoint]) -> Entry:
    owners = sorted(point.dist.name if point.dist else point.value for point in claims)
    version = (claims[0].dist.version if claims[0].dist else "") if len(claims) == 1 else ""
    problem = None
    if len(claims) > 1:
        problem = RuntimeBroken(
            f"{' and '.join(owners)} both provide a runtime called {name}",
            fix="uninstall one of them",
        )
    elif not _ID.fullmatch(name):
        problem = RuntimeBroken(
            f"{owners[0]} calls its runtime {name!r}, wanted small letters, digits and hyphens",
            fix=f"uninstall {owners[0]}",
        )
    package = claims[0].module.partition(".")[0]
    return Entry(name, " and ".join(owners), version, package, problem)


def remedy(adapter: str) -> str:
    """The `Entry.remedy` of the adapter of that id here."""
    found = (entry.remedy for entry in find() if entry.id == adapter)
    return next(found, "reinstall superfluid")
