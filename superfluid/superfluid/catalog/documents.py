"""What is known of the runtimes here, as the documents that hosts read."""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
from pathlib import Path
from typing import Final

from superfluid.catalog import formats
from superfluid.catalog.catalog import Catalog, Row
from superfluid.catalog.standing import Choice, Chooser, Standing, Wanted
from superfluid.installs.store import Installs, install_name
from superfluid.supervisor import confine
from superfluid_compat.documents import (
    Build,
    Candidate,
    Compat,
    OptionRow,
    Options,
    RuntimeCompat,
    RuntimeRow,
    Runtimes,
    Serves,
    VersionRow,
    Versions,
)
from superfluid_compat.errors import ExitCode, SuperfluidError
from superfluid_workerd.options import Option

_VERSION: Final = importlib.metadata.version("superfluid")


async def runtimes_document(chooser: Chooser) -> Runtimes:
    """A row for each runtime and install. Raises a `UsageError` over options of a runtime that
    none of its installs takes: they were given wrong."""
    standings = await chooser.all()
    for id_ in dict.fromkeys(each.row.id for each in standings):
        misused = [each.misuse for each in standings if each.row.id == id_]
        if misused[0] is not None and all(misused):
            raise misused[0]
    return Runtimes(
        superfluid=_VERSION, runtimes=[_runtime_row(each, chooser.installs) for each in standings]
    )


def _runtime_row(standing: Standing, installs: Installs) -> RuntimeRow:
    row, install, probe, verdict = (
        standing.row, standing.install, standing.probe, standing.verdict
    )  # fmt: skip
    info = row.info
    used, pinned = installs.in_use(row.id), installs.pinned(row.id)
    manifest = install.manifest if install else None
    version = probe.version if probe else (manifest.version if manifest else "")
    return RuntimeRow(
        id=row.id,
        install=install.name if install else None,
        state=verdict.state,
        rule=verdict.rule,
        problem=verdict.problem,
        fix=verdict.fix,
        version=version or (info.version if info and info.bundled else ""),
        abi=probe.abi if probe else None,
        requires=info.requires if info else None,
        formats=[each.name for each in info.formats] if info else [],
        devices=[each.name for each in probe.devices] if probe else [],
        sandbox=confine.best(),
        installable=installable(row),
        in_use=install.name == used.name if install and used else verdict.serves,
        pinned=install is not None and pinned is not None and install.name == pinned.name,
        aliases=list(info.aliases) if info else [],
        distribution=row.entry.distribution,
        options=option_rows(row),
    )


def installable(row: Row) -> str | None:
    """The newest version that installs on this machine."""
    known = row.about.versions if row.about else ()
    first = next((each for each in known if each.here is None), None)
    return install_name(first.version, first.backend) if first else None


def option_rows(row: Row) -> list[OptionRow]:
    """The adapter's options; none when a declaration is unusable, which its verdict says."""
    try:
        return [_option_row(row.id, option) for option in row.options]
    except SuperfluidError:
        return []


def _option_row(adapter: str, option: Option) -> OptionRow:
    said = option.describe()
    return OptionRow(flag=option.flag(adapter), variable=option.variable(adapter), **said)


def options_document(row: Row) -> Options:
    """Raises `RuntimeBroken` when a declaration is unusable."""
    return Options(runtime=row.id, options=[_option_row(row.id, each) for each in row.options])


def versions_document(row: Row, installs: Installs) -> Versions:
    """What the adapter installs on its own, newest first, and which of it is here."""
    here = {each.name for each in installs.all(row.id)}
    known = [
        VersionRow(
            version=each.version,
            backend=each.backend,
            installs_here=each.here is None,
            reason=each.here,
            contract=each.contract,
            installed=install_name(each.version, each.backend) in here,
        )
        for each in (row.about.versions if row.about else ())
    ]
    # An adapter may list one backend after the other; what is equal stays in its order.
    known.sort(key=lambda each: _numbers(each.version), reverse=True)
    return Versions(runtime=row.id, versions=known)


def _numbers(version: str) -> list[int]:
    """What versions of one runtime are ordered by, whatever stands between their numbers."""
    return [int(number) for number in re.findall(r"[0-9]+", version)]


async def compat_document(catalog: Catalog) -> Compat:
    """This build's half of every contract, merged from the adapters' answers."""
    rows = await catalog.rows()
    return Compat(superfluid=_VERSION, runtimes={row.id: _compat(row) for row in rows})


def _compat(row: Row) -> RuntimeCompat:
    entry, about = row.entry, row.about
    if about is None:
        return RuntimeCompat(
            distribution=entry.distribution,
            distribution_version=entry.version,
            problem=row.problem.line() if row.problem else "no answer",
        )
    return RuntimeCompat(
        distribution=entry.distribution,
        distribution_version=entry.version,
        version=about.info.version,
        kit=about.info.kit,
        requires=about.info.requires,
        formats=[each.name for each in about.info.formats],
        installs=[
            Build(version=each.version, backend=each.backend, contract=each.contract)
            for each in about.versions
        ],
        contract=about.compat,
    )


async def serves_document(chooser: Chooser, model: Path, wanted: Wanted) -> Serves:
    """Which runtime serves `model`, why, and what each would refuse."""
    runtime = install = None
    try:
        choice = await chooser.choose(model, wanted)
    except SuperfluidError as error:
        why, code = error.line(), ExitCode(error.exit_code)
    else:
        standing, why, code = choice.standing, choice.why, ExitCode.OK
        runtime = standing.row.id
        install = standing.install.name if standing.install else None
    candidates = await asyncio.gather(
        *(_candidate(chooser, each, model) for each in await chooser.all())
    )
    # A header that the chosen runtime refuses was not read while it was the only candidate.
    chosen = next((it for it in candidates if (it.id, it.install) == (runtime, install)), None)
    if chosen is not None and not chosen.serves:
        runtime, install, why, code = None, None, chosen.reason, ExitCode(chosen.exit_code)
    return Serves(
        model=str(model),
        runtime=runtime,
        install=install,
        why=why,
        exit_code=code,
        candidates=list(candidates),
    )


async def _candidate(chooser: Chooser, standing: Standing, model: Path) -> Candidate:
    id_, install = standing.row.id, standing.install.name if standing.install else None
    if standing.row.about is not None and standing.row.format_of(model) is None:
        return Candidate(
            id=id_,
            install=install,
            serves=False,
            code="format_unread",
            reason=f"it does not read {formats.found(model)}",
            exit_code=ExitCode.MODEL,
        )
    if standing.misuse is not None:
        return _refused(standing, standing.misuse)
    verdict = standing.verdict
    if not verdict.serves:
        return Candidate(
            id=id_,
            install=install,
            serves=False,
            code=verdict.rule,
            reason=f"{verdict.state}: {verdict.problem}",
            fix=verdict.fix,
            exit_code=verdict.exit_code,
        )
    try:
        facts = await chooser.facts(standing, model)
        if chooser.plan is not None:
            await chooser.plan(Choice(standing, chooser.options(standing.row), ""))
    except SuperfluidError as error:
        return _refused(standing, error)
    reason = f"reads {facts.format}, architecture {facts.architecture}"
    return Candidate(id=id_, install=install, serves=True, reason=reason)


def _refused(standing: Standing, error: SuperfluidError) -> Candidate:
    return Candidate(
        id=standing.row.id,
        install=standing.install.name if standing.install else None,
        serves=False,
        code=error.code,
        reason=error.message,
        fix=error.fix,
        exit_code=error.exit_code,
    )
