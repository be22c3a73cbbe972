from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superfluid_compat.errors import BadOptionValue
from superfluid_workerd.options import WORKER
from superfluid_workerd.turns import Policy, Ready, Seat, linger_s, plan

WIDE = Policy(max_seats=64, turn_tokens=32, prompt_chunk=32)


def _decoder(order: int, seated: int = -1) -> Ready:
    return Ready(order, 1, decodes=True, seated=seated)


def _prompt(order: int, pending: int) -> Ready:
    return Ready(order, pending, decodes=False)


def test_decoding_streams_sit_first_and_prompts_fill_what_is_left() -> None:
    seats = plan([_prompt(0, 100), _decoder(1), _decoder(2)], WIDE, 512)
    assert seats == [Seat(1, 1), Seat(2, 1), Seat(0, 30)]


def test_a_short_prompt_behind_long_ones_is_fed_whole_at_once() -> None:
    long = [_prompt(order, 1000) for order in range(7)]
    seats = plan([*long, _prompt(7, 4)], WIDE, 512)
    assert seats[-1] == Seat(7, 4)
    assert sum(seat.tokens for seat in seats) == 32


def test_what_short_prompts_leave_goes_to_the_oldest() -> None:
    seats = plan([_prompt(0, 1000), _prompt(1, 2), _prompt(2, 1000)], WIDE, 512)
    assert seats == [Seat(0, 30), Seat(1, 2)]


def test_short_prompts_get_half_a_turn_between_them_the_shortest_first() -> None:
    seats = plan([_prompt(0, 1000), _prompt(1, 12), _prompt(2, 10)], WIDE, 512)
    assert seats == [Seat(0, 16), Seat(1, 6), Seat(2, 10)]


def test_prompts_of_like_lengths_go_first_come_first_served() -> None:
    seats = plan([_prompt(0, 60), _prompt(1, 31), _prompt(2, 40)], WIDE, 512)
    assert seats == [Seat(0, 32)]


def test_nothing_of_a_turn_is_left_while_a_prompt_could_take_it() -> None:
    policy = Policy(max_seats=4, turn_tokens=32, prompt_chunk=16)
    assert plan([_prompt(0, 200), _prompt(1, 100)], policy, 512) == [Seat(0, 16), Seat(1, 16)]


def test_short_prompts_leave_the_first_its_seat() -> None:
    policy = Policy(max_seats=2, turn_tokens=32, prompt_chunk=32)
    seats = plan([_prompt(0, 1000), _prompt(1, 2), _prompt(2, 2)], policy, 512)
    assert seats == [Seat(0, 30), Seat(1, 2)]


def test_a_prompt_takes_at_most_its_chunk() -> None:
    policy = Policy(max_seats=4, turn_tokens=100, prompt_chunk=10)
    assert plan([_prompt(0, 1000)], policy, 512) == [Seat(0, 10)]


def test_a_step_never_holds_more_than_the_runtime_takes() -> None:
    assert plan([_prompt(0, 1000)], WIDE, 8) == [Seat(0, 8)]


def test_of_more_decoders_than_seats_those_that_waited_longest_sit() -> None:
    policy = Policy(max_seats=2)
    ready = [_decoder(0, seated=5), _decoder(1, seated=4), _decoder(2, seated=3)]
    assert plan(ready, policy, 512) == [Seat(1, 1), Seat(2, 1)]


def test_prompts_have_a_seat_where_decoders_would_take_all() -> None:
    """Lanes facts, failure 15: others keep a prompt from its first token."""
    decoders = [_decoder(order, seated=order) for order in range(8)]
    for policy, step in ((Policy(max_seats=4), 512), (Policy(turn_tokens=4), 512), (WIDE, 4)):
        seats = plan([*decoders, _prompt(8, 100), _prompt(9, 2)], policy, step)
        assert [seat.order for seat in seats] == [0, 1, 2, 8]


def test_a_single_seat_goes_to_whoever_waited_longest() -> None:
    policy, pending, turns = Policy(max_seats=1, prompt_chunk=2), 10, []
    seated = {0: 0, 1: -1}
    for turn in range(1, 9):
        ready = [_decoder(0, seated[0]), Ready(1, pending, decodes=False, seated=seated[1])]
        (seat,) = plan(ready, policy, 512)
        seated[seat.order] = turn
        pending -= seat.tokens if seat.order else 0
        turns.append(seat.order)
    assert turns == [1, 0] * 4


def test_a_long_prompt_never_keeps_a_decoder_from_its_seat() -> None:
    pending = 50 * WIDE.turn_tokens
    while pending:
        seats = plan([_decoder(0), _prompt(1, pending)], WIDE, 512)
        assert seats[0] == Seat(0, 1)
        assert seats[1].tokens == min(pending, WIDE.turn_tokens - 1)
        pending -= seats[1].tokens


_READY = st.lists(st.tuples(st.booleans(), st.integers(1, 300), st.integers(-1, 20)), max_size=30)


@given(_READY, st.integers(1, 20), st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_every_plan_keeps_its_promises(
    drawn: list[tuple[bool, int, int]], most: int, budget: int, chunk: int, step: int
) -> None:
    ready = [
        Ready(order, 1 if decodes else pending, decodes, seated)
        for order, (decodes, pending, seated) in enumerate(drawn)
    ]
    by_order = {it.order: it for it in ready}
    policy = Policy(max_seats=most, turn_tokens=budget, prompt_chunk=chunk)
    seats = plan(ready, policy, step)

    assert bool(seats) == bool(ready)
    assert len({seat.order for seat in seats}) == len(seats) <= most
    assert sum(seat.tokens for seat in seats) <= min(budget, step)
    for seat in seats:
        assert 1 <= seat.tokens <= by_order[seat.order].pending
        assert by_order[seat.order].decodes or seat.tokens <= chunk
    kinds = [by_order[seat.order].decodes for seat in seats]
    assert kinds == sorted(kinds, reverse=True)
    decoders = sum(it.decodes for it in ready)
    room = min(most, budget, step)
    if decoders < room or decoders == len(ready):
        assert sum(kinds) == min(decoders, room)
    elif room > 1:
        assert sum(kinds) == room - 1
    for group in (True, False):
        orders = [s.order for s in seats if by_order[s.order].decodes is group]
        assert orders == sorted(orders)


_PROMPTS = st.lists(st.integers(1, 200), min_size=1, max_size=8)
_BOUNDED = settings(max_examples=100, deadline=None, derandomize=True)


def _answered(arrivals: Sequence[Sequence[int]], policy: Policy) -> list[int]:
    """The turn that fed each prompt its last token, from 1, for prompts that come before each
    turn; numbered as they come."""
    left: dict[int, int] = {}
    ended: dict[int, int] = {}
    for turn in itertools.count(1):
        for pending in arrivals[turn - 1] if turn <= len(arrivals) else ():
            left[len(left)] = pending
        if turn > len(arrivals) and len(ended) == len(left):
            return [ended[order] for order in sorted(ended)]
        waiting = [_prompt(order, pending) for order, pending in left.items() if pending]
        seats = plan(waiting, policy, 512)
        assert bool(seats) == bool(waiting)
        for seat in seats:
            left[seat.order] -= seat.tokens
            if not left[seat.order]:
                ended[seat.order] = turn
    raise AssertionError


@_BOUNDED
@given(
    _PROMPTS,
    st.lists(st.lists(st.integers(1, 40), max_size=6), max_size=60),
    st.integers(1, 8),
    st.integers(4, 64),
    st.integers(4, 64),
)
def test_nobody_waits_longer_than_for_those_before_whoever_comes_after(
    first: list[int], later: list[list[int]], most: int, budget: int, chunk: int
) -> None:
    """Half of each turn, or a chunk, goes to the first in line."""
    policy = Policy(max_seats=most, turn_tokens=budget, prompt_chunk=chunk)
    ended = _answered([first, *later], policy)
    least = min(chunk, budget - budget // 2)
    bound = 0
    for turn, pending in zip(ended, first, strict=False):
        bound += math.ceil(pending / least)
        assert turn <= bound


@_BOUNDED
@given(st.lists(st.integers(50, 99), min_size=1, max_size=8), st.integers(8, 64))
def test_of_like_lengths_each_is_answered_as_soon_as_those_before_it_allow(
    pending: list[int], budget: int
) -> None:
    """No order of service has a sooner first token on average, were their lengths the same."""
    policy = Policy(max_seats=8, turn_tokens=budget, prompt_chunk=512)
    sums = itertools.accumulate(pending)
    assert _answered([pending], policy) == [math.ceil(it / budget) for it in sums]


@_BOUNDED
@given(
    st.lists(st.integers(1000, 2000), min_size=1, max_size=4),
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
    st.integers(8, 64),
)
def test_short_prompts_behind_long_ones_share_half_of_each_turn(
    long: list[int], short: list[int], budget: int
) -> None:
    """Lanes facts, failure 15."""
    policy = Policy(max_seats=16, turn_tokens=budget, prompt_chunk=512)
    ended = sorted(_answered([[*long, *short]], policy)[len(long) :])
    sums = itertools.accumulate(sorted(short))
    assert ended == [math.ceil(it / (budget // 2)) for it in sums]


def test_a_lone_stream_never_lingers() -> None:
    assert linger_s(0, 1, Policy(turn_linger_us=1000)) == 0


def test_lingering_ends_when_all_are_ready_or_the_seats_are_full() -> None:
    policy = Policy(max_seats=4, turn_linger_us=1000)
    assert linger_s(2, 3, policy) == pytest.approx(0.001)
    assert linger_s(3, 3, policy) == 0
    assert linger_s(4, 9, policy) == 0


def test_the_environment_sets_the_policy() -> None:
    policy = Policy.from_environment(
        {"SUPERFLUID_MAX_SEATS": "3", "SUPERFLUID_TURN_LINGER_US": "250", "HOME": "x"}
    )
    assert policy == Policy(max_seats=3, turn_linger_us=250)


def test_a_bad_setting_is_refused_by_name() -> None:
    for option in WORKER:
        with pytest.raises(
            BadOptionValue, match=f"^{option.variable()} is 'abc', wanted a"
        ) as caught:
            Policy.from_environment({option.variable(): "abc"})
        assert caught.value.param == option.variable()
        assert caught.value.fix is not None
        assert option.variable() in caught.value.fix
        assert "--" not in caught.value.fix, "there is no such flag"


def test_the_page_about_lanes_has_every_setting_with_its_default() -> None:
    page = (Path(__file__).parents[3] / "docs" / "lanes.md").read_text()
    for option in WORKER:
        (row,) = (line for line in page.splitlines() if f"`{option.variable()}`" in line)
        shown = row.split("|")[2].strip()
        assert option.parse(shown) == option.default
