"""The error tree: every class says what it is, how it exits and what to do."""

from __future__ import annotations

import re

import pytest

from superfluid_compat import errors
from superfluid_compat.errors import BY_CODE, ExitCode, SuperfluidError
from superfluid_compat.verdicts import State, judge_number, require_number


def tree(kind: type[SuperfluidError]) -> list[type[SuperfluidError]]:
    return [kind, *(inner for child in kind.__subclasses__() for inner in tree(child))]


CLASSES = tree(SuperfluidError)
LEAVES = [kind for kind in CLASSES if not kind.__subclasses__()]


def test_every_class_is_found_by_a_code_of_its_own() -> None:
    assert sorted(kind.__name__ for kind in BY_CODE.values()) == sorted(
        kind.__name__ for kind in CLASSES
    )
    assert all(BY_CODE[kind.code] is kind for kind in CLASSES)


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_every_leaf_states_its_code_exit_status_and_fix(kind: type[SuperfluidError]) -> None:
    assert "code" in vars(kind)
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", kind.code)
    assert kind.exit_code in ExitCode
    assert kind.exit_code is not ExitCode.OK
    assert 400 <= kind.http_status < 600
    assert kind.default_fix or kind is errors.Cancelled
    assert "\n" not in kind.default_fix


def test_each_branch_exits_as_the_table_of_exit_codes_says() -> None:
    branches = {
        errors.UsageError: ExitCode.USAGE,
        errors.ModelError: ExitCode.MODEL,
        errors.RuntimeUnavailable: ExitCode.RUNTIME,
        errors.ServeError: ExitCode.FAILURE,
        errors.LinkError: ExitCode.FAILURE,
        errors.StepError: ExitCode.FAILURE,
        errors.RequestError: ExitCode.FAILURE,
    }
    assert set(branches) == set(SuperfluidError.__subclasses__())
    for branch, code in branches.items():
        assert {kind.exit_code for kind in tree(branch)} == {code}


def test_a_clients_mistake_is_a_4xx_and_nothing_else_of_ours_is() -> None:
    assert all(400 <= kind.http_status < 500 for kind in tree(errors.RequestError))
    own = {*tree(errors.ServeError), *tree(errors.StepError), *tree(errors.LinkError)}
    assert all(kind.http_status >= 500 for kind in own - {errors.Cancelled})


def test_the_drawing_of_the_tree_names_every_class() -> None:
    drawn = set(re.findall(r"[A-Z][A-Za-z]+", (errors.__doc__ or "").split("A message says")[0]))
    assert {kind.__name__ for kind in CLASSES} <= drawn


def test_a_line_is_one_line_with_fix_and_dossier() -> None:
    error = errors.WorkerDied("signal 11\nin layer 3", fix="try\tagain", dossier="d-7")
    assert error.line() == "signal 11 in layer 3; try again (dossier d-7)"
    assert errors.Cancelled("gone").line() == "gone"
    assert str(error) == error.message


def test_numbers_serve_when_equal_and_are_refused_by_number() -> None:
    assert judge_number("link", found=3, wanted=3).serves
    require_number("link", found=3, wanted=3)
    assert judge_number("link", found=2, wanted=3).state is State.REFUSED
    with pytest.raises(errors.ContractRefused, match=r"link 2.*link 3") as caught:
        require_number("link", found=2, wanted=3)
    assert "3" in caught.value.fix
