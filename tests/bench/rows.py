"""What a section yields: one figure with its spread, and how samples are taken in turn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")
MIB: Final = 1 << 20


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. `samples` are in `unit`, none where `note` says why there is no
    figure; `wanted` is the aim, in words.

    `conditions` says what a repeat needs: file, types, cap, cold or warm, threads.
    """

    name: str
    unit: str
    samples: list[float]
    wanted: str = ""
    note: str = ""
    conditions: dict[str, Any] = {}

    @property
    def median(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None

    def line(self) -> str:
        """Median, spread, aim, note and conditions in one line."""
        figure = "no figure"
        if self.samples:
            middle, least, most = self.median, min(self.samples), max(self.samples)
            figure = f"{middle:10.4g} {self.unit:<7} {least:.4g} to {most:.4g}"
        facts = " ".join(f"{key}={value}" for key, value in self.conditions.items())
        wanted = f"wanted {self.wanted}" if self.wanted else ""
        return "  ".join(filter(None, [f"  {self.name:<52}{figure}", wanted, self.note, facts]))


@dataclass(frozen=True, slots=True)
class Bench:
    """What every section gets. `folder` keeps generated files and compiled kernels; of a section
    that has parts, `parts` are those wanted, all where there are none."""

    folder: Path
    quick: bool = False
    parts: tuple[str, ...] = ()

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


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """Between which samples the true median lies, at 95 % or more (at less for fewer than six):
    order statistics, whatever the distribution."""
    order, count = sorted(samples), len(samples)
    least, tail = 0, 0.5**count
    while least + 1 < count - least - 1:
        tail += math.comb(count, least + 1) * 0.5**count
        if 2 * tail > 0.05:
            break
        least += 1
    return order[least], order[-1 - least]
