"""Options: what text and configuration may say, and what a refusal names."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluid_compat.errors import BadOptionValue, UnknownOption
from superfluid_workerd.options import (
    COMMON,
    Kind,
    Option,
    Resolved,
    Scope,
    nearest,
    parse_indices,
    parse_size,
    require_known,
    resolve,
)

names = st.from_regex(r"[a-z][a-z0-9]{0,5}(-[a-z0-9]{1,5}){0,2}", fullmatch=True)


def option(kind: Kind, **more: Any) -> Option:
    choices = ("fast", "exact") if kind is Kind.CHOICE else ()
    return Option("cache-type", kind, "what it does", choices=choices, **more)


@st.composite
def declared(draw: st.DrawFn) -> Option:
    kind = draw(st.sampled_from(Kind))
    bounded = kind in (Kind.INTEGER, Kind.NUMBER, Kind.SIZE)
    low = draw(st.none() | st.integers(0, 10)) if bounded else None
    high = draw(st.none() | st.integers(20, 1000)) if bounded else None
    defaults: dict[Kind, Any] = {
        Kind.BOOLEAN: st.booleans(),
        Kind.INTEGER: st.integers(10, 20),
        Kind.NUMBER: st.floats(10, 20),
        Kind.SIZE: st.integers(10, 20),
        Kind.CHOICE: st.sampled_from(["fast", "exact"]),
        Kind.STRING: st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1),
        Kind.PATH: st.just("/models"),
        Kind.INDICES: st.lists(st.integers(0, 99)).map(tuple),
    }
    return Option(
        draw(names),
        kind,
        draw(st.text(max_size=20)),
        draw(st.none() | defaults[kind]),
        minimum=low,
        maximum=high,
        choices=("fast", "exact") if kind is Kind.CHOICE else (),
        keywords=draw(st.sampled_from([(), ("auto",), ("auto", "all")])),
        unit=draw(st.sampled_from(["", "bytes"])),
        scope=draw(st.sampled_from(Scope)),
    )


@given(declared())
def test_a_description_is_json_and_gives_the_option_back(one: Option) -> None:
    assert Option.from_description(json.loads(json.dumps(one.describe()))) == one
    json.dumps(one.schema())


@given(declared(), st.text(max_size=30))
def test_any_text_is_a_value_the_option_takes_or_a_refusal_that_names_it(
    one: Option, text: str
) -> None:
    try:
        value = one.parse(text)
    except BadOptionValue as refused:
        error = refused
    else:
        assert one.check(value) == value
        return
    assert error.param == one.name
    assert one.name in error.message
    assert one.accepts() in error.message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(declared(), json_values)
def test_any_configured_value_is_taken_or_refused(one: Option, value: Any) -> None:
    try:
        taken = one.check(value)
    except BadOptionValue as refused:
        error = refused
    else:
        assert one.check(taken) == taken
        return
    assert error.param == one.name


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Kind.BOOLEAN, "Yes", True),
        (Kind.BOOLEAN, "0", False),
        (Kind.INTEGER, " +5 ", 5),
        (Kind.INTEGER, "-3", -3),
        (Kind.NUMBER, "1e3", 1000.0),
        (Kind.NUMBER, ".5", 0.5),
        (Kind.SIZE, "1.5 GiB", 3 << 29),
        (Kind.SIZE, "256M", 256 << 20),
        (Kind.SIZE, "12", 12),
        (Kind.CHOICE, "EXACT", "exact"),
        (Kind.PATH, "/a b", "/a b"),
        (Kind.INDICES, "7,0-3, 2 - 4", (0, 1, 2, 3, 4, 7)),
    ],
)
def test_text_is_read(kind: Kind, text: str, value: object) -> None:
    parsed = option(kind).parse(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Kind.BOOLEAN, "maybe"),
        (Kind.INTEGER, "1_000"),
        (Kind.INTEGER, "١٢"),
        (Kind.INTEGER, "1.0"),
        (Kind.INTEGER, "9" * 19),
        (Kind.INTEGER, "9" * 5000),
        (Kind.NUMBER, "nan"),
        (Kind.NUMBER, "inf"),
        (Kind.NUMBER, "1e400"),
        (Kind.NUMBER, "1e" + "9" * 5000),
        (Kind.NUMBER, "1_0"),
        (Kind.SIZE, "9" * 5000),
        (Kind.SIZE, "1e9"),
        (Kind.SIZE, "-1"),
        (Kind.SIZE, "16777216T"),
        (Kind.CHOICE, "slow"),
        (Kind.STRING, " "),
        (Kind.PATH, "a\0b"),
        (Kind.INDICES, "3-1"),
        (Kind.INDICES, "1,,2"),
        (Kind.INDICES, "0-999999999"),
        (Kind.INDICES, ",".join(["0-60000"] * 2)),
    ],
)
def test_hostile_text_is_refused_on_a_short_line(kind: Kind, text: str) -> None:
    with pytest.raises(BadOptionValue) as caught:
        option(kind).parse(text)
    assert len(caught.value.message) < 250


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Kind.BOOLEAN, 1),
        (Kind.INTEGER, True),
        (Kind.INTEGER, 10**4000),
        (Kind.NUMBER, 10**400),
        (Kind.NUMBER, math.nan),
        (Kind.SIZE, 1.5),
        (Kind.CHOICE, ["fast"]),
        (Kind.STRING, 3),
        (Kind.INDICES, [0, -1]),
        (Kind.INDICES, [True]),
        (Kind.INDICES, [10**30]),
    ],
)
def test_values_of_another_shape_are_refused(kind: Kind, value: object) -> None:
    with pytest.raises(BadOptionValue, match="cache-type"):
        option(kind).check(value)


@given(st.integers(0, 2**63 - 1))
def test_plain_sizes_are_exact(size: int) -> None:
    assert parse_size(str(size)) == size


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 50)), min_size=1, max_size=8))
def test_indices_are_the_union_of_their_ranges(ranges: list[tuple[int, int]]) -> None:
    text = ",".join(f"{first}-{first + more}" for first, more in ranges)
    union = {i for first, more in ranges for i in range(first, first + more + 1)}
    assert parse_indices(text) == tuple(sorted(union))


@given(st.text("0123456789-, .kKmMgGtTiIbBeE", max_size=30))
def test_parsers_return_or_decline(text: str) -> None:
    size, indices = parse_size(text), parse_indices(text)
    assert size is None or 0 <= size < 1 << 63
    assert indices is None or len(indices) <= 1 << 16


def test_bounds_are_inclusive_and_named() -> None:
    one = option(Kind.INTEGER, minimum=2, maximum=4, keywords=("auto",))
    assert [one.parse(text) for text in ("2", "4", "AUTO")] == [2, 4, "auto"]
    for text in ("1", "5"):
        with pytest.raises(BadOptionValue, match="an integer from 2 to 4, or auto"):
            one.parse(text)


def test_the_strongest_source_wins_and_is_remembered() -> None:
    options = [option(Kind.INTEGER, default=1), Option("other", Kind.PATH, "h")]
    sources: list[tuple[str, dict[str, object]]] = [
        ("flag", {"cache-type": "3"}),
        ("config f", {"cache-type": 2, "other": "/x"}),
    ]
    assert resolve(options, sources) == {
        "cache-type": Resolved(3, "flag"),
        "other": Resolved("/x", "config f"),
    }
    assert resolve(options, []) == {
        "cache-type": Resolved(1, "default"),
        "other": Resolved(None, "default"),
    }


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownOption) as caught:
        resolve(COMMON, [("environment", {"contxt": "5"})])
    assert caught.value.param == "contxt"
    assert caught.value.message == "unknown option SUPERFLUID_CONTXT (environment)"
    assert caught.value.fix == "did you mean SUPERFLUID_CONTEXT?"


@pytest.mark.parametrize(
    ("origin", "fix"),
    [
        ("flag", "give --lanes an integer from 1 to 256"),
        ("environment", "set SUPERFLUID_LANES to an integer from 1 to 256"),
        ("config /x.toml [models.m]", "set lanes in /x.toml [models.m] to an integer from 1 to"),
    ],
)
def test_a_bad_value_is_mended_where_it_came_from(origin: str, fix: str) -> None:
    for value in ("many", 0):
        with pytest.raises(BadOptionValue) as caught:
            resolve(COMMON, [("flag", {}), (origin, {"lanes": value})])
        assert caught.value.fix.startswith(fix)


def test_an_unknown_name_is_spelled_as_where_it_came_from() -> None:
    for origin, found, near in (
        ("flag", "--x-mood", "--x-mode"),
        ("environment", "SUPERFLUID_X_MOOD", "SUPERFLUID_X_MODE"),
        ("config f [runtimes.x]", "mood", "mode"),
    ):
        with pytest.raises(UnknownOption) as caught:
            require_known(["mode", "gear"], [(origin, {"mood": 1})], "x")
        assert caught.value.message == f"unknown option {found} ({origin})"
        assert caught.value.fix == f"did you mean {near}?"
    with pytest.raises(UnknownOption) as caught:
        require_known(["mode"], [("flag", {"zzz": 1})], "x")
    assert caught.value.fix == "see superfluid runtime options x"
    assert nearest("zzz", ["context", "lanes"]) is None


def test_flags_and_variables_follow_the_name() -> None:
    one = option(Kind.BOOLEAN)
    assert (one.flag(), one.flag("native")) == ("--cache-type", "--native-cache-type")
    assert one.variable() == "SUPERFLUID_CACHE_TYPE"
    assert one.variable("native") == "SUPERFLUID_NATIVE_CACHE_TYPE"


@pytest.mark.parametrize("name", ["", "Cache", "cache_type", "-a", "a--b"])
def test_a_name_that_is_not_kebab_case_cannot_be_declared(name: str) -> None:
    with pytest.raises(ValueError, match="kebab-case"):
        Option(name, Kind.STRING, "h")


def test_a_default_the_option_refuses_cannot_be_declared() -> None:
    with pytest.raises(BadOptionValue):
        option(Kind.INTEGER, default=9, maximum=8)
    with pytest.raises(ValueError, match="choices"):
        Option("a", Kind.CHOICE, "h")
