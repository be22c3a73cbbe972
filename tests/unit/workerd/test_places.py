from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluid_compat.errors import BadFrame, InvalidField, Overloaded
from superfluid_workerd.link.frames import Choices
from superfluid_workerd.places import Places


def test_choices_that_never_fit_are_refused_with_what_fits() -> None:
    places = Places(lanes=2, most_waiting=4)
    with pytest.raises(
        InvalidField, match="n asks for 20 choices, at most 6 fit: 2 lanes"
    ) as caught:
        places.take(1, Choices(group=1, count=20))
    assert caught.value.param == "n"
    with pytest.raises(InvalidField, match="prompt asks for 7 choices"):
        places.take(1, Choices(group=2, count=7, param="prompt"))
    assert len(places) == 0


def test_choices_are_taken_all_or_none() -> None:
    places = Places(lanes=2, most_waiting=4)
    places.take(1)
    for number in range(2, 8):  # Each is refused, also where what is left of them would fit.
        with pytest.raises(Overloaded, match="6 choices were asked for, there is room for 5 now"):
            places.take(number, Choices(group=1, count=6))
    places.take(2, Choices(group=2, count=4))
    places.take(3)
    with pytest.raises(Overloaded):
        places.take(4)  # What is kept for choices is nobody else's.
    for number in (5, 6, 7):
        places.take(number, Choices(group=2, count=4))
    assert len(places) == 6


def test_what_choices_did_not_use_is_free_when_the_last_of_them_is_gone() -> None:
    places = Places(lanes=1, most_waiting=3)
    places.take(1, Choices(group=1, count=4))
    places.take(2, Choices(group=1, count=4))
    places.give_back(1)
    with pytest.raises(Overloaded):
        places.take(3, Choices(group=2, count=2))
    places.give_back(2)
    places.take(3, Choices(group=2, count=4))


def test_a_number_is_taken_once() -> None:
    places = Places(lanes=1, most_waiting=3)
    places.take(1)
    with pytest.raises(BadFrame, match="stream 1"):
        places.take(1)
    places.give_back(1)
    places.give_back(1)
    places.take(1)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5), st.booleans()), max_size=30))
def test_there_are_never_more_than_places_and_in_the_end_all_are_free(
    asked: list[tuple[int, int, bool]],
) -> None:
    places = Places(lanes=2, most_waiting=3)
    number = 0
    for group, (count, come, leave) in enumerate(asked):
        choices = Choices(group=group, count=count) if count > 1 else None
        accepted = []
        for index in range(min(come, count)):
            number += 1
            try:
                places.take(number, choices)
            except Overloaded:
                assert index == 0, "some of them were taken"
                break
            accepted.append(number)
        assert len(places) <= 5
        for each in accepted if leave else []:
            places.give_back(each)
    for each in places.numbers():
        places.give_back(each)
    places.take(0, Choices(group=-1, count=5))
