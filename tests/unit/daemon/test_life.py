"""The worker's life as a machine: named paths, then every order of events."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from superfluid.supervisor.life import (
    Action,
    Broke,
    Bury,
    Drain,
    Elapsed,
    End,
    Event,
    Exited,
    GiveUp,
    Greeted,
    Halt,
    Idle,
    Kill,
    Life,
    Limits,
    Moved,
    Progressed,
    Refused,
    SendLoad,
    SendPing,
    SendShutdown,
    Spawn,
    Start,
)
from superfluid.supervisor.states import (
    LADDER,
    LIVE,
    TRANSITIONS,
    WITH_PROCESS,
    WorkerState,
    follow,
)

S = WorkerState
LIMITS = Limits(
    still_s=dict.fromkeys(LADDER, 10.0),
    ping_s=2.0,
    backoff_s=1.0,
    backoff_most_s=4.0,
    failures=4,
    failures_since=7,
    shutdown_s=3.0,
)
UP: Sequence[Event] = (
    Start(),
    Greeted(),
    Progressed(S.PROBED),
    Progressed(S.MAPPED),
    Progressed(S.WARMED),
    Progressed(S.SERVING),
)


def fed(life: Life, events: Sequence[Event], now: float = 0.0) -> list[Action]:
    return [action for event in events for action in life.handle(event, now)]


def at(state: WorkerState) -> Life:
    """A life that has climbed to `state`."""
    life = Life(LIMITS)
    fed(life, UP[: LADDER.index(state) + 1])
    assert life.state is state
    return life


def test_the_way_up_spawns_once_and_loads_once() -> None:
    life = Life(LIMITS)
    assert fed(life, UP) == [Spawn(), SendLoad()]
    assert life.state is S.SERVING


def test_a_worker_may_skip_stages_but_not_go_back() -> None:
    life = at(S.HANDSHAKEN)
    assert fed(life, [Progressed(S.SERVING)]) == []
    assert life.state is S.SERVING
    life = at(S.MAPPED)
    assert fed(life, [Progressed(S.PROBED)]) == [End()]
    assert life.state is S.FAILED


@pytest.mark.parametrize("state", LADDER)
def test_an_exit_on_any_rung_is_buried_at_that_rung_and_tried_again(state: WorkerState) -> None:
    life = at(state)
    assert fed(life, [Exited("killed by SIGSEGV")]) == [Bury(state, "killed by SIGSEGV")]
    assert (life.state, life.deadline) == (S.BACKOFF, 1.0)
    assert life.handle(Elapsed(), 0.9) == []
    assert life.handle(Elapsed(), 1.0) == [Spawn()]


@pytest.mark.parametrize("state", LADDER)
def test_a_breach_ends_the_process_and_waits_for_it(state: WorkerState) -> None:
    life = at(state)
    assert fed(life, [Broke("a bad frame")]) == [End()]
    assert (life.state, life.deadline) == (S.FAILED, None)
    assert fed(life, [Broke("another"), Moved(served=True)]) == []
    assert fed(life, [Exited("killed by SIGTERM")]) == [
        Bury(state, "a bad frame; killed by SIGTERM")
    ]


def test_waits_double_up_to_a_bound_and_then_it_gives_up() -> None:
    life, now, waits = Life(LIMITS), 0.0, list[float]()
    fed(life, [Start()])
    for _ in range(LIMITS.failures - 1):
        life.handle(Exited("died"), now)
        assert life.deadline is not None
        waits.append(life.deadline - now)
        now = life.deadline
        assert life.handle(Elapsed(), now) == [Spawn()]
    assert waits == [1.0, 2.0, 4.0]
    assert life.handle(Exited("died"), now)[-1] == GiveUp("died", refused=False)
    assert life.state is S.GAVE_UP


def test_what_has_served_is_given_longer_to_serve_again() -> None:
    """What keeps every load from ending may be an outage of the machine that passes."""
    life = at(S.SERVING)
    fed(life, [Moved(served=True)])
    for failure in range(1, LIMITS.failures_since):
        fed(life, [Exited("died")])
        assert (life.state, life.failures) == (S.BACKOFF, failure)
        fed(life, [Elapsed()], 100.0)
    assert fed(life, [Exited("died")])[-1] == GiveUp("died", refused=False)


def test_after_giving_up_it_may_end_and_be_started_afresh() -> None:
    life = at(S.PROBED)
    fed(life, [Refused("no"), Exited("done")])
    assert fed(life, [Start(), Elapsed()]) == []
    assert fed(life, [Halt(), Start()]) == [Spawn()]
    assert (life.state, life.failures) == (S.SPAWNED, 0)


def test_a_served_turn_forgives_earlier_failures() -> None:
    life = at(S.SERVING)
    for _ in range(10 * LIMITS.failures):
        fed(life, [Moved(served=True), Exited("died")])
        assert life.state is S.BACKOFF
        assert life.deadline is not None
        fed(life, [Elapsed(), *UP[1:]], life.deadline)


def test_a_death_that_a_stream_explains_counts_for_nothing_once_it_has_served() -> None:
    life = Life(LIMITS)
    for _ in range(3 * LIMITS.failures):
        fed(life, [*UP, Moved(served=True)] if life.state is S.GONE else UP[1:])
        fed(life, [Exited("died", explained=True)])
        assert (life.state, life.failures) == (S.BACKOFF, 1)
        assert life.handle(Elapsed(), 100.0) == [Spawn()]


def test_an_explanation_does_not_spare_a_worker_that_never_served() -> None:
    life = Life(LIMITS)
    life.handle(Start(), 0.0)
    for _ in range(LIMITS.failures):
        fed(life, [*UP[1:], Exited("died", explained=True)])
        life.handle(Elapsed(), 100.0)
    assert life.state is S.GAVE_UP


def test_the_next_load_waits_for_memory_within_a_bound() -> None:
    life = at(S.SERVING)
    fed(life, [Exited("died")])
    assert life.handle(Elapsed(room=False), 1.0) == []
    assert life.deadline is not None
    assert 1.0 < life.deadline < 2.0
    assert life.handle(Elapsed(room=False), 10.9) == []
    assert life.handle(Elapsed(room=False), 11.0) == [Spawn()]
    other = at(S.SERVING)
    fed(other, [Exited("died")])
    assert other.handle(Elapsed(room=False), 1.0) == []
    assert other.handle(Elapsed(room=True), 1.2) == [Spawn()]


def test_a_burial_says_what_comes_next() -> None:
    (bury,) = fed(at(S.SERVING), [Exited("died")])
    assert isinstance(bury, Bury)
    assert bury.then == "another worker after 1 s"


def test_a_turn_that_serves_nobody_forgives_nothing() -> None:
    life = at(S.SERVING)
    fed(life, [Exited("died"), Elapsed()])
    fed(life, [Elapsed(), *UP[1:], Moved(served=False)], 1.0)
    assert life.failures == 1


def test_a_refused_load_is_not_tried_again_and_leaves_no_dossier() -> None:
    life = at(S.PROBED)
    assert fed(life, [Refused("no such architecture")]) == [End()]
    assert fed(life, [Exited("exited with code 3", final=True)]) == [
        GiveUp("no such architecture", refused=True)
    ]


def test_an_exit_code_that_is_final_stops_a_load_but_not_a_server() -> None:
    loading, serving = at(S.MAPPED), at(S.SERVING)
    exited = Exited("exited with code 3", final=True)
    assert fed(loading, [exited])[-1] == GiveUp("exited with code 3", refused=True)
    assert fed(serving, [exited]) == [Bury(S.SERVING, "exited with code 3")]
    assert serving.state is S.BACKOFF


def test_only_lack_of_progress_times_a_load_out() -> None:
    life = at(S.MAPPED)
    for now in range(5, 500, 5):
        assert life.handle(Progressed(S.MAPPED), now) == []
        assert life.handle(Elapsed(), now + 4.9) == []
    assert life.handle(Elapsed(), 505.0) == [End()]
    assert life.handle(Exited("killed"), 505.0) == [
        Bury(S.MAPPED, "made no progress for 10 s while mapped; killed")
    ]


def test_a_quiet_turn_loop_is_pinged_and_a_deaf_one_ended() -> None:
    life, sent = at(S.SERVING), list[Action]()
    while life.state is S.SERVING:
        assert life.deadline is not None
        sent += life.handle(Elapsed(), life.deadline)
    assert sent == [SendPing()] * 4 + [End()]


def test_an_answering_turn_loop_lives_on() -> None:
    life = at(S.SERVING)
    for _ in range(100):
        assert life.deadline is not None
        now = life.deadline
        assert life.handle(Elapsed(), now) == [SendPing()]
        assert life.handle(Moved(served=False), now) == []
    assert life.state is S.SERVING


def test_what_has_served_may_refuse_a_load_and_be_tried_again() -> None:
    life = at(S.SERVING)
    fed(life, [Moved(served=True), Exited("died")])
    for failure in range(2, LIMITS.failures_since):
        fed(life, [Elapsed()], 100.0 * failure)
        assert fed(life, [*UP[1:3], Refused("no room")], 100.0 * failure) == [SendLoad(), End()]
        (buried,) = fed(life, [Exited("exited with code 3", final=True)], 100.0 * failure)
        assert buried == Bury(S.PROBED, "no room; exited with code 3")
        assert (life.state, life.failures) == (S.BACKOFF, failure)
    fed(life, [Elapsed()], 1000.0)
    last = fed(life, [Exited("exited with code 4", final=True)], 1000.0)[-1]
    assert last == GiveUp("exited with code 4", refused=False)


def test_a_drain_lets_streams_end_then_shuts_down() -> None:
    life = at(S.SERVING)
    assert fed(life, [Drain(30.0), Moved(served=True)]) == []
    assert (life.state, life.leaving) == (S.DRAINING, True)
    assert life.handle(Idle(), 5.0) == [SendShutdown()]
    assert life.handle(Idle(), 5.0) == []
    assert life.handle(Exited("exited with code 0"), 6.0) == []
    assert life.state is S.GONE


def test_no_process_outlives_the_bound_of_a_drain() -> None:
    life = at(S.SERVING)
    fed(life, [Drain(5.0)])
    assert life.handle(Elapsed(), 2.0) == [SendPing()]
    assert life.handle(Moved(served=True), 4.0) == []
    assert life.handle(Elapsed(), 5.0) == [End(), Kill()]
    assert life.handle(Moved(served=True), 5.0) == []
    assert life.handle(Exited("killed"), 5.1) == []
    assert life.state is S.GONE


def test_a_worker_that_does_not_shut_down_is_ended_and_killed_at_the_bound() -> None:
    life = at(S.SERVING)
    fed(life, [Drain(5.0)])
    assert life.handle(Idle(), 1.0) == [SendShutdown()]
    assert life.handle(Elapsed(), 4.0) == [End()]
    assert life.deadline == 5.0
    assert life.handle(Elapsed(), 5.0) == [Kill()]
    assert life.deadline is None
    assert life.handle(Exited("killed"), 5.1) == []
    assert life.state is S.GONE


def test_a_death_while_draining_is_a_pause_and_the_bound_stays() -> None:
    life = at(S.SERVING)
    fed(life, [Drain(30.0)])
    assert life.handle(Exited("killed by SIGSEGV"), 2.0) == [Bury(S.SERVING, "killed by SIGSEGV")]
    assert life.handle(Elapsed(), 3.0) == [Spawn()]
    assert fed(life, UP[1:], 4.0) == [SendLoad()]
    assert life.handle(Drain(90.0), 5.0) == []
    for now in range(6, 30):
        assert life.handle(Moved(served=True), now) == []
    assert life.handle(Elapsed(), 30.0) == [End(), Kill()]
    assert life.handle(Exited("killed by SIGKILL"), 30.1) == []
    assert life.state is S.GONE


def test_a_turn_loop_that_hangs_while_draining_is_replaced() -> None:
    life = at(S.SERVING)
    fed(life, [Drain(50.0)])
    for now in (2.0, 4.0, 6.0, 8.0):
        assert life.handle(Elapsed(), now) == [SendPing()]
    assert life.handle(Elapsed(), 10.0) == [End()]
    assert life.handle(Exited("killed"), 10.0) == [
        Bury(S.SERVING, "made no progress for 10 s while draining; killed")
    ]
    assert life.handle(Elapsed(), 11.0) == [Spawn()]


@pytest.mark.parametrize("state", [*LADDER[:-1], S.BACKOFF, S.FAILED])
@pytest.mark.parametrize("event", [Idle(), Elapsed()])
def test_a_drain_ends_a_worker_on_its_way_when_nobody_waits_or_its_bound_comes(
    state: WorkerState, event: Event
) -> None:
    life = at(state if state in LADDER else S.SERVING)
    if state is S.FAILED:
        fed(life, [Broke("garbage")])
    elif state is S.BACKOFF:
        fed(life, [Exited("died")])
    assert fed(life, [Drain(0.5)]) == []
    assert life.state is state
    ended = life.handle(event, 0.5)
    kill = [Kill()] if isinstance(event, Elapsed) and state is not S.BACKOFF else []
    assert ended == [*([End()] if state in LADDER else []), *kill]
    if state is not S.BACKOFF:
        fed(life, [Exited("killed")], 0.6)
    assert (life.state, life.deadline) == (S.GONE, None)


def test_a_halt_waits_for_nothing() -> None:
    life = at(S.MAPPED)
    assert fed(life, [Halt()]) == [End()]
    assert fed(life, [Exited("killed by SIGTERM")]) == []
    assert life.state is S.GONE
    life = at(S.SERVING)
    assert fed(life, [Broke("garbage"), Halt()]) == [End()]
    assert fed(life, [Exited("killed")]) == [Bury(S.SERVING, "garbage; killed")]
    assert life.state is S.GONE


def test_a_second_hello_or_an_early_turn_breaks_the_protocol() -> None:
    for event in (Greeted(), Progressed(S.HANDSHAKEN), Moved(served=True)):
        life = at(S.HANDSHAKEN)
        assert fed(life, [event]) == [End()]
    life = at(S.SPAWNED)
    assert fed(life, [Progressed(S.SERVING)]) == [End()]


def test_every_pair_of_states_is_a_named_transition_or_refused() -> None:
    for before, after in itertools.product(S, S):
        if (before, after) in TRANSITIONS:
            assert follow(before, after) is after
        else:
            with pytest.raises(ValueError, match="does not go"):
                follow(before, after)


STAGES = st.sampled_from(LADDER[1:])
WORKER_EVENTS = st.one_of(
    st.just(Greeted()),
    STAGES.map(Progressed),
    st.booleans().map(lambda served: Moved(served=served)),
    st.just(Broke("broke")),
    st.just(Refused("refused")),
)
OWNER_EVENTS = st.one_of(
    st.just(Start()), st.floats(0, 60).map(Drain), st.just(Idle()), st.just(Halt())
)


class AnyLife(RuleBasedStateMachine):
    """Plays worker, owner and clock against the machine; the world obeys its actions."""

    def __init__(self) -> None:
        super().__init__()
        self.life = Life(LIMITS)
        self.now = 0.0
        self.processes = 0
        self.ended = False
        self.killed = False
        self.leave_by = float("inf")

    def give(self, event: Event) -> None:
        before = self.life.state
        if isinstance(event, Drain) and not self.life.leaving:
            self.leave_by = self.now + event.bound_s
        actions = self.life.handle(event, self.now)
        if self.life.state is S.GONE:
            self.leave_by = float("inf")
        for action in actions:
            if isinstance(action, Spawn):
                assert self.now < self.leave_by
                self.processes += 1
                self.ended = self.killed = False
            elif isinstance(action, End):
                assert self.processes == 1
                assert not self.ended, "a process is ended once"
                self.ended = True
            elif isinstance(action, Kill):
                assert self.processes == 1
                assert self.now >= self.leave_by
                self.killed = True
            elif isinstance(action, (Bury, GiveUp)):
                assert self.processes == 0
            else:
                assert before in LIVE

    @rule(event=WORKER_EVENTS)
    @precondition(lambda self: self.processes == 1)
    def worker(self, event: Event) -> None:
        self.give(event)

    @rule(event=OWNER_EVENTS)
    def owner(self, event: Event) -> None:
        self.give(event)

    @rule(final=st.booleans())
    @precondition(lambda self: self.processes == 1)
    def dies(self, final: bool) -> None:
        self.processes, self.ended, self.killed = 0, False, False
        self.give(Exited("died", final=final))

    @rule(seconds=st.floats(0, 100))
    def waits(self, seconds: float) -> None:
        self.now += seconds
        self.give(Elapsed())

    @rule()
    @precondition(lambda self: self.life.deadline is not None)
    def waits_for_the_deadline(self) -> None:
        assert self.life.deadline is not None
        self.now = max(self.now, self.life.deadline)
        before = (self.life.state, self.life.deadline)
        self.give(Elapsed())
        assert (self.life.state, self.life.deadline) != before, "a due timer changes something"

    @invariant()
    def a_process_stands_behind_exactly_these_states(self) -> None:
        assert (self.life.state in WITH_PROCESS) == (self.processes == 1)

    @invariant()
    def nothing_waits_for_ever(self) -> None:
        """Either a bounded timer runs, or an ended process is waited for, or all is at rest."""
        resting = self.life.state in (S.GONE, S.GAVE_UP)
        if self.life.deadline is None:
            assert resting or self.ended
        else:
            assert not resting
            assert self.life.leaving or not self.ended
        if self.life.deadline is not None:
            assert self.life.deadline <= self.now + 60.0

    @invariant()
    def a_drain_ends_at_its_bound(self) -> None:
        """As soon as time is told, no process is left that was not killed."""
        due = self.life.deadline is not None and self.life.deadline <= self.now
        assert self.processes == 0 or self.killed or due or self.now < self.leave_by

    @invariant()
    def failures_are_bounded(self) -> None:
        assert 0 <= self.life.failures <= LIMITS.failures_since


AnyLife.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestAnyLife = AnyLife.TestCase
