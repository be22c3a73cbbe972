"""Options as words: what is good comes back as it was meant, what is bad is exit 2 by name."""

from __future__ import annotations

import string
from typing import Final

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from superfluid.catalog.standing import resolve_options
from superfluid.cli.settled import adapter_flags
from superfluid.config import SERVE, settle
from superfluid_compat.errors import BadOptionValue, ExitCode, UnknownOption
from superfluid_workerd.options import Kind, Option, Value

ADAPTER: Final = (
    Option("cache-bytes", Kind.SIZE, "x", "auto", minimum=0, keywords=("auto",)),
    Option("layers", Kind.INDICES, "x"),
    Option("kv-type", Kind.CHOICE, "x", "f32", choices=("f32", "f16", "q8_0")),
    Option("exact", Kind.BOOLEAN, "x", False),
    Option("rope-scale", Kind.NUMBER, "x", minimum=0.0, maximum=100.0),
    Option("lib", Kind.PATH, "x"),
    Option("main-gpu", Kind.INTEGER, "x", 0, minimum=-1, maximum=15),
)
EVERY: Final = (*ADAPTER, *SERVE)
LETTERS: Final = st.text(string.ascii_lowercase, min_size=1, max_size=8)


def good(option: Option) -> st.SearchStrategy[tuple[str, Value]]:
    """A text that the option takes, and the value it stands for."""
    low = int(option.minimum) if option.minimum is not None else -(10**6)
    high = int(option.maximum) if option.maximum is not None else 10**9
    match option.kind:
        case Kind.BOOLEAN:
            words: list[tuple[str, Value]] = [("on", True), ("no", False), ("TRUE", True)]
            return st.sampled_from(words)
        case Kind.INTEGER | Kind.SIZE:
            return st.integers(low, high).map(lambda value: (str(value), value))
        case Kind.NUMBER:
            return st.floats(low, high).map(lambda value: (repr(value), value))
        case Kind.CHOICE:
            return st.sampled_from(option.choices).map(lambda value: (value.upper(), value))
        case Kind.INDICES:
            numbers = st.lists(st.integers(0, 99), min_size=1)
            return numbers.map(lambda it: (",".join(map(str, it)), tuple(sorted(set(it)))))
        case Kind.STRING | Kind.PATH:
            return LETTERS.map(lambda value: (value, value))


def bad(option: Option) -> st.SearchStrategy[str]:
    """A text that the option does not take."""
    if option.kind in (Kind.STRING, Kind.PATH):
        return st.just("")
    words = LETTERS.filter(lambda it: it not in (*option.choices, *option.keywords))
    words = words.filter(lambda it: it not in ("on", "off", "yes", "no", "true", "false"))
    odd = st.sampled_from(["", "-", "1e", "nan", "inf", "--", "9" * 40, "1,,2", "0x1", "½"])
    texts = [words, odd]
    if option.kind in (Kind.INTEGER, Kind.SIZE, Kind.NUMBER) and option.maximum is not None:
        texts.append(st.integers(int(option.maximum) + 1, 10**15).map(str))
    return st.one_of(*texts)


@pytest.mark.parametrize("option", EVERY, ids=lambda option: option.name)
@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_good_words_come_back_and_bad_ones_are_exit_2_by_name(
    option: Option, data: st.DataObject
) -> None:
    text, value = data.draw(good(option))
    found = resolve_options("x", [option], [("flag", {option.name: text})])[option.name]
    assert (found.value, found.origin) == (value, "flag")
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    assert option.parse(shown) == value
    wrong = data.draw(bad(option))
    origin, mended = data.draw(st.sampled_from([
        ("flag", f"give --x-{option.name} "),
        ("environment", f"set {option.variable('x')} to "),
        ("config f [runtimes.x]", f"set x-{option.name} in f [runtimes.x] to "),
    ]))  # fmt: skip
    with pytest.raises(BadOptionValue) as caught:
        resolve_options("x", [option], [(origin, {option.name: wrong})])
    assert caught.value.exit_code is ExitCode.USAGE
    assert caught.value.message.startswith(f"option x-{option.name} was given ")
    assert caught.value.fix.startswith(mended)
    assert "\n" not in caught.value.line()


@given(option=st.sampled_from(EVERY), data=st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_misspelt_name_is_exit_2_and_names_the_nearest(
    option: Option, data: st.DataObject
) -> None:
    assume(len(option.name) > 3)
    place = data.draw(st.integers(1, len(option.name) - 2))
    name = option.name[:place] + option.name[place + 1 :]
    assume(name not in {each.name for each in EVERY} and not name.endswith("-"))
    with pytest.raises(UnknownOption) as caught:
        resolve_options("x", EVERY, [("flag", {name: "1"})])
    assert caught.value.exit_code is ExitCode.USAGE
    assert f"unknown option --x-{name} (flag)" in caught.value.message
    assert caught.value.fix.startswith("did you mean --x-")


@given(name=LETTERS, value=st.text(max_size=5))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_flag_is_its_adapters_by_the_longest_id(name: str, value: str) -> None:
    found = adapter_flags([(f"--two-words-{name}", value)], ["two", "two-words"])
    assert found == {"two": {}, "two-words": {name: value}}


def test_the_strongest_source_wins_whatever_the_order_of_options() -> None:
    file = [("config f", {"lanes": 9, "threads": 8, "context": 7})]
    found = settle(SERVE, {"lanes": "2"}, {"SUPERFLUID_THREADS": "3"}, file)
    told = {name: (found[name].value, found[name].origin) for name in file[0][1]}
    assert told == {
        "lanes": (2, "flag"),
        "threads": (3, "environment"),
        "context": (7, "config f"),
    }
