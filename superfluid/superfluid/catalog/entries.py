"""Which adapters exist: names and distributions, by entry point; nothing is imported."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from superfluid_compat.errors import RuntimeBroken

GROUP: Final = "superfluid.adapters"


@dataclass(frozen=True, slots=True)
class Entry:
    """One adapter id and who provides it, in which top-level package; `problem` when it cannot
    be asked."""

    id: str
    distribution: str
    version: str
    package: str
    problem: RuntimeBroken | None = None


def find(points: Iterable[EntryPoint] | None = None) -> tuple[Entry, ...]:
    """Every adapter by id. An id that two distributions claim is one entry with that problem."""
    by_id: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP) if points is None else points:
        by_id.setdefault(point.name, []).append(point)
    return tuple(_entry(name, claims) for name, claims in sorted(by_id.items()))


def _entry(name: str, claims: list[EntryPoint]) -> Entry:
    owners = sorted(point.dist.name if point.dist else point.value for point in claims)
    version = (claims[0].dist.version if claims[0].dist else "") if len(claims) == 1 else ""
    problem = None
    if len(claims) > 1:
        problem = RuntimeBroken(
            f"{' and '.join(owners)} both provide a runtime called {name}",
            fix="uninstall one of them",
        )
    package = claims[0].module.partition(".")[0]
    return Entry(name, " and ".join(owners), version, package, problem)
