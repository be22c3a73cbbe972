"""Signals that ask this process to end: none is lost, none ends it halfway.

From the first line of the program they are held back until somebody hears them: the daemon's loop,
or a command that may be interrupted anywhere. Meanwhile one would be a traceback out of an import,
or an exit code that says the wrong thing.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Final

STOPPING: Final = (signal.SIGINT, signal.SIGTERM)
"""Somebody wants it to end."""
_LEAVING: Final = (signal.SIGHUP, signal.SIGUSR1)
_ALL: Final = frozenset({*STOPPING, *_LEAVING})


def hold() -> None:
    """Have this thread hear none until it does so in `heard` or `interrupting`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """In the block they do what they are set to do, those that were held first of all."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ALL)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def interrupting() -> Iterator[None]:
    """In the block each of them raises `KeyboardInterrupt`, at its end at the latest: what is
    raised in a finalizer goes no further. For the main thread alone."""
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (*STOPPING, *leaving())}
    try:
        with heard():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if interrupted:
        raise KeyboardInterrupt


def leaving() -> list[signal.Signals]:
    """Its terminal is gone, or it is to drain; without what whoever started this process had it
    ignore, as `nohup` does SIGHUP."""
    return [number for number in _LEAVING if signal.getsignal(number) is not signal.SIG_IGN]
