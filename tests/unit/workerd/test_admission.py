from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from superfluid_adapter_fake.tokenizer import VOCABULARY, ByteTokenizer

from superfluid_workerd.admission import MOST_PASSED, Waiting
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
        reserve=reserve,
    )


def _nobody(_stream: Stream) -> bool:
    return False


class _Room:
    """A line and who runs, admitting as the turn loop does."""

    def __init__(self, lanes: int = 2, pool: int = 0, **policy: Any) -> None:
        self.waiting = Waiting(lanes, dataclasses.replace(Policy(), **policy), pool)
        self.running: list[Stream] = []

    def add(self, *streams: Stream) -> None:
        for stream in streams:
            self.waiting.add(stream)

    def admit(self, follows: Callable[[Stream], bool] = _nobody) -> list[Stream]:
        admitted = []
        while (stream := self.waiting.next(self.running, follows)) is not None:
            self.waiting.remove(stream)
            self.running.append(stream)
            admitted.append(stream)
        return admitted

    def victims(self, follows: Callable[[Stream], bool] = _nobody) -> list[Stream]:
        return self.waiting.victims(self.running, follows)


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


def test_neither_an_equal_nor_one_that_waited_long_gives_up_its_lane() -> None:
    for held in (_stream("interactive", 0), _stream("background", -31)):
        room = _Room(lanes=1, class_ageing_ms=10_000)
        room.add(held)
        room.admit()
        room.add(_stream("interactive", 1))
        assert room.victims() == []


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
