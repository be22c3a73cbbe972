"""What one stream computed and another need not: the prefix cache, joined prefills, parking."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from superfluid_adapter_fake.orders import Orders

from superfluid_compat.errors import Capacity, StepError, Unsupported
from superfluid_workerd import sequences
from superfluid_workerd.adapter import Feed, MemoryUse, SequenceId, Tick
from superfluid_workerd.admission import MOST_PARKED
from superfluid_workerd.link.frames import Class, GenerationRequest
from superfluid_workerd.prefix import BLOCK
from superfluid_workerd.turns import Policy
from support.turn_loop import Loop, Stage, alone, request

if TYPE_CHECKING:
    from superfluid_workerd.adapter import Logits

LONG = 2048
COPYING = Orders(context=LONG, spare=6)
EXPORTING = Orders(context=LONG, spare=6, copy=False)
PLAIN = Orders(context=LONG, copy=False, export=False)


def _prompt(seed: int, count: int) -> list[int]:
    return [(seed * 31 + i * i) % 256 for i in range(count)]


def _one_after_another(loop: Loop, *wanted: GenerationRequest) -> None:
    """Each stream starts when the one before has ended."""
    left = list(enumerate(wanted))

    def idle() -> None:
        if not left:
            loop.stop()
            return
        loop.idle = idle
        loop.join(*left.pop(0))

    loop.idle = idle
    idle()
    loop.run()
    for number, ask in enumerate(wanted):
        assert loop.heard[number].tokens == alone(ask, loop.orders, LONG)
    assert loop.leaked == 0


@pytest.mark.parametrize("orders", [COPYING, EXPORTING, PLAIN], ids=["copy", "export", "plain"])
def test_the_next_turn_of_a_chat_feeds_only_what_is_new(orders: Orders) -> None:
    loop = Loop(orders)
    first = request(_prompt(1, 100), 10)
    spoken = _prompt(1, 100) + alone(first, orders, LONG)
    second = request(spoken + _prompt(2, 20), 5)
    _one_after_another(loop, first, second)
    assert loop.heard[0].cached == 0
    assert loop.heard[1].cached == 109  # The last token drawn was never fed.
    assert loop.stats_at_end.prefill_tokens == 100 + 21
    assert loop.stats_at_end.shared_tokens == 109


@pytest.mark.parametrize("orders", [COPYING, EXPORTING, PLAIN], ids=["copy", "export", "plain"])
def test_a_prompt_that_comes_again_leaves_one_token_to_feed(orders: Orders) -> None:
    loop = Loop(orders)
    ask = request(_prompt(1, 100), 4)
    _one_after_another(loop, ask, _seeded(ask, 2), _seeded(ask, 3))
    assert [loop.heard[n].cached for n in range(3)] == [0, 99, 99]


def _seeded(ask: GenerationRequest, seed: int) -> GenerationRequest:
    sampling = msgspec.structs.replace(ask.sampling, seed=seed)
    return msgspec.structs.replace(ask, sampling=sampling)


def test_the_longest_match_wins_and_is_compared_not_believed() -> None:
    loop = Loop(COPYING)
    head = _prompt(1, 200)
    asks = [
        request(head[:64] + _prompt(5, 100), 2),
        request(head[:150] + _prompt(6, 9), 2),
        request([*head[:149], (head[149] + 1) % 256, *head[150:]], 2),
        request(head, 2),
    ]
    _one_after_another(loop, *asks)
    assert [loop.heard[n].cached for n in range(4)] == [0, 64, 149, 150]


def test_equal_hashes_of_unequal_tokens_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(chain: list[bytes], tokens: Sequence[int]) -> None:
        chain += [b"%d" % depth for depth in range(len(chain), len(tokens) // BLOCK)]

    monkeypatch.setattr(sequences, "extend", blind)
    loop = Loop(COPYING)
    head = _prompt(1, 100)
    asks = [request(it, 3) for it in (head, _prompt(2, 100), [*head[:70], *_prompt(3, 40)], head)]
    _one_after_another(loop, *asks)
    assert [loop.heard[n].cached for n in range(4)] == [0, 0, 70, 99]


def test_a_copy_leaves_what_is_kept_for_the_next() -> None:
    loop = Loop(COPYING)
    asks = [request(_prompt(1, 100) + _prompt(seed, 40), 2) for seed in range(5, 9)]
    _one_after_another(loop, *asks, asks[0])
    assert [loop.heard[n].cached for n in range(5)] == [0, 100, 100, 100, 139]


def test_a_runtime_that_cannot_go_back_shares_whole_sequences_only() -> None:
    orders = Orders(context=LONG, truncate="zero", spare=4)
    loop = Loop(orders)
    first = request(_prompt(1, 100), 10)
    spoken = _prompt(1, 100) + alone(first, orders, LONG)
    asks = [first, request(spoken + _prompt(2, 20), 5), request(_prompt(1, 100), 3)]
    _one_after_another(loop, *asks)
    assert [loop.heard[n].cached for n in range(3)] == [0, 109, 0]


def test_nothing_is_kept_where_no_bytes_are_given() -> None:
    loop = Loop(COPYING, policy=Policy(prefix_cache_bytes=0))
    ask = request(_prompt(1, 100), 4)
    _one_after_another(loop, ask, ask)
    assert [loop.heard[n].cached for n in range(2)] == [0, 0]
    assert loop.bytes_at_end == 0


def test_what_was_used_least_recently_goes_first_and_the_bytes_are_kept() -> None:
    """The fake's states take 16 bytes a token: room for two prompts of 100 and their answers."""
    loop = Loop(COPYING, policy=Policy(prefix_cache_bytes=16 * 220))
    one, two, three = (request(_prompt(seed, 100), 2) for seed in (1, 2, 3))
    _one_after_another(loop, one, two, one, three, one, two)
    assert [loop.heard[n].cached for n in range(6)] == [0, 0, 99, 0, 99, 0]
    assert loop.bytes_at_end <= 16 * 220


def test_a_cache_that_fills_the_runtime_never_keeps_a_stream_out() -> None:
    """Lanes facts, failure 16: one pool that runs full ends every generation."""
    orders = Orders(context=LONG, tokens=300, spare=4)
    loop = Loop(orders, lanes=2)
    _one_after_another(loop, *(request(_prompt(seed, 120), 4) for seed in range(6)))
    assert loop.stats_at_end.failed_turns == 0


SWAPPING = Orders(context=LONG, spare=6, swap=1 << 20)


def _swapping(swap: int = 1 << 20, **more: Any) -> Loop:
    return Loop(Orders(context=LONG, spare=6, swap=swap, **more))


def test_what_rested_while_others_computed_leaves_the_runtime_and_is_found_again() -> None:
    loop = _swapping()
    one, long = request(_prompt(1, 100), 4), request(_prompt(2, sequences._REST), 4)
    _one_after_another(loop, one, long, _seeded(one, 2))
    assert [loop.heard[n].cached for n in range(3)] == [0, 0, 99]
    assert loop.executor.sequences.inside_tokens < loop.stats_at_end.stored_tokens


def test_what_rested_for_a_short_time_only_stays_where_it_is() -> None:
    loop = _swapping()
    asks = [request(_prompt(seed, BLOCK + 8), 4) for seed in range(2)]
    _one_after_another(loop, *asks)
    assert loop.executor.sequences.inside_tokens == loop.stats_at_end.stored_tokens > 0


def test_nothing_is_swapped_out_where_the_runtime_does_not_ask_for_it() -> None:
    loop = Loop(COPYING)
    asks = [request(_prompt(seed, 400), 4) for seed in range(3)]
    _one_after_another(loop, *asks)
    assert loop.executor.sequences.inside_tokens == loop.stats_at_end.stored_tokens


def test_a_runtime_that_did_not_ask_is_never_asked_to_export_for_room() -> None:
    """Not even one that says nothing of its memory."""

    class Silent(Stage):
        def memory(self) -> MemoryUse:
            return MemoryUse()

        def seq_export(self, sequence: SequenceId) -> bytes:
            raise AssertionError("it was exported")

    loop = Loop(Orders(context=LONG, tokens=300, spare=4), lanes=2, stage=Silent)
    for number in range(4):
        loop.join(number, request(_prompt(number, 120), 4))
    loop.run()
    assert [loop.heard[number].finish for number in range(4)] == ["length"] * 4


def test_what_goes_on_from_a_swapped_state_takes_its_place() -> None:
    """Else a conversation would be kept once for each of its turns."""
    loop = _swapping()
    said, asks = _prompt(1, 100), list[GenerationRequest]()
    for seed in range(2, 6):
        asks.append(request(said, 10))
        said = said + alone(asks[-1], loop.orders, LONG) + _prompt(seed, 20)
        asks.append(request(_prompt(10 + seed, sequences._REST), 1))
    _one_after_another(loop, *asks)
    assert [loop.heard[n].cached for n in range(2, 8, 2)] == [109, 139, 169]
    talk = len(said) - 20 - 1
    assert loop.stats_at_end.stored_tokens == talk + 4 * sequences._REST


def test_a_part_of_a_swapped_state_leaves_it_for_the_next() -> None:
    loop = _swapping()
    head, others = _prompt(1, 100), itertools.count(20)
    asks = list[GenerationRequest]()
    for seed in range(5, 9):
        asks.append(request(head + _prompt(seed, 40), 2))
        asks.append(request(_prompt(next(others), sequences._REST), 1))
    _one_after_another(loop, *asks)
    assert [loop.heard[n].cached for n in range(0, 8, 2)] == [0, 100, 100, 100]


def test_swapped_states_are_bounded_and_the_least_recently_used_goes() -> None:
    sizes = list[int]()

    class Weighed(Stage):
        def seq_export(self, sequence: SequenceId) -> bytes:
            payload = super().seq_export(sequence)
            sizes.append(len(payload))
            return payload

    asks = [request(_prompt(seed, 300), 1) for seed in range(4)]
    order = [*asks, asks[0], asks[3]]
    _one_after_another(Loop(SWAPPING, stage=Weighed), *order)
    room = 2 * max(sizes)
    loop = _swapping(room)
    _one_after_another(loop, *order)
    assert [loop.heard[n].cached for n in (4, 5)] == [0, 299]
    assert loop.executor.sequences.swapped_bytes <= room


def test_a_full_runtime_swaps_what_it_would_have_dropped() -> None:
    loop = _swapping(tokens=300)
    asks = [request(_prompt(seed, 120), 4) for seed in range(6)]
    _one_after_another(loop, *asks, *(_seeded(ask, 2) for ask in asks))
    assert loop.stats_at_end.failed_turns == 0
    assert [loop.heard[n].cached for n in range(6, 12)] == [119] * 6


@pytest.mark.parametrize("error", [Capacity("no room"), Unsupported("damaged")])
def test_a_swapped_state_that_does_not_come_back_is_computed_again(error: StepError) -> None:
    class Forgetful(Stage):
        def seq_import(self, payload: bytes) -> SequenceId:
            raise error

    loop = Loop(SWAPPING, stage=Forgetful)
    one, long = request(_prompt(1, 100), 4), request(_prompt(2, 300), 4)
    _one_after_another(loop, one, long, _seeded(one, 2))
    assert loop.heard[2].cached == 0


def test_what_a_running_stream_shares_stays_beside_it() -> None:
    """Its cells are held anyway, and whoever comes next has them for nothing."""
    exported = list[int]()

    class Watched(Stage):
        def seq_export(self, sequence: SequenceId) -> bytes:
            exported.append(self.seq_length(sequence))
            return super().seq_export(sequence)

    loop = Loop(SWAPPING, stage=Watched)
    head = _prompt(1, 200)
    first, second = (request(head + _prompt(seed, 20), 1) for seed in (2, 3))
    _one_after_another(loop, first, msgspec.structs.replace(second, max_tokens=600))
    assert (loop.heard[1].cached, exported) == (200, [])


def _together(loop: Loop, wanted: Sequence[GenerationRequest]) -> None:
    for number, ask in enumerate(wanted):
        loop.join(number, ask)
    loop.run()
    for number, ask in enumerate(wanted):
        assert loop.heard[number].tokens == alone(ask, loop.orders, loop.intake.context)
    assert loop.leaked == 0


@pytest.mark.parametrize("orders", [COPYING, EXPORTING], ids=["copy", "export"])
def test_streams_that_come_together_prefill_a_shared_beginning_once(orders: Orders) -> None:
    loop = Loop(orders, lanes=8)
    head = _prompt(1, 1000)
    _together(loop, [request([*head, *_prompt(seed, 7)], 6) for seed in range(2, 34)])
    assert loop.stats_at_end.prefill_tokens == 1000 + 32 * 7
    assert loop.stats_at_end.seats / loop.stats_at_end.turns > 3
    assert {loop.heard[n].cached for n in range(1, 32)} == {1000}


def test_a_shared_beginning_that_its_first_stream_leaves_is_taken_over() -> None:
    loop = Loop(COPYING, lanes=4, policy=Policy(prompt_chunk=100))
    loop.runtime.within = lambda turn: loop.cancel(0) if turn == 4 else None
    wanted = [request(_prompt(1, 1000) + _prompt(seed, 7), 3) for seed in range(2, 5)]
    for number, ask in enumerate(wanted):
        loop.join(number, ask)
    loop.run()
    assert loop.heard[0].finish == "cancelled"
    for number in (1, 2):
        assert loop.heard[number].tokens == alone(wanted[number], COPYING, LONG)
    # What the first had fed went to the second, and its to the third; nothing was fed twice.
    assert loop.stats_at_end.prefill_tokens < 1000 + 100 + 14


def test_a_stranger_does_not_wait_for_a_prefill_that_others_wait_for() -> None:
    loop = Loop(COPYING, lanes=3, policy=Policy(turn_tokens=64))
    head = _prompt(1, 1000)
    for number in range(3):
        loop.join(number, request([*head, number], 2))
    loop.join(3, request(_prompt(9, 10), 2))
    loop.run()
    assert loop.heard[3].first_turn <= 2
    assert loop.heard[1].first_turn > 10


def test_what_a_runtime_can_neither_copy_nor_export_is_prefilled_side_by_side() -> None:
    loop = Loop(PLAIN, lanes=4)
    _together(loop, [request([*_prompt(1, 200), seed], 3) for seed in range(4)])
    assert loop.stats_at_end.prefill_tokens == 4 * 201


# Preemption.


def _preempted(loop: Loop, low: Class = "background") -> dict[int, GenerationRequest]:
    """Two lanes held by `low`, an interactive stream in turn 5, an equal of theirs in turn 6."""
    wanted = {
        0: request(_prompt(1, 90), 30, low),
        1: request(_prompt(2, 90), 30, low),
        2: request(_prompt(3, 5), 6, "interactive"),
        3: request(_prompt(4, 40), 4, low),
    }
    arrive = {5: 2, 6: 3}

    def before(turn: int) -> None:
        assert loop.executor.stats().parked_bytes <= most_parked
        if turn in arrive:
            loop.join(arrive[turn], wanted[arrive[turn]])

    most_parked = loop.policy.parked_bytes
    loop.runtime.before = before
    for number in (0, 1):
        loop.join(number, wanted[number])
    loop.run()
    for number, ask in wanted.items():
        assert loop.heard[number].tokens == alone(ask, loop.orders, LONG)
    assert loop.leaked == 0
    return wanted


@pytest.mark.parametrize(
    "parked_bytes", [1 << 20, 16 * 96, 0], ids=["exported", "larger-than-it-seemed", "kept"]
)
def test_an_interactive_arrival_takes_a_lane_and_its_holder_only_pauses(parked_bytes: int) -> None:
    """Lanes facts, failure 13: preempted work is computed again."""
    loop = Loop(Orders(context=LONG, spare=2), lanes=2, policy=Policy(parked_bytes=parked_bytes))
    _preempted(loop)
    assert loop.stats_at_end.preempted == 1
    assert loop.heard[2].first_turn == 6
    assert loop.stats_at_end.refed_tokens == 0
    assert loop.stats_at_end.prefill_tokens == 90 + 90 + 5 + 40


@pytest.mark.parametrize("low", ["completion", "agent", "background"])
def test_a_lane_is_taken_however_long_its_holder_ran(low: Class) -> None:
    """Without ageing whoever came first is before all; running is no merit all the same."""
    loop = Loop(Orders(context=LONG, spare=2), lanes=2, policy=Policy(class_ageing_ms=0))
    _preempted(loop, low)
    assert loop.stats_at_end.preempted == 1
    assert loop.heard[2].first_turn == 6


def test_the_lane_that_is_taken_goes_to_whom_it_was_taken_for() -> None:
    """An agent that was ahead in line would have had it, and the chat have waited."""
    loop = Loop(Orders(context=LONG, spare=2), lanes=1, policy=Policy(class_ageing_ms=0))
    wanted = {
        0: request(_prompt(1, 90), 30, "background"),
        1: request(_prompt(2, 20), 5, "agent"),
        2: request(_prompt(3, 5), 6, "interactive"),
    }

    def before(turn: int) -> None:
        if turn == 5:
            loop.join(1, wanted[1])
            loop.join(2, wanted[2])

    loop.runtime.before = before
    loop.join(0, wanted[0])
    loop.run()
    assert loop.heard[2].first_turn == 6
    assert loop.stats_at_end.preempted == 1
    for number, ask in wanted.items():
        assert loop.heard[number].tokens == alone(ask, loop.orders, LONG)


def test_chats_without_end_do_not_keep_a_stream_from_its_end() -> None:
    loop = Loop(Orders(context=LONG, spare=2), lanes=1, policy=Policy(class_ageing_ms=0))
    low = request(_prompt(1, 40), 20, "background")
    loop.join(0, low)
    chats = 0

    def before(turn: int) -> None:
        nonlocal chats
        if turn % 3 == 0 and not loop.heard[0].over and chats < 200:
            chats += 1
            loop.join(chats, request(_prompt(chats, 3), 2, "interactive"))

    loop.runtime.before = before
    loop.run()
    assert loop.heard[0].tokens == alone(low, loop.orders, LONG)
    assert chats < 200
    assert loop.stats_at_end.preempted == MOST_PARKED


def test_without_room_for_its_state_a_preempted_stream_is_computed_again() -> None:
    loop = Loop(PLAIN, lanes=2, policy=Policy(parked_bytes=0, prefix_cache_bytes=0))
    _preempted(loop)
    assert loop.stats_at_end.preempted == 1
    assert loop.stats_at_end.refed_tokens > 90


def test_a_state_that_does_not_come_back_is_computed_again() -> None:
    class Forgetful(Stage):
        def seq_import(self, payload: bytes) -> int:
            raise Unsupported("never heard of it")

    loop = Loop(Orders(context=LONG, copy=False), lanes=2, stage=Forgetful)
    _preempted(loop)
    assert loop.stats_at_end.refed_tokens > 90


def test_a_preempted_stream_goes_on_before_new_equals() -> None:
    """Lanes facts, failure 12: a preempted request loses its place."""
    loop = Loop(Orders(context=LONG, spare=2), lanes=2)
    wanted = _preempted(loop)
    assert loop.heard[3].first_turn > loop.heard[2].first_turn
    resumed = [
        turn for turn, step in enumerate(loop.runtime.steps, start=1)
        if any(_is_of(feed, wanted[1], loop.heard[1].tokens) for feed in step)
    ]  # fmt: skip
    assert resumed[-1] - resumed[0] > len(resumed) - 1, "it was never parked"
    back = next(b for a, b in itertools.pairwise(resumed) if b > a + 1)
    assert loop.heard[3].first_turn > back


def _is_of(feed: Feed, ask: GenerationRequest, answer: list[int]) -> bool:
    history: list[int] = [*ask.prompt.tokens, *answer]  # type: ignore[union-attr]  # Tokens here
    return list(feed.tokens) == history[feed.start : feed.start + len(feed.tokens)]


def test_a_parked_stream_that_is_cancelled_leaves_nothing() -> None:
    loop = Loop(Orders(context=LONG, spare=2), lanes=1)
    loop.join(0, request(_prompt(1, 90), 30, "background"))
    chat = request(_prompt(2, 5), 9, "interactive")

    def before(turn: int) -> None:
        if turn == 4:
            loop.join(1, chat)
        if turn == 7:
            assert loop.executor.stats().parked == 1
            assert loop.executor.stats().parked_bytes > 0
            loop.cancel(0)

    loop.runtime.before = before
    loop.run()
    assert loop.heard[0].finish == "cancelled"
    assert loop.heard[1].tokens == alone(chat, loop.orders, LONG)
    assert loop.leaked == 0


def test_all_finish_where_four_fit_alone_and_not_together() -> None:
    """Lanes facts, failure 16: one pool that runs full ends every generation."""
    for tells in (True, False):
        for export in (True, False):
            orders = Orders(context=LONG, tokens=200, tells=tells, export=export, copy=export)
            loop = Loop(orders, lanes=4)
            _together(loop, [request(_prompt(seed, 60), 100) for seed in range(4)])
            assert {loop.heard[n].finish for n in range(4)} == {"length"}
            assert tells or 0 < loop.stats_at_end.preempted < 8


def test_a_large_stream_is_passed_by_small_ones_and_served_all_the_same() -> None:
    """Lanes facts, failure 11: a head with a large need blocks the small, or starves itself."""
    loop = Loop(Orders(context=LONG, tokens=400), lanes=4, policy=Policy(prefix_cache_bytes=0))
    wanted = {0: request(_prompt(1, 60), 40), 1: request(_prompt(2, 300), 60)}
    wanted |= {n: request(_prompt(n, 20), 20) for n in range(2, 60)}
    left = list(wanted)

    def before(_turn: int) -> None:
        if left:
            number = left.pop(0)
            loop.join(number, wanted[number])

    loop.runtime.before = before
    loop.join(left[0], wanted[left.pop(0)])
    loop.run()
    for number, ask in wanted.items():
        assert loop.heard[number].tokens == alone(ask, loop.orders, 400)
    assert loop.heard[2].first_turn < loop.heard[1].first_turn
    assert loop.heard[1].first_turn < loop.heard[59].first_turn


def test_a_stream_that_alone_has_no_room_is_told_so_and_nobody_else_suffers() -> None:
    orders = Orders(context=LONG, tokens=150, tells=False)
    loop = Loop(orders, lanes=2)
    loop.intake = replace(loop.intake, context=LONG)
    loop.join(0, request(_prompt(1, 200), 5))
    fits = request(_prompt(2, 50), 5)
    loop.join(1, fits)
    loop.run()
    assert loop.heard[0].error == Capacity.code
    assert loop.heard[1].tokens == alone(fits, orders, LONG)
    assert loop.leaked == 0


def test_a_foreign_conversation_is_never_restored_while_states_come_and_go() -> None:
    """Lanes facts, failure 5: a cache of prompts hands out another's under concurrent eviction."""
    loop = Loop(Orders(context=LONG, spare=1), lanes=2, policy=Policy(parked_bytes=4000))
    classes: list[Class] = ["interactive", "background", "agent"]
    wanted = {
        n: request(_prompt(1, 64) + [n] * BLOCK + _prompt(n, 20), 12, classes[n % 3], seed=n)
        for n in range(43)
    }
    left = list(wanted)

    def before(turn: int) -> None:
        for _ in range({1: 2, 5: 1}.get(turn % 20, 0) if left else 0):
            number = left.pop(0)
            loop.join(number, wanted[number])

    loop.runtime.before = before
    loop.join(left[0], wanted[left.pop(0)])
    loop.run()
    for number, ask in wanted.items():
        assert loop.heard[number].tokens == alone(ask, loop.orders, LONG)
    assert loop.stats_at_end.shared_tokens > 1000
    assert loop.stats_at_end.preempted > 3
    assert loop.leaked == 0


def test_rows_that_the_runtime_overwrites_later_change_no_answer() -> None:
    """Lanes facts, failure 6: an engine's output buffer replays other requests' answers."""

    class Reusing(Stage):
        lent: list[Any] = []  # noqa: RUF012  # one instance

        def step(self, feeds: Sequence[Feed], tick: Tick) -> Sequence[Logits | None]:
            for row in self.lent:
                row[:] = 0.0
            rows = super().step(feeds, tick)
            self.lent[:] = [row for row in rows if row is not None]
            return rows

    loop = Loop(Orders(context=LONG), stage=Reusing)
    _together(loop, [request(_prompt(seed, 20), 12) for seed in range(4)])
