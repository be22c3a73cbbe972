"""`superfluid serve`, from the bound port to the last stream drained."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import socket
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from superfluid import control, signals
from superfluid.catalog.catalog import Catalog
from superfluid.catalog.environment import worker_environment
from superfluid.catalog.prepared import Preparations, Say, stamps, unchanged
from superfluid.catalog.standing import Choice, Chooser, Standing, Wanted
from superfluid.catalog.workerd import lent_packages, shipped
from superfluid.config import Sources
from superfluid.installs.store import MANIFEST, Installs
from superfluid.paths import unwritable
from superfluid.supervisor import confine, name, scratch
from superfluid.supervisor.host import Folders, ModelHost, ModelSpec
from superfluid.supervisor.ledger import Ledger
from superfluid.supervisor.supervisor import Supervisor
from superfluid_compat.errors import (
    ExitCode,
    PortInUse,
    RuntimeBroken,
    UnknownModel,
    UsageError,
    one_line,
)
from superfluid_workerd.link.answers import Facts
from superfluid_workerd.link.answers import Rights as Declared
from superfluid_workerd.link.frames import Class, Load
from superfluid_workerd.options import Kind, Resolved
from superfluid_workerd.sandbox.rights import Level, Rights

DRAIN_S: Final = 30.0
_BACKLOG: Final = 512
_NUMBERS: Final = ("context", "lanes", "threads", "memory-budget")
_EXAMPLE: Final = ("completions", '{"prompt": "The capital of France is", "max_tokens": 16}')
_EMBEDDING_EXAMPLE: Final = ("embeddings", '{"input": "The capital of France"}')
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What to serve, where and how; everything that needs no worker is checked already.

    `model` is the file or folder on disk, `model_name` what clients call it. `wanted` names a
    runtime, or leaves it to the format; `untested` lets an untested one serve. `common` holds
    every option of `options.COMMON`. `adapter_options` holds what was given for each adapter by
    id, unresolved: only its worker knows its options. `port` 0 takes a free one. `state`, `cache`
    and `runtimes` are folders of this home, shared by every server on it; `server` tells the
    servers apart.
    """

    model: Path
    model_name: str
    common: Mapping[str, Resolved]
    state: Path
    cache: Path
    runtimes: Path
    host: str = "127.0.0.1"
    port: int = 8453
    server: str = "default"
    wanted: Wanted = field(default_factory=Wanted)
    untested: bool = False
    service_class: Class = "agent"
    adapter_options: Mapping[str, Sources] = field(default_factory=dict)


def run(settings: ServeSettings, say: Say | None = None) -> ExitCode:
    """Serve until a signal ends it; `say` is told what a person at the terminal wants to know.

    Raises what keeps it from serving, or from serving on, as the error with its exit code.
    """
    return asyncio.run(serve(settings, say or _print))


async def serve(settings: ServeSettings, say: Say, catalog: Catalog | None = None) -> ExitCode:
    """`run` within an event loop, which must be the main thread's."""
    with (
        Signals() as heard,
        bound(settings.host, settings.port) as listener,
        name.held(settings.state / "servers" / settings.server) as home,
    ):
        folders = Folders(home / "scratch", settings.state / "dossiers", home / "workers")
        _clear(folders)
        choosing = Choosing(settings, catalog or reading(settings), say)
        spec = await heard.unless_asked(choosing.spec())
        if spec is None:
            return ExitCode.OK
        with choosing.held():
            host = ModelHost(spec, folders)
            answers = Controlled(settings.server, Supervisor([host]), listener)
            async with control.listening(home, answers):
                return await _serve(answers, host, heard, say, settings.service_class)


def reading(settings: ServeSettings) -> Catalog:
    """The catalog that asks of the model what `settings` are about. What was asked for by name is
    not only had by the worker that serves, and nothing asked for less is a reason to give less."""
    level = cast(Level, settings.common["sandbox"].value)
    return Catalog(shipped("strict" if level == "strict" else "auto"))


def _clear(folders: Folders) -> None:
    """End and remove what a killed server of this name left."""
    try:
        Ledger(folders.ledger).reap(folders.scratch)
    except OSError as error:
        raise unwritable(folders.ledger, error) from error
    scratch.clear(folders.scratch)


class Choosing:
    """From settings to a runtime that is ready for the model."""

    def __init__(self, settings: ServeSettings, catalog: Catalog, say: Say) -> None:
        self._settings, self._catalog, self._say = settings, catalog, say
        self._model = confine.opened(settings.model)
        self._preparations = Preparations(settings.cache)
        self._installs = Installs(settings.runtimes)
        self._chooser: Chooser | None = None
        self._choice: Choice | None = None
        self._files: list[tuple[str, int, int]] = []

    async def choose(self) -> Choice:
        """Raises what `Chooser.choose` raises."""
        settings = self._settings
        chooser = Chooser(
            self._catalog,
            self._installs,
            self._preparations,
            settings.adapter_options,
            settings.untested,
            _count(settings, "memory-budget") or None,
            self._say,
            self.memory,
        )
        self._chooser = chooser
        self._choice = await chooser.choose(self._model, settings.wanted)
        return self._choice

    async def facts(self, choice: Choice) -> Facts:
        """What the chosen runtime reads of the model. Raises what it finds against it."""
        row, place = choice.standing.row, choice.standing.place
        return await self._preparations.facts(self._catalog, row, self._model, choice.values, place)

    async def memory(self, choice: Choice) -> dict[str, int]:
        """The memory plan that the load would follow, in bytes by part."""
        common = {name: _count(self._settings, name) for name in _NUMBERS}
        id_, place = choice.standing.row.id, choice.standing.place
        return await self._catalog.memory(id_, self._model, choice.values, common, place)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep what serves from being removed meanwhile."""
        install = self._choice.standing.install if self._choice else None
        with self._installs.held(install) if install else contextlib.nullcontext():
            yield

    async def spec(self) -> ModelSpec:
        """What the supervisor serves, the runtime prepared for it."""
        settings, choice = self._settings, await self.choose()
        row, place = choice.standing.row, choice.standing.place
        await self._preparations.ensure(
            self._catalog, row, self._model, choice.values, self._say, place=place
        )
        self._files = stamps(choice.standing.probe) if choice.standing.probe else []
        named = {f"{row.id}-{name}": found for name, found in choice.options.items()}
        return ModelSpec(
            name=settings.model_name,
            runtime=choice.standing.label,
            load=Load(
                model=str(self._model),
                name=settings.model_name,
                scratch="",
                shared=str(self._preparations.shared(row.id)),
                context=_count(settings, "context"),
                lanes=_count(settings, "lanes"),
                threads=_count(settings, "threads"),
                memory_budget=_count(settings, "memory-budget") or None,
                options=choice.values,
            ),
            command=self._command,
            environment=worker_environment,
            rights=self._rights(choice),
            install=_digest(choice),
            remedy=row.entry.remedy,
            recheck=self.recheck,
            origins=origins(settings.common) | origins(named),
        )

    def _command(self, link: int) -> list[str]:
        """The argv of a worker of what was chosen. Raises `RuntimeUnavailable`."""
        if self._choice is None:
            raise RuntimeBroken("no runtime was chosen")
        row, place = self._choice.standing.row, self._choice.standing.place
        return self._catalog.workerd.argv(row.id, "serve", "--link", str(link), place=place)

    def recheck(self) -> Coroutine[Any, Any, None] | None:
        """Where files of the runtime are not those that were judged, what judges it once more: a
        worker may not. It raises `RuntimeUnavailable`."""
        if self._choice is None or self._chooser is None:
            return None
        before = self._choice.standing
        gone = before.install is not None and before.install.missing()
        if not gone and unchanged(self._files):
            return None
        return self._judge_again(self._chooser, before)

    async def _judge_again(self, chooser: Chooser, before: Standing) -> None:
        standing = await chooser.stand(before.row, before.install)
        if not standing.verdict.serves:
            raise standing.verdict.error(standing.label)
        self._files = stamps(standing.probe) if standing.probe else []

    def _rights(self, choice: Choice) -> Rights:
        """What its worker may do."""
        settings, row, place = self._settings, choice.standing.row, choice.standing.place
        level: Level = cast(Level, settings.common["sandbox"].value)
        named = [option.name for option in row.options if option.kind is Kind.PATH]
        given = [choice.values.get(name) for name in named]
        probe = choice.standing.probe
        readable = [
            self._preparations.shared(row.id),
            *map(Path, lent_packages(row.id).values()),
            *(Path(str(path)) for path in (place.folder, *given) if path),
            *map(Path, probe.files if probe else ()),
        ]
        return confine.rights(
            level,
            row.info.rights if row.info else Declared(),
            self._model,
            readable,
            memory_budget=_count(settings, "memory-budget"),
        )


def _digest(choice: Choice) -> str:
    """Of the manifest, which holds those of all files; empty for what ships with its adapter."""
    install = choice.standing.install
    if install is None:
        return ""
    return hashlib.sha256((install.folder / MANIFEST).read_bytes()).hexdigest()


def _count(settings: ServeSettings, option: str) -> int:
    """A common option's number, 0 where the choice is left to the adapter."""
    value = settings.common[option].value
    return value if isinstance(value, int) else 0


def origins(options: Mapping[str, Resolved]) -> dict[str, Any]:
    """Each value with where it came from, as plain JSON."""
    return {name: {"value": found.value, "origin": found.origin} for name, found in options.items()}


async def _serve(
    answers: Controlled, host: ModelHost, heard: Signals, say: Say, service_class: Class
) -> ExitCode:
    supervisor, listener = answers.supervisor, answers.listener
    supervisor.start()
    from superfluid.http.server import Server  # imported while the worker loads

    server = Server(supervisor, listener, service_class)
    answering = asyncio.create_task(server.serve())
    over = asyncio.create_task(supervisor.over())
    ready = asyncio.create_task(_announce(host, listener, say))
    asked = asyncio.create_task(heard.asked.wait())
    insisted = asyncio.create_task(heard.insisted.wait())
    try:
        await asyncio.wait({over, asked, answering}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            answering.result()
        supervisor.drain(DRAIN_S)
        await asyncio.wait({over, insisted}, return_when=asyncio.FIRST_COMPLETED)
        problem = None if asked.done() else await over
    finally:
        supervisor.kill()
        await supervisor.over()
        for task in (ready, asked, insisted, over):
            task.cancel()
        server.should_exit = True
        server.force_exit = insisted.done()
        await asyncio.gather(answering, ready, asked, insisted, over, return_exceptions=True)
    if problem is not None:
        raise problem
    return ExitCode.OK


@dataclass(frozen=True, slots=True)
class Controlled:
    """Answers on the control socket. A drain lasts `DRAIN_S` at most and ends the server when no
    model is left."""

    name: str
    supervisor: Supervisor
    listener: socket.socket

    def __call__(self, request: control.Request) -> control.Reply:
        if request.ask == "drain":
            try:
                self.supervisor.drain(DRAIN_S, request.model)
            except UnknownModel as error:
                return control.Reply(problem=error.line())
        return control.Reply(
            server=control.ServerReport(
                name=self.name,
                pid=os.getpid(),
                url=_url(self.listener),
                models=self.supervisor.reports(),
            )
        )


def _url(listener: socket.socket) -> str:
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    return f"http://{shown}:{port}/v1"


async def _announce(host: ModelHost, listener: socket.socket, say: Say) -> None:
    await host.served()
    url = _url(listener)
    say(f"serving {host.spec.name} with {host.spec.runtime} at {url}")
    can = host.description.capabilities if host.description else {}
    route, body = _EXAMPLE if can.get("generates", True) else _EMBEDDING_EXAMPLE
    say(f"try: curl {url}/{route} -d '{body}'")
    reached = host.sandbox()
    if reached["asked"] == "auto" and reached.get("level") != "strict":
        missing = ", ".join(reached.get("missing", ()))
        say(f"sandbox: {reached.get('level', 'none')} is the best here; missing: {missing}")


class Signals:
    """What the loop hears while the block runs, and before it what was held back. Each asks to end;
    a second SIGINT or SIGTERM insists, whatever else asked. SIGHUP stays ignored if it was. What
    comes after the block is held back again: the exit code is settled then.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()
        self._stopping = False
        self._hearing = contextlib.ExitStack()

    def __enter__(self) -> Signals:
        loop = asyncio.get_running_loop()
        for number in signals.STOPPING:
            loop.add_signal_handler(number, self.stop)
        for number in signals.leaving():
            loop.add_signal_handler(number, self.asked.set)
        self._hearing.enter_context(signals.heard())
        return self

    def __exit__(self, *_: object) -> None:
        # The handlers go with the loop, which outlives its threads: until then no other thread
        # that a signal may be sent to finds it deadly.
        self._hearing.close()

    def stop(self) -> None:
        """What SIGINT and SIGTERM do."""
        self.asked.set()
        if self._stopping:
            self.insisted.set()
        self._stopping = True

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, or None, with `work` cancelled, when a signal comes first."""
        task, asked = asyncio.create_task(work), asyncio.create_task(self.asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for each in (task, asked):
                each.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens there, closed with the block. Clients that come early wait in it.

    Raises `PortInUse`, `UsageError` (no such address here, not allowed).
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            raise _cannot_listen(host, port, error) from error
        yield listener


def _cannot_listen(host: str, port: int, error: OSError) -> PortInUse | UsageError:
    if error.errno == errno.EADDRINUSE:
        return PortInUse(f"port {port} of {host} is taken, wanted it free", param="port")
    reason = (error.strerror or str(error)).lower()
    fix = "choose an address of this machine with --host and a --port that this user may take"
    return UsageError(f"cannot listen at {host} port {port}: {reason}", fix=fix, param="host")


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # whoever read may be gone; who serves goes on
        print(one_line(line), flush=True)
