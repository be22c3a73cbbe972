"""One served model: drives its worker's life and keeps its streams."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from superfluid.control import WorkerReport
from superfluid.supervisor import dossiers, judged, life, memory, pids, shortage
from superfluid.supervisor.clock import Clock
from superfluid.supervisor.dossiers import Dossier, Dossiers
from superfluid.supervisor.ledger import Ledger
from superfluid.supervisor.life import Life, Limits
from superfluid.supervisor.process import Exit
from superfluid.supervisor.requests import Asked, Build, Requests
from superfluid.supervisor.resume import Resumption
from superfluid.supervisor.scratch import Scratch
from superfluid.supervisor.states import LIVE, LOADING, WorkerState
from superfluid.supervisor.streams import LiveStream
from superfluid.supervisor.worker import Worker
from superfluid_compat import numbers
from superfluid_compat.errors import (
    BadFrame,
    ContractRefused,
    Draining,
    ExitCode,
    LinkError,
    ModelError,
    Overloaded,
    RuntimeBroken,
    SuperfluidError,
    UsageError,
    WorkerDied,
    WorkerGaveUp,
)
from superfluid_compat.verdicts import require_number
from superfluid_workerd.link import frames
from superfluid_workerd.link.frames import (
    Description,
    GenerationRequest,
    Prompt,
    Text,
    ToDaemon,
    Tokens,
)
from superfluid_workerd.link.refusals import error_of, in_words
from superfluid_workerd.sandbox.rights import Rights

_LOG = logging.getLogger(__name__)
MOST_STREAMS: Final = 512
_OUTSIDE: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that come from somebody else, where they do not come from here."""
_BY_EXIT: Final[Mapping[int, type[SuperfluidError]]] = {
    ExitCode.USAGE: UsageError,
    ExitCode.MODEL: ModelError,
    ExitCode.RUNTIME: RuntimeBroken,
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What to serve and with what. `load` gets a scratch folder of its own for each worker.

    `command` builds a worker's argv from the link's descriptor, `environment` its environment
    from the scratch folder. `origins` tells each option's value and where it came from. `rights`
    is what a worker may do beside using its scratch; without it, whatever this user may.
    `install` is the digest of the install's manifest, `remedy` what may mend a broken runtime.
    `recheck` is asked before each worker: None when what it runs is as it was, else what looks at
    it again and raises what keeps the worker from starting.
    """

    name: str
    runtime: str
    load: frames.Load
    command: Callable[[int], Sequence[str]]
    environment: Callable[[Path], Mapping[str, str]]
    origins: Mapping[str, Any] = field(default_factory=dict)
    rights: Rights | None = None
    install: str = ""
    remedy: str | None = None
    recheck: Callable[[], Coroutine[Any, Any, None] | None] = lambda: None


@dataclass(frozen=True, slots=True)
class Folders:
    """Where one server keeps what outlives a worker."""

    scratch: Path
    dossiers: Path
    ledger: Path


class ModelHost:
    """Starts a worker, starts another when it dies, and tells streams what becomes of them.

    Used from the event loop's thread alone. `wait_s` is how long a request waits for a worker.
    """

    def __init__(
        self,
        spec: ModelSpec,
        folders: Folders,
        limits: Limits | None = None,
        *,
        wait_s: float = 60.0,
    ) -> None:
        self.spec: Final = spec
        self.created: Final = int(time.time())
        self.description: Description | None = None
        self.stats = frames.TurnStats()
        self.error: SuperfluidError | None = None
        """Why the last worker failed; cleared when one serves again."""
        self._ledger = Ledger(folders.ledger)
        self._dossiers = Dossiers(folders.dossiers)
        self._wait_s = wait_s
        limits = limits or Limits()
        self._life = Life(limits)
        self._look_s = limits.ping_s
        self._clock = Clock(2 * limits.ping_s)
        self._events: deque[life.Event] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._worker: Worker | None = None
        self._rechecking: asyncio.Task[None] | None = None
        self._scratch = Scratch(folders.scratch)
        self._group = ""
        self._born = 0.0
        self._found_bytes = 0
        self._killed: Mapping[str, int] = {}
        self._starved = ""
        self.spawned = 0
        """How many workers there have been."""
        self._exit: Exit | None = None
        self._stage = WorkerState.SPAWNED
        self._refusal: SuperfluidError | None = None
        self._guilty: LiveStream | None = None
        self._numbers = itertools.count(1)
        self._streams = Resumption(self._send, self._numbers)
        self._requests = Requests(self._send, self._numbers)
        self._loaded = False
        self._changed = asyncio.Event()

    @property
    def state(self) -> WorkerState:
        return self._life.state

    @property
    def pid(self) -> int | None:
        """The worker's process, while there is one."""
        return self._worker.process.pid if self._worker else None

    def sandbox(self) -> dict[str, Any]:
        """What was asked and what the last worker that loaded reached."""
        asked = self.spec.rights.level if self.spec.rights else "none"
        if self.description is None:
            return {"asked": asked}
        return {**self.description.record.got.get("sandbox", {}), "asked": asked}

    def report(self) -> WorkerReport:
        """What there is to say of it now."""
        return WorkerReport(
            model=self.spec.name,
            runtime=self.spec.runtime,
            state=self.state.value,
            pid=self.pid or 0,
            rss_bytes=memory.resident(self.pid) if self.pid else 0,
            uptime_s=round(time.monotonic() - self._born, 1) if self.pid else 0.0,
            workers=self.spawned,
            streams=len(self._streams),
            lanes=self.spec.load.lanes,
            sandbox=self.sandbox(),
            problem=self.error.line() if self.error else "",
        )

    # What the daemon asks.

    def start(self) -> None:
        self._dispatch(life.Start())

    async def served(self) -> None:
        """Return when a worker serves; raise why none ever will."""
        await self._until(lambda: self.state in _SETTLED)
        if self.state is not WorkerState.SERVING:
            raise self._unavailable()

    async def over(self) -> SuperfluidError | None:
        """Return when no worker runs nor will: the reason, or None when it was asked to end."""
        await self._until(lambda: self.state in (WorkerState.GAVE_UP, WorkerState.GONE))
        await self._scratch.swept()
        return self.error if self.state is WorkerState.GAVE_UP else None

    def drain(self, bound_s: float) -> None:
        """Take no new streams; shut down when those that run have ended, at latest after the
        bound. A death meanwhile costs them a pause, as any other."""
        self._dispatch(life.Drain(bound_s))
        self._idle()

    def halt(self) -> None:
        """End the worker at once."""
        self._dispatch(life.Halt())

    def kill(self) -> None:
        """End the worker without any grace."""
        self.halt()
        if self._worker is not None:
            self._worker.process.kill()

    # What clients ask.

    async def generate(self, request: GenerationRequest) -> LiveStream:
        stream = LiveStream(request, self._cancel)
        await self._serving_worker()
        if len(self._streams) >= MOST_STREAMS:
            raise Overloaded(f"{len(self._streams)} streams run or wait, at most {MOST_STREAMS} do")
        self._streams.add(stream)
        try:
            await stream.accepted
        except asyncio.CancelledError:
            stream.abandon()
            raise
        return stream

    async def tokenize(self, prompt: Prompt, *, special: bool) -> frames.Tokenized:
        answer: frames.Tokenized = await self._ask(
            lambda number: frames.Tokenize(request=number, prompt=prompt, special=special),
            frames.Tokenized,
        )
        return answer

    async def detokenize(self, tokens: Sequence[int]) -> frames.Detokenized:
        answer: frames.Detokenized = await self._ask(
            lambda number: frames.Detokenize(request=number, tokens=list(tokens)),
            frames.Detokenized,
        )
        return answer

    async def embed(
        self, inputs: Sequence[Text | Tokens], dimensions: int | None
    ) -> frames.Embedded:
        answer: frames.Embedded = await self._ask(
            lambda number: frames.Embed(request=number, inputs=list(inputs), dimensions=dimensions),
            frames.Embedded,
        )
        floats = len(inputs) * answer.width
        if len(answer.tokens) != len(inputs) or len(answer.vectors) != 4 * floats:
            raise BadFrame(
                f"the worker of {self.spec.name} answered {len(answer.vectors)} bytes of vectors, "
                f"wanted {len(inputs)} vectors of {answer.width} floats"
            )
        return answer

    async def fresh_stats(self) -> frames.TurnStats:
        """What the turn loop counts, answered by itself; the last known while none serves."""
        if self.state is WorkerState.SERVING:
            ping = Asked(lambda number: frames.Ping(number=number), frames.Pong, fleeting=True)
            self._requests.start(ping)
            with contextlib.suppress(WorkerDied, Draining):
                await self._answer(ping)
        return self.stats

    async def _ask(self, build: Build, wanted: type[ToDaemon]) -> Any:
        """The answer, if need be of a later worker."""
        await self._serving_worker()
        asked = Asked(build, wanted)
        self._requests.hold(asked)
        self._pump()
        return await self._answer(asked)

    async def _answer(self, asked: Asked) -> Any:
        try:
            return await asked.answer
        finally:
            self._requests.withdraw(asked)
            self._idle()

    def _pump(self) -> None:
        """Send what waits, beside no stream that is to be alone."""
        if self._loaded and not self._streams.probing:
            self._requests.pump()

    async def _serving_worker(self) -> None:
        """Return when one serves. Raises why none will, or does not in time."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._until(lambda: self.state in _SETTLED or self._life.leaving)
        except TimeoutError as error:
            raise Overloaded(
                f"{self.spec.name} is not loaded after {self._wait_s:g} s of waiting "
                f"(its worker is {self.state})"
            ) from error
        if self.state is not WorkerState.SERVING or self._worker is None:
            raise self._unavailable()

    def _unavailable(self) -> SuperfluidError:
        if self.state is WorkerState.GAVE_UP and self.error is not None:
            return self.error
        return Draining("the server is shutting down")

    def _cancel(self, stream: LiveStream) -> None:
        self._streams.remove(stream)
        self._idle()

    def _idle(self) -> None:
        self._pump()
        if not self._streams and not self._requests:
            self._dispatch(life.Idle())

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            changed = self._changed
            await changed.wait()

    # The machine, and carrying out what it asks for.

    def _dispatch(self, event: life.Event) -> None:
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        before, was_leaving = self.state, self._life.leaving
        try:
            while self._events:
                for action in self._life.handle(self._events.popleft(), self._clock.now()):
                    with self._answered_for(f"the step {type(action).__name__}"):
                        self._perform(action)
        finally:
            self._handling = False
            self._rearm()
        if self.state is not before:
            _LOG.debug("%s: worker %s → %s", self.spec.name, before, self.state)
            if self.state is WorkerState.GAVE_UP:
                self._fail_all(self._unavailable())
            elif self.state is WorkerState.GONE:
                self._fail_all(Draining("the server shut down before the answer was complete"))
        if (self.state, self._life.leaving) != (before, was_leaving):
            self._notify()

    def _rearm(self) -> None:
        due = self._life.deadline
        if self._timer is not None:
            if due is not None and self._due <= due:
                return  # it comes early, finds nothing due and is armed again
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._due = due
            # Often enough that the clock tells being stopped from having waited.
            delay = min(max(0.0, due - self._clock.now()), self._look_s)
            self._timer = asyncio.get_running_loop().call_later(delay, self._elapsed)

    def _elapsed(self) -> None:
        self._timer = None
        room = False
        with self._answered_for("looking for free memory"):
            room = self._room()
        self._dispatch(life.Elapsed(room=room))

    def _room(self) -> bool:
        """Whether there is as much memory free as the last load found, or as it took."""
        if self.state is not WorkerState.BACKOFF or self._exit is None:
            return True
        return memory.available() >= min(self._found_bytes, self._exit.peak_rss_bytes)

    def _perform(self, action: life.Action) -> None:
        match action:
            case life.Spawn():
                self._spawn()
            case life.SendLoad():
                own = str(self._scratch.current)
                self._send(msgspec.structs.replace(self.spec.load, scratch=own))
            case life.SendPing():
                self._send(frames.Ping(number=next(self._numbers)))
            case life.SendShutdown():
                self._send(frames.Shutdown())
            case life.End():
                self._stop_rechecking()
                if self._worker is not None:
                    self._worker.process.end()
            case life.Kill():
                self._stop_rechecking()
                if self._worker is not None:
                    self._worker.process.kill()
            case life.Bury():
                self._bury(action)
            case life.GiveUp(reason, refused):
                self._give_up(reason, refused=refused)

    def _send(self, message: frames.ToWorker) -> None:
        if self._worker is not None:
            self._worker.send(message)

    def _spawn(self) -> None:
        self._born = time.monotonic()
        self._exit = self._refusal = None
        self._stage, self._starved = WorkerState.SPAWNED, ""
        self._found_bytes = memory.available()
        self._killed = memory.kills()
        self.spawned += 1
        try:
            again = self.spec.recheck()
        except Exception as error:  # noqa: BLE001  # recorded, and the last one's is what is told
            self._never_born(shortage.not_started(self.spec.name, error, self.spec.remedy))
        else:
            if again is None:
                self._start()
            else:
                self._rechecking = asyncio.create_task(again)
                self._rechecking.add_done_callback(self._rechecked)

    def _rechecked(self, task: asyncio.Task[None]) -> None:
        self._rechecking = None
        if task.cancelled():
            self._dispatch(life.Exited(""))
            return
        match task.exception():
            case None:
                self._start()
            case Exception() as error:
                self._never_born(shortage.not_started(self.spec.name, error, self.spec.remedy))

    def _stop_rechecking(self) -> None:
        if self._rechecking is not None:
            self._rechecking.cancel()

    def _start(self) -> None:
        try:
            scratch = self._scratch.make()
            self._worker = Worker(
                self.spec.command,
                environment=self.spec.environment(scratch),
                rights=self._rights(scratch),
                ledger=self._ledger,
                listener=self,
            )
        except Exception as error:  # noqa: BLE001  # recorded, and the last one's is what is told
            self._never_born(shortage.not_started(self.spec.name, error, self.spec.remedy))
        else:
            self._send(frames.Hello())

    def _rights(self, scratch: Path) -> Rights | None:
        rights = self.spec.rights
        if rights is None:
            return None
        if rights.user is not None:
            os.chown(scratch, *rights.user)
        self._group = pids.make(rights.threads if rights.level != "none" else 0)
        own = str(scratch.resolve())
        return dataclasses.replace(rights, write=(own,), group=self._group)

    def _never_born(self, error: SuperfluidError) -> None:
        self._remove_scratch()
        if isinstance(error, RuntimeBroken):
            self._refuse(error)
        else:
            self._refusal = error
            self._dispatch(life.Broke(error.message))
        self._dispatch(life.Exited(""))

    def _remove_scratch(self) -> None:
        pids.remove(self._group)
        self._group = ""
        self._scratch.drop()

    def _bury(self, bury: life.Bury) -> None:
        id_ = self._record(bury.stage, bury.reason, bury.then)
        _LOG.error("%s: worker gone, %s (dossier %s)", self.spec.name, bury.reason, id_)
        if self._exit is None and self._refusal is not None:  # it never was
            self.error = self._refusal
        else:
            self.error = WorkerDied(f"the worker of {self.spec.name} is gone ({bury.reason})")
        self.error.dossier = id_
        if self._guilty is not None:
            self._guilty.fail(self.error)
        self._requests.condemn(self.error)
        if self.state is WorkerState.GONE:
            self._fail_all(self.error)

    def _record(self, stage: WorkerState, reason: str, then: str) -> str:
        """Write the dossier of the worker that just exited, or was never born; its id."""
        worker, how = self._worker, self._exit
        dossier = Dossier(
            id=dossiers.new_id(),
            time=dossiers.now(),
            model=self.spec.name,
            runtime=self.spec.runtime,
            pid=worker.process.pid if worker else 0,
            stage=stage,
            reason=reason,
            then=self._told(then),
            exit=how.words() if how else "never started",
            code=how.code if how else None,
            uptime_s=round(time.monotonic() - self._born, 3),
            peak_rss_bytes=how.peak_rss_bytes if how else 0,
            out_of_memory=self._starved,
            install=self.spec.install,
            sandbox=self.sandbox(),
            options=dict(self.spec.origins),
            stderr=worker.process.tail.lines() if worker else [],
        )
        self._dossiers.write(dossier)
        return dossier.id

    def _told(self, then: str) -> str:
        blamed = "the one stream it had failed" if self._guilty is not None else ""
        if self._requests.guilty:
            blamed = blamed or "a request that workers died over failed"
        kept = f"{len(self._streams)} streams kept" if len(self._streams) else ""
        return "; ".join(part for part in (then, blamed, kept) if part)

    def _give_up(self, reason: str, *, refused: bool) -> None:
        dossier = self.error.dossier if self.error else None
        kind = _BY_EXIT.get(self._exit.code, WorkerGaveUp) if self._exit else WorkerGaveUp
        if self._refusal is not None:
            self.error = self._refusal
            if not refused:
                self.error.dossier = dossier
            elif isinstance(self.error, RuntimeBroken):
                # A refusal of the model explains itself; a fault of the runtime leaves a record.
                self.error.dossier = self._record(self._stage, reason, "no further try")
        elif refused:
            found = f"the worker of {self.spec.name} is gone ({reason})"
            fix = self.spec.remedy if kind is RuntimeBroken else None
            self.error = kind(found, fix=fix, dossier=dossier)
        else:
            failures = self._life.failures
            self.error = WorkerGaveUp(
                f"the worker of {self.spec.name} failed {failures} times, the last time: {reason}",
                dossier=dossier,
            )

    def _fail_all(self, error: SuperfluidError) -> None:
        for stream in self._streams.clear():
            stream.fail(error)
        self._requests.clear(error)

    def _refuse(self, error: SuperfluidError) -> None:
        self._refusal = error
        self._dispatch(life.Refused(error.message))

    # What the worker does.

    def exited(self, how: Exit) -> None:
        self._exit = how
        # Whoever dies otherwise while memory runs out dies of something else.
        killed = how.code == -signal.SIGKILL
        self._starved = memory.evidence(self._killed, memory.kills()) if killed else ""
        outside = -how.code in _OUTSIDE and not self._starved and self.state in LIVE
        self._loaded = False
        self._guilty = self._streams.died(outside=outside)
        self._requests.died(outside=outside)
        explained = self._guilty is not None or self._requests.guilty
        reason = f"{how.words()}, out of memory" if self._starved else how.words()
        self._dispatch(life.Exited(reason, final=how.final, explained=explained))
        self._guilty = None
        self._worker = None
        with self._answered_for("removing what a worker left"):
            self._remove_scratch()
        self._idle()

    def broken(self, reason: str) -> None:
        self._dispatch(life.Broke(reason))

    def frame(self, message: ToDaemon) -> None:
        if self.state not in LIVE:
            return
        self._stage = self.state
        with self._answered_for(f"reading a {type(message).__name__}"):
            self._heard(message)

    @contextlib.contextmanager
    def _answered_for(self, what: str) -> Iterator[None]:
        """An error in the block that nobody foresaw costs the worker that runs, and is told; a
        callback of the loop has nobody else to tell."""
        try:
            yield
        except LinkError:
            raise
        except Exception as error:  # noqa: BLE001  # recorded, in the log and the dossier
            _LOG.exception("%s: %s failed", self.spec.name, what)
            self._dispatch(life.Broke(f"{what} failed: {in_words(error)}"))

    def _heard(self, message: ToDaemon) -> None:
        match message:
            case frames.Hello():
                self._hello(message)
            case frames.Stage():
                self._dispatch(life.Progressed(WorkerState(message.stage)))
            case frames.Ready():
                self._described(judged.description(message.description))
            case frames.LoadFailed():
                self._load_failed(error_of(message.error))
            case frames.Prompted():
                self._streams.prompted(message)
            case frames.Turn():
                self._turn(message)
            case frames.StreamFailed():
                if failed := self._streams.failed(message.stream):
                    failed.fail(error_of(message.error))
                    self._idle()
            case frames.Tokenized() | frames.Detokenized():
                self._requests.answered(message.request, message)
            case frames.Embedded():
                self._requests.answered(message.request, message)
                self._dispatch(life.Moved(served=True))
            case frames.RequestFailed():
                self._requests.answered(message.request, error_of(message.error))
            case frames.Pong():
                self.stats = message.stats
                self._requests.answered(message.number, message)
                self._dispatch(life.Moved(served=False))

    def _hello(self, message: frames.Hello) -> None:
        try:
            require_number("link", found=message.link, wanted=numbers.LINK)
            require_number("adapter kit", found=message.kit, wanted=numbers.KIT)
        except ContractRefused as error:
            self._refuse(error)
        else:
            self._dispatch(life.Greeted())

    def _described(self, description: Description) -> None:
        loading = self.state in LOADING
        self._dispatch(life.Progressed(WorkerState.SERVING))
        if self._kept_children():
            self._dispatch(life.Broke("keeps starting processes though its model is loaded"))
        elif loading and self.state in (WorkerState.SERVING, WorkerState.DRAINING):
            self.description = description
            self.error = None
            if description.plan:
                _LOG.info("%s: memory plan %s", self.spec.name, _planned(description.plan))
            self._loaded = True
            self._streams.serving(description.context)
            self._pump()

    def _kept_children(self) -> bool:
        """Whether processes of the load are left that cannot be ended; theirs is an older, wider
        filter."""
        rights = self.spec.rights
        if self._worker is None or rights is None or not rights.spawn or rights.level == "none":
            return False
        return not self._worker.process.alone()

    def _load_failed(self, error: SuperfluidError) -> None:
        if error.exit_code is ExitCode.FAILURE:
            self._dispatch(life.Broke(f"failed to load: {error.message}"))
        else:
            self._refuse(error)

    def _turn(self, turn: frames.Turn) -> None:
        self.stats = turn.stats
        for delta in turn.deltas:
            self._streams.gained(delta)
        for number, tokens in turn.prefilled.items():
            self._streams.prefilled(number, tokens)
        self._dispatch(life.Moved(served=any(delta.tokens for delta in turn.deltas)))
        self._idle()


_SETTLED: Final = frozenset(
    {WorkerState.SERVING, WorkerState.DRAINING, WorkerState.GAVE_UP, WorkerState.GONE}
)


def _planned(plan: Mapping[str, int]) -> str:
    parts = ", ".join(f"{part} {size >> 20}" for part, size in plan.items())
    return f"{sum(plan.values()) >> 20} MiB ({parts})"
