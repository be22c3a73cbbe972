"""Models opened by the llama.cpp runtime, on the library that this process may load."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from superfluid_adapter_llamacpp.llamacpp import LlamaCppAdapter
from superfluid_workerd.adapter import LoadedModel, OpenRequest
from superfluid_workerd.registry import checked_options
from support.llama_libraries import BUILD, library


@contextlib.contextmanager
def opened(
    model: Path,
    shared: Path,
    *,
    context: int = 0,
    lanes: int = 4,
    threads: int = 1,
    memory_budget: int | None = None,
    **options: Any,
) -> Iterator[LoadedModel]:
    """`model`, loaded; options by their names with underscores. Closed at the end."""
    adapter = LlamaCppAdapter()
    named = {name.replace("_", "-"): value for name, value in options.items()}
    loaded = adapter.open(
        OpenRequest(
            model=model,
            scratch=shared,
            shared=shared,
            context=context,
            lanes=lanes,
            threads=threads,
            memory_budget=memory_budget,
            options=checked_options(adapter, {"lib": str(library(BUILD)), **named}),
        )
    )
    try:
        yield loaded
    finally:
        loaded.runtime.close()
