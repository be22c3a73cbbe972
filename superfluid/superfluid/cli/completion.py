"""What the shell completes: runtimes, their installs, versions, backends and options."""

from __future__ import annotations

import contextlib
from typing import Any

from superfluid.cli.settled import adapter_ids
from superfluid_compat.errors import SuperfluidError
from superfluid_workerd.options import Kind, Option


def runtime_ids(incomplete: str) -> list[str]:
    return [id_ for id_ in adapter_ids() if id_.startswith(incomplete)]


def installs(ctx: Any, incomplete: str) -> list[str]:
    """Names of the installs of the runtime that stands before."""
    from superfluid.installs.store import Installs
    from superfluid.paths import Paths

    runtime = _runtime(ctx)
    found = Installs(Paths.find().runtimes).all(runtime) if runtime else []
    return [each.name for each in found if each.name.startswith(incomplete)]


def versions(ctx: Any, incomplete: str) -> list[str]:
    """Versions that the adapter of the runtime before installs here."""
    known = _about(_runtime(ctx))
    found = [each.version for each in known.versions if each.here is None] if known else []
    return [each for each in dict.fromkeys(found) if each.startswith(incomplete)]


def backends(ctx: Any, incomplete: str) -> list[str]:
    """Backends of the runtime before that install here, in the version before if there is one."""
    known = _about(_runtime(ctx))
    version = ctx.params.get("version")
    found = [
        each.backend
        for each in (known.versions if known else ())
        if each.here is None and each.backend and version in (None, each.version)
    ]
    return [each for each in dict.fromkeys(found) if each.startswith(incomplete)]


def option_flags(incomplete: str) -> list[tuple[str, str]]:
    """`--ID-NAME` of every option of every runtime, with its help."""
    found = _options().items()
    return [(flag, option.help) for flag, option in found if flag.startswith(incomplete)]


def option_values(flag: str, incomplete: str) -> list[str]:
    """Words that a runtime's option `--ID-NAME` takes."""
    option = _options().get(flag)
    return words_of(option, incomplete) if option is not None else []


def words_of(option: Option, incomplete: str) -> list[str]:
    """Words that `option` takes, where there are some."""
    truth = ("true", "false") if option.kind is Kind.BOOLEAN else ()
    found = (*option.choices, *option.keywords, *truth)
    return [word for word in found if word.startswith(incomplete)]


def _options() -> dict[str, Option]:
    """Every option of every runtime, by its flag."""
    import asyncio

    from superfluid.catalog.catalog import Catalog

    found: dict[str, Option] = {}
    for row in asyncio.run(Catalog().rows()):
        with contextlib.suppress(SuperfluidError):
            found |= {option.flag(row.id): option for option in row.options}
    return found


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


def _runtime(ctx: Any) -> str:
    """The runtime that was named; where an option waits for its value, arguments before it are
    not sorted out yet."""
    return str(ctx.params.get("runtime") or next(iter(ctx.args), ""))


def _about(runtime: str) -> Any:
    import asyncio

    from superfluid.catalog.catalog import Catalog

    with contextlib.suppress(SuperfluidError):
        return asyncio.run(Catalog().row(runtime)).about
    return None
