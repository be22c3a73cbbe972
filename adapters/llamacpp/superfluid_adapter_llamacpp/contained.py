"""Running what may die, hang, print and fork, so that nothing of it is left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import psutil

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_GRACE_S: Final = 2.0
_ASKER: Final = "SUPERFLUID_LLAMA_ASKER"
_MOST_BYTES: Final = 1 << 22


@dataclass(frozen=True, slots=True)
class Ended:
    """What a child answered, the last it said otherwise, and how it ended: nothing for code 0."""

    lines: list[bytes]
    said: str
    how: str


def ask(words: Sequence[str], limit_s: float) -> Ended:
    """Run a module of ours that `contain`s itself, within `limit_s`."""
    # Isolated, so that neither the current folder nor a variable lends it a module.
    command = [sys.executable, "-I", "-m", *words]
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1", _ASKER: str(os.getpid())}
    # Files, since whoever inherits a pipe keeps it open.
    with tempfile.TemporaryFile() as answers, tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=answers, stderr=said, env=environment
        )
        how = _awaited(child, limit_s)
        answers.seek(0)
        lines = answers.read(_MOST_BYTES).splitlines()
        said.seek(0)
        return Ended(lines, said.read(_MOST_BYTES).decode(errors="replace"), how)


def _awaited(child: subprocess.Popen[bytes], limit_s: float) -> str:
    try:
        return _ending(child.wait(limit_s))
    except subprocess.TimeoutExpired:
        return f"did not answer for {limit_s:g} s"
    finally:
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_S)
            child.kill()
            child.wait()


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}" if code else ""
    try:
        return f"died by {signal.Signals(-code).name}"
    except ValueError:
        return f"died by signal {-code}"


def contain(work: Callable[[int], object]) -> NoReturn:
    """Do `work` in a child, given the descriptor to answer on; then end all that it started and
    end as it did. What is printed meanwhile goes to stderr."""
    answers = os.dup(1)
    os.dup2(2, 1)
    _adopt()
    child = os.fork()
    if child == 0:
        for one in _stops():
            signal.signal(one, signal.SIG_DFL)
        code = 1
        try:
            work(answers)
            code = 0
        except BaseException:  # noqa: BLE001  # told, and how it ended is how we end
            traceback.print_exc()
        # The library's own exit handlers must not decide how this process ends.
        os._exit(code)
    _, status = os.waitpid(child, 0)
    _end_all()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(OSError, ValueError):  # some signals keep their handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


def _stops() -> list[signal.Signals]:
    """What ends this process; what who asked ignores (`nohup`) must not end it before."""
    ignorable = (signal.SIGINT, signal.SIGHUP)
    return [
        signal.SIGTERM,
        *(one for one in ignorable if signal.getsignal(one) is not signal.SIG_IGN),
    ]


def _stopped(*_: object) -> NoReturn:
    _end_all()
    os._exit(1)


def _adopt() -> None:
    """Become the parent of every orphan below, and end when who asked does."""
    for one in _stops():
        signal.signal(one, _stopped)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    # Who ended before that is no longer the parent, and no signal comes.
    if os.environ.get(_ASKER, str(os.getppid())) != str(os.getppid()):
        _stopped()


def _end_all() -> None:
    while found := psutil.Process().children(recursive=True):
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=_GRACE_S)
