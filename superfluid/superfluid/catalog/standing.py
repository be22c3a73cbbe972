"""What stands of each runtime and install here, and which one serves a model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import psutil

from superfluid.catalog.catalog import Catalog, Row
from superfluid.catalog.prepared import Preparations, Say, of_problem
from superfluid.catalog.workerd import HERE, Place
from superfluid.config import Sources
from superfluid.installs.store import Install, Installs
from superfluid.models.pull import size_text
from superfluid_compat.errors import (
    ContractRefused,
    DoesNotFit,
    ForeignOption,
    ModelError,
    RuntimeBroken,
    RuntimeNotInstalled,
    SuperfluidError,
    UsageError,
)
from superfluid_compat.verdicts import Rule, State, Verdict, judge_library
from superfluid_workerd.link.answers import Facts, Probe
from superfluid_workerd.options import Option, Resolved, require_known, resolve

AVAILABLE_SHARE: Final = 0.8
"""Of the memory that is free, what a model may take."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A runtime by id or alias, and one of its installs; None leaves the choice."""

    runtime: str | None = None
    install: str | None = None

    @classmethod
    def parse(cls, text: str | None, model: str = "") -> Wanted:
        """From `ID[@INSTALL]`, or a list of such with `MODEL=` before those for one model."""
        general, own = "", ""
        for part in (text or "").split(","):
            name, equals, choice = part.rpartition("=")
            if not equals:
                general = choice
            elif name == model:
                own = choice
        runtime, _, install = (own or general).strip().partition("@")
        return cls(runtime or None, install or None)


@dataclass(frozen=True, slots=True)
class Standing:
    """One runtime and install, with the verdict on it; `place` is where its workers run, and
    `misuse` what is wrong with the options that it was to be tried with."""

    row: Row
    install: Install | None
    verdict: Verdict
    probe: Probe | None = None
    place: Place = HERE
    misuse: UsageError | None = None

    @property
    def label(self) -> str:
        """`llamacpp@0.1-cpu`, or the id alone for what needs no install."""
        return f"{self.row.id}@{self.install.name}" if self.install else self.row.id


@dataclass(frozen=True, slots=True)
class Choice:
    """Who serves a model, why, and with which options, each with its origin."""

    standing: Standing
    options: Mapping[str, Resolved]
    why: str

    @property
    def values(self) -> dict[str, Any]:
        return {name: found.value for name, found in self.options.items()}


def resolve_options(
    adapter: str, declared: Sequence[Option], sources: Sources
) -> dict[str, Resolved]:
    """An adapter's options, refused by the names that users give them."""
    require_known([option.name for option in declared], sources, adapter)
    prefix = f"{adapter}-"
    named = [replace(option, name=f"{prefix}{option.name}") for option in declared]
    given = [
        (origin, {f"{prefix}{name}": it for name, it in values.items()})
        for origin, values in sources
    ]
    return {name.removeprefix(prefix): it for name, it in resolve(named, given).items()}


def available_bytes() -> int:
    """Memory that a model may take when no budget was given."""
    return int(psutil.virtual_memory().available * AVAILABLE_SHARE)


@dataclass(frozen=True, slots=True)
class Chooser:
    """Judges what is here. `sources` gives each adapter's options by its id.

    `untested` lets an untested runtime serve; `budget` bounds a model, in bytes. `plan` asks a
    chosen runtime's worker for its memory plan and raises `DoesNotFit`.
    """

    catalog: Catalog
    installs: Installs
    preparations: Preparations
    sources: Mapping[str, Sources] = field(default_factory=dict)
    untested: bool = False
    budget: int | None = None
    say: Say = lambda line: None
    plan: Callable[[Choice], Awaitable[object]] | None = None

    def options(self, row: Row) -> dict[str, Resolved]:
        """The adapter's options. Raises `UnknownOption`, `BadOptionValue`."""
        return resolve_options(row.id, row.options, self.sources.get(row.id, ()))

    async def all(self) -> list[Standing]:
        """A standing for each install, or for the runtime where there is none or where the user
        gave one of his own, which serves in place of all."""
        pairs: list[tuple[Row, Install | None]] = []
        for row in await self.catalog.rows():
            installs = () if self.owned(row) else self.installs.all(row.id)
            pairs += [(row, each) for each in installs] or [(row, None)]
        return list(await asyncio.gather(*(self.stand(row, install) for row, install in pairs)))

    async def stand(self, row: Row, install: Install | None = None) -> Standing:
        """The verdict on one runtime and install; any problem is a verdict."""
        try:
            return await self._stand(row, install)
        except UsageError as error:
            return Standing(row, install, _of_error(error), misuse=error)

    async def _stand(self, row: Row, install: Install | None) -> Standing:
        """The same, save for options that the runtime refuses: they were given wrong."""
        if row.info is None:
            return Standing(row, install, _of_error(row.problem))
        try:
            values = {name: it.value for name, it in self.options(row).items()}
            place, refused = _place(row, install, values)
            if refused is not None:
                return Standing(row, install, refused)
            probe = await self.preparations.probe(self.catalog, row, values, place, self.say)
        except UsageError:
            raise
        except SuperfluidError as error:
            return Standing(row, install, _of_error(error))
        verdict = judge(row, probe)
        if self.untested:
            verdict = verdict.allowing_untested()
        own = install if place.folder else None
        return Standing(row, own, verdict, probe, place)

    async def choose(self, model: Path, wanted: Wanted) -> Choice:
        """Who serves `model`. A choice is validated against the format before anything loads.

        Raises what `Catalog.candidates` raises, `UnknownInstall`, `ForeignOption`, a bad option
        of the chosen runtime, the verdict's error when none serves, and what the header says
        against it when several were asked.
        """
        rows = await self.catalog.candidates(model, wanted.runtime)
        for row in rows:
            self.options(row)
        chosen = await self._choose(model, wanted, rows)
        await self._require_own_flags(chosen.standing.row.id)
        return chosen

    async def _choose(self, model: Path, wanted: Wanted, rows: Sequence[Row]) -> Choice:
        if wanted.runtime is not None:
            return self._chosen(await self._named(rows[0], wanted.install), "asked for by name")
        owned = next((row for row in rows if self.owned(row)), None)
        if owned is not None:
            return self._chosen(await self._named(owned, None), "a runtime of the user's own")
        standings = await asyncio.gather(
            *(self._stand(row, self.installs.in_use(row.id)) for row in rows)
        )
        ready = [each for each in standings if each.verdict.serves]
        if not ready:
            raise _none_ready(standings)
        if len(ready) == 1:
            return self._chosen(ready[0], "the only ready runtime that reads its format")
        return await self._best(model, ready)

    def owned(self, row: Row) -> bool:
        """Whether the user gave a runtime of his own for it, and so chose it."""
        option = row.info.own_option if row.info else None
        given = self.sources.get(row.id, ())
        return option is not None and any(values.get(option) for _, values in given)

    async def _named(self, row: Row, name: str | None) -> Standing:
        standing = await self._stand(row, self._install(row, name))
        if not standing.verdict.serves:
            error = standing.verdict.error(standing.label)
            if self.owned(row) and row.info:
                error.param = f"{row.id}-{row.info.own_option}"
            raise error
        return standing

    def _install(self, row: Row, name: str | None) -> Install | None:
        """The install `name` or the one in use; none beside a runtime of the user's own, which a
        named one contradicts."""
        if not self.owned(row):
            return self.installs.get(row.id, name) if name else self.installs.in_use(row.id)
        if name and row.info:
            option = f"{row.id}-{row.info.own_option}"
            raise UsageError(
                f"--runtime {row.id}@{name} names an install, --{option} a runtime of your own",
                fix="give one of them",
                param=option,
            )
        return None

    async def _best(self, model: Path, ready: Sequence[Standing]) -> Choice:
        """The first whose header reading finds nothing against it and that it fits."""
        refusal: SuperfluidError | None = None
        for standing in ready:
            try:
                facts = await self.facts(standing, model)
            except ModelError as error:
                refusal = refusal or error
                self.say(f"{standing.row.id} does not serve {model.name}: {error.message}")
                continue
            return await self._fitting(standing, facts, ready)
        raise refusal or _none_ready(ready)

    async def facts(self, standing: Standing, model: Path) -> Facts:
        """What a ready runtime reads of the model. Raises what its reading finds against it."""
        values = {name: it.value for name, it in self.options(standing.row).items()}
        return await self.preparations.facts(
            self.catalog, standing.row, model, values, standing.place
        )

    async def _fitting(self, first: Standing, facts: Facts, ready: Sequence[Standing]) -> Choice:
        streaming = next((s for s in ready if s.row.info and s.row.info.streams), None)
        why = "the first ready runtime that reads its format"
        if streaming is None or streaming is first:
            return self._chosen(first, why)
        lack = await self._lack(first, facts)
        if lack is None:
            return self._chosen(first, why)
        line = (
            f"{lack}: served by {streaming.row.id}, which streams them, in place of {first.row.id}"
        )
        self.say(line)
        return self._chosen(streaming, line)

    async def _lack(self, standing: Standing, facts: Facts) -> str | None:
        """Why the model does not fit in memory with this runtime, if so."""
        budget = self.budget if self.budget is not None else available_bytes()
        if facts.bytes > budget:
            there = size_text(budget)
            return f"its weights take {size_text(facts.bytes)}, {there} of memory are there"
        if self.plan is None:
            return None
        try:
            await self.plan(Choice(standing, self.options(standing.row), ""))
        except DoesNotFit as error:
            return f"its weights and what goes with them do not fit ({error.message})"
        return None

    async def _require_own_flags(self, chosen: str) -> None:
        """Refuse flags of runtimes that do not serve: those that none has as such."""
        for id_, sources in self.sources.items():
            flags = next((values for origin, values in sources if origin == "flag"), {})
            if id_ != chosen and flags:
                with contextlib.suppress(RuntimeBroken, ContractRefused):
                    self.options(await self.catalog.row(id_))
                name = next(iter(flags))
                raise ForeignOption(
                    f"--{id_}-{name} is an option of runtime {id_}, the model is served by "
                    f"{chosen}",
                    fix=f"leave it out, or give --runtime {id_}",
                    param=f"{id_}-{name}",
                )

    def _chosen(self, standing: Standing, why: str) -> Choice:
        return Choice(standing, self.options(standing.row), why)


def judge(row: Row, probe: Probe) -> Verdict:
    """What a probe makes of a runtime."""
    if probe.problem is not None:
        return of_problem(row, probe)
    requires = row.info.requires if row.info else None
    if requires is None:
        found = f"version {probe.version}"
        if not probe.tested:
            fix = "allow it with --untested"
            return Verdict(State.UNTESTED, Rule.BUILD_UNTESTED, found, "a tested build", fix)
        return Verdict(State.READY, Rule.WORKS, found, "")
    verdict = judge_library(requires, version=probe.version, number=probe.abi, tested=probe.tested)
    own = probe.fix if verdict.state is State.UNTESTED else ""
    return replace(verdict, fix=own) if own else verdict


def _place(
    row: Row, install: Install | None, values: Mapping[str, Any]
) -> tuple[Place, Verdict | None]:
    info, id_ = row.info, row.id
    own = values.get(info.own_option) if info and info.own_option else None
    if isinstance(own, str):
        interpreter = Path(own, "bin", "python")
        return Place(None, interpreter if _exists(interpreter) else None), None
    if install is not None:
        gone = install.missing()
        fix = f"run superfluid runtime repair {id_} {install.name}"
        verdict = (
            Verdict(State.MISSING, Rule.FILES_MISSING, gone, "every file", fix) if gone else None
        )
        return install.place, verdict
    if info is not None and not info.bundled:
        fix = f"run superfluid runtime install {id_}"
        return HERE, Verdict(
            State.NOT_INSTALLED, Rule.NOT_INSTALLED, "no install", "an install", fix
        )
    return HERE, None


def _exists(path: Path) -> bool:
    """Whether something is there; not at a path that no system call takes."""
    try:
        return path.exists()
    except OSError:
        return False


def _of_error(error: SuperfluidError | None) -> Verdict:
    if error is None:
        return Verdict(State.BROKEN, Rule.ADAPTER_FAILED, "no answer", "an answer")
    refused = isinstance(error, ContractRefused)
    state = State.REFUSED if refused else State.BROKEN
    rule = Rule.KIT_DIFFERS if refused else Rule.ADAPTER_FAILED
    return Verdict(state, rule, error.message, "", error.fix)


def _none_ready(standings: Sequence[Standing]) -> SuperfluidError:
    """The one verdict, or one that an install would mend, with all of them named."""
    first = next((s for s in standings if s.verdict.state is State.NOT_INSTALLED), standings[0])
    if len(standings) == 1:
        return first.verdict.error(first.label)
    told = "; ".join(f"{s.label} is {s.verdict.state} ({s.verdict.problem})" for s in standings)
    return RuntimeNotInstalled(
        f"no runtime that reads the model is ready: {told}", fix=first.verdict.fix
    )
