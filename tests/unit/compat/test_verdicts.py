"""Verdicts: numbers decide, then named lines of versions, then what nobody tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from superfluid_compat.errors import ExitCode
from superfluid_compat.verdicts import (
    Line,
    Requirement,
    Rule,
    State,
    Verdict,
    judge_library,
    judge_number,
)

WANTED = Requirement("engine ABI", (7, 8), (Line("0.3", 7), Line("0.2", 6)), ("1.0",))
PAIRS = Requirement("the pair", tested=("0.32.2+0.31.3", "0.32.4+0.32.0"))


@pytest.mark.parametrize(
    ("number", "version", "tested", "state", "rule"),
    [
        (7, "anything", True, State.READY, Rule.NUMBER_EQUAL),
        (8, "0.2", True, State.READY, Rule.NUMBER_EQUAL),
        (6, "0.3", True, State.REFUSED, Rule.NUMBER_DIFFERS),
        (0, "1.0", True, State.REFUSED, Rule.NUMBER_DIFFERS),
        (None, "0.3", True, State.READY, Rule.VERSION_LINE),
        (None, "0.3.12", True, State.READY, Rule.VERSION_LINE),
        (None, "0.30", True, State.REFUSED, Rule.NUMBER_UNSTATED),
        (None, "0.2.1", True, State.REFUSED, Rule.NUMBER_DIFFERS),
        (None, "1.0", True, State.REFUSED, Rule.NUMBER_UNSTATED),
        (7, "1.1", False, State.UNTESTED, Rule.BUILD_UNTESTED),
        (None, "0.3", False, State.UNTESTED, Rule.BUILD_UNTESTED),
        (9, "1.1", False, State.REFUSED, Rule.NUMBER_DIFFERS),
    ],
)
def test_a_library_is_judged(
    number: int | None, version: str, tested: bool, state: State, rule: Rule
) -> None:
    found = judge_library(WANTED, version=version, number=number, tested=tested)
    assert (found.state, found.rule) == (state, rule)
    assert found.exit_code is (ExitCode.OK if state is State.READY else ExitCode.RUNTIME)
    assert (found.problem is None) is (state is State.READY)


def test_a_refusal_names_both_numbers() -> None:
    found = judge_library(WANTED, version="3", number=5)
    assert found.problem == "found engine ABI 5, wanted engine ABI 7 or 8, or version 0.3.x"
    assert found.error("engine").exit_code is ExitCode.RUNTIME
    assert found.allowing_untested() is found


def test_without_numbers_the_tested_versions_decide() -> None:
    assert judge_library(PAIRS, version="0.32.4+0.32.0", number=None).rule == Rule.VERSION_TESTED
    other = judge_library(PAIRS, version="0.40+0.40", number=None)
    assert other.state is State.UNTESTED
    assert "0.32.2+0.31.3" in other.wanted
    assert other.allowing_untested().rule == Rule.UNTESTED_ALLOWED
    assert other.allowing_untested().serves
    assert other.error("x").code == "runtime_untested"


@pytest.mark.parametrize("state", [state for state in State if state is not State.READY])
def test_every_state_that_does_not_serve_is_exit_4(state: State) -> None:
    verdict = Verdict(state, "rule", "found", "wanted", "do it")
    assert verdict.exit_code is ExitCode.RUNTIME
    assert verdict.error("a").line() == "runtime a: found found, wanted wanted; do it"


def test_every_reason_code_stands_in_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "exit-codes.md").read_text("utf-8")
    assert all(f"| `{rule}` | `" in page for rule in Rule)


def test_a_number_differs_or_not() -> None:
    assert judge_number("kit", found=1, wanted=1).rule == Rule.NUMBER_EQUAL
    assert judge_number("kit", found=2, wanted=1).rule == Rule.NUMBER_DIFFERS
