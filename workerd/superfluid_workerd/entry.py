"""The first code of every worker process: narrow what it may do, then become the real command.

    superfluid-workerd ID about | info | options | compat | versions
    superfluid-workerd ID plan VERSION [--backend NAME]
    superfluid-workerd ID install FOLDER                      an install plan as JSON on stdin
    superfluid-workerd ID check --shared FOLDER [--options JSON]
    superfluid-workerd ID facts MODEL [--shared FOLDER] [--options JSON]
    superfluid-workerd ID memory MODEL [--options JSON] [--context N] [--lanes N] ...
    superfluid-workerd ID prepare --shared FOLDER [--options JSON]    facts as JSON on stdin
    superfluid-workerd ID tokenize MODEL [--shared FOLDER] [--options JSON] [--special]
                         [--plain] [--pieces]
                                                              text on stdin
    superfluid-workerd ID serve --link FD

Each but `serve` prints one JSON document on stdout and exits 0, or prints a `Refusal` and exits
with its error's code. Whatever an engine prints goes to stderr. `--parent PID` before ID makes
the process leave when that parent has left; `--install FOLDER` names the install to run with.
`--rights FD`, for what reads a model, is an inherited file that holds `sandbox.Rights` as JSON.

Only the standard library is imported before the rights are applied, and no thread is started.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

_PR_SET_PDEATHSIG: Final = 1
_FIRST_VICTIM: Final = 500
_READS_STDIN: Final = frozenset({"install", "prepare", "tokenize"})
_STDIN_BYTES: Final = 64 << 20


class Usage(Exception):
    """The arguments do not form a command."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Usage(message)


def grammar() -> argparse.ArgumentParser:
    """The arguments of `superfluid-workerd`."""
    parser = _Parser(prog="superfluid-workerd", description="One adapter, in its own process.")
    parser.add_argument("--parent", type=int, metavar="PID", help="leave when this process has")
    parser.add_argument("--install", metavar="FOLDER", help="the install to run with")
    parser.add_argument("adapter", metavar="ID", help="the adapter's id")
    confined = _Parser(add_help=False)
    confined.add_argument("--rights", type=int, metavar="FD", help="what it may do, as JSON")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("about", help="info, options, compat and versions in one")
    commands.add_parser("info", help="what the runtime is")
    commands.add_parser("options", help="the options it declares")
    commands.add_parser("compat", help="its half of compat.json")
    commands.add_parser("versions", help="the versions it can install")
    plan = commands.add_parser("plan", help="how to install one of them")
    plan.add_argument("version")
    plan.add_argument("--backend", default="")
    install = commands.add_parser("install", help="finish what was staged")
    install.add_argument("staged", metavar="FOLDER")
    check = commands.add_parser("check", help="try the runtime without a model")
    facts = commands.add_parser("facts", parents=[confined], help="what a model's header says")
    prepare = commands.add_parser("prepare", help="fill the shared folder for a model")
    tokenize = commands.add_parser("tokenize", parents=[confined], help="token ids of a text")
    memory = commands.add_parser("memory", parents=[confined], help="the memory plan of a load")
    for number in ("context", "lanes", "threads", "memory-budget"):
        memory.add_argument(f"--{number}", type=int, default=0)
    for command in (facts, memory, tokenize):
        command.add_argument("model", metavar="MODEL")
    for command in (check, prepare):
        command.add_argument("--shared", required=True, metavar="FOLDER")
    for command in (check, facts, prepare, memory, tokenize):
        command.add_argument("--options", default="{}", metavar="JSON")
    for command in (facts, tokenize):
        command.add_argument("--shared", metavar="FOLDER", help="what the check of it filled")
    tokenize.add_argument("--special", action="store_true", help="read special tokens as such")
    tokenize.add_argument("--plain", action="store_true", help="add no token around the text")
    tokenize.add_argument("--pieces", action="store_true", help="answer each token's bytes too")
    serve = commands.add_parser(
        "serve", parents=[confined], help="serve one model over an inherited link"
    )
    serve.add_argument("--link", type=int, required=True, metavar="FD")
    return parser


def die_with_parent(call: argparse.Namespace) -> None:
    """Have the kernel end this process with its parent, where it can; leave when that is late."""
    if sys.platform == "linux":
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            print("the parent-death signal was refused", file=sys.stderr)
    if call.parent is not None and os.getppid() != call.parent:
        os._exit(1)


def dump_no_core(_call: argparse.Namespace) -> None:
    """A core dump would hold prompts and weights."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def go_first(_call: argparse.Namespace) -> None:
    """Have the kernel, where it kills for want of memory, choose this process, not the daemon."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(_FIRST_VICTIM))


def confine(call: argparse.Namespace) -> None:
    """Take all rights away but those that the daemon handed over."""
    descriptor = getattr(call, "rights", None)
    if descriptor is None:
        return
    from superfluid_workerd import sandbox

    with open(descriptor, "rb") as file:
        rights = sandbox.Rights.decode(file.read())
    sandbox.apply(rights, lambda: die_with_parent(call))


RIGHTS: Final[tuple[Callable[[argparse.Namespace], None], ...]] = (
    die_with_parent,
    dump_no_core,
    go_first,
    confine,
)
"""What narrows the process, in order, before anything of ours or of an engine is imported."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The console script."""
    try:
        call, usage = grammar().parse_args(arguments), None
    except Usage as error:
        call, usage = argparse.Namespace(parent=None, command=None), str(error)
    given = sys.stdin.buffer.read(_STDIN_BYTES) if call.command in _READS_STDIN else b""
    answers = _redirect()
    for narrow in RIGHTS:
        narrow(call)

    from superfluid_workerd import commands

    code = commands.refuse(usage, answers) if usage else commands.run(call, given, answers)
    # An engine's own threads and exit handlers must not hold up, or crash, a finished process.
    os._exit(code)


def _redirect() -> int:
    """Take stdin away and give stdout to the answers alone; the descriptor to answer on."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    main()
