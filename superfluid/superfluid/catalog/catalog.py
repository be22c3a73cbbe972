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
from superfluid.catalog.workerd import HERE, Place, Workerd, shipped
from superfluid_compat import numbers
from superfluid_compat.errors import (
    BadOptionValue,
    ModelError,
    RuntimeBroken,
    SuperfluidError,
    UnknownAdapter,
    WrongRuntime,
)
from superfluid_compat.verdicts import require_number
from superfluid_workerd.link.answers import About, AdapterInfo, Facts, Format, InstallPlan, Probe
from superfluid_workerd.options import Option, nearest

ANSWER_S: Final = 30.0
PATIENCE: Final = 5
"""How many times as long as others an adapter may take that is asked beside them."""

LEAST_S: Final = 8.0
"""How long it may take after others in any case."""
READ_S: Final = 120.0
CHECK_S: Final = 300.0
PREPARE_S: Final = 1800.0


@dataclass(frozen=True, slots=True)
class Row:
    """One adapter: all that it says of itself from data, or why it could not."""

    entry: Entry
    about: About | None
    problem: SuperfluidError | None = None

    @property
    def info(self) -> AdapterInfo | None:
        return self.about.info if self.about else None

    @property
    def options(self) -> list[Option]:
        """What it declares. Raises `RuntimeBroken` when a declaration is unusable."""
        said = self.about.options if self.about else ()
        try:
            return [Option.from_description(each) for each in said]
        except (KeyError, TypeError, ValueError, BadOptionValue) as error:
            raise RuntimeBroken(
                f"runtime {self.id} declares an unusable option: {error}",
                fix=self.entry.remedy,
            ) from error

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
        """All adapters, the broken ones with their reason; whoever keeps the others waiting is
        one of these."""
        clock = asyncio.get_running_loop().time
        began = clock()
        asking = {entry: asyncio.create_task(self._row(entry)) for entry in self.entries}
        waiting = {task for entry, task in asking.items() if entry.problem is None}
        patience = None
        try:
            while waiting:
                answered, waiting = await asyncio.wait(
                    waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED
                )
                if not answered:
                    break
                patience = max(LEAST_S, (PATIENCE - 1) * (clock() - began))
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return [
            _late(entry, clock() - began) if task in waiting else await task
            for entry, task in asking.items()
        ]

    async def row(self, adapter: str) -> Row:
        """The adapter of that id or alias. Raises `UnknownAdapter`, or why it cannot answer."""
        exact = [entry for entry in self.entries if entry.id == adapter]
        row = await self._row(exact[0]) if exact else named(await self.rows(), adapter)
        if row.problem is not None:
            raise row.problem
        return row

    async def _row(self, entry: Entry) -> Row:
        if entry.problem is not None:
            return Row(entry, None, entry.problem)
        try:
            about = await self.workerd.ask(entry.id, ["about"], About, timeout_s=ANSWER_S)
            require_number("adapter kit", found=about.info.kit, wanted=numbers.KIT)
        except SuperfluidError as error:
            return Row(entry, None, error)
        return Row(entry, about)

    async def facts(
        self,
        adapter: str,
        model: Path,
        place: Place = HERE,
        *,
        options: Mapping[str, Any] | None = None,
        shared: Path | None = None,
        readable: Sequence[Path] = (),
    ) -> Facts:
        """What the model's header says, read by a worker. With the folder `shared` that a check
        filled, and `readable` what it went by, the engine's word on the model too."""
        words = ["facts", str(model)]
        if shared is not None:
            words += _folder_and_options(shared, options or {})
            readable = [shared, *readable]
        return await self.workerd.ask(
            adapter,
            words,
            Facts,
            place=place,
            timeout_s=READ_S,
            model=model,
            readable=readable,
        )

    async def check(
        self, adapter: str, options: Mapping[str, Any], shared: Path, place: Place = HERE
    ) -> Probe:
        """What trying the runtime here found; a problem is an answer, not an error."""
        words = ["check", *_folder_and_options(shared, options)]
        return await self.workerd.ask(adapter, words, Probe, place=place, timeout_s=CHECK_S)

    async def prepare(
        self,
        adapter: str,
        facts: Facts,
        options: Mapping[str, Any],
        shared: Path,
        place: Place = HERE,
    ) -> None:
        """Have `shared` filled for models with these facts."""
        words = ["prepare", *_folder_and_options(shared, options)]
        given = msgspec.json.encode(facts)
        await self.workerd.ask(
            adapter, words, dict[str, Any], given=given, place=place, timeout_s=PREPARE_S
        )

    async def memory(
        self,
        adapter: str,
        model: Path,
        options: Mapping[str, Any],
        numbers: Mapping[str, int],
        place: Place = HERE,
    ) -> dict[str, int]:
        """The memory plan of a load, in bytes by part; `numbers` are the common options'."""
        flags = [word for name, it in numbers.items() for word in (f"--{name}", str(it))]
        words = ["memory", str(model), *flags, "--options", _json(options)]
        named = [Path(it) for it in options.values() if isinstance(it, str) and it.startswith("/")]
        return await self.workerd.ask(
            adapter,
            words,
            dict[str, int],
            place=place,
            timeout_s=ANSWER_S,
            model=model,
            readable=named,
        )

    async def install_plan(self, adapter: str, version: str, backend: str) -> InstallPlan:
        """How to install that version."""
        words = ["plan", version, *(["--backend", backend] if backend else [])]
        return await self.workerd.ask(adapter, words, InstallPlan, timeout_s=ANSWER_S)

    async def finish_install(self, adapter: str, plan: InstallPlan, staged: Place) -> None:
        """Have the adapter finish what is staged."""
        words = ["install", str(staged.folder)]
        given = msgspec.json.encode(plan)
        await self.workerd.ask(
            adapter, words, dict[str, Any], given=given, place=staged, timeout_s=PREPARE_S
        )

    async def candidates(self, model: Path, runtime: str | None = None) -> list[Row]:
        """The adapters that read `model` by its format, best first; the one named `runtime` alone.

        A dedicated engine comes before one that streams weights, one that was installed before
        one that ships, then by id. Raises `UnknownAdapter`, `ModelNotFound`, `WrongRuntime` when
        another than the one named reads it, `ModelError` when none does, `RuntimeBroken` when one
        that cannot be asked might, or the problem of the adapter that was named or is the only
        one.
        """
        rows = await self.rows()
        asked = rows if runtime is None else [named(rows, runtime)]
        reading = [row for row in asked if row.format_of(model) is not None]
        if reading:
            return sorted(reading, key=_preference)
        working = [row for row in asked if row.info is not None]
        if not working:
            raise next((row.problem for row in asked if row.problem), _no_adapter())
        others = [row for row in rows if row.format_of(model) is not None]
        if runtime is not None and others:
            raise _wrong(model, working[0], others)
        raise _unread(model, working, [row for row in asked if row.info is None])


def _preference(row: Row) -> tuple[bool, bool, str]:
    info = row.info
    return (info is None or info.streams, info is None or info.bundled, row.id)


def _json(value: Mapping[str, Any]) -> str:
    return msgspec.json.encode(dict(value)).decode()


def _wrong(model: Path, row: Row, others: Sequence[Row]) -> WrongRuntime:
    reads = ", ".join(each.name for each in row.info.formats) if row.info else "nothing"
    return WrongRuntime(
        f"{model} is {formats.found(model)}, which runtime {row.id} does not read (it reads "
        f"{reads})",
        fix=f"give --runtime {' or '.join(each.id for each in others)}, or leave it out",
        param="runtime",
    )


def _folder_and_options(shared: Path, options: Mapping[str, Any]) -> list[str]:
    return ["--shared", str(shared), "--options", _json(options)]


def named(rows: Sequence[Row], runtime: str) -> Row:
    """The row of that id or alias. Raises `UnknownAdapter` with the nearest."""
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


def _late(entry: Entry, took_s: float) -> Row:
    """The row of an adapter that did not answer while others did."""
    problem = RuntimeBroken(
        f"runtime {entry.id} did not answer in {took_s:.0f} s when asked for about, as others did",
        fix=entry.remedy,
    )
    return Row(entry, None, problem)


def _no_adapter() -> RuntimeBroken:
    return RuntimeBroken("no runtime is here at all, wanted at least the native one")


def _unread(model: Path, rows: Sequence[Row], broken: Sequence[Row]) -> SuperfluidError:
    wanted = "; ".join(
        f"{row.id} reads {', '.join(each.name for each in row.info.formats)}"
        for row in rows
        if row.info is not None
    )
    message = f"{model} is {formats.found(model)}, which no runtime asked reads ({wanted})"
    problems = [(row.id, row.problem) for row in broken if row.problem is not None]
    if problems:
        told = "; ".join(f"{id_}: {problem.message}" for id_, problem in problems)
        return RuntimeBroken(f"{message}; others do not answer: {told}", fix=problems[0][1].fix)
    named = "name a file in it, or " if model.is_dir() else ""
    return ModelError(message, fix=f"{named}give a model in one of these formats")
