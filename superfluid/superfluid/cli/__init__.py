"""The command line: one module per command group, words and exit codes only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import NoReturn

_INTERRUPTED = 130
"""What a shell reports of a command that Ctrl-C ended; typer turns the exception into it."""


def main() -> NoReturn:
    """Entry point of `superfluid`."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit code. A refusal or failure is one line on standard error."""
    import typer.main
    from typer.exceptions import TyperException

    from superfluid.cli.app import app
    from superfluid_compat.errors import ExitCode, SuperfluidError

    command = typer.main.get_command(app)
    try:
        code = command.main(list(arguments), prog_name="superfluid", standalone_mode=False)
    except SuperfluidError as error:
        return _fail(error.line(), error.exit_code)
    except TyperException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "superfluid"
        return _fail(f"{error.format_message().rstrip('.')}; see {path} --help", ExitCode.USAGE)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", ExitCode.FAILURE)
    if code == _INTERRUPTED:
        return _fail("interrupted", _INTERRUPTED)
    return code if isinstance(code, int) else ExitCode.OK


def _fail(message: str, code: int) -> int:
    # Whoever reads standard error may be gone; the exit code still tells.
    with contextlib.suppress(BrokenPipeError):
        print("superfluid: " + " ".join(message.split()), file=sys.stderr, flush=True)
    return code


__all__ = ["main", "run"]
