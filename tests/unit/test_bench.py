"""The bench's own parts: order of samples, ratios, what it prints and writes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from bench import __main__ as command
from bench import sampling, timed
from bench.rows import Bench, Row, alternate, interval, ratios


def test_calls_go_there_and_back_so_that_drift_falls_on_all() -> None:
    order: list[str] = []

    def call(name: str) -> int:
        order.append(name)
        return len(order)

    calls = {name: partial(call, name) for name in "ab"}
    assert alternate(2, calls) == {"a": [1, 4, 5, 8], "b": [2, 3, 6, 7]}
    assert order == list("abbaabba")
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]


def test_the_median_lies_where_order_statistics_say() -> None:
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert interval([float(it) for it in range(1, 21)]) == (6.0, 15.0)
    assert interval([float(it) for it in range(1, 11)]) == (2.0, 9.0)


def test_a_clock_leaves_out_what_inner_clocks_count(tmp_path: Path) -> None:
    path = tmp_path / "clocks"
    path.write_bytes(bytes(timed.FILE_BYTES))
    clocks = timed.Clocks(path, {"outer": (), "inner": ()})

    def work() -> int:
        return sum(range(200_000))

    inner = clocks.around(1, work)
    outer = clocks.around(0, lambda: (inner(), work(), inner(), work(), work(), work()))
    began = time.thread_time()
    outer()
    took = time.thread_time() - began
    spent = timed.read(path, {"outer": None, "inner": None})
    assert took * 0.75 < spent["outer"] + spent["inner"] <= took
    assert 0.1 < spent["inner"] / took < 0.6


def test_a_line_says_what_a_repeat_needs() -> None:
    row = Row(
        name="decode", unit="tok/s", samples=[1.0, 4.0, 2.0], wanted="2 or more",
        conditions={"threads": 2},
    )  # fmt: skip
    words = " ".join(row.line().split())
    assert words == "decode 2 tok/s 1 to 4 wanted 2 or more threads=2"
    empty = Row(name="in a cgroup", unit="", samples=[], note="none can be had here")
    assert " ".join(empty.line().split()) == "in a cgroup no figure none can be had here"


def test_a_section_that_fails_is_named_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(bench: Bench) -> Iterator[Row]:
        yield Row(name="first", unit="s", samples=[1.0])
        raise RuntimeError("the engine left")

    monkeypatch.setattr(sampling, "rows", rows)
    target = tmp_path / "results" / "run.json"
    assert command.main(["sampling", "--quick", "--json", str(target)]) == 1
    written = json.loads(target.read_text())
    assert written["failed"] == {"sampling": "RuntimeError: the engine left"}
    assert written["sections"]["sampling"][0]["median"] == 1.0
    assert written["machine"]["cores"] >= 1
    assert "the engine left" in capsys.readouterr().out


def test_an_unknown_section_is_refused_with_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["speed"])
    assert "no section speed; there are start, decode" in capsys.readouterr().err
