from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluid_workerd.pace import Pace


def _learned(fixed_s: float, each_s: float, turns: list[int]) -> Pace:
    pace = Pace()
    for tokens in turns:
        pace.add(tokens, fixed_s + each_s * tokens)
    return pace


def test_before_anything_is_known_a_turn_takes_few() -> None:
    assert Pace().tokens_within(0.2) == 128


def test_where_a_token_more_costs_nothing_there_is_no_bound() -> None:
    assert _learned(1.0, 0.0, [1, 8, 300]).tokens_within(0.2) is None


@given(st.floats(0, 0.05), st.floats(1e-4, 1e-2), st.integers(0, 99))
def test_the_bound_is_what_fits_in_the_target(fixed_s: float, each_s: float, seed: int) -> None:
    dice = random.Random(seed)
    pace = _learned(fixed_s, each_s, [dice.randint(1, 512) for _ in range(20)])
    found = pace.tokens_within(0.2)
    assert found is not None
    assert found == pytest.approx(max(32, (0.2 - fixed_s) / each_s), rel=0.01, abs=1.1)


def test_where_reading_dominates_a_turn_may_take_twice_as_long_as_without_prompts() -> None:
    found = _learned(4.0, 0.01, [1, 8, 300, 8, 400]).tokens_within(0.2)
    assert found == pytest.approx(400, abs=2)


def test_turns_all_alike_bound_too_and_what_follows_corrects_them() -> None:
    pace = _learned(2.0, 0.001, [512] * 5)
    first = pace.tokens_within(0.2)
    assert first is not None
    assert first < 64
    for _ in range(3):
        pace.add(first, 2.0 + 0.001 * first)
    assert pace.tokens_within(0.2) == pytest.approx(2000, rel=0.01)


def test_a_slow_runtime_still_takes_something_of_a_prompt() -> None:
    assert _learned(0.0, 1.0, [1, 2, 3]).tokens_within(0.2) == 32


def test_what_was_long_ago_is_forgotten() -> None:
    pace = _learned(0.0, 0.1, [10, 20, 30])
    for tokens in (10, 200) * 60:
        pace.add(tokens, tokens * 0.001)
    assert pace.tokens_within(0.2) == pytest.approx(200, abs=3)
