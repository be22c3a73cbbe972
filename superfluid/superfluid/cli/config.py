"""`superfluid config show`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from superfluid.cli.runtimes import Json, table

app = typer.Typer(help="Options, and where their values come from.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("show")
def show(
    model: Annotated[
        str | None, typer.Argument(help="A table of the file's models; shows what it serves with.")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", help="Configuration file to read.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print every option of serve and of each runtime, its value and where it comes from."""
    import json

    found = _resolved(model, config)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table((name, _shown(each["value"]), each["origin"]) for name, each in sorted(found.items()))


def _resolved(model: str | None, config: str | None) -> dict[str, dict[str, Any]]:
    import asyncio

    from superfluid.catalog.catalog import Catalog
    from superfluid.catalog.standing import resolve_options
    from superfluid.cli.settled import settled
    from superfluid.daemon import origins

    told = settled(model, {"config": config} if config else {})
    found = dict(told.values)
    for row in asyncio.run(Catalog().rows()):
        if row.about is not None:
            own = resolve_options(row.id, row.options, told.adapters.get(row.id, ()))
            found |= {f"{row.id}-{name}": each for name, each in own.items()}
    return origins(found)


def _shown(value: Any) -> str:
    from superfluid.cli.plan import shown

    return shown(value)
