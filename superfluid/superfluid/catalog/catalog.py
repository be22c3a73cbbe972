"""What each adapter says, asked side by side, and which of them serves a model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from superfluid.catalog import entries, formats
from superfluid.catalog.entries import Entry
from superfluid.catalog.workerd import Workerd, shipped
from superfluid_compat import numbers
from superfluid_compat.errors import (
    BadOptionValue,
    ContractRefused,
    ModelError,
    RuntimeBroken,
    RuntimeNotInstalled,
    RuntimeUnavailable,
    SuperfluidError,
    UnknownAdapter,
)
from superfluid_compat.verdicts import State, require_number
from superfluid_workerd.link.answers import AdapterInfo, Facts, Format, Probe
from superfluid_workerd.options import Option, nearest

ANSWER_S: Final = 30.0
CHECK_S: Final = 300.0
PREPARE_S: Final = 1800.0
_UNAVAILABLE: Final[Mapping[str, type[RuntimeUnavailable]]] = {
    State.NOT_INSTALLED: RuntimeNotInstalled,
    State.MISSING: RuntimeNotInstalled,
    State.REFUSED: ContractRefused,
}
"""What a probe's rule makes of its problem; any other is `RuntimeBroken`."""


@dataclass(frozen=True, slots=True)
class Row:
    """One adapter: what it says of itself, or why it could not."""

    entry: Entry
    info: AdapterInfo | None
    problem: SuperfluidError | None = None

    @property
    def id(self) -> str:
        return self.entry.id

    def named(self, name: str) -> bool:
        return name == self.id or (self.info is not None and name in self.info.aliases)

    def format_of(self, model: Path) -> Format | None:
        """The first of its formats that `model` looks like."""
        known = self.info.formats if self.info else ()
        return next((each for each in known if formats.holds(model, each)), None)


class Catalog:
    """Every adapter that is here. Answers are asked of workers, one process each."""

    def __init__(
        self, workerd: Workerd | None = None, found: Sequence[Entry] | None = None
    ) -> None:
        self.workerd = workerd or shipped()
        self.entries = tuple(entries.find() if found is None else found)

    async def rows(self) -> list[Row]:
        """All adapters, the broken ones with their reason."""
        return list(await asyncio.gather(*(self._row(entry) for entry in self.entries)))

    async def _row(self, entry: Entry) -> Row:
        if entry.problem is not None:
            return Row(entry, None, entry.problem)
        try:
            info = await self.workerd.ask(entry.id, ["info"], AdapterInfo, timeout_s=ANSWER_S)
            require_number("adapter kit", found=info.kit, wanted=numbers.KIT)
        except SuperfluidError as error:
            return Row(entry, None, error)
        return Row(entry, info)

    async def options(self, adapter: str) -> list[Option]:
        """The options `adapter` declares."""
        said = await self.workerd.ask(
            adapter, ["options"], list[dict[str, Any]], timeout_s=ANSWER_S
        )
        try:
            return [Option.from_description(each) for each in said]
        except (KeyError, TypeError, ValueError, BadOptionValue) as error:
            raise RuntimeBroken(f"runtime {adapter} declares an unusable option: {error}") from (
                error
            )

    async def facts(self, adapter: str, model: Path) -> Facts:
        """What the model's header says, read by a worker."""
        return await self.workerd.ask(adapter, ["facts", str(model)], Facts, timeout_s=ANSWER_S)

    async def check(self, adapter: str, options: Mapping[str, Any], shared: Path) -> Probe:
        """Try the runtime here. Raises the `RuntimeUnavailable` that its problem means."""
        probe = await self.workerd.ask(
            adapter,
            ["check", *_folder_and_options(shared, options)],
            Probe,
            timeout_s=CHECK_S,
        )
        if probe.problem is not None:
            kind = _UNAVAILABLE.get(probe.rule, RuntimeBroken)
            raise kind(f"runtime {adapter}: {probe.problem}", fix=probe.fix or None)
        return probe

    async def prepare(
        self, adapter: str, facts: Facts, options: Mapping[str, Any], shared: Path
    ) -> None:
        """Have `shared` filled for models with these facts."""
        words = ["prepare", *_folder_and_options(shared, options)]
        given = msgspec.json.encode(facts)
        await self.workerd.ask(adapter, words, dict[str, Any], given=given, timeout_s=PREPARE_S)

    async def pick(self, model: Path, runtime: str | None = None) -> Row:
        """The adapter that serves `model`: the one named `runtime`, else by the model's format.

        Raises `UnknownAdapter`, `ModelNotFound`, `ModelError` when none reads what is there, or
        the problem of the adapter that was named or is the only one.
        """
        rows = await self.rows()
        if runtime is not None:
            rows = [_named(rows, runtime)]
        for row in rows:
            if row.format_of(model) is not None:
                return row
        working = [row for row in rows if row.info is not None]
        if not working:
            raise next((row.problem for row in rows if row.problem), _no_adapter())
        raise _unread(model, working)


def _folder_and_options(shared: Path, options: Mapping[str, Any]) -> list[str]:
    return ["--shared", str(shared), "--options", msgspec.json.encode(dict(options)).decode()]


def _named(rows: Sequence[Row], runtime: str) -> Row:
    for row in rows:
        if row.named(runtime):
            return row
    known = [row.id for row in rows]
    near = nearest(runtime, known)
    raise UnknownAdapter(
        f"no runtime is called {runtime}; here are {', '.join(known) or 'none'}",
        fix=f"did you mean {near}?" if near else None,
        param="runtime",
    )


def _no_adapter() -> RuntimeBroken:
    return RuntimeBroken("no runtime is here at all, wanted at least the native one")


def _unread(model: Path, rows: Sequence[Row]) -> ModelError:
    wanted = "; ".join(
        f"{row.id} reads {', '.join(each.name for each in row.info.formats)}"
        for row in rows
        if row.info is not None
    )
    return ModelError(
        f"{model} is {formats.found(model)}, which no runtime asked reads ({wanted})",
        fix="give a model in one of these formats",
    )
