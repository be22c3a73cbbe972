"""The tree of commands. Modules behind a command are imported when it runs."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from superfluid.cli import config, inspect, models, runtime, runtimes, serve, tokenize

app = typer.Typer(
    help="Serve local language models.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve", cls=serve.ServeCommand)(serve.serve)
app.command("runtimes")(runtimes.runtimes)
app.command("compat")(runtimes.compat)
app.command("tokenize")(tokenize.tokenize)
app.command("why")(inspect.why)
app.command("status")(inspect.status)
app.command("ps")(inspect.ps)
app.command("drain")(inspect.drain)
app.add_typer(runtime.app, name="runtime")
app.add_typer(models.app, name="models")
app.add_typer(config.app, name="config")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"superfluid {importlib.metadata.version('superfluid')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
