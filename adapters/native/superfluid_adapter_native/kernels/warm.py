"""Compiles kernels ahead, in a process that holds no model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from superfluid_adapter_native.kernels.engine import CacheType, Kernels
from superfluid_adapter_native.quants.types import TensorType


def warm(
    kinds: Iterable[TensorType],
    *,
    exact: bool,
    caches: Iterable[CacheType],
    folder: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Saves in `folder` what models of these types need; how many kernels were not there yet."""
    with closing(Kernels(threads=1, exact=exact, cache=folder, writable=True)) as kernels:
        kernels.prepare(kinds, caches, progress)
        return kernels.store.compiled
