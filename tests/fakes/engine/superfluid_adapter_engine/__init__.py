"""A runtime whose engine is a shared library of a few lines, installed on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from superfluid_adapter_engine.engine import EngineAdapter


def adapter() -> EngineAdapter:
    """The entry point."""
    from superfluid_adapter_engine.engine import EngineAdapter

    return EngineAdapter()
