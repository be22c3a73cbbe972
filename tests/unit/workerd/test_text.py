"""Text streams against the whole string, however the bytes arrive."""

from __future__ import annotations

import codecs
import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superfluid_workerd.codec.text import TextStream


def expected(data: bytes, stop: list[str]) -> tuple[str, str | None]:
    """Of the whole of `data`."""
    return stopped(data.decode("utf-8", "replace"), stop)


def stopped(text: str, stop: list[str]) -> tuple[str, str | None]:
    """By trying every end in turn: the first at which a stop string is complete, the longest."""
    for end in range(1, len(text) + 1):
        complete = [word for word in stop if word and text[:end].endswith(word)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def chunks(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def run(stream: TextStream, parts: list[bytes]) -> list[str]:
    return [*(stream.push(part) for part in parts), stream.finish()]


awkward = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.lists(
        st.sampled_from([b"a", b"b", b"\xe4\xb8\xad", b"\xf0\x9f", b"\x98\x80", b"\xff", b"\xc0"]),
        max_size=40,
    ).map(b"".join),
)
stops = st.lists(st.text("ab中\ufffd", min_size=1, max_size=5), max_size=5)


@given(awkward, stops, st.lists(st.integers(0, 1000), max_size=8))
def test_any_cutting_gives_the_text_of_the_whole(
    data: bytes, stop: list[str], cuts: list[int]
) -> None:
    stream = TextStream(stop)
    out = run(stream, chunks(data, cuts))
    text, stopped_by = expected(data, stop)
    assert "".join(out) == text
    assert stream.stopped_by == stopped_by


@given(awkward, stops, st.integers(0, 50))
def test_what_was_sent_is_left_out_of_a_replay(data: bytes, stop: list[str], sent: int) -> None:
    text, _ = expected(data, stop)
    stream = TextStream(stop, sent=sent)
    assert "".join(run(stream, [data])) == text[sent:]


@given(awkward, stops)
def test_text_goes_out_as_soon_as_it_is_decided(data: bytes, stop: list[str]) -> None:
    """Held back is at most what could still become a character or a stop string."""
    stream = TextStream(stop)
    out = ""
    for end in range(1, len(data) + 1):
        out += stream.push(data[end - 1 : end])
        # Bytes that may still become a character are none yet, and stop nothing.
        decided = codecs.getincrementaldecoder("utf-8")("replace").decode(data[:end])
        seen, stopped_by = stopped(decided, stop)
        if stopped_by:
            assert out == seen
            break
        undecided = data[:end].decode("utf-8", "replace")
        held = len(undecided) - len(out)
        tail = undecided[len(out) :].rstrip("\ufffd")
        assert held <= 3 or any(word.startswith(tail[:1]) for word in stop)
        assert not undecided[len(out) :].strip("\ufffd") or any(
            word.startswith(tail[: len(word)]) for word in stop
        )


def test_a_character_waits_for_its_last_byte() -> None:
    stream = TextStream()
    assert [stream.push(bytes([byte])) for byte in "é中😀".encode()] == [
        *("", "é"),
        *("", "", "中"),
        *("", "", "", "😀"),
    ]


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    stream = TextStream()
    assert stream.push(b"a\xf0\x9f") == "a"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_a_possible_stop_string_waits_until_it_is_decided() -> None:
    stream = TextStream(["\n\nUser:"])
    assert stream.push(b"Hi.\n\nUs") == "Hi."
    assert stream.push(b"age") == "\n\nUsage"
    assert stream.push(b"\n\n\nUser: x") == "\n"
    assert stream.stopped_by == "\n\nUser:"
    assert stream.push(b"more") == ""
    assert stream.finish() == ""


@pytest.mark.parametrize(
    ("stop", "text", "stopped_by"),
    [
        (["abcd", "bc"], "a", "bc"),
        (["bc", "abc"], "", "abc"),
        (["c", "bc", "abc"], "", "abc"),
        (["abcde", "cd"], "ab", "cd"),
    ],
)
def test_the_first_complete_and_then_the_longest_counts(
    stop: list[str], text: str, stopped_by: str
) -> None:
    stream = TextStream(stop)
    assert stream.push(b"abcdef") == text
    assert stream.stopped_by == stopped_by


def test_a_replaced_byte_can_complete_a_stop_string_at_the_end() -> None:
    stream = TextStream(["b\ufffd"])
    assert stream.push(b"ab\xf0") == "a"
    assert stream.finish() == ""
    assert stream.stopped_by == "b\ufffd"


def test_time_is_linear_for_stop_strings_that_almost_match() -> None:
    def seconds(length: int) -> float:
        stream = TextStream(["a" * 500 + "b", "a" * 499 + "c"])
        begin = time.process_time()
        for _ in range(length // 100):
            stream.push(b"a" * 100)
        return time.process_time() - begin

    seconds(1000)
    # Eight where time is linear and 64 where it is quadratic; a busy machine spoils some pairs.
    pairs = [(seconds(80_000), max(seconds(10_000), 1e-3)) for _ in range(5)]
    assert min(long / short for long, short in pairs) < 20
