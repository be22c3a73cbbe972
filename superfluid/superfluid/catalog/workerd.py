"""How a worker process is called, and how its JSON answers are asked for."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from superfluid.catalog.entries import override, remedy
from superfluid.catalog.environment import worker_environment
from superfluid.supervisor import confine
from superfluid.supervisor.tail import Tail
from superfluid_compat.entrypoints import ADAPTERS
from superfluid_compat.errors import ModelDamaged, RuntimeBroken
from superfluid_workerd.link.answers import Refusal
from superfluid_workerd.link.answers import Rights as Declared
from superfluid_workerd.link.refusals import error_of
from superfluid_workerd.sandbox.rights import Level

ANSWER_BYTES: Final = 16 << 20
_READ_BYTES: Final = 64 << 10
_OWN_DEATHS: Final = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
)
"""Signals that a process brings on itself."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a runtime lies: the folder of its install, and the Python its workers run under.

    Both None for a runtime that ships with its adapter.
    """

    folder: Path | None = None
    interpreter: Path | None = None


HERE: Final = Place()


@dataclass(frozen=True, slots=True)
class Workerd:
    """The command that becomes a worker; `prefix` is its argv up to the worker's own arguments.

    `reading` is the sandbox of those that read a model to answer a question.
    """

    prefix: tuple[str, ...]
    reading: Level = "auto"

    def argv(self, adapter: str, *words: str, place: Place = HERE) -> list[str]:
        """A worker of `adapter` that leaves with this process.

        A worker named by `SUPERFLUID_WORKER_<ID>` comes before all others.
        """
        named = override(adapter)
        if named is not None:
            prefix = tuple(shlex.split(named))
        elif place.interpreter is not None:
            prefix = bridged(place.interpreter, adapter)
        else:
            prefix = self.prefix
        install = ("--install", str(place.folder)) if place.folder else ()
        return [*prefix, "--parent", str(os.getpid()), *install, adapter, *words]

    async def ask(
        self,
        adapter: str,
        words: Sequence[str],
        answer: type[T],
        *,
        given: bytes = b"",
        place: Place = HERE,
        timeout_s: float,
        model: Path | None = None,
        readable: Sequence[Path] = (),
    ) -> T:
        """The JSON answer to `words`, decoded as `answer`; `given` goes to its stdin. With
        `model` the worker may read that, its install and `readable`, and do nothing else.

        Raises what the worker refused with, `ModelDamaged` when reading `model` killed it, or
        `RuntimeBroken` when it died otherwise, took longer than `timeout_s` or answered something
        else.
        """
        rights = None
        if model is not None:
            lent = [Path(path) for path in lent_packages(adapter).values()]
            own = [place.folder] if place.folder else []
            rights = confine.rights(self.reading, Declared(), model, [*own, *lent, *readable])
        with confine.handed(rights) as descriptors:
            child = await self._start(adapter, words, place, descriptors)
        errors = Tail()
        try:
            async with asyncio.timeout(timeout_s):
                said, _, _ = await asyncio.gather(
                    _read(child), _drain(child, errors), _give(child, given)
                )
                code = await child.wait()
        except TimeoutError as error:
            raise _broken(adapter, words, f"took longer than {timeout_s:g} s", errors) from error
        finally:
            await _end(child)
        if code != 0:
            with contextlib.suppress(msgspec.MsgspecError):
                raise error_of(msgspec.json.decode(said, type=Refusal))
            if model is not None and -code in _OWN_DEATHS:
                raise _killed(adapter, model, signal.Signals(-code), errors)
            raise _broken(adapter, words, f"ended with code {code}", errors)
        try:
            return msgspec.json.decode(said, type=answer)
        except msgspec.MsgspecError as error:
            raise _broken(adapter, words, f"answered something else: {error}", errors) from error

    async def _start(
        self, adapter: str, words: Sequence[str], place: Place, descriptors: Sequence[int]
    ) -> asyncio.subprocess.Process:
        argv = self.argv(adapter, *words, *confine.words(descriptors), place=place)
        try:
            return await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=worker_environment(),
                pass_fds=tuple(descriptors),
                start_new_session=True,
            )
        except OSError as error:
            raise RuntimeBroken(
                f"the worker {argv[0]} could not be started: {error}", fix=remedy(adapter)
            ) from error


def shipped(reading: Level = "auto") -> Workerd:
    """The worker beside this daemon, under the same interpreter.

    By the interpreter's own path, so a link to the command in some other folder changes nothing;
    `-P` keeps the current folder from lending it modules.
    """
    return Workerd((sys.executable, "-P", "-m", "superfluid_workerd"), reading)


def bridged(interpreter: Path, adapter: str) -> tuple[str, ...]:
    """A worker under another Python, which is lent our packages and the adapter's."""
    points = list(entry_points(group=ADAPTERS, name=adapter))
    owners = {point.dist.name: point.dist for point in points if point.dist is not None}
    packages = lent_packages(adapter)
    lent = {
        "packages": packages,
        "distributions": [
            (name, found.version, found.read_text("entry_points.txt") or "")
            for name, found in owners.items()
        ],
    }
    bridge = Path(packages["superfluid_workerd"], "bridge.py")
    return (str(interpreter), "-I", str(bridge), msgspec.json.encode(lent).decode())


def lent_packages(adapter: str) -> dict[str, str]:
    """What a worker imports of ours, and of who made the adapter: folder or file by name."""
    names = {"superfluid_compat", "superfluid_workerd"}
    names |= {
        point.module.partition(".")[0] for point in entry_points(group=ADAPTERS, name=adapter)
    }
    return dict(_folders(sorted(names)))


def _folders(packages: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The folder of each top-level package, or a module's file; nothing is imported."""
    for name in packages:
        found = importlib.util.find_spec(name)
        if found is not None:
            folders = found.submodule_search_locations or ([found.origin] if found.origin else ())
            yield from ((name, folder) for folder in folders)


async def _read(child: asyncio.subprocess.Process) -> bytes:
    if child.stdout is None:
        return b""
    kept = bytearray()
    while data := await child.stdout.read(_READ_BYTES):
        kept += data[: ANSWER_BYTES + 1 - len(kept)]  # one too many shows that it was too long
    return bytes(kept)


async def _drain(child: asyncio.subprocess.Process, tail: Tail) -> None:
    while child.stderr is not None and (data := await child.stderr.read(_READ_BYTES)):
        tail.feed(data)


async def _give(child: asyncio.subprocess.Process, given: bytes) -> None:
    if child.stdin is None:
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        child.stdin.write(given)
        await child.stdin.drain()
        child.stdin.close()
        await child.stdin.wait_closed()


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()


def _killed(adapter: str, model: Path, by: signal.Signals, errors: Tail) -> ModelDamaged:
    return ModelDamaged(
        f"{model}: runtime {adapter} died of reading it, by {by.name}{_last_line(errors)}"
    )


def _broken(adapter: str, words: Sequence[str], what: str, errors: Tail) -> RuntimeBroken:
    return RuntimeBroken(
        f"runtime {adapter} {what} when asked for {words[0]}{_last_line(errors)}",
        fix=remedy(adapter),
    )


def _last_line(errors: Tail) -> str:
    last = errors.lines()[-1:]
    return f"; its last line: {last[0]}" if last else ""
