"""What the shell completes: runtimes, their installs and versions, and their options."""

from __future__ import annotations

import contextlib
from typing import Any

from superfluid.cli.settled import adapter_ids
from superfluid_compat.errors import SuperfluidError


def runtime_ids(incomplete: str) -> list[str]:
    return [id_ for id_ in adapter_ids() if id_.startswith(incomplete)]


def installs(ctx: Any, incomplete: str) -> list[str]:
    """Names of the installs of the runtime that stands before."""
    from superfluid.installs.store import Installs
    from superfluid.paths import Paths

    runtime = str(ctx.params.get("runtime", ""))
    found = Installs(Paths.find().runtimes).all(runtime) if runtime else []
    return [each.name for each in found if each.name.startswith(incomplete)]


def versions(ctx: Any, incomplete: str) -> list[str]:
    """Versions that the adapter of the runtime before installs here."""
    known = _about(str(ctx.params.get("runtime", "")))
    found = [each.version for each in known.versions if each.here is None] if known else []
    return [each for each in dict.fromkeys(found) if each.startswith(incomplete)]


def option_flags(incomplete: str) -> list[tuple[str, str]]:
    """`--ID-NAME` of every option of every runtime, with its help."""
    import asyncio

    from superfluid.catalog.catalog import Catalog

    found = []
    for row in asyncio.run(Catalog().rows()):
        with contextlib.suppress(SuperfluidError):
            found += [(option.flag(row.id), option.help) for option in row.options]
    return [(flag, text) for flag, text in found if flag.startswith(incomplete)]


def runtime_choices(incomplete: str) -> list[str]:
    """`ID` and `ID@INSTALL`, for `--runtime`."""
    from superfluid.installs.store import Installs
    from superfluid.paths import Paths

    kept = Installs(Paths.find().runtimes)
    names = [
        name
        for id_ in adapter_ids()
        for name in (id_, *(f"{id_}@{each.name}" for each in kept.all(id_)))
    ]
    return [name for name in names if name.startswith(incomplete)]


def _about(runtime: str) -> Any:
    import asyncio

    from superfluid.catalog.catalog import Catalog

    with contextlib.suppress(SuperfluidError):
        return asyncio.run(Catalog().row(runtime)).about
    return None
