from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from superfluid_adapter_fake.orders import Orders
from superfluid_adapter_fake.tokenizer import VOCABULARY

from superfluid_compat.errors import (
    BadFrame,
    Capacity,
    DoesNotFit,
    Fatal,
    Fault,
    InvalidField,
    Overloaded,
)
from superfluid_workerd.adapter import Feed, Tick
from superfluid_workerd.counters import WINDOW_TURNS
from superfluid_workerd.executor import Executor
from superfluid_workerd.link.frames import (
    Generate,
    GenerationRequest,
    Prompted,
    Replay,
    Sampling,
    Shutdown,
    Text,
    ToDaemon,
    Tokens,
)
from superfluid_workerd.rows import checked
from superfluid_workerd.turns import Policy
from support import clock
from support.clock import Clock
from support.turn_loop import Heard, Loop, Stage, alone, request

if TYPE_CHECKING:
    from superfluid_workerd.adapter import Logits


def _lone(wanted: GenerationRequest, orders: Orders | None = None) -> Loop:
    loop = Loop(orders)
    loop.join(1, wanted)
    loop.run()
    return loop


def test_a_lone_stream_gets_its_tokens_and_ends_by_length() -> None:
    wanted = request("hello", 12)
    loop = _lone(wanted)
    heard = loop.heard[1]
    assert heard.prompt == list(b"hello")
    assert heard.tokens == alone(wanted, loop.orders)
    assert heard.text == bytes(heard.tokens).decode()
    assert heard.finish == "length"
    assert loop.stats_at_end.free_lanes == loop.lanes
    assert loop.bytes_at_end == 0
    assert loop.runtime.closed


def test_one_frame_for_each_turn_whoever_sits_in_it() -> None:
    loop = Loop()
    for number in range(4):
        loop.join(number, request(f"prompt {number}", 6))
    loop.run()
    assert len(loop.turns) == 6
    assert [len(turn.deltas) for turn in loop.turns] == [4] * 6
    assert loop.stats_at_end.turns == 6
    assert loop.stats_at_end.seats == 24


class Lending(Stage):
    """Its rows hold until it is called again, whatever for."""

    lent: Sequence[Logits | None] = ()

    def step(self, feeds: Sequence[Feed], tick: Tick) -> Sequence[Logits | None]:
        self._take_back()
        self.lent = super().step(feeds, tick)
        return self.lent

    def seq_length(self, sequence: int) -> int:
        self._take_back()
        return super().seq_length(sequence)

    def seq_truncate(self, sequence: int, length: int) -> None:
        self._take_back()
        super().seq_truncate(sequence, length)

    def _take_back(self) -> None:
        for rows in self.lent:
            if rows is not None:
                rows[:] = np.nan


def test_rows_are_drawn_from_before_the_runtime_is_called_again() -> None:
    loop = Loop(stage=Lending)
    wanted = {number: request(f"prompt {number}", 1 + number) for number in range(4)}
    for number, one in wanted.items():
        loop.join(number, one)
    loop.run()
    for number, one in wanted.items():
        assert loop.heard[number].error is None
        assert loop.heard[number].tokens == alone(one, loop.orders)


def test_late_join_recycled_lane_and_full_house_equal_solo() -> None:
    loop = Loop(lanes=3)
    wanted = {n: request(f"stream {n}", tokens) for n, tokens in enumerate((4, 9, 5, 6, 3))}
    joins = {2: [1], 4: [2], 5: [3, 4]}

    def arrive(turn: int) -> None:
        for number in joins.get(turn, []):
            loop.join(number, wanted[number])

    loop.runtime.before = arrive
    loop.join(0, wanted[0])
    loop.run()
    for number, ask in wanted.items():
        assert loop.heard[number].tokens == alone(ask, loop.orders)
    assert max(len(step) for step in loop.runtime.steps) == 3
    assert {feed.sequence for step in loop.runtime.steps for feed in step} == {1, 2, 3}


def test_how_far_a_prompt_has_come_is_told_after_each_turn() -> None:
    loop = Loop(policy=Policy(turn_tokens=16, prompt_chunk=7))
    loop.join(1, request("x" * 30, 2))
    loop.run()
    assert [turn.prefilled for turn in loop.turns] == [{1: 7}, {1: 14}, {1: 21}, {1: 28}, {}, {}]
    assert [len(turn.deltas) for turn in loop.turns] == [0, 0, 0, 0, 1, 1]


def test_the_first_turn_of_a_prompt_takes_little_of_it() -> None:
    loop = Loop(Orders(context=1024, step_tokens=512))
    loop.join(1, request("x" * 600, 1))
    loop.run()
    first, second = (len(step[0].tokens) for step in loop.runtime.steps[:2])
    assert first == 128
    assert second > first


def test_a_prompt_is_fed_in_chunks_and_answers_the_same() -> None:
    wanted = request("x" * 200, 5)
    loop = Loop(policy=Policy(turn_tokens=16, prompt_chunk=7))
    loop.join(1, wanted)
    loop.run()
    assert loop.heard[1].tokens == alone(wanted, loop.orders)
    fed = [len(step[0].tokens) for step in loop.runtime.steps]
    assert fed == [7] * 28 + [4] + [1] * 4
    assert loop.stats_at_end.prefill_tokens == 200
    assert loop.stats_at_end.decode_tokens == 4


def test_a_decoder_beside_a_long_prompt_sits_in_every_turn() -> None:
    loop = Loop(policy=Policy(turn_tokens=8))
    loop.join(1, request("d", 40))
    loop.join(2, request("p" * 200, 2))
    loop.run()
    assert all(len(step) >= 1 and step[0].sequence == 1 for step in loop.runtime.steps[:40])


def test_a_short_prompt_after_long_ones_answers_within_two_turns() -> None:
    loop = Loop(lanes=4, policy=Policy(turn_tokens=32))
    for number in range(3):
        loop.join(number, request("p" * 240, 2))
    loop.join(3, request("hi", 2))
    loop.run()
    assert loop.heard[3].first_turn <= 2
    assert min(loop.heard[n].first_turn for n in range(3)) > 2


def test_a_cancel_before_a_turn_takes_effect_in_it() -> None:
    loop = Loop()
    loop.join(1, request("a", 50))
    loop.join(2, request("b", 6))
    loop.runtime.before = lambda turn: loop.cancel(1) if turn == 3 else None
    loop.run()
    assert loop.heard[1].finish == "cancelled"
    assert len(loop.heard[1].tokens) == 2
    assert loop.heard[2].tokens == alone(request("b", 6), loop.orders)
    assert [len(step) for step in loop.runtime.steps] == [2, 2, 2, 1, 1, 1]


def test_a_step_that_nobody_waits_for_is_abandoned() -> None:
    loop = Loop(policy=Policy(turn_tokens=8))
    loop.join(1, request("p" * 200, 50))
    loop.runtime.within = lambda turn: loop.cancel(1) if turn == 3 else None
    loop.run()
    assert loop.heard[1].finish == "cancelled"
    assert loop.runtime.number == 3
    assert len(loop.runtime.steps) == 2
    assert loop.stats_at_end.failed_turns == 0
    assert (loop.stats_at_end.free_lanes, loop.bytes_at_end) == (loop.lanes, 0)


def test_a_step_goes_on_for_those_who_still_wait_when_one_leaves_in_prefill() -> None:
    loop = Loop(policy=Policy(turn_tokens=16))
    other = request("q" * 60, 4)
    loop.join(1, request("p" * 200, 4))
    loop.join(2, other)
    loop.runtime.within = lambda turn: loop.cancel(1) if turn == 3 else None
    loop.run()
    assert loop.heard[1].finish == "cancelled"
    assert loop.heard[1].tokens == []
    assert loop.heard[2].tokens == alone(other, loop.orders)
    assert sum(len(f.tokens) for step in loop.runtime.steps for f in step[-1:]) == 63


def test_a_queued_stream_that_is_cancelled_is_never_seated() -> None:
    loop = Loop(lanes=1)
    loop.join(1, request("a", 5))
    loop.join(2, request("b", 5))
    loop.runtime.before = lambda turn: loop.cancel(2) if turn == 2 else None
    loop.run()
    assert loop.heard[2].finish == "cancelled"
    assert loop.runtime.number == 5


def test_a_stream_cancelled_before_its_intake_is_done_never_runs() -> None:
    loop = Loop()
    loop.heard[1] = Heard()
    loop.executor.expect(1)
    loop.cancel(1)
    generate = Generate(stream=1, request=request("a", 5))
    loop.executor.post(loop.intake.stream(generate, None))
    loop.run()
    assert loop.heard[1].finish == "cancelled"
    assert loop.runtime.number == 0


def test_a_deadline_ends_a_running_and_a_queued_stream() -> None:
    with clock.held() as now:
        loop = Loop(lanes=1)
        loop.join(1, request("a", 200), deadline=now.now_s + 0.05)
        loop.join(2, request("b", 5), deadline=now.now_s - 1)
        loop.runtime.within = lambda _turn: now.pass_(0.002)
        loop.run()
    assert loop.heard[1].finish == loop.heard[2].finish == "cancelled"
    assert 0 < len(loop.heard[1].tokens) < 200
    assert loop.heard[2].tokens == []


@pytest.mark.parametrize("error", [Fault("no"), ZeroDivisionError("no tree")])
@pytest.mark.parametrize("truncate", ["any", "zero"])
def test_a_failed_step_costs_its_seats_and_nobody_else(error: Exception, truncate: str) -> None:
    loop = Loop(Orders(truncate="zero" if truncate == "zero" else "any"), lanes=2)
    wanted = {n: request(f"s{n}", 6) for n in range(4)}
    loop.runtime.before = lambda turn: loop.runtime.fail_next.append(error) if turn == 3 else None
    for number, ask in wanted.items():
        loop.join(number, ask)
    loop.run()
    assert [loop.heard[n].error for n in range(4)] == ["fault", "fault", None, None]
    for number in (2, 3):
        assert loop.heard[number].tokens == alone(wanted[number], loop.orders)
    assert loop.stats_at_end.failed_turns == 1
    assert (loop.stats_at_end.free_lanes, loop.bytes_at_end) == (2, 0)


def test_a_lost_state_ends_the_loop() -> None:
    loop = Loop()
    loop.runtime.fail_next.append(Fatal("gone"))
    loop.join(1, request("a", 5))
    with pytest.raises(Fatal, match="gone"):
        loop.run()


def test_without_room_for_all_the_younger_wait_and_nobody_fails() -> None:
    class Tight(Stage):
        def step(self, feeds: Sequence[Feed], tick: Tick) -> Sequence[Logits | None]:
            held = sum(self.seq_length(sequence) for sequence in (1, 2, 3))
            if held + sum(len(feed.tokens) for feed in feeds) > 60 and len(feeds) > 1:
                raise Capacity("no room")
            return super().step(feeds, tick)

    loop = Loop(lanes=3, stage=Tight)
    wanted = {n: request("p" * 16, 8) for n in range(3)}
    for number, ask in wanted.items():
        loop.join(number, ask)
    loop.run()
    for number, ask in wanted.items():
        assert loop.heard[number].tokens == alone(ask, loop.orders)


def test_a_runtime_that_holds_fewer_sequences_than_lanes_is_refused_at_once() -> None:
    with pytest.raises(DoesNotFit, match="odd could not set up lane 2 of 4: 2 sequences exist"):
        _executor(Stage(Orders(), 2), 4)


def test_a_runtime_that_cannot_make_its_sequences_is_refused_by_the_lane() -> None:
    class Single(Stage):
        def seq_create(self) -> int:
            if self._sequences:
                raise Capacity("one sequence only")
            return super().seq_create()

    with pytest.raises(DoesNotFit, match="odd could not set up lane 1 of 2: one sequence only"):
        _executor(Single(Orders(), 2), 2)


def test_a_runtime_whose_new_sequences_are_not_empty_is_refused_at_once() -> None:
    class Full(Stage):
        def seq_length(self, sequence: int) -> int:
            return super().seq_length(sequence) + 1

    with pytest.raises(
        DoesNotFit, match="odd could not set up lane 0 of 2: a new sequence holds 1"
    ):
        _executor(Full(Orders(), 2), 2)


def _executor(runtime: Stage, lanes: int) -> Executor:
    return Executor(runtime, lanes, Policy(), lambda message: None, "odd")


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (request("p" * 256), "context_length_exceeded"),
        (request([5, VOCABULARY]), "invalid_value"),
        (request([-1]), "invalid_value"),
        (request("a", 0), "invalid_value"),
        (GenerationRequest(prompt=Tokens(tokens=[1]), sampling=Sampling(logit_bias={999: 1.0})),
         "invalid_value"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_request_is_refused_before_any_turn(
    wanted: GenerationRequest, code: str
) -> None:
    loop = _lone(wanted)
    assert loop.heard[1].error == code
    assert loop.runtime.number == 0


def test_the_longest_prompt_that_fits_gets_one_token() -> None:
    heard = _lone(request("p" * 255, None)).heard[1]
    assert (len(heard.tokens), heard.finish) == (1, "length")


def test_an_empty_text_begins_with_the_opening_token() -> None:
    wanted = GenerationRequest(prompt=Text(text="", add_special=False), max_tokens=1)
    heard = _lone(wanted).heard[1]
    assert heard.prompt == [256]
    assert heard.finish == "length"


def test_a_stop_string_ends_a_stream_and_stays_out_of_its_text() -> None:
    orders = Orders(script="Hello wörld. ")
    wanted = GenerationRequest(
        prompt=Tokens(tokens=[1] * 14), max_tokens=100, stop=("ld.", "zzz"),
        sampling=Sampling(temperature=0),
    )  # fmt: skip
    heard = _lone(wanted, orders).heard[1]
    assert heard.text == "Hello wör"
    assert (heard.finish, heard.stopped_by) == ("stop", "ld.")


def test_the_end_of_text_ends_a_stream_unless_ignored() -> None:
    orders = Orders(script="abcdef", eos=10)
    prompt = Tokens(tokens=[1] * 6)
    greedy = Sampling(temperature=0)
    stops = _lone(GenerationRequest(prompt=prompt, sampling=greedy, max_tokens=9), orders)
    ignores = _lone(
        GenerationRequest(prompt=prompt, sampling=greedy, max_tokens=9, ignore_eos=True), orders
    )
    assert (stops.heard[1].text, stops.heard[1].finish) == ("abcd", "stop")
    assert stops.heard[1].tokens[-1] == 257
    assert (ignores.heard[1].text, ignores.heard[1].finish) == ("abcdefabc", "length")


def test_a_stop_token_ends_a_stream_and_stays_out_of_its_text() -> None:
    wanted = GenerationRequest(
        prompt=Tokens(tokens=[1] * 6), sampling=Sampling(temperature=0), stop_token_ids=(ord("d"),)
    )
    heard = _lone(wanted, Orders(script="abcdef")).heard[1]
    assert (heard.text, heard.finish) == ("abc", "stop")


@pytest.mark.parametrize("cut", range(13))
def test_a_stream_cut_anywhere_goes_on_as_if_it_had_not_been(cut: int) -> None:
    orders = Orders(script="Hello wörld. ")
    wanted = GenerationRequest(
        prompt=Tokens(tokens=[1] * 14), max_tokens=13, sampling=Sampling(seed=3), ignore_eos=True
    )
    whole = _lone(wanted, orders).heard[1]
    first = "".join(delta.text for delta in whole.deltas[:cut])
    loop = Loop(orders)
    replay = Replay(
        prompt=[1] * 14, committed=whole.tokens[:cut], sent={"text": max(0, len(first) - 1)}
    )
    loop.join(1, wanted, replay)
    loop.run()
    assert loop.heard[1].tokens == whole.tokens[cut:]
    assert loop.heard[1].text == whole.text[max(0, len(first) - 1) :]
    assert loop.heard[1].finish == "length"


def test_a_replay_that_is_already_at_its_end_says_so_without_a_turn() -> None:
    loop = Loop(Orders())
    loop.join(1, request("a", 3), Replay(prompt=[97], committed=[98, 99, 100], sent={"text": 2}))
    loop.run()
    assert (loop.heard[1].text, loop.heard[1].finish) == ("d", "length")
    assert loop.runtime.number == 0


def test_ids_that_only_pad_the_vocabulary_are_neither_taken_nor_drawn() -> None:
    loop = Loop()
    intake = replace(loop.intake, vocabulary=VOCABULARY + 5)
    with pytest.raises(InvalidField, match=f"0 to {VOCABULARY - 1}"):
        intake.stream(Generate(stream=1, request=request([VOCABULARY])), None)
    stream = intake.stream(Generate(stream=1, request=request("a", temperature=0.0)), None)
    row = np.zeros(VOCABULARY + 5, np.float32)
    row[[7, VOCABULARY + 3]] = 5.0, 9.0
    assert stream.draw(row).tokens == [7]


def test_a_turn_waits_for_a_stream_that_is_arriving_and_no_longer() -> None:
    loop = Loop(policy=Policy(turn_linger_us=10_000_000))
    wanted = {n: request(f"s{n}", 3) for n in (1, 2)}
    loop.join(1, wanted[1])
    loop.heard[2] = Heard()
    loop.executor.expect(2)
    late = threading.Thread(target=lambda: _arrive_after(loop, wanted[2]))
    late.start()
    with clock.held():
        loop.run()
    late.join()
    assert [len(step) for step in loop.runtime.steps] == [2, 2, 2]
    assert {n: loop.heard[n].tokens for n in wanted} == {
        n: alone(ask, loop.orders) for n, ask in wanted.items()
    }


def _arrive_after(loop: Loop, wanted: GenerationRequest) -> None:
    """Post stream 2 once the loop has taken in stream 1."""
    assert loop.prompted.wait(150)
    loop.executor.post(loop.intake.stream(Generate(stream=2, request=wanted), None))


def test_a_lone_stream_never_waits_for_others() -> None:
    loop = Loop(policy=Policy(turn_linger_us=10_000_000))
    loop.join(1, request("a", 5))
    with clock.held():
        loop.run()
    assert loop.stats_at_end.lingered_s == 0


def test_streams_that_wait_for_a_lane_are_not_waited_for() -> None:
    loop = Loop(lanes=2, policy=Policy(turn_linger_us=10_000_000))
    for number in range(5):
        loop.join(number, request("a", 3))
    with clock.held():
        loop.run()
    assert loop.stats_at_end.lingered_s == 0


def test_more_than_lanes_and_queue_is_refused() -> None:
    loop = Loop(lanes=1, policy=Policy(max_waiting=1))
    loop.join(1, request("a"))
    loop.join(2, request("b"))
    with pytest.raises(Overloaded, match="1 streams run and 1 wait"):
        loop.executor.expect(3)


def test_a_number_in_use_is_no_frame_to_take() -> None:
    loop = Loop()
    loop.join(1, request("a"))
    with pytest.raises(BadFrame, match="stream 1"):
        loop.executor.expect(1)


def test_a_ping_is_answered_within_a_long_step() -> None:
    loop = Loop()
    asked: list[int] = []

    def ask(turn: int) -> None:
        if turn == 2:
            asked.append(len(asked))
            loop.ping(len(asked))

    loop.runtime.within = ask
    loop.join(1, request("a", 3))
    loop.run()
    assert [pong.number for pong in loop.pongs] == list(range(1, len(asked) + 1))
    assert len({pong.ticks for pong in loop.pongs}) == len(asked) > 1
    assert {pong.stats.turns for pong in loop.pongs} == {1}


def test_shutdown_in_a_step_cancels_every_stream() -> None:
    loop = Loop(lanes=1)
    loop.idle = lambda: None
    loop.join(1, request("a", 50))
    loop.join(2, request("b", 50))
    loop.runtime.within = lambda turn: loop.executor.post(Shutdown()) if turn == 3 else None
    loop.run()
    assert [loop.heard[n].finish for n in (1, 2)] == ["cancelled"] * 2
    assert loop.runtime.closed


def test_a_cancel_within_a_step_drops_what_the_step_brings() -> None:
    """Lanes facts, failure 3: a cancel is acknowledged and the generation goes on."""
    loop = Loop(lanes=2)
    other = request("b", 8)
    loop.join(1, request("a", 50))
    loop.join(2, other)
    loop.runtime.within = lambda turn: loop.cancel(1) if turn == 4 else None
    loop.run()
    assert loop.heard[1].finish == "cancelled"
    assert len(loop.heard[1].tokens) == 3
    assert loop.heard[2].tokens == alone(other, loop.orders)
    assert [len(step) for step in loop.runtime.steps] == [2] * 4 + [1] * 4


def test_a_stream_that_joins_one_and_leaves_again_disturbs_neither() -> None:
    """Lanes facts, failure 9: a second stream that joins a batch of one ends it."""
    loop = Loop()
    wanted = {1: request("solo for a while", 12), 2: request("a guest", 3)}
    loop.runtime.before = lambda turn: loop.join(2, wanted[2]) if turn == 4 else None
    loop.join(1, wanted[1])
    loop.run()
    for number, ask in wanted.items():
        assert loop.heard[number].tokens == alone(ask, loop.orders)
    assert [len(step) for step in loop.runtime.steps] == [1] * 4 + [2] * 3 + [1] * 5


def test_a_deadline_within_a_step_frees_the_lane_once_and_its_next_holder_is_safe() -> None:
    """Lanes facts, failures 20 and 22: an expired stream keeps its state, or a late call for it
    reaches who has its lane now."""
    nxt = request("next", 6)

    def within(_turn: int) -> None:
        if loop.heard[1].over:
            loop.cancel(1)
        else:
            now.pass_(0.002)

    with clock.held() as now:
        loop = Loop(lanes=1)
        loop.join(1, request("a", 200), deadline=now.now_s + 0.05)
        loop.join(2, nxt)
        loop.runtime.within = within
        loop.run()
    assert loop.heard[1].finish == "cancelled"
    assert loop.heard[2].tokens == alone(nxt, loop.orders)
    assert loop.stats_at_end.free_lanes == 1


def test_occupancy_does_not_decay_under_load() -> None:
    """Lanes facts, failure 23: turns get emptier the longer many clients call."""
    loop = Loop(lanes=8, policy=Policy(max_waiting=1000))
    for number in range(300):
        loop.join(number, request([number % 256, 7], 4 + number % 9))
    loop.run()
    sizes = [len(step) for step in loop.runtime.steps]
    third = len(sizes) // 3
    assert sum(sizes[-2 * third : -third]) >= 0.9 * sum(sizes[:third])
    assert sum(sizes) / len(sizes) > 7.5


@pytest.mark.parametrize("truncate", ["any", "zero"])
def test_a_failed_step_is_tried_again_where_the_runtime_allows_it(truncate: str) -> None:
    loop = Loop(Orders(truncate="zero" if truncate == "zero" else "any", retry=True), lanes=2)
    wanted = {n: request(f"stream {n}", 6) for n in range(3)}
    loop.runtime.before = lambda turn: (
        loop.runtime.fail_next.append(Fault("once")) if turn in (1, 4) else None
    )
    for number, ask in wanted.items():
        loop.join(number, ask)
    loop.run()
    for number, ask in wanted.items():
        assert loop.heard[number].tokens == alone(ask, loop.orders)
    assert loop.stats_at_end.failed_turns == 2
    assert (loop.stats_at_end.refed_tokens > 0) == (truncate == "zero")


def test_a_step_that_fails_again_costs_its_seats_an_error() -> None:
    loop = Loop(Orders(retry=True), lanes=2)
    wanted = {n: request(f"s{n}", 6) for n in range(4)}
    loop.runtime.before = lambda turn: (
        loop.runtime.fail_next.append(Fault("again")) if turn in (3, 4) else None
    )
    for number, ask in wanted.items():
        loop.join(number, ask)
    loop.run()
    assert [loop.heard[n].error for n in range(4)] == ["fault", "fault", None, None]
    assert loop.leaked == 0


def test_nothing_is_kept_of_a_stream_that_a_failed_step_ended() -> None:
    loop = Loop()
    loop.runtime.before = lambda turn: (
        loop.runtime.fail_next.append(Fault("no")) if turn == 5 else None
    )
    loop.join(1, request("x" * 90, 9))
    loop.run()
    assert (loop.heard[1].error, loop.stats_at_end.stored) == ("fault", 0)


def test_an_exception_of_no_tree_is_not_tried_again() -> None:
    loop = Loop(Orders(retry=True))
    loop.runtime.fail_next.append(ZeroDivisionError("no tree"))
    loop.join(1, request("a", 6))
    loop.run()
    assert loop.heard[1].error == "fault"
    assert loop.runtime.number == 1


def test_a_row_that_cannot_be_drawn_from_costs_its_stream_alone() -> None:
    class Poisoned(Stage):
        def step(self, feeds: Sequence[Feed], tick: Tick) -> Sequence[Logits | None]:
            rows = super().step(feeds, tick)
            if self.number == 3 and rows[0] is not None:
                rows[0][:] = np.nan
            return rows

    loop = Loop(stage=Poisoned)
    other = request("b", 6)
    loop.join(1, request("a", 6))
    loop.join(2, other)
    loop.run()
    assert loop.heard[1].error == "not_finite"
    assert loop.heard[2].tokens == alone(other, loop.orders)


WRONG: dict[str, Callable[[list[Logits | None]], object]] = {
    "entries, wanted 2": lambda rows: [*rows, rows[0]],
    "1 entries, wanted 2": lambda rows: rows[:1],
    "a NoneType, wanted a list": lambda rows: None,
    "is None, wanted float32 of shape (1, ": lambda rows: [None] * len(rows),
    "is float64 of shape": lambda rows: [row if row is None else row.astype(np.float64)
                                     for row in rows],
    "is float32 of shape (2, ": lambda rows: [row if row is None else np.repeat(row, 2, axis=0)
                                              for row in rows],
    "is float32 of shape (1, 7)": lambda rows: [row if row is None else row[:, :7]
                                                for row in rows],
    "is a list, wanted": lambda rows: [row if row is None else row.tolist() for row in rows],
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize("retry", [False, True])
def test_a_step_that_answers_what_was_not_asked_costs_its_seats_and_nobody_else(
    message: str, retry: bool
) -> None:
    class Wrong(Stage):
        def step(self, feeds: Sequence[Feed], tick: Tick) -> Any:
            rows = super().step(feeds, tick)
            return WRONG[message](list(rows)) if self.number in (3, 4) else rows

    loop = Loop(Orders(retry=retry), lanes=2, stage=Wrong)
    wanted = {n: request(f"s{n}", 6) for n in range(6)}
    for number, ask in wanted.items():
        loop.join(number, ask)
    loop.run()
    failed = [n for n in wanted if loop.heard[n].error is not None]
    assert len(failed) == (2 if retry else 4)
    for number, ask in wanted.items():
        if number in failed:
            assert loop.heard[number].error == "fault"
        else:
            assert loop.heard[number].tokens == alone(ask, loop.orders)
    assert loop.leaked == 0


@pytest.mark.parametrize(
    ("logits", "entry", "message"),
    [
        ("none", (1, 5), "entry 1 of the step is float32 of shape (1, 5), wanted None"),
        ("all", (1, 5), "entry 1 of the step is float32 of shape (1, 5), wanted float32 of shape"
                        " (3, 5)"),
        ("all", (3, 5), None),
        ("last", (1, 5), None),
    ],
)  # fmt: skip
def test_rows_are_checked_against_their_feed(
    logits: Literal["none", "last", "all"], entry: tuple[int, int], message: str | None
) -> None:
    feeds = [Feed(1, [1], 0, "none"), Feed(2, [1, 2, 3], 0, logits)]
    answer = (None, np.zeros(entry, np.float32))
    if message is None:
        assert checked(answer, feeds, 5) == list(answer)
        return
    with pytest.raises(Fault) as caught:
        checked(answer, feeds, 5)
    assert caught.value.message == message


def test_streams_on_threads_of_their_own_get_what_they_get_alone() -> None:
    """Seating is whatever the turn loop finds: four threads, sixteen streams one after another."""
    loop = Loop(policy=Policy(turn_linger_us=200))
    loop.idle = lambda: None
    wanted = {n: request([n, 3 * n, 7], 9) for n in range(64)}

    def client(first: int) -> None:
        for number in range(first, 64, 4):
            loop.join(number, wanted[number])
            assert loop.wait(number)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(4)]
    runner = threading.Thread(target=loop.run)
    for thread in (runner, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    loop.stop()
    runner.join()
    for number, ask in wanted.items():
        assert loop.heard[number].tokens == alone(ask, loop.orders)
    assert loop.stats_at_end.seats / loop.stats_at_end.turns > 1.2, "next to nothing was batched"


def test_what_is_counted_of_turns_and_waits() -> None:
    loop = Loop(lanes=2, policy=Policy(max_seats=1))
    for number in range(3):
        loop.join(number, request("a", 4))
    loop.run()
    stats = loop.stats_at_end
    assert (stats.lanes, stats.admitted) == (2, 3)
    assert (stats.turns, stats.seats) == (12, 12)
    assert stats.ready > stats.turns
    assert (stats.window_turns, stats.window_seats) == (stats.turns, stats.seats)
    assert stats.window_ready == stats.ready
    assert stats.queued_s > 0


def test_the_window_counts_the_last_turns_alone() -> None:
    loop = Loop(Orders(context=2000), lanes=4)
    for number in range(3):
        loop.join(number, request(f"{number}", 50))
    loop.join(3, request("long", 50 + WINDOW_TURNS))
    loop.run()
    stats = loop.stats_at_end
    assert stats.turns == 50 + WINDOW_TURNS
    assert stats.seats == 4 * 50 + WINDOW_TURNS
    assert (stats.window_turns, stats.window_seats) == (WINDOW_TURNS, WINDOW_TURNS)


def test_time_lingered_is_counted_and_a_lone_stream_has_none() -> None:
    with clock.held():
        assert _lone(request("a", 30)).stats_at_end.lingered_s == 0
    began = time.monotonic()
    loop = Loop(policy=Policy(turn_linger_us=20_000))
    loop.join(1, request("a", 2))
    loop.heard[2] = Heard()
    loop.executor.expect(2)
    loop.idle = lambda: None
    late = request("b", 2)

    def arrive() -> None:
        assert loop.wait(1)
        loop.executor.post(loop.intake.stream(Generate(stream=2, request=late), None))

    done = threading.Thread(target=arrive)
    done.start()
    runner = threading.Thread(target=loop.run)
    runner.start()
    assert loop.wait(2)
    loop.stop()
    runner.join()
    done.join()
    assert 0.02 <= loop.stats_at_end.lingered_s <= time.monotonic() - began


def test_a_prompt_is_accepted_at_once_and_told_again_what_it_got_for_nothing() -> None:
    loop = Loop(lanes=1)
    told: list[int | None] = []
    hear = loop.executor._send

    def heard(message: ToDaemon) -> None:
        if isinstance(message, Prompted) and message.stream == 2:
            told.append(message.cached)
        hear(message)

    loop.executor._send = heard
    loop.join(1, request("x" * 64, 5))
    loop.join(2, request("x" * 64, 5))
    loop.run()
    assert told == [None, 63]


def slow(loop: Loop, now: Clock) -> None:
    """Every token from now on takes a fifth of a millisecond."""
    before = loop.runtime.before

    def timed(turn: int) -> None:
        before(turn)
        now.pass_(0.0002 * sum(len(feed.tokens) for feed in loop.runtime.attempts[-1]))

    loop.runtime.before = timed


def test_a_long_prompt_holds_up_decoders_by_no_more_than_the_target() -> None:
    """Lanes facts, failure 14: the larger the chunks of a prompt, the longer others stall."""
    orders = Orders(context=4096, step_tokens=512)
    with clock.held() as now:
        loop = Loop(orders, policy=Policy(turn_target_ms=20))
        loop.join(1, request("d", 60))
        long = request("p" * 2500, 2)
        loop.runtime.before = lambda turn: loop.join(2, long) if turn == 4 else None
        slow(loop, now)
        loop.run()
    beside = [step for step in loop.runtime.steps if len(step) == 2]
    assert len(beside) > 2500 / 150
    assert all(step[0].sequence == 1 for step in beside)
    chunks = sorted(len(step[1].tokens) for step in beside)
    assert chunks[len(chunks) // 2] < 150


def test_a_long_prompt_alone_takes_turns_of_ten_times_the_target() -> None:
    with clock.held() as now:
        loop = Loop(Orders(context=4096, step_tokens=512), policy=Policy(turn_target_ms=3))
        loop.join(1, request("p" * 3000, 2))
        slow(loop, now)
        loop.run()
    chunks = sorted(len(feed.tokens) for (feed,) in loop.runtime.steps[2:-2])
    assert 40 < chunks[len(chunks) // 2] < 250
