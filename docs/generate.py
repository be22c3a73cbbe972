"""Writes the generated pages of docs/; with --check, fails when one is out of date."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import typer.main

from superfluid.cli.app import app
from superfluid.config import SERVE
from superfluid_compat.errors import ExitCode, SuperfluidError

DOCS: Final = Path(__file__).resolve().parent
NOTE: Final = "<!-- Written by docs/generate.py; change the code, then run `make docs`. -->"
MEANINGS: Final = {
    ExitCode.OK: "clean end: drained, or stopped by a signal as asked",
    ExitCode.FAILURE: "failed while running: port taken, another server of the same name runs on "
    "this home, a worker gave up",
    ExitCode.USAGE: "usage or configuration refused before anything loads",
    ExitCode.MODEL: "the model does not load: not found, cannot be fetched, damaged, of an "
    "architecture or type no runtime we know reads, or too large",
    ExitCode.RUNTIME: "the runtime for the model is not installed or cannot run here",
}


def cli_page() -> str:
    """Every command with its arguments and options, and where options may come from."""
    command = typer.main.get_command(app)
    variables = ((f"`{o.flag()}`", f"`{o.variable()}`", o.accepts()) for o in SERVE)
    return _page(
        "The command line",
        *_command(command, "superfluid"),
        "## Options from the environment",
        "A flag beats its variable, a variable beats the default. An option of a runtime, "
        "`--ID-NAME VALUE`, has the variable `SUPERFLUID_ID_NAME`; `SUPERFLUID_HOME` puts config, "
        "data, cache and state below one folder. A value is checked wherever it comes from.",
        _table(("option of `serve`", "variable", "takes"), variables),
    )


def _command(command: Any, path: str) -> Iterator[str]:
    yield f"## `{path}`"
    if command.help:
        yield " ".join(command.help.split())
    rows = [(_names(parameter), _text(parameter.help or "")) for parameter in command.params]
    yield _table(("argument or option", "meaning"), rows) if rows else "It takes no options."
    children: Mapping[str, Any] = getattr(command, "commands", {})
    for name, child in children.items():
        yield from _command(child, f"{path} {name}")


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = parameter.name.upper()
        return f"`{name}`" if parameter.required else f"`[{name}]`"
    return ", ".join(f"`{name}`" for name in parameter.opts)


def exit_codes_page() -> str:
    """The exit codes, and every error with what it means to scripts and to HTTP clients."""
    codes = ((str(int(code)), meaning) for code, meaning in MEANINGS.items())
    return _page(
        "Exit codes and errors",
        "Every refusal and failure is one line on standard error, `superfluid: ` and then what "
        "was found, what was wanted and what to do. A command stopped by Ctrl-C while it fetches "
        "ends with 130.",
        _table(("exit code", "meaning"), codes),
        "## Errors",
        "The code stands in HTTP error bodies and dossiers. `what to do` is what the error says "
        "when it knows no better remedy.",
        _table(
            ("class", "code", "exit", "HTTP", "what to do"),
            (
                (f"`{e.__name__}`", f"`{e.code}`", str(int(e.exit_code)), str(e.http_status),
                 _text(e.default_fix))
                for e in _tree(SuperfluidError)
            ),
        ),
    )  # fmt: skip


def _tree(root: type[SuperfluidError]) -> Iterator[type[SuperfluidError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


def _page(title: str, *parts: str) -> str:
    return "\n\n".join((f"# {title}", NOTE, *parts)) + "\n"


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = (heads, ("---",) * len(heads), *rows)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _text(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "cli.md": cli_page,
    "exit-codes.md": exit_codes_page,
}


def main(arguments: list[str]) -> int:
    """Write the pages, or with `--check` say which are out of date; the exit code."""
    pages = {DOCS / name: write() for name, write in PAGES.items()}
    if arguments != ["--check"]:
        for path, text in pages.items():
            path.write_text(text, "utf-8")
        return 0
    stale = [
        path.name
        for path, text in pages.items()
        if not path.is_file() or path.read_text("utf-8") != text
    ]
    if stale:
        print(f"docs out of date: {', '.join(stale)}; run make docs", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
