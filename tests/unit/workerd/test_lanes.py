from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluid_workerd.lanes import Lane, LaneTable, StaleLane


def _take(table: LaneTable) -> Lane:
    lane = table.take()
    assert lane is not None
    return lane


def test_the_lowest_free_lane_comes_first() -> None:
    table = LaneTable(3)
    first, second = _take(table), _take(table)
    table.give_back(first)
    again = _take(table)
    assert (first.index, second.index, again.index) == (0, 1, 0)
    assert again != first
    assert table.taken == [again, second]
    assert table.free == 1


def test_a_full_table_gives_nothing() -> None:
    table = LaneTable(1)
    _take(table)
    assert table.take() is None


def test_a_table_without_lanes_is_refused() -> None:
    with pytest.raises(ValueError, match="0 lanes"):
        LaneTable(0)


def test_only_a_taken_lane_can_be_given_back() -> None:
    table = LaneTable(2)
    lane = _take(table)
    table.give_back(lane)
    for stale in (lane, Lane(1, 0), Lane(7, 0)):
        with pytest.raises(StaleLane):
            table.give_back(stale)


def test_a_stale_handle_cannot_touch_the_next_holder() -> None:
    table = LaneTable(1)
    old = _take(table)
    table.give_back(old)
    new = _take(table)
    with pytest.raises(StaleLane):
        table.seat([old])
    with pytest.raises(StaleLane):
        table.give_back(old)
    assert table.taken == [new]


def test_seats_are_taken_distinct_and_in_the_order_given() -> None:
    table = LaneTable(3)
    lanes = [_take(table) for _ in range(3)]
    table.give_back(lanes[1])
    assert table.seat([lanes[2], lanes[0]]) == (lanes[2], lanes[0])
    with pytest.raises(StaleLane):
        table.seat([lanes[0], lanes[1]])
    with pytest.raises(ValueError, match="named twice"):
        table.seat([lanes[0], lanes[0]])


@given(st.integers(1, 6), st.lists(st.integers(0, 9), max_size=60))
def test_a_table_equals_a_plain_model_of_it(count: int, moves: list[int]) -> None:
    table = LaneTable(count)
    held: dict[int, Lane] = {}
    seen: set[Lane] = set()
    for move in moves:
        free = sorted(set(range(count)) - held.keys())
        if move < 5:
            lane = table.take()
            assert (lane.index if lane else None) == (free[0] if free else None)
            if lane is not None:
                assert lane not in seen
                seen.add(lane)
                held[lane.index] = lane
        elif held:
            lane = held.pop(sorted(held)[move % len(held)])
            table.give_back(lane)
        assert table.taken == sorted(held.values())
        assert table.free == count - len(held)
