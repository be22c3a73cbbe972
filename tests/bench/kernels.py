"""How fast the kernels read weights, against how fast this machine reads memory in the same run;
and how fast they multiply prompts, against NumPy's BLAS over decoded tiles.

The baselines and the kernel take turns, so that what else the machine does falls on all alike. Read
the ratios, not the seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from bench.rows import MIB, Bench, Row, ratios
from superfluid_adapter_native.kernels.engine import Kernels
from superfluid_adapter_native.quants.types import TYPES, TensorType
from support.gguf_writer import random_raw

Floats = NDArray[np.float32]

_COLUMNS = 1024
_TILE = 256
_PROMPT_ROWS = 64
_THREADS = 2
_SIDE = 2048
_BLAS_TILE = 256
_BLAS_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_K", "Q6_K")
_BLAS_ROWS = (32, 128, 512)
_REST_S = 0.06
_DECODE_AIM = "0.5 or more for the default model's types"


def rows(bench: Bench) -> Iterator[Row]:
    """Each type on each of its routes: weights read at one row of x, products at many."""
    size, rounds = (32 * MIB, 3) if bench.quick else (96 * MIB, 9)
    floats = np.ones((size // 4 // _COLUMNS, _COLUMNS), np.float32)
    for exact in (False, True):
        engine = Kernels(threads=_THREADS, exact=exact, cache=bench.folder, writable=True)
        for kind in TYPES:
            if kind.elements > 1 or exact:
                yield from _of_type(kind, engine, floats, rounds)
        for kind in TYPES:
            if kind.name in _BLAS_TYPES and (kind.elements > 1 or exact):
                yield from _beside_blas(kind, engine, 2 * rounds)


def _beside_blas(kind: TensorType, engine: Kernels, rounds: int) -> Iterator[Row]:
    """Prompts of several lengths times one square matrix: by our kernel, and by decoding a tile of
    the matrix after another into the second cache for BLAS."""
    tile = random_raw(kind.name, _BLAS_TILE * _SIDE, np.random.default_rng(0))
    raw = np.frombuffer(tile * (_SIDE // _BLAS_TILE), np.uint8)
    weight = engine.weight(kind, raw, (_SIDE, _SIDE), resident=True)
    tiles = [np.arange(first, first + _BLAS_TILE) for first in range(0, _SIDE, _BLAS_TILE)]
    for count in _BLAS_ROWS:
        x = np.random.default_rng(1).standard_normal((count, _SIDE), np.float32)
        out, theirs = np.empty((2, count, _SIDE), np.float32)

        def by_blas(x: Floats = x, theirs: Floats = theirs) -> None:
            for ids in tiles:
                theirs[:, ids[0] : ids[-1] + 1] = x @ engine.gather(weight, ids).T

        def by_ours(x: Floats = x, out: Floats = out) -> None:
            engine.linear(x, weight, out)

        amount = count * _SIDE * _SIDE
        ours, blas = _rates(rounds, (by_ours, amount), (by_blas, amount))
        yield Row(
            name=f"{kind.name} by {_route(engine)}, {count} rows: over BLAS on decoded tiles",
            unit="x",
            samples=ratios(ours, blas),
            note=f"{statistics.median(ours):.0f} beside {statistics.median(blas):.0f} GMAC/s",
            conditions={"matrix": f"{_SIDE}x{_SIDE}", "threads": _THREADS},
        )


def _route(engine: Kernels) -> str:
    return "float" if engine.exact else "int8"


def _of_type(kind: TensorType, engine: Kernels, floats: Floats, rounds: int) -> Iterator[Row]:
    tiles = floats.nbytes // kind.row_bytes(_COLUMNS) // _TILE
    tile = random_raw(kind.name, _TILE * _COLUMNS, np.random.default_rng(0))
    raw = np.frombuffer(tile * tiles, np.uint8)
    count, few = tiles * _TILE, 8 * _TILE
    weight = engine.weight(kind, raw, (count, _COLUMNS), resident=True)
    small = engine.weight(kind, raw[: few * weight.row_bytes], (few, _COLUMNS), resident=True)
    x, many = (np.ones((n, _COLUMNS), np.float32) for n in (1, _PROMPT_ROWS))
    out = np.empty((1, count), np.float32)
    read, matvec, decode, prompt = _rates(
        rounds,
        (floats.sum, floats.nbytes),
        (lambda: floats @ x[0], floats.nbytes),
        (lambda: engine.linear(x, weight, out), raw.nbytes),
        (lambda: engine.linear(many, small), _PROMPT_ROWS * few * _COLUMNS),
    )
    facts = {"route": _route(engine), "threads": _THREADS}
    name = f"{kind.name} by {facts['route']}"
    yield Row(name=f"{name}, weights read", unit="GB/s", samples=decode, conditions=facts)
    for base, samples in (("a plain read of memory", read), ("BLAS over F32", matvec)):
        yield Row(
            name=f"{name}, of {base}",
            unit="ratio",
            samples=ratios(decode, samples),
            wanted=_DECODE_AIM,
            conditions=facts,
        )
    yield Row(name=f"{name}, {_PROMPT_ROWS} rows", unit="GMAC/s", samples=prompt, conditions=facts)


def _rates(rounds: int, *acts: tuple[Callable[[], object], int]) -> list[list[float]]:
    """Billions of each act's amount per second, a sample per round. Before each the other's threads
    come to rest, since those of BLAS look for work for a while, and its own are woken."""
    found: list[list[float]] = [[] for _ in acts]
    for _ in range(rounds):
        for samples, (act, amount) in zip(found, acts, strict=True):
            time.sleep(_REST_S)
            act()
            start = time.perf_counter()
            act()
            samples.append(amount / (time.perf_counter() - start) / 1e9)
    return found
