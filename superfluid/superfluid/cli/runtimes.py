"""`superfluid runtimes [MODEL]` and `superfluid compat`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from superfluid_compat.errors import ExitCode

if TYPE_CHECKING:
    import msgspec

    from superfluid.catalog.standing import Chooser
    from superfluid_compat.documents import Compat, RuntimeRow, Runtimes, Serves

_LONGEST: Final = 120

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def runtimes(
    model: Annotated[
        str | None, typer.Argument(help="A stored model or a path; says what serves it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show each runtime and install, what stands of it here, and what mends it.

    With MODEL: which runtime serves it and why; exit 1 when none here does.
    """
    import asyncio

    from superfluid.catalog.documents import runtimes_document
    from superfluid.cli.settled import settled

    if model is not None:
        _serves(model, as_json=as_json)
        return
    with settled(None, {}).traced():
        document = asyncio.run(runtimes_document(chooser()))
    if as_json:
        print_json(document)
    else:
        _print_runtimes(document)


def compat(as_json: Json = False) -> None:
    """Show this build's half of every contract, as its adapters state it."""
    import asyncio

    from superfluid.catalog.catalog import Catalog
    from superfluid.catalog.documents import compat_document

    document = asyncio.run(compat_document(Catalog()))
    if as_json:
        print_json(document)
    else:
        _print_compat(document)


def chooser(model: str | None = None) -> Chooser:
    """What judges here, with the options that environment and configuration file give."""
    from superfluid.catalog.catalog import Catalog
    from superfluid.catalog.prepared import Preparations
    from superfluid.catalog.standing import Chooser
    from superfluid.cli.settled import settled
    from superfluid.cli.terminal import say
    from superfluid.installs.store import Installs
    from superfluid.paths import Paths

    told, paths = settled(model, {}), Paths.find()
    budget = told.values["memory-budget"].value
    return Chooser(
        Catalog(),
        Installs(paths.runtimes),
        Preparations(paths.cache),
        told.adapters,
        untested=bool(told.values["untested"].value),
        budget=budget if isinstance(budget, int) else None,
        say=say,
    )


def print_json(document: msgspec.Struct) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def table(rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as their widest cell."""
    cells = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))] if cells else []
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())


def _print_runtimes(document: Runtimes) -> None:
    heads = ("RUNTIME", "INSTALL", "STATE", "VERSION", "ABI", "REQUIRES", "FORMATS", "DEVICES",
             "SANDBOX", "INSTALLABLE")  # fmt: skip
    table([heads, *(_cells(row) for row in document.runtimes)])
    for row in document.runtimes:
        if row.problem is not None:
            name = f"{row.id}@{row.install}" if row.install else row.id
            print(f"{name}: {row.problem}" + (f"; {row.fix}" if row.fix else ""))


def _cells(row: RuntimeRow) -> tuple[str, ...]:
    mark = " (pinned)" if row.pinned else (" (in use)" if row.in_use and row.install else "")
    wanted = "/".join(str(number) for number in row.requires.numbers) if row.requires else ""
    return (
        row.id,
        (row.install or "-") + mark,
        row.state,
        row.version or "-",
        "-" if row.abi is None else str(row.abi),
        wanted or ("tested" if row.requires else "-"),
        ",".join(row.formats) or "-",
        ",".join(row.devices) or "-",
        row.sandbox,
        row.installable or "-",
    )


def _print_compat(document: Compat) -> None:
    print(f"superfluid {document.superfluid}: link {document.link}, adapter kit {document.kit}")
    for id_, half in document.runtimes.items():
        if half.problem is not None:
            print(f"{id_}: {half.problem}")
            continue
        print(f"{id_} {half.version} of {half.distribution} {half.distribution_version}")
        lines: dict[str, Any] = {"formats": half.formats}
        if half.requires is not None:
            lines["requires"] = half.requires.wanted()
        lines["installs"] = [f"{it.version}-{it.backend}".rstrip("-") for it in half.installs]
        for name, value in {**lines, **half.contract}.items():
            if value:
                print(f"  {name}: {_plain(value)}")


def _plain(value: Any) -> str:
    """A value in a line; of what is too long for one, how much there is."""
    text = _words(value)
    return text if len(text) <= _LONGEST else f"{len(value)}, see --json"


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    if isinstance(value, list):
        between = "; " if any(isinstance(each, dict) for each in value) else ", "
        return between.join(map(_words, value))
    return str(value)


def _serves(model: str, *, as_json: bool) -> None:
    import asyncio

    from superfluid.catalog.documents import serves_document
    from superfluid.cli.serve import settings
    from superfluid.cli.settled import settled
    from superfluid.cli.terminal import say
    from superfluid.daemon import Choosing, reading
    from superfluid.models.resolve import locate
    from superfluid.models.store import Store
    from superfluid.paths import Paths

    told = settled(model, {})
    store = Store(Paths.find())
    located = locate(str(told.argument), store, offline=True, because="superfluid runtimes")
    asked = settings(located, told)
    choosing = Choosing(asked, reading(asked), say)
    judge = replace(chooser(model), plan=choosing.memory)
    document = asyncio.run(serves_document(judge, located.path, asked.wanted))
    if as_json:
        print_json(document)
    else:
        _print_serves(document)
    if document.runtime is None:
        raise typer.Exit(ExitCode.FAILURE)


def _print_serves(document: Serves) -> None:
    install = f"@{document.install}" if document.install else ""
    served = f"served by {document.runtime}{install}" if document.runtime else "not served here"
    print(f"{document.model}: {served}: {document.why}")
    for each in document.candidates:
        name = f"{each.id}@{each.install}" if each.install else each.id
        answer = "yes" if each.serves else "no"
        print(f"  {name}: {answer}, {each.reason}" + (f"; {each.fix}" if each.fix else ""))
