"""The life of one model's worker as a pure machine: events and the time in, actions out.

    spawned → handshaken → probed → mapped → warmed → serving → draining → gone
                         ↘ failed → backoff → spawned … → gave-up

It starts no process and reads no clock. Whoever drives it carries out the actions in order and
calls again with `Elapsed` when `deadline` has come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from superfluid.supervisor.states import (
    LADDER,
    LIVE,
    LOADING,
    WITH_PROCESS,
    WorkerState,
    follow,
)

S = WorkerState
_STILL_S: Final = {
    S.SPAWNED: 60.0,
    S.HANDSHAKEN: 120.0,
    S.PROBED: 120.0,
    S.MAPPED: 180.0,
    S.WARMED: 120.0,
    S.SERVING: 60.0,
}
_ROOM_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Limits:
    """How patient a life is. `still_s`: longest time without progress, by state.

    The wait after failure n is `backoff_s` · 2ⁿ⁻¹, at most `backoff_most_s`; `failures` of them
    end a life that has not served a turn yet, `failures_since` without a turn served in between one
    that has: what worked before may be held up by something that passes. The next load waits at
    most `room_s` longer for the memory of the last.
    """

    still_s: Mapping[WorkerState, float] = field(default_factory=lambda: dict(_STILL_S))
    ping_s: float = 5.0
    backoff_s: float = 0.1
    backoff_most_s: float = 30.0
    failures: int = 5
    failures_since: int = 8
    room_s: float = 10.0
    shutdown_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Start:
    """A worker is wanted."""


@dataclass(frozen=True, slots=True)
class Greeted:
    """The worker's `Hello` came and its numbers are ours."""


@dataclass(frozen=True, slots=True)
class Progressed:
    """The load moved, within or up to `stage`."""

    stage: WorkerState


@dataclass(frozen=True, slots=True)
class Moved:
    """The turn loop gave a sign; `served` when it committed a token."""

    served: bool


@dataclass(frozen=True, slots=True)
class Broke:
    """The worker did what it must not."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker said why it will never serve this."""

    reason: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The process is reaped. `final`: its exit code says that another try would end alike;
    `explained`: one stream is to blame, not the worker."""

    reason: str
    final: bool = False
    explained: bool = False


@dataclass(frozen=True, slots=True)
class Drain:
    """No new streams; those that run have `bound_s`, and another worker if theirs dies. No process
    outlives the bound."""

    bound_s: float


@dataclass(frozen=True, slots=True)
class Idle:
    """No stream runs any more."""


@dataclass(frozen=True, slots=True)
class Halt:
    """End at once."""


@dataclass(frozen=True, slots=True)
class Elapsed:
    """Time passed. `room`: memory for another load is free."""

    room: bool = True


Event: TypeAlias = (
    Start | Greeted | Progressed | Moved | Broke | Refused | Exited | Drain | Idle | Halt | Elapsed
)


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a process."""


@dataclass(frozen=True, slots=True)
class SendLoad:
    """Tell the worker what to load."""


@dataclass(frozen=True, slots=True)
class SendPing:
    """Ask the turn loop for a sign."""


@dataclass(frozen=True, slots=True)
class SendShutdown:
    """Ask the worker to close its runtime and exit."""


@dataclass(frozen=True, slots=True)
class End:
    """Terminate the process group and escalate; `Exited` must follow within a bound."""


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process group without any grace; `Exited` must follow."""


@dataclass(frozen=True, slots=True)
class Bury:
    """The process is gone without having been asked to: write the dossier. `then` says what comes
    next."""

    stage: WorkerState
    reason: str
    then: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No further try. `refused`: the worker said why itself; else it failed too often."""

    reason: str
    refused: bool


Action: TypeAlias = Spawn | SendLoad | SendPing | SendShutdown | End | Kill | Bury | GiveUp


class Life:
    """The machine. `leaving`: a drain was asked for, and this is the last that is wanted."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.state = S.GONE
        self.failures = 0
        self.leaving = False
        self._due: float | None = None
        self._leave_by: float | None = None
        self._proven = False
        self._room_until = 0.0
        self._clear()

    @property
    def deadline(self) -> float | None:
        """When `Elapsed` is due, None when nothing is awaited."""
        known = [at for at in (self._due, self._leave_by) if at is not None]
        return min(known, default=None)

    def _clear(self) -> None:
        """What belongs to one process."""
        self._still_until = 0.0
        self._stage = S.SPAWNED
        self._reason = ""
        self._refused = False
        self._unwanted = False
        self._asked = False
        self._ending = False

    def handle(self, event: Event, now: float) -> list[Action]:
        """What `event` at `now` (monotonic seconds) asks for, in order."""
        match event:
            case Start():
                return self._start(now)
            case Greeted():
                return self._greeted(now)
            case Progressed(stage):
                return self._climb(stage, now, "a stage of the load")
            case Moved(served):
                return self._moved(served, now)
            case Broke(reason):
                return self._fail(reason)
            case Refused(reason):
                return self._refuse(reason)
            case Exited():
                return self._exited(event, now)
            case Drain(bound_s):
                return self._drain(bound_s, now)
            case Idle():
                return self._idle(now)
            case Halt():
                return self._halt()
            case Elapsed(room):
                return self._elapsed(room, now)

    def _to(self, state: WorkerState) -> None:
        self.state = follow(self.state, state)
        if state in LADDER:
            self._stage = state
        self._due = None
        if state in (S.GONE, S.GAVE_UP):
            self._leave_by = None

    def _start(self, now: float) -> list[Action]:
        if self.state is not S.GONE:
            return []
        self.failures, self.leaving = 0, False
        return self._spawn(now)

    def _spawn(self, now: float) -> list[Action]:
        self._to(S.SPAWNED)  # gone → spawned, backoff → spawned
        self._clear()
        self._progress(now)
        return [Spawn()]

    def _progress(self, now: float) -> None:
        self._still_until = now + self._limits.still_s[self._stage]
        self._due = self._still_until
        if self._stage is S.SERVING:
            self._due = min(self._due, now + self._limits.ping_s)

    def _greeted(self, now: float) -> list[Action]:
        if self.state is not S.SPAWNED:
            return self._out_of_place("a second Hello")
        self._to(S.HANDSHAKEN)  # spawned → handshaken
        self._progress(now)
        return [SendLoad()]

    def _climb(self, goal: WorkerState, now: float, what: str) -> list[Action]:
        if self.state not in LOADING - {S.SPAWNED} or self.state is goal is S.HANDSHAKEN:
            return self._out_of_place(f"{what} ({goal})")
        if LADDER.index(goal) < LADDER.index(self.state):
            return self._out_of_place(f"{what} ({goal})")
        while self.state is not goal:  # handshaken → probed → mapped → warmed → serving
            self._to(LADDER[LADDER.index(self.state) + 1])
        if self.leaving and self.state is S.SERVING:
            self._to(S.DRAINING)  # serving → draining
        self._progress(now)
        return []

    def _out_of_place(self, what: str) -> list[Action]:
        if self.state not in LADDER:
            return []
        return self._fail(f"sent {what} while {self.state}")

    def _moved(self, served: bool, now: float) -> list[Action]:
        if self.state in LOADING:
            return self._out_of_place("a turn")
        if self.state is S.SERVING or self._finishing:
            self._progress(now)
        if served and self.state in LIVE:
            self.failures = 0
            self._proven = True
        return []

    @property
    def _finishing(self) -> bool:
        """Its streams have not ended and it was not asked to either."""
        return self.state is S.DRAINING and not (self._asked or self._ending)

    def _end(self) -> list[Action]:
        if self._ending:
            return []
        self._ending = True
        self._due = None
        return [End()]

    def _fail(self, reason: str) -> list[Action]:
        if self.state in LADDER or self._finishing:
            self._to(S.FAILED)  # every rung, draining → failed
            self._reason = reason
            return self._end()
        if self.state is S.DRAINING:
            self._reason = self._reason or reason
            return self._end()
        return []

    def _refuse(self, reason: str) -> list[Action]:
        # What has served refuses for a reason that may pass, such as want of memory.
        if self.state in LADDER and not self._proven:
            self._refused = True
        return self._fail(reason)

    def _exited(self, exited: Exited, now: float) -> list[Action]:
        if self.state is S.DRAINING and not self._finishing:
            return self._exited_draining(exited.reason)
        told = self._refused
        if self.state in LADDER or self.state is S.DRAINING:
            self._refused = exited.final and self.state in LOADING and not self._proven
            self._to(S.FAILED)  # every rung, draining → failed
        if self.state is not S.FAILED:
            return []
        if told:
            return self._after_failure(self._reason, now)
        if exited.explained and self._proven:
            self.failures = 0
        reason = "; ".join(part for part in (self._reason, exited.reason) if part)
        after = self._after_failure(reason, now)
        return [Bury(self._stage, reason, self._then(now)), *after]

    def _then(self, now: float) -> str:
        if self.state is S.BACKOFF and self._due is not None:
            return f"another worker after {self._due - now:.3g} s"
        if self.state is S.GAVE_UP:
            return f"gave up after failure {self.failures} without a turn served"
        return "no other was wanted"

    def _exited_draining(self, reason: str) -> list[Action]:
        expected = self._asked or (self._ending and not self._reason)
        self._to(S.GONE)  # draining → gone
        if expected:
            return []
        return [Bury(self._stage, "; ".join(part for part in (self._reason, reason) if part))]

    def _after_failure(self, reason: str, now: float) -> list[Action]:
        if self._unwanted:
            self._to(S.GONE)  # failed → gone
            return []
        self.failures += 1
        most = self._limits.failures_since if self._proven else self._limits.failures
        if self._refused or self.failures >= most:
            self._to(S.GAVE_UP)  # failed → gave-up
            return [GiveUp(reason, self._refused)]
        self._to(S.BACKOFF)  # failed → backoff
        self._due = now + self._backoff_s()
        self._room_until = self._due + self._limits.room_s
        return []

    def _backoff_s(self) -> float:
        doublings = min(self.failures - 1, 32)
        return min(self._limits.backoff_s * 2.0**doublings, self._limits.backoff_most_s)

    def _drain(self, bound_s: float, now: float) -> list[Action]:
        if self.leaving or self.state is S.GONE:
            return []
        if self.state is S.GAVE_UP:
            return self._halt()
        self.leaving = True
        self._leave_by = now + bound_s
        if self.state is S.SERVING:
            self._to(S.DRAINING)  # serving → draining
            self._progress(now)
        return []

    def _idle(self, now: float) -> list[Action]:
        if not self.leaving or self.state is S.GAVE_UP:
            return []
        return self._shutdown(now) if self.state is S.DRAINING else self._halt()

    def _shutdown(self, now: float) -> list[Action]:
        if self._asked or self._ending:
            return []
        self._asked = True
        self._due = now + self._limits.shutdown_s
        return [SendShutdown()]

    def _halt(self) -> list[Action]:
        self.leaving = True
        if self.state is S.FAILED:
            self._unwanted = True
            return []
        if self.state in LADDER:
            self._to(S.DRAINING)  # every rung → draining
        if self.state is S.DRAINING:
            return self._end()
        if self.state in (S.BACKOFF, S.GAVE_UP):
            self._to(S.GONE)  # backoff → gone, gave-up → gone
        return []

    def _overdue(self) -> list[Action]:
        """The bound of a drain has come: no time is left to end in."""
        self._leave_by = None
        kill = [Kill()] if self.state in WITH_PROCESS else []
        return [*self._halt(), *kill]

    def _elapsed(self, room: bool, now: float) -> list[Action]:
        if self.deadline is None or now < self.deadline:
            return []
        if self._leave_by is not None and now >= self._leave_by:
            return self._overdue()
        if self.state is S.BACKOFF:
            if room or now >= self._room_until:
                return self._spawn(now)
            self._due = now + _ROOM_POLL_S
            return []
        if self._asked:
            return self._end()
        if now >= self._still_until:
            still = self._limits.still_s[self._stage]
            return self._fail(f"made no progress for {still:g} s while {self.state}")
        self._due = min(self._still_until, now + self._limits.ping_s)
        return [SendPing()]
