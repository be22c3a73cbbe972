"""What a section yields: one figure with its spread, and how samples are taken in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")
MIB: Final = 1 << 20


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. `samples` are in `unit`; `wanted` is the aim, in words.

    `conditions` says what a repeat needs: file, types, cap, cold or warm, threads.
    """

    name: str
    unit: str
    samples: list[float]
    wanted: str = ""
    note: str = ""
    conditions: dict[str, Any] = {}

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


@dataclass(frozen=True, slots=True)
class Bench:
    """What every section gets. `folder` keeps generated files and compiled kernels."""

    model: Path
    folder: Path
    quick: bool = False
    conditions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """Times the pattern there-and-back is run."""
        return 1 if self.quick else 2

    def place(self, name: str) -> Path:
        """A folder of this name, made."""
        path = self.folder / name
        path.mkdir(parents=True, exist_ok=True)
        return path


def alternate(rounds: int, calls: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Results of each call, taken A B, B A, A B ...: drift of the machine falls on all alike."""
    found: dict[str, list[T]] = {name: [] for name in calls}
    names = list(calls)
    for _ in range(rounds):
        for name in (*names, *reversed(names)):
            found[name].append(calls[name]())
    return found


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Sample by sample, so that each ratio is of neighbours in time."""
    return [one / other for one, other in zip(above, below, strict=True)]
