"""What a pull looks like on a terminal, and in a log that is none."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from superfluid.models.pull import Offer, Reports, size_text


@contextlib.contextmanager
def pull_reports(name: str) -> Iterator[Reports]:
    """Reports to standard error: one line of what comes, a bar on a terminal, else tenths."""
    with _progress() as progress:
        yield Reports(
            offered=lambda offer: say(_announcement(name, offer)),
            progress=progress,
            waiting=lambda: say(f"{name}: another process is fetching it, waiting"),
        )


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _announcement(name: str, offer: Offer) -> str:
    return f"fetching {name}: {size_text(offer.size)}, licence: {offer.licence}"


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    if sys.stderr.isatty():
        with _bar() as update:
            yield update
    else:
        yield _Tenths().update


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=None)

    def update(done: int, total: int) -> None:
        # Nothing is drawn before the first byte: most starts fetch nothing.
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        bar.stop()


class _Tenths:
    """One line for each tenth that came in."""

    def __init__(self) -> None:
        self._said = 0

    def update(self, done: int, total: int) -> None:
        tenth = done * 10 // total if total else 0
        if tenth > self._said:
            self._said = tenth
            say(f"{tenth * 10}% of {size_text(total)}")
