"""Tensors that are read together: where each lies in memory once they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from superfluid_adapter_native.arena import PAGE, whole_pages
from superfluid_adapter_native.formats.source import Tensor

_NEAR_BYTES: Final = 64 << 10
"""What lies between two tensors is read too if it is no more than this."""


@dataclass(frozen=True, slots=True)
class Run:
    """`count` bytes of a file from `start`, to be at `place` in memory.

    `start` and `place` are whole pages, `count` what is wanted, which may end within one."""

    file: int
    start: int
    count: int
    place: int


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Tensors, the runs that hold them, where in memory each begins, and how much that takes."""

    tensors: tuple[Tensor, ...]
    runs: tuple[Run, ...]
    places: Mapping[str, int]
    bytes: int


def unit_of(tensors: Iterable[Tensor]) -> Unit:
    """These tensors as they lie: neighbours in a file are neighbours in memory."""
    ordered = sorted(tensors, key=lambda one: (one.file, one.offset))
    runs: list[Run] = []
    places: dict[str, int] = {}
    room = 0
    for tensor in ordered:
        last = runs[-1] if runs else None
        end = tensor.offset + tensor.bytes
        if last is not None and _near(last, tensor):
            end = max(end, last.start + last.count)
            runs[-1] = last = Run(last.file, last.start, end - last.start, last.place)
        else:
            start = tensor.offset // PAGE * PAGE
            last = Run(tensor.file, start, end - start, room)
            runs.append(last)
        places[tensor.name] = last.place + tensor.offset - last.start
        room = last.place + whole_pages(last.count)
    return Unit(tuple(ordered), tuple(runs), places, room)


def unit_bytes(tensors: Sequence[Tensor]) -> int:
    """Memory that a unit of these takes, whole pages."""
    return unit_of(tensors).bytes


def _near(run: Run, tensor: Tensor) -> bool:
    return run.file == tensor.file and tensor.offset <= run.start + run.count + _NEAR_BYTES
