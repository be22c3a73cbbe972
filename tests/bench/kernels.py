"""How fast the kernels read weights, against how fast this machine reads memory in the same run.

Each figure is the median of rounds in which the baselines and the kernel take turns, so that what
else the machine does falls on all of them alike. Read the ratios, not the seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from superfluid_adapter_native.kernels.engine import Kernels
from superfluid_adapter_native.quants.types import TYPES, TensorType
from support.gguf_writer import random_raw

COLUMNS = 1024
WEIGHT_BYTES = 96 << 20
ROUNDS = 9
PROMPT_ROWS = 64


@dataclass(frozen=True, slots=True)
class Measure:
    """One type on one route; rates of weights as they are stored, and ratios within a round."""

    type: str
    route: str
    threads: int
    gigabytes_per_second: float
    of_memory_read: float
    of_float_matvec: float
    prompt_gigamacs_per_second: float


def seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def measure(kinds: Sequence[TensorType], threads: int, *, cache: Path | None) -> list[Measure]:
    """Every type on both routes."""
    floats = np.ones((WEIGHT_BYTES // 4 // COLUMNS, COLUMNS), np.float32)
    ones = np.ones(COLUMNS, np.float32)
    engines = {
        "exact" if exact else "int8": Kernels(
            threads=threads, exact=exact, cache=cache, writable=cache is not None
        )
        for exact in (False, True)
    }
    return [
        _measure(kind, route, threads, engine, floats, ones)
        for kind in kinds
        for route, engine in engines.items()
    ]


def _measure(
    kind: TensorType,
    route: str,
    threads: int,
    engine: Kernels,
    floats: np.ndarray[tuple[int, int], np.dtype[np.float32]],
    ones: np.ndarray[tuple[int], np.dtype[np.float32]],
) -> Measure:
    rows = WEIGHT_BYTES // kind.row_bytes(COLUMNS)
    tile = random_raw(kind.name, 256 * COLUMNS, np.random.default_rng(0))
    raw = np.frombuffer(tile * (rows // 256), np.uint8)
    rows = rows // 256 * 256
    weight = engine.weight(kind, raw, (rows, COLUMNS), resident=True)
    small = engine.weight(kind, raw[: 2048 * weight.row_bytes], (2048, COLUMNS), resident=True)
    x, many = (np.ones((n, COLUMNS), np.float32) for n in (1, PROMPT_ROWS))
    out = np.empty((1, rows), np.float32)
    acts: list[tuple[Callable[[], object], float]] = [
        (floats.sum, floats.nbytes),
        (lambda: floats @ ones, floats.nbytes),
        (lambda: engine.linear(x, weight, out), raw.nbytes),
        (lambda: engine.linear(many, small), PROMPT_ROWS * 2048 * COLUMNS),
    ]
    for act, _ in acts:
        act()
    rounds = [[amount / seconds(act) / 1e9 for act, amount in acts] for _ in range(ROUNDS)]
    return Measure(
        type=kind.name,
        route=route if kind.elements > 1 else "float",
        threads=threads,
        gigabytes_per_second=statistics.median(r[2] for r in rounds),
        of_memory_read=statistics.median(r[2] / r[0] for r in rounds),
        of_float_matvec=statistics.median(r[2] / r[1] for r in rounds),
        prompt_gigamacs_per_second=statistics.median(r[3] for r in rounds),
    )


def table(measures: Sequence[Measure]) -> str:
    head = f"{'type':8}{'route':8}{'GB/s':>8}{'of memory':>11}{'of sgemv':>10}{'prompt GMAC/s':>15}"
    lines = [
        f"{m.type:8}{m.route:8}{m.gigabytes_per_second:8.1f}{m.of_memory_read:11.2f}"
        f"{m.of_float_matvec:10.2f}{m.prompt_gigamacs_per_second:15.1f}"
        for m in measures
    ]
    return "\n".join([head, *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.kernels", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--types", default=",".join(kind.name for kind in TYPES))
    parser.add_argument("--cache", type=Path, default=None)
    chosen = parser.parse_args(arguments)
    names = chosen.types.split(",")
    kinds = [kind for kind in TYPES if kind.name in names]
    measures = measure(kinds, chosen.threads, cache=chosen.cache)
    print(table(measures))
    print(json.dumps([asdict(m) for m in measures]))


if __name__ == "__main__":
    main()
