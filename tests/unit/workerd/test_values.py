"""Options read by type, and the record of a load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from superfluid_workerd.adapter import Kind, OpenRequest, Option, Value, Values
from superfluid_workerd.options import resolve

DECLARED = (
    Option("count", Kind.INTEGER, "", 3),
    Option("most", Kind.SIZE, "", "auto", keywords=("auto",)),
    Option("share", Kind.NUMBER, "", 1),
    Option("way", Kind.CHOICE, "", "fast", choices=("fast", "exact")),
    Option("where", Kind.PATH, ""),
    Option("exact", Kind.BOOLEAN, "", False),
    Option("layers", Kind.INDICES, ""),
)


def values(**given: Value) -> Values:
    resolved = resolve(DECLARED, [("flag", given)])
    return Values({name: found.value for name, found in resolved.items()})


def test_each_kind_is_read_as_its_type() -> None:
    read = values(most=1 << 20, share=0.5, where="/x", exact=True, layers=(1, 2))
    assert (read.integer("count"), read.integer("most")) == (3, 1 << 20)
    assert read.number("share") == 0.5
    assert (read.text("way"), read.text("where")) == ("fast", "/x")
    assert read.flag("exact") is True
    assert read.indices("layers") == (1, 2)


def test_nothing_given_or_a_keyword_is_the_callers_default() -> None:
    read = values()
    assert read.integer("most", None) is None
    assert read.text("where", "here") == "here"
    assert read.indices("layers", ()) == ()
    assert read.number("share", 9) == 1
    assert read.integer("no-such", 7) == 7


WRONG: dict[str, Callable[[Values], object]] = {
    "option where holds None, wanted a text": lambda read: read.text("where"),
    "option most holds 'auto', wanted an integer": lambda read: read.integer("most"),
    "option exact holds False, wanted an integer": lambda read: read.integer("exact"),
    "option exact holds False, wanted a number": lambda read: read.number("exact", 0.0),
    "option share holds 1, wanted true or false": lambda read: read.flag("share", False),
    "option count holds 3, wanted indices": lambda read: read.indices("count", None),
}


@pytest.mark.parametrize("message", WRONG)
def test_another_type_than_the_declared_one_is_named(message: str) -> None:
    with pytest.raises(TypeError) as caught:
        WRONG[message](values())
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("known", "got"),
    [
        ({}, {}),
        ({"threads": 2}, {"threads": 2}),
        ({"memory_budget": 9, "own": {"way": "fast"}}, {"memory-budget": 9, "way": "fast"}),
    ],
)
def test_a_record_says_what_was_asked_and_what_was_got(
    known: dict[str, Any], got: dict[str, Any]
) -> None:
    request = OpenRequest(
        model=Path("m"),
        scratch=Path("s"),
        shared=Path("s"),
        lanes=4,
        threads=1,
        memory_budget=10,
        options={"way": "exact", "where": None, "layers": (1, 2)},
    )
    record = request.record(context=64, **known)
    common = {"context": 0, "lanes": 4, "threads": 1, "memory-budget": 10}
    assert record.asked == {**common, "way": "exact", "layers": [1, 2]}
    assert record.got == {"context": 64, "lanes": 4, **got}
