"""Models opened by the native runtime, with kernels compiled once for a whole test run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from superfluid_adapter_native.native import OPTIONS, NativeAdapter
from superfluid_workerd.adapter import Feed, LoadedModel, OpenRequest, Runtime

Logits = NDArray[np.float32]


@contextlib.contextmanager
def opened(
    model: Path,
    shared: Path,
    *,
    context: int = 0,
    lanes: int = 4,
    threads: int = 2,
    memory_budget: int | None = None,
    prepare: bool = True,
    **options: Any,
) -> Iterator[LoadedModel]:
    """`model`, loaded; options by their names with underscores. Closed at the end. Without
    `prepare` kernels that are not in `shared` yet are not compiled ahead."""
    adapter = NativeAdapter()
    given = {name.replace("_", "-"): value for name, value in options.items()}
    checked = {one.name: given.pop(one.name, one.default) for one in OPTIONS}
    assert not given
    if prepare:
        adapter.prepare(adapter.facts(model), checked, shared, lambda done, total: None)
    loaded = adapter.open(
        OpenRequest(
            model=model,
            scratch=shared,
            shared=shared,
            context=context,
            lanes=lanes,
            threads=threads,
            memory_budget=memory_budget,
            options=checked,
        )
    )
    try:
        yield loaded
    finally:
        loaded.runtime.close()


def ignore() -> None:
    """A tick that does nothing."""


def one_by_one(runtime: Runtime, sequence: int, tokens: Sequence[int]) -> Logits:
    """Logits after each of `tokens`, which follow what the sequence has, one in a step."""
    rows: list[Logits] = []
    for token in tokens:
        start = runtime.seq_length(sequence)
        (found,) = runtime.step([Feed(sequence, [token], start, "all")], ignore)
        assert found is not None
        rows.append(found)
    return np.concatenate(rows)


def whole(runtime: Runtime, tokens: Sequence[int], sequence: int | None = None) -> Logits:
    """Logits after each of `tokens`, all in one step."""
    target = runtime.seq_create() if sequence is None else sequence
    start = runtime.seq_length(target)
    (found,) = runtime.step([Feed(target, list(tokens), start, "all")], ignore)
    assert found is not None
    return found
