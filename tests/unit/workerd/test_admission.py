from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from superfluid_adapter_fake.tokenizer import VOCABULARY, ByteTokenizer

from superfluid_workerd.admission import MOST_PARKED, MOST_PASSED, Waiting
from superfluid_workerd.codec.text import TextStream
from superfluid_workerd.link.frames import Class, Sampling
from superfluid_workerd.sampling import Sampler
from superfluid_workerd.stream import Stream
from superfluid_workerd.turns import Policy

_numbers = itertools.count(1)


def _stream(service_class: Class = "agent", arrived: float = 0.0, reserve: int = 1) -> Stream:
    return Stream(
        number=next(_numbers),
        history=[1],
        prompt_tokens=1,
        limit=1,
        stops=frozenset(),
        sampler=Sampler(Sampling(), VOCABULARY),
        text=TextStream(),
        tokenizer=ByteTokenizer(),
        service_class=service_class,
        arrived=arrived,
        queued=arrived,
        reserve=reserve,
    )


def _nobody(_stream: Stream) -> bool:
    return False


class _Room:
    """A line and who runs, admitting as the turn loop does; `now` is the time."""

    def __init__(self, lanes: int = 2, pool: int = 0, **policy: Any) -> None:
        self.waiting = Waiting(lanes, dataclasses.replace(Policy(), **policy), pool)
        self.running: list[Stream] = []
        self.now = 0.0

    def add(self, *streams: Stream) -> None:
        for stream in streams:
            self.waiting.add(stream)

    def admit(self, follows: Callable[[Stream], bool] = _nobody) -> list[Stream]:
        admitted = []
        while (stream := self.waiting.next(self.running, follows)) is not None:
            self._seat(stream)
            admitted.append(stream)
        return admitted

    def victims(self, follows: Callable[[Stream], bool] = _nobody) -> list[Stream]:
        found = self.waiting.preemption(self.running, follows)
        return [] if found is None else found[1]

    def preempt(self) -> Stream | None:
        """Carry one preemption out; who got the room."""
        found = self.waiting.preemption(self.running, _nobody)
        if found is None:
            return None
        arrival, victims = found
        for victim in victims:
            self.running.remove(victim)
            victim.queued = self.now
            victim.parkings += 1
            self.waiting.add(victim)
        self._seat(arrival)
        return arrival

    def _seat(self, stream: Stream) -> None:
        self.waiting.remove(stream)
        stream.began = self.now
        stream.waited += self.now - stream.queued
        self.running.append(stream)


def test_within_a_class_who_came_first_goes_first() -> None:
    room = _Room()
    late, early, last = _stream(arrived=2), _stream(arrived=1), _stream(arrived=3)
    room.add(late, early, last)
    assert room.admit() == [early, late]


def test_a_class_further_up_goes_first_until_the_other_waited_long_enough() -> None:
    background = _stream("background", arrived=0)
    for arrived, first in ((29.0, False), (31.0, True)):
        room = _Room(lanes=1, class_ageing_ms=10_000)
        chat = _stream("interactive", arrived=arrived)
        room.add(background, chat)
        assert room.admit() == [background if first else chat]


def test_a_class_holds_at_most_its_lanes_and_keeps_nobody_waiting() -> None:
    room = _Room(lanes=3, background_lanes=1)
    backgrounds = [_stream("background", arrived=i) for i in range(3)]
    agent = _stream(arrived=5)
    room.add(*backgrounds, agent)
    assert room.admit() == [agent, backgrounds[0]]
    room.running.remove(backgrounds[0])
    assert room.admit() == [backgrounds[1]]


def test_a_stream_that_does_not_fit_lets_others_pass_and_is_not_passed_for_ever() -> None:
    """Lanes facts, failure 11: a head with a large need blocks the small, or starves itself."""
    room = _Room(lanes=8, pool=100)
    big = _stream(arrived=0, reserve=90)
    first = _stream(arrived=-1, reserve=20)
    room.add(first, big)
    assert room.admit() == [first]
    passed = 0
    for arrived in range(1, 100):
        room.add(_stream(arrived=arrived, reserve=20))
        admitted = room.admit()
        if big in admitted:
            break
        passed += len(admitted)
        room.running.pop(0)
    assert big in room.running
    assert passed == MOST_PASSED


def test_the_reserved_never_exceed_the_pool() -> None:
    room = _Room(lanes=8, pool=100)
    room.add(*(_stream(arrived=i, reserve=40) for i in range(5)))
    assert len(room.admit()) == 2


def test_who_waits_for_a_prefill_keeps_nobody_waiting() -> None:
    room = _Room(lanes=2)
    follower, other = _stream(arrived=0), _stream(arrived=1)
    room.add(follower, other)
    assert room.admit(lambda it: it is follower) == [other]
    assert room.admit() == [follower]


def test_an_interactive_stream_takes_the_lane_of_the_lowest_class_that_came_last() -> None:
    room = _Room(lanes=3)
    agent, early, late = (
        _stream("agent", 5), _stream("background", 1), _stream("background", 2)
    )  # fmt: skip
    room.add(agent, early, late)
    room.admit()
    assert room.victims() == []
    room.add(_stream("interactive", 6))
    assert room.admit() == []
    assert room.victims() == [late]


@pytest.mark.parametrize("service_class", ["completion", "agent", "background"])
def test_no_other_class_takes_a_lane(service_class: Class) -> None:
    room = _Room(lanes=1)
    room.add(_stream("background", 0))
    room.admit()
    room.add(_stream(service_class, 1))
    assert room.victims() == []


def test_no_equal_gives_up_its_lane() -> None:
    room = _Room(lanes=1)
    room.add(_stream("interactive", 0))
    room.admit()
    room.add(_stream("interactive", 1))
    assert room.victims() == []


@pytest.mark.parametrize("ageing_ms", [0, 1, 10_000])
@pytest.mark.parametrize("service_class", ["completion", "agent", "background"])
def test_a_lane_is_given_up_however_long_it_was_held(service_class: Class, ageing_ms: int) -> None:
    for ran_s in (0.001, 11, 31, 100_000):
        room = _Room(lanes=2, class_ageing_ms=ageing_ms)
        early, late = _stream(service_class, 0), _stream(service_class, 0.0001)
        room.add(early, late)
        room.now = 0.0002
        room.admit()
        room.now = ran_s
        room.add(_stream("interactive", ran_s))
        assert room.victims() == [late]


def test_a_long_wait_does_not_keep_a_lane_from_one_that_comes_later() -> None:
    room = _Room(lanes=1, class_ageing_ms=10_000)
    low = _stream("background", 0)
    room.add(low)
    room.now = 60
    room.admit()
    room.now = 61
    room.add(_stream("interactive", 61))
    assert room.victims() == [low]


def test_who_aged_past_an_interactive_stream_keeps_the_lane_that_it_got() -> None:
    """Else the two would take it from each other without end."""
    room = _Room(lanes=1, class_ageing_ms=10_000)
    held, low, chat = (
        _stream("interactive", 0), _stream("background", 1), _stream("interactive", 40)
    )  # fmt: skip
    room.add(held)
    room.admit()
    room.add(low, chat)
    room.now = 50
    room.running.remove(held)
    assert room.admit() == [low]
    assert room.victims() == []


def test_the_room_belongs_to_whom_it_was_made_for() -> None:
    """One that was ahead in line would else have taken it."""
    room = _Room(lanes=1, class_ageing_ms=10_000)
    low, agent, chat = (
        _stream("background", 0), _stream("agent", 1), _stream("interactive", 25)
    )  # fmt: skip
    room.add(low)
    room.admit()
    room.now = 25
    room.add(agent, chat)
    assert next(iter(room.waiting)) is agent
    assert room.preempt() is chat
    assert room.running == [chat]


def test_who_gave_up_a_lane_goes_before_its_equals_and_only_waiting_ages_it() -> None:
    room = _Room(lanes=1, class_ageing_ms=10_000)
    low = _stream("background", 0)
    room.add(low)
    room.admit()
    room.now = 100
    equal, newer = _stream("background", 50), _stream("background", 101)
    agent, chat = _stream("agent", 99), _stream("interactive", 100)
    room.add(equal, agent, chat)
    assert room.preempt() is chat
    room.now = 101
    room.add(newer)
    order = []
    while room.running:
        order.append(room.running.pop())
        room.admit()
    # What waited fifty seconds is before the agent, and takes its elder along.
    assert order == [chat, low, equal, agent, newer]


def test_nobody_gives_up_its_lane_for_ever() -> None:
    room = _Room(lanes=1, class_ageing_ms=10_000)
    low = _stream("background", 0)
    room.add(low)
    room.admit()
    parked = 0
    for round_ in range(100):
        room.now = 100 * round_ + 50.0
        room.add(_stream("interactive", room.now))
        if room.preempt() is None:
            break
        parked += 1
        room.running.clear()
        room.now += 40
        assert room.admit() == [low]
    assert room.running == [low]
    assert parked == MOST_PARKED


def test_nobody_gives_up_a_lane_for_one_that_its_cap_or_a_prefill_holds_back() -> None:
    room = _Room(lanes=2, interactive_lanes=1)
    room.add(_stream("interactive", 0), _stream("background", 0))
    room.admit()
    chat = _stream("interactive", 1)
    room.add(chat)
    assert room.victims() == []
    free = _Room(lanes=1)
    free.add(_stream("background", 0))
    free.admit()
    free.add(chat)
    assert free.victims(lambda it: it is chat) == []


def test_a_lack_of_memory_is_made_good_like_a_lack_of_lanes() -> None:
    room = _Room(lanes=4, pool=100)
    low = _stream("background", 0, reserve=90)
    room.add(low)
    room.admit()
    room.add(_stream("interactive", 1, reserve=20))
    assert room.admit() == []
    assert room.victims() == [low]


def test_as_many_give_way_as_it_takes_and_nobody_where_that_would_not_do() -> None:
    room = _Room(lanes=4, pool=100)
    low = [_stream("background", n, reserve=30) for n in range(3)]
    room.add(*low)
    room.admit()
    room.add(_stream("interactive", 5, reserve=60))
    assert room.victims() == [low[2], low[1]]
    crowded = _Room(lanes=4, pool=100)
    crowded.add(_stream("interactive", 0, reserve=50), _stream("background", 0, reserve=30))
    crowded.admit()
    crowded.add(_stream("interactive", 5, reserve=60))
    assert crowded.victims() == []


_DRAWN = st.lists(
    st.tuples(
        st.sampled_from(["interactive", "completion", "agent", "background"]),
        st.integers(0, 60),
        st.integers(1, 50),
    ),
    max_size=25,
)


@given(_DRAWN, st.integers(1, 4), st.sampled_from([0, 50, 120]), st.integers(0, 2))
def test_every_stream_is_served_in_the_end(
    drawn: list[tuple[Class, int, int]], lanes: int, pool: int, cap: int
) -> None:
    room = _Room(lanes=lanes, pool=pool, agent_lanes=cap)
    streams = [_stream(*each) for each in drawn]
    room.add(*streams)
    served: list[Stream] = []
    for _ in range(len(streams) + 1):
        room.admit()
        assert len(room.running) <= lanes
        assert not pool or sum(it.reserve for it in room.running) <= pool
        assert not cap or _count(room.running, "agent") <= cap
        if room.running:
            served.append(room.running.pop(0))
    assert sorted(it.number for it in served) == sorted(it.number for it in streams)
    for name in {it.service_class for it in streams} if not pool else set():
        order = [it.arrived for it in served if it.service_class == name]
        assert order == sorted(order)


def _count(streams: Collection[Stream], service_class: Class) -> int:
    return sum(it.service_class == service_class for it in streams)
