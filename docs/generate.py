"""Writes the generated pages and the JSON schemas; with --check, fails when one is out of date."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import typer.main

from superfluid.cli.app import app
from superfluid.config import SERVE
from superfluid_compat.documents import DOCUMENTS, FOLDER, schema_name, schema_text
from superfluid_compat.errors import ExitCode, SuperfluidError
from superfluid_compat.verdicts import Rule, State

DOCS: Final = Path(__file__).resolve().parent
NOTE: Final = "<!-- Written by docs/generate.py; change the code, then run `make docs`. -->"
MEANINGS: Final = {
    ExitCode.OK: "clean end: drained, or stopped by a signal as asked",
    ExitCode.FAILURE: "failed while running: port taken, another server of the same name runs on "
    "this home, a worker gave up",
    ExitCode.USAGE: "usage or configuration refused before anything loads",
    ExitCode.MODEL: "the model does not load: not found, cannot be fetched, damaged, of an "
    "architecture or type no runtime we know reads, or too large",
    ExitCode.RUNTIME: "the runtime for the model is not installed or cannot run here; an install "
    "failed",
}


STATES: Final = {
    Rule.WORKS: State.READY,
    Rule.NUMBER_EQUAL: State.READY,
    Rule.VERSION_LINE: State.READY,
    Rule.VERSION_TESTED: State.READY,
    Rule.UNTESTED_ALLOWED: State.READY,
    Rule.NUMBER_DIFFERS: State.REFUSED,
    Rule.NUMBER_UNSTATED: State.REFUSED,
    Rule.KIT_DIFFERS: State.REFUSED,
    Rule.BUILD_UNTESTED: State.UNTESTED,
    Rule.NOT_INSTALLED: State.NOT_INSTALLED,
    Rule.FILES_MISSING: State.MISSING,
    Rule.ADAPTER_FAILED: State.BROKEN,
    Rule.NO_DEVICE: State.BROKEN,
}


def cli_page() -> str:
    """Every command with its arguments and options, and where options may come from."""
    command = typer.main.get_command(app)
    variables = ((f"`{o.flag()}`", f"`{o.variable()}`", o.accepts()) for o in SERVE)
    return _page(
        "The command line",
        *_command(command, "superfluid"),
        "## Options from the environment",
        "A flag beats its variable, a variable beats the [configuration file](config.md), the file "
        "beats the default. An option of a runtime, `--ID-NAME VALUE`, has the variable "
        "`SUPERFLUID_ID_NAME`; `SUPERFLUID_HOME` puts config, data, cache and state below one "
        "folder. A value is checked wherever it comes from.",
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
        "was found, what was wanted and what to do. A command stopped by Ctrl-C ends "
        "with 130, `serve` with 0, whether SIGINT, SIGTERM, SIGHUP or SIGUSR1 stops it, and "
        "whenever it comes once Python has started.",
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
        "## Reason codes",
        "Each row of `superfluid runtimes --json` has the `rule` that decided its `state`. These "
        "are superfluid's own; an adapter adds codes of its engine's. Any state but `ready` is "
        "exit 4 when the runtime is needed.",
        _table(("rule", "state"), ((f"`{rule}`", f"`{state}`") for rule, state in STATES.items())),
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


PAGES: Final[Mapping[Path, Callable[[], str]]] = {
    DOCS / "cli.md": cli_page,
    DOCS / "exit-codes.md": exit_codes_page,
    **{FOLDER / schema_name(it): partial(schema_text, it) for it in DOCUMENTS},
}


def validate(path: Path) -> None:
    """Check a `compat.json` against its schema; raises where it is another document."""
    import jsonschema

    jsonschema.validate(json.loads(path.read_text("utf-8")), json.loads(schema_text("compat")))


def main(arguments: list[str]) -> int:
    """Write the pages, or with `--check` say which are out of date; the exit code."""
    if arguments[:1] == ["--validate"]:
        validate(Path(arguments[1]))
        return 0
    pages = {path: write() for path, write in PAGES.items()}
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
