"""The adapter's own options, typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from superfluid_adapter_native.kv_cache import KVType
from superfluid_workerd.adapter import Options, Values
from superfluid_workerd.limits import cores


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
        values = Values(options)
        return cls(
            cache_bytes=values.integer("cache-bytes", None),
            layers=values.indices("layers", None),
            max_layers=values.integer("max-layers", None),
            kv_type=cast(KVType, values.text("kv-type", "f32")),
            read_ahead=values.flag("read-ahead", True),
            exact=values.flag("exact", False),
        )


def threads_for(asked: int) -> int:
    """`asked`, or for 0 one per core that this process may use."""
    return asked or cores()
