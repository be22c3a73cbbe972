"""The command line: one module per command group, words and exit codes only."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from superfluid import signals
from superfluid.text import is_text

_INTERRUPTED = 130
"""What a shell reports of a command that Ctrl-C ended; typer turns the exception into it."""


def main() -> NoReturn:
    """Entry point of `superfluid`."""
    signals.hold()
    _open_streams()
    code = run(sys.argv[1:])
    _flush()
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit code. A refusal or failure is one line on standard error."""
    import typer.main
    from typer.exceptions import TyperException

    from superfluid.cli.app import app
    from superfluid_compat.errors import ExitCode, SuperfluidError

    foreign = next((it for it in [*arguments, *_variables()] if not is_text(it)), None)
    if foreign is not None:
        return _fail(
            f"{foreign} is no UTF-8, wanted text; rename what it names",
            ExitCode.USAGE,
        )
    command = typer.main.get_command(app)
    # `serve` says itself when it hears signals: being stopped as asked is a clean end of it.
    hearing = contextlib.nullcontext() if arguments[:1] == ["serve"] else signals.heard()
    try:
        with hearing:
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
    except KeyboardInterrupt:  # before the command began
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        return _fail("interrupted", _INTERRUPTED)
    return code if isinstance(code, int) else ExitCode.OK


def _variables() -> list[str]:
    return [f"{name}={text}" for name, text in os.environ.items() if name.startswith("SUPERFLUID_")]


def _open_streams() -> None:
    """Have the three standard streams, if need be to nowhere: the next file that is opened would
    get the number of one that is closed, and what is printed. No character fails to be printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # for good
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _flush() -> None:
    """Whoever reads may be gone; the exit code still tells."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> int:
    from superfluid_compat.errors import one_line

    with contextlib.suppress(OSError):
        print(f"superfluid: {one_line(message)}", file=sys.stderr, flush=True)
    return code


__all__ = ["main", "run"]
