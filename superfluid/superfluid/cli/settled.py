"""Everything a `serve` is told, by flag, environment and configuration file, in one place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from superfluid.catalog.entries import find
from superfluid.config import CONFIG, SERVE, Sources, adapter_variables, given_by, settle
from superfluid.paths import Paths
from superfluid_compat.errors import SuperfluidError, UsageError
from superfluid_workerd.options import Resolved, nearest, place_of, unknown_option

if TYPE_CHECKING:
    from superfluid.configfile import ConfigFile

Extra = Sequence[tuple[str, str | None]]
"""Flags that are none of `serve`'s own, with their values."""


@dataclass(frozen=True, slots=True)
class Settled:
    """`values` holds every option of `serve`; `adapters` what was given for each adapter by id,
    unresolved. `name` is the model's table in the file, `argument` what is to be served."""

    argument: str | None
    name: str | None
    values: Mapping[str, Resolved]
    adapters: Mapping[str, Sources]

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """An error over an option that no flag gave says what did."""
        try:
            yield
        except SuperfluidError as error:
            place = self._place(error.param) if error.param else None
            if place is not None and place not in error.line():
                error.fix = f"{error.fix}; it was given by {place}"
            raise

    def _place(self, name: str) -> str | None:
        own = self.values.get(name)
        if own is not None:
            return place_of(name, own.origin)
        given = (
            given_by(id_, option, origin)
            for id_, sources in self.adapters.items()
            for origin, values in sources
            for option in values
            if name in (option, f"{id_}-{option}")
        )
        return next(given, None)


def settled(argument: str | None, flags: Mapping[str, object], extra: Extra = ()) -> Settled:
    """Raises `BadConfig`, `UnknownOption`, `BadOptionValue`, `UnknownAdapter`, `UsageError`."""
    ids = adapter_ids()
    given = adapter_flags(extra, ids)
    file = config_file(flags)
    if file is not None:
        file.require_adapters(ids)
    table = file.model(argument) if file else None
    name = argument if table else None
    return Settled(
        table.model if table else argument,
        name,
        settle(SERVE, flags, config=file.sources(name) if file else ()),
        {
            id_: (
                ("flag", given[id_]),
                ("environment", adapter_variables(id_)),
                *(file.adapter_sources(id_, name) if file else ()),
            )
            for id_ in ids
        },
    )


def config_file(flags: Mapping[str, object]) -> ConfigFile | None:
    """The file that was named, else the home's if there is one. Raises `BadConfig`."""
    named = settle([CONFIG], {k: v for k, v in flags.items() if k == CONFIG.name})[CONFIG.name]
    path = Path(str(named.value)).expanduser() if named.value else Paths.find().config_file
    if not named.value and not path.is_file():
        return None
    from superfluid.configfile import read

    return read(path)


def adapter_flags(given: Extra, ids: Sequence[str]) -> dict[str, dict[str, object]]:
    """Values by adapter and option name; the adapter's worker says later which names it has.

    Raises `UnknownOption` for a flag that is of no adapter, `UsageError` for one without value.
    """
    longest = sorted(ids, key=len, reverse=True)
    flags: dict[str, dict[str, object]] = {id_: {} for id_ in ids}
    for flag, value in given:
        id_ = next((id_ for id_ in longest if flag.startswith(f"--{id_}-")), None)
        if id_ is None:
            raise unknown_option(flag.removeprefix("--"), _known_names(flag, ids), "flag")
        if value is None:
            raise UsageError(f"{flag} has no value, wanted one", fix=f"give {flag} VALUE")
        flags[id_][flag.removeprefix(f"--{id_}-")] = value
    return flags


def adapter_ids() -> list[str]:
    """Ids of the adapters that are here, by their entry points' names."""
    return [entry.id for entry in find()]


def _known_names(flag: str, ids: Sequence[str]) -> list[str]:
    """What `flag` may have meant; with a mistyped adapter, the same name at the right one."""
    word, _, name = flag.removeprefix("--").partition("-")
    near = nearest(word, ids)
    return [option.name for option in SERVE] + ([f"{near}-{name}"] if near and name else [])


__all__ = ["Extra", "Settled", "adapter_flags", "adapter_ids", "config_file", "settled"]
