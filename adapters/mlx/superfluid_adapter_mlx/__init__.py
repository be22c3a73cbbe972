"""mlx-lm as a runtime of superfluid. Importing this loads no engine."""

from __future__ import annotations

from superfluid_workerd.adapter import Adapter


def adapter() -> Adapter:
    """The entry point."""
    from superfluid_adapter_mlx.mlx import MlxAdapter

    return MlxAdapter()


__all__ = ["adapter"]
