"""The adapter's own options, typed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import cast

from superfluid_adapter_native.kv_cache import KVType
from superfluid_workerd.adapter import Options


@dataclass(frozen=True, slots=True)
class Settings:
    """The adapter's options, typed. None for `cache_bytes`: as much as the budget leaves."""

    cache_bytes: int | None
    layers: tuple[int, ...] | None
    max_layers: int | None
    kv_type: KVType
    read_ahead: bool
    exact: bool

    @classmethod
    def of(cls, options: Options) -> Settings:
        """From checked options; what is missing has its default."""
        cache = options.get("cache-bytes", "auto")
        layers, most = options.get("layers"), options.get("max-layers")
        return cls(
            cache_bytes=cache if isinstance(cache, int) else None,
            layers=layers if isinstance(layers, tuple) else None,
            max_layers=most if isinstance(most, int) else None,
            kv_type=cast(KVType, options.get("kv-type") or "f32"),
            read_ahead=bool(options.get("read-ahead", True)),
            exact=bool(options.get("exact", False)),
        )


def threads_for(asked: int) -> int:
    """`asked`, or for 0 one per core that this process may use."""
    if asked:
        return asked
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
