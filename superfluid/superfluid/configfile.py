"""`superfluid.toml`: models, runtimes, options and server, each value as a flag would give it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from superfluid.config import DAEMON, Sources
from superfluid_compat.errors import BadConfig, UnknownAdapter
from superfluid_workerd.options import COMMON, nearest

Value: TypeAlias = bool | int | float | str | list[int]
_STRICT: Final = ConfigDict(extra="forbid", strict=True)


class ModelTable(BaseModel):
    """`[models.NAME]`: what `superfluid serve NAME` serves and how."""

    model_config = _STRICT
    model: str = Field(min_length=1)
    runtime: str | None = None
    options: dict[str, Value] = {}
    runtimes: dict[str, dict[str, Value]] = {}


class Tables(BaseModel):
    """The whole file."""

    model_config = _STRICT
    server: dict[str, Value] = {}
    options: dict[str, Value] = {}
    runtimes: dict[str, dict[str, Value]] = {}
    models: dict[str, ModelTable] = {}


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file that was read; values are checked where they are resolved."""

    path: Path
    tables: Tables

    def model(self, name: str | None) -> ModelTable | None:
        return self.tables.models.get(name) if name is not None else None

    def sources(self, name: str | None) -> Sources:
        """What the file gives to options of `serve`, strongest first."""
        general = {**self.tables.server, **self.tables.options}
        found = [(self._origin(), general)]
        table = self.model(name)
        if table is not None:
            own = dict(table.options)
            if table.runtime is not None:
                own["runtime"] = table.runtime
            found.insert(0, (self._origin(f"models.{name}"), own))
        return found

    def adapter_sources(self, adapter: str, name: str | None) -> Sources:
        """What it gives to an adapter's options, strongest first."""
        found = [
            (self._origin(f"runtimes.{adapter}"), self.tables.runtimes.get(adapter, {})),
        ]
        table = self.model(name)
        if table is not None:
            origin = self._origin(f"models.{name}.runtimes.{adapter}")
            found.insert(0, (origin, table.runtimes.get(adapter, {})))
        return [(origin, values) for origin, values in found if values]

    def require_adapters(self, known: Iterable[str]) -> None:
        """Raise `UnknownAdapter` for a table of a runtime that is not among `known`."""
        ids = sorted(known)
        tables = [self.tables.runtimes, *(it.runtimes for it in self.tables.models.values())]
        for id_ in (id_ for table in tables for id_ in table):
            if id_ not in ids:
                near = nearest(id_, ids)
                raise UnknownAdapter(
                    f"{self.path} has options for runtime {id_}; here are {', '.join(ids)}",
                    fix=f"did you mean {near}?" if near else "remove the table",
                )

    def _origin(self, table: str = "") -> str:
        return f"config {self.path}" + (f" [{table}]" if table else "")


def read(path: Path) -> ConfigFile:
    """The file at `path`. Raises `BadConfig` naming the place that is wrong."""
    try:
        with path.open("rb") as file:
            tables = Tables.model_validate(tomllib.load(file))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise BadConfig(f"{path} cannot be read: {reason}", fix="name a file with --config") from (
            error
        )
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadConfig(f"{path} is no TOML: {error}") from error
    except ValidationError as error:
        raise BadConfig(f"{path}: {_first(error)}", fix="see docs/config.md") from error
    _require_places(path, tables)
    return ConfigFile(path, tables)


def _first(error: ValidationError) -> str:
    found: Mapping[str, Any] = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in found["loc"])
    if found["type"] == "extra_forbidden":
        # Models are at the third level of the file, all other tables at the first.
        known = (ModelTable if found["loc"][0] == "models" else Tables).model_fields
        near = nearest(str(found["loc"][-1]), known)
        meant = f", did you mean {near}?" if near else f", wanted one of {', '.join(known)}"
        return f"{place} is no name of this file{meant}"
    return f"{place}: {str(found['msg']).lower()}" if place else str(found["msg"])


def _require_places(path: Path, tables: Tables) -> None:
    """Each option in its table: the server's in `server`, those of a load in `options`."""
    names = {"server": {it.name for it in DAEMON}, "options": {it.name for it in COMMON}}
    given = [("server", tables.server), ("options", tables.options)]
    given += [("options", table.options) for table in tables.models.values()]
    for table, values in given:
        other = "options" if table == "server" else "server"
        for name in values:
            if name in names[other]:
                raise BadConfig(f"{path}: {name} stands in {table}, wanted in [{other}]")
    if "config" in tables.server:
        raise BadConfig(f"{path}: server.config: a configuration file names no other")
