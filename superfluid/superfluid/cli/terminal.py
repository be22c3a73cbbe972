"""What a pull looks like on a terminal, and in a log that is none."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from superfluid.models.pull import Offer, Progress, Reports, size_text
from superfluid_compat.errors import SuperfluidError

if TYPE_CHECKING:
    from superfluid.installs.installer import Outcome


@contextlib.contextmanager
def pull_reports(name: str) -> Iterator[Reports]:
    """Reports to standard error: one line of what comes, a bar on a terminal, else tenths."""
    with _progress() as progress:
        yield Reports(
            offered=lambda offer: say(_announcement(name, offer)),
            progress=progress,
            waiting=lambda: say(f"{name}: another process is fetching it, waiting"),
        )


class InstallReports:
    """What an install looks like: lines and a bar for people, lines of JSON for hosts."""

    def __init__(self, runtime: str, progress: Progress, *, as_json: bool) -> None:
        self._runtime, self._progress, self._as_json = runtime, progress, as_json
        self._said = -1

    def stage(self, name: str) -> None:
        if self._as_json:
            self._line(event="stage", stage=name)
        elif name == "check":
            say(f"{self._runtime}: checking that it works here")

    def progress(self, done: int, total: int) -> None:
        if not self._as_json:
            self._progress(done, total)
        elif done * 100 // max(total, 1) != self._said:
            self._said = done * 100 // max(total, 1)
            self._line(event="progress", done=done, total=total)

    def say(self, line: str) -> None:
        if self._as_json:
            self._line(event="note", message=line)
        else:
            say(line)

    def waiting(self) -> None:
        self.say(f"{self._runtime}: another process installs it, waiting")

    def done(self, outcome: Outcome, line: str) -> None:
        if self._as_json:
            self._line(
                event="done",
                install=outcome.install.name,
                path=str(outcome.install.folder),
                fresh=outcome.fresh,
                in_use=outcome.in_use,
            )
        else:
            print(line)

    def failed(self, error: SuperfluidError) -> None:
        if self._as_json:
            self._line(
                event="failed",
                code=error.code,
                message=error.message,
                fix=error.fix,
                exit_code=int(error.exit_code),
            )

    def _line(self, **fields: Any) -> None:
        print(json.dumps({"runtime": self._runtime, **fields}), flush=True)


@contextlib.contextmanager
def install_reports(runtime: str, *, as_json: bool) -> Iterator[InstallReports]:
    """Reports to standard error, or with `as_json` to standard output."""
    if as_json:
        yield InstallReports(runtime, lambda done, total: None, as_json=True)
        return
    with _progress() as progress:
        yield InstallReports(runtime, progress, as_json=False)


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

    columns = (BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
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
            say(f"{tenth * 10}% is here")
