"""`superfluid serve`, from the bound port to the last stream drained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from superfluid_workerd.options import Resolved

Sources: TypeAlias = Sequence[tuple[str, Mapping[str, object]]]
"""(origin, values by option name), strongest first: what `options.resolve` takes."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What to serve, where and how; everything that needs no worker is checked already.

    `model` is the file or folder on disk, `model_name` what clients call it. `runtime` is an
    adapter's id, None picks by format. `common` holds every option of `options.COMMON`.
    `adapter_options` holds what was given for each adapter by id, unresolved: only its worker
    knows its options. `port` 0 takes a free one. `state` and `cache` are folders of this home,
    shared by every server on it; `server` tells the servers apart.
    """

    model: Path
    model_name: str
    common: Mapping[str, Resolved]
    state: Path
    cache: Path
    host: str = "127.0.0.1"
    port: int = 8453
    server: str = "default"
    runtime: str | None = None
    adapter_options: Mapping[str, Sources] = field(default_factory=dict)
