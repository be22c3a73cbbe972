"""What every runtime promises, as tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import pytest

from superfluid_compat.errors import (
    Capacity,
    OutOfBoundary,
    UnknownSequence,
    Unsupported,
)
from superfluid_workerd.adapter import Feed, Runtime, SequenceId
from superfluid_workerd.conformance.case import Case, Opened

if TYPE_CHECKING:
    from superfluid_workerd.adapter import Logits

STAGGERED: Final = (
    {0: 0}, {0: 0, 1: 1}, {1: 1}, {0: 0, 1: 1, 2: 2}, {2: 2}, {0: 3, 2: 2}, {0: 3, 1: 1, 2: 2},
)  # fmt: skip
"""Seats by turn, lane to stream: late join, sitting out, full house, recycling, resuming."""

_CALLS: Final[dict[str, Callable[[Runtime, SequenceId], object]]] = {
    "seq_free": lambda runtime, it: runtime.seq_free(it),
    "seq_length": lambda runtime, it: runtime.seq_length(it),
    "seq_truncate": lambda runtime, it: runtime.seq_truncate(it, 0),
    "step": lambda runtime, it: runtime.step([Feed(it, [0], 0)], lambda: None),
    "seq_copy": lambda runtime, it: runtime.seq_copy(it, 0),
    "seq_export": lambda runtime, it: runtime.seq_export(it),
}


class _Abandon(Exception):
    pass


class RuntimeContract:
    """Needs a fixture `case` of type `Case`."""

    def test_the_description_covers_what_was_asked(self, case: Case) -> None:
        loaded = case.load()
        described = loaded.runtime.describe()
        assert described.sequences >= case.lanes
        assert described.context >= max(case.context, 1)
        assert described.step_tokens >= 1
        assert described.vocabulary >= 1
        assert described.swap_bytes >= 0
        assert described.export or not described.swap_bytes
        assert loaded.runtime.describe() == described
        assert {"context", "lanes"} <= set(loaded.record.asked) & set(loaded.record.got)
        loaded.runtime.close()

    def test_what_does_not_embed_says_so(self, case: Case) -> None:
        with case.opened() as opened:
            assert opened.describe.generates, "this suite is for models that give text"
            if opened.describe.embedding is None:
                with pytest.raises(Unsupported):
                    opened.runtime.embed([[0]], lambda: None)
            else:
                assert opened.runtime.embed([[0]], lambda: None).shape[0] == 1

    # Sequences.

    def test_as_many_sequences_as_lanes_begin_empty(self, case: Case) -> None:
        with case.opened() as opened:
            made = [opened.runtime.seq_create() for _ in range(case.lanes)]
            assert len(set(made)) == case.lanes
            assert [opened.runtime.seq_length(it) for it in made] == [0] * case.lanes

    def test_past_its_sequences_it_has_no_room_and_after_a_free_it_has(self, case: Case) -> None:
        with case.opened() as opened:
            made = [opened.runtime.seq_create() for _ in range(opened.describe.sequences)]
            with pytest.raises(Capacity):
                opened.runtime.seq_create()
            opened.runtime.seq_free(made[0])
            assert opened.runtime.seq_length(opened.runtime.seq_create()) == 0

    @pytest.mark.parametrize("call", sorted(_CALLS))
    @pytest.mark.parametrize("freed", [True, False], ids=["freed", "never-made"])
    def test_a_sequence_that_is_not_there_is_named(
        self, case: Case, call: str, freed: bool
    ) -> None:
        with case.opened() as opened:
            sequence = opened.runtime.seq_create()
            if freed:
                opened.runtime.seq_free(sequence)
            wanted = (UnknownSequence, Unsupported) if "seq_" in call else UnknownSequence
            with pytest.raises(wanted):
                _CALLS[call](opened.runtime, sequence if freed else 1 << 30)

    def test_a_sequence_holds_what_it_was_fed(self, case: Case) -> None:
        with case.opened() as opened:
            one, two = opened.runtime.seq_create(), opened.runtime.seq_create()
            opened.step([opened.feed(one, opened.tokens(3)), opened.feed(two, opened.tokens(1))])
            opened.step([opened.feed(two, opened.tokens(2))])
            assert (opened.runtime.seq_length(one), opened.runtime.seq_length(two)) == (3, 3)

    def test_a_bound_on_all_tokens_together_is_kept_and_costs_nobody(self, case: Case) -> None:
        with case.opened() as opened:
            most = opened.describe.tokens
            assert most >= 0
            if most == 0:
                return
            one, two = opened.runtime.seq_create(), opened.runtime.seq_create()
            longest = min(most, opened.describe.context)
            opened.extend(one, opened.tokens(longest))
            if longest < most:
                return
            with pytest.raises(Capacity):
                opened.extend(two, opened.tokens(1))
            assert opened.runtime.seq_length(one) == longest
            assert opened.runtime.seq_length(two) == 0
            opened.runtime.seq_truncate(one, 0)
            tokens = opened.tokens(3)
            _close(opened.extend(two, tokens), opened.alone(tokens), case)

    def test_memory_returns_after_a_free(self, case: Case) -> None:
        with case.opened() as opened:
            before = opened.runtime.memory().sequences
            for _ in range(3):
                sequence = opened.runtime.seq_create()
                opened.extend(sequence, opened.tokens(8))
                opened.runtime.seq_free(sequence)
                opened.runtime.release()
            assert opened.runtime.memory().sequences <= before

    def test_a_recycled_sequence_holds_nothing_of_its_last_stream(self, case: Case) -> None:
        with case.opened() as opened:
            tokens = opened.tokens(6, seed=1)
            expected = opened.alone(tokens)
            sequence = opened.runtime.seq_create()
            opened.extend(sequence, opened.tokens(9, seed=2))
            opened.runtime.seq_truncate(sequence, 0)
            assert opened.runtime.seq_length(sequence) == 0
            _close(opened.extend(sequence, tokens), expected, case)

    # Steps.

    def test_rows_are_those_asked_for(self, case: Case) -> None:
        with case.opened() as opened:
            kinds: list[Literal["none", "last", "all"]] = ["none", "last", "all"]
            feeds = [
                opened.feed(opened.runtime.seq_create(), opened.tokens(4), kind) for kind in kinds
            ]
            none, last, every = opened.step(feeds)
            assert none is None
            assert last is not None
            assert every is not None
            assert last.shape == (1, opened.describe.vocabulary)
            assert every.shape == (4, opened.describe.vocabulary)
            assert last.dtype == every.dtype == np.float32
            assert np.isfinite(every).all()
            _close(every[-1], last[0], case)

    def test_all_rows_are_those_of_one_token_at_a_time(self, case: Case) -> None:
        with case.opened() as opened:
            tokens = opened.tokens(5, seed=3)
            (every,) = opened.step([opened.feed(opened.runtime.seq_create(), tokens, "all")])
            assert every is not None
            single = opened.runtime.seq_create()
            for row, token in zip(every, tokens, strict=True):
                _close(row, opened.extend(single, [token]), case)

    @pytest.mark.parametrize("width", [1, 2, 3])
    def test_a_stream_gets_what_it_gets_alone_whoever_sits_beside_it(
        self, case: Case, width: int
    ) -> None:
        with case.opened() as opened, case.opened() as other:
            lanes = [opened.runtime.seq_create() for _ in range(3)]
            fed: dict[int, list[int]] = {stream: [] for stream in range(4)}
            for turn, seats in enumerate(STAGGERED):
                if turn == 5:
                    opened.runtime.seq_truncate(lanes[0], 0)
                feeds = []
                for lane, stream in seats.items():
                    tokens = opened.tokens(width, seed=100 * stream + turn)
                    fed[stream] += tokens
                    feeds.append(opened.feed(lanes[lane], tokens))
                for row, stream in zip(opened.step(feeds), seats.values(), strict=True):
                    assert row is not None
                    _close(row[-1], other.alone(fed[stream]), case)

    def test_ragged_widths_change_nothing(self, case: Case) -> None:
        with case.opened() as opened:
            texts = [opened.tokens(count, seed=count) for count in (7, 1, 4)]
            expected = [opened.alone(tokens) for tokens in texts]
            made = [opened.runtime.seq_create() for _ in texts]
            feeds = [opened.feed(it, text) for it, text in zip(made, texts, strict=True)]
            for row, wanted in zip(opened.step(feeds), expected, strict=True):
                assert row is not None
                _close(row[-1], wanted, case)

    def test_widths_that_change_from_step_to_step_change_nothing(self, case: Case) -> None:
        with case.opened() as opened:
            tokens = opened.tokens(7, seed=5)
            expected = opened.alone(tokens)
            sequence = opened.runtime.seq_create()
            row = None
            for first, last in ((0, 1), (1, 4), (4, 5), (5, 7)):
                row = opened.extend(sequence, tokens[first:last])
            assert row is not None
            _close(row, expected, case)

    def test_the_order_of_seats_changes_nothing(self, case: Case) -> None:
        with case.opened() as opened:
            texts = [opened.tokens(3, seed=seed) for seed in (1, 2)]
            one, two = opened.runtime.seq_create(), opened.runtime.seq_create()
            rows = opened.step([opened.feed(two, texts[1]), opened.feed(one, texts[0])])
            for row, text in zip(rows, reversed(texts), strict=True):
                assert row is not None
                _close(row[-1], opened.alone(text), case)

    def test_rows_are_apart_and_the_callers_to_write_on(self, case: Case) -> None:
        with case.opened() as opened:
            texts = [opened.tokens(3, seed=seed) for seed in (1, 2)]
            feeds = [opened.feed(opened.runtime.seq_create(), text, "all") for text in texts]
            first, second = opened.runtime.step(feeds, lambda: None)
            assert first is not None
            assert second is not None
            kept = first.copy()
            second[:] = 0
            np.testing.assert_array_equal(first, kept)
            for text in texts:
                assert np.abs(opened.alone(text)).max() > 0
            _close(opened.alone(texts[0]), kept[-1], case)

    # Errors that change nothing.

    def test_tokens_outside_the_vocabulary_are_refused(self, case: Case) -> None:
        with case.opened() as opened:
            for token in (-1, opened.describe.vocabulary, 1 << 40):
                _refused(opened, case, tokens=[0, token], start=2)

    def test_a_feed_without_tokens_is_refused(self, case: Case) -> None:
        with case.opened() as opened:
            _refused(opened, case, tokens=[], start=2)

    def test_a_start_that_is_not_the_length_is_refused(self, case: Case) -> None:
        with case.opened() as opened:
            _refused(opened, case, tokens=[0], start=1)
            _refused(opened, case, tokens=[0], start=3)

    def test_past_the_context_is_refused(self, case: Case) -> None:
        with case.opened() as opened:
            sequence = opened.runtime.seq_create()
            context, most = opened.describe.context, opened.describe.step_tokens
            if context > 4096:
                with pytest.raises(OutOfBoundary):
                    opened.step([Feed(sequence, [0] * (context + 1), 0)])
                return
            for start in range(0, context, most):
                count = min(most, context - start)
                opened.step([Feed(sequence, [0] * count, start, "none")])
            with pytest.raises(OutOfBoundary):
                opened.step([Feed(sequence, [0], context)])
            assert opened.runtime.seq_length(sequence) == context

    def test_one_bad_feed_changes_no_other_sequence(self, case: Case) -> None:
        with case.opened() as opened:
            good, bad = opened.runtime.seq_create(), opened.runtime.seq_create()
            with pytest.raises(OutOfBoundary):
                opened.step([opened.feed(good, [0, 1]), Feed(bad, [-1], 0)])
            assert opened.runtime.seq_length(good) == opened.runtime.seq_length(bad) == 0

    # Ticks.

    def test_a_step_ticks(self, case: Case) -> None:
        with case.opened() as opened:
            ticks: list[int] = []
            sequence = opened.runtime.seq_create()
            opened.step([opened.feed(sequence, opened.tokens(4))], lambda: ticks.append(1))
            assert ticks

    def test_a_step_can_be_abandoned_and_its_sequences_go_back(self, case: Case) -> None:
        def abandon() -> None:
            raise _Abandon

        with case.opened() as opened:
            tokens = opened.tokens(4, seed=7)
            expected = opened.alone(tokens + tokens)
            sequence, other = opened.runtime.seq_create(), opened.runtime.seq_create()
            opened.step([opened.feed(sequence, tokens), opened.feed(other, tokens)])
            with pytest.raises(_Abandon):
                opened.step([opened.feed(sequence, opened.tokens(5))], abandon)
            assert opened.runtime.seq_length(sequence) >= len(tokens)
            if not _back(opened.runtime, sequence, len(tokens)):
                opened.runtime.seq_truncate(sequence, 0)
                opened.extend(sequence, tokens)
            _close(opened.extend(sequence, tokens), expected, case)
            _close(opened.extend(other, tokens), expected, case)

    # Going back, copying, moving.

    def test_truncation_goes_back_exactly_or_says_it_cannot(self, case: Case) -> None:
        with case.opened() as opened:
            tokens, tail = opened.tokens(6, seed=1), opened.tokens(3, seed=2)
            sequence = opened.runtime.seq_create()
            opened.extend(sequence, tokens)
            for length in (6, 5, 2):
                went = _back(opened.runtime, sequence, length)
                assert went or opened.describe.truncate == "zero"
                if went:
                    assert opened.runtime.seq_length(sequence) == length
                    _close(
                        opened.extend(sequence, tail), opened.alone(tokens[:length] + tail), case
                    )
                    opened.runtime.seq_truncate(sequence, 0)
                    opened.extend(sequence, tokens[:length])
            opened.runtime.seq_truncate(sequence, 0)
            _close(opened.extend(sequence, tail), opened.alone(tail), case)

    def test_truncation_past_the_length_is_refused(self, case: Case) -> None:
        with case.opened() as opened:
            for length in (3, -1):
                sequence = opened.runtime.seq_create()
                opened.extend(sequence, opened.tokens(2))
                with pytest.raises(OutOfBoundary):
                    opened.runtime.seq_truncate(sequence, length)
                assert opened.runtime.seq_length(sequence) == 2
                opened.runtime.seq_free(sequence)

    def test_a_copy_goes_its_own_way_or_is_unsupported(self, case: Case) -> None:
        with case.opened() as opened:
            tokens, left, right = (opened.tokens(4, seed=seed) for seed in (1, 2, 3))
            sequence = opened.runtime.seq_create()
            opened.extend(sequence, tokens)
            if not opened.describe.copy:
                with pytest.raises(Unsupported):
                    opened.runtime.seq_copy(sequence, 4)
                return
            copy = opened.runtime.seq_copy(sequence, 4)
            rows = opened.extend(sequence, left), opened.extend(copy, right)
            _close(rows[0], opened.alone(tokens + left), case)
            _close(rows[1], opened.alone(tokens + right), case)
            opened.runtime.seq_free(sequence)
            _close(opened.extend(copy, left), opened.alone(tokens + right + left), case)
            with pytest.raises(OutOfBoundary):
                opened.runtime.seq_copy(copy, 99)

    def test_a_copy_of_a_part_is_that_part_or_refused_and_leaves_nothing(self, case: Case) -> None:
        with case.opened() as opened:
            count = min(48, opened.describe.context - 4)
            tokens, tail = opened.tokens(count, seed=1), opened.tokens(3, seed=2)
            sequence = opened.runtime.seq_create()
            for start in range(0, count, 4):
                opened.extend(sequence, tokens[start : start + 4])
            for length in (0, 1, count // 2, count - 1, count, count + 1, -1):
                try:
                    copy = opened.runtime.seq_copy(sequence, length)
                except (Unsupported, OutOfBoundary):
                    continue
                assert opened.runtime.seq_length(copy) == length
                _close(opened.extend(copy, tail), opened.alone(tokens[:length] + tail), case)
                opened.runtime.seq_free(copy)
            _leaves_nothing(opened, 1)
            _close(opened.extend(sequence, tail), opened.alone(tokens + tail), case)

    def test_what_is_no_state_leaves_no_sequence(self, case: Case) -> None:
        with case.opened() as opened:
            sequence = opened.runtime.seq_create()
            opened.extend(sequence, opened.tokens(5, seed=1))
            able = opened.describe.export
            for damaged in _damaged(opened.runtime.seq_export(sequence)) if able else [b""]:
                with pytest.raises(Unsupported):
                    opened.runtime.seq_import(damaged)
                _leaves_nothing(opened, 1)

    def test_a_sequence_moves_to_another_runtime_or_is_unsupported(self, case: Case) -> None:
        with case.opened() as opened, case.opened() as other:
            tokens, tail = opened.tokens(5, seed=1), opened.tokens(2, seed=2)
            sequence = opened.runtime.seq_create()
            opened.extend(sequence, tokens)
            if not opened.describe.export:
                with pytest.raises(Unsupported):
                    opened.runtime.seq_export(sequence)
                with pytest.raises(Unsupported):
                    opened.runtime.seq_import(b"")
                return
            payload = opened.runtime.seq_export(sequence)
            moved = other.runtime.seq_import(payload)
            assert other.runtime.seq_length(moved) == 5
            _close(other.extend(moved, tail), other.alone(tokens + tail), case)
            before = other.runtime.memory().sequences
            for damaged in _damaged(payload):
                with pytest.raises(Unsupported):
                    other.runtime.seq_import(damaged)
            assert other.runtime.memory().sequences == before


def _leaves_nothing(opened: Opened, held: int) -> None:
    """Beside `held` sequences there is room for all others that were promised."""
    made: list[SequenceId] = []
    wanted = opened.describe.sequences - held
    with contextlib.suppress(Capacity):
        made.extend(opened.runtime.seq_create() for _ in range(wanted))
    assert len(made) == wanted, f"{wanted - len(made)} sequences are left of what was refused"
    for sequence in made:
        opened.runtime.seq_free(sequence)


def _damaged(payload: bytes) -> Sequence[bytes]:
    middle = len(payload) // 2
    flipped = payload[:middle] + bytes([payload[middle] ^ 1]) + payload[middle + 1 :]
    return b"", payload[:middle], payload[:-1], flipped, payload + b"\0"


def _back(runtime: Runtime, sequence: SequenceId, length: int) -> bool:
    """Whether the sequence could be truncated; if not, it is unchanged."""
    before = runtime.seq_length(sequence)
    try:
        runtime.seq_truncate(sequence, length)
    except Unsupported:
        assert runtime.seq_length(sequence) == before
        return False
    return True


def _refused(opened: Opened, case: Case, *, tokens: list[int], start: int) -> None:
    """The feed is refused after two tokens, and the sequence goes on as if never asked."""
    before, tail = opened.tokens(2, seed=1), opened.tokens(2, seed=2)
    sequence = opened.runtime.seq_create()
    opened.extend(sequence, before)
    with pytest.raises(OutOfBoundary):
        opened.step([Feed(sequence, tokens, start)])
    assert opened.runtime.seq_length(sequence) == 2
    _close(opened.extend(sequence, tail), opened.alone(before + tail), case)
    opened.runtime.seq_free(sequence)


def _close(found: Logits, wanted: Logits, case: Case) -> None:
    if case.tolerance == 0:
        np.testing.assert_array_equal(found, wanted)
    else:
        np.testing.assert_allclose(found, wanted, rtol=0, atol=case.tolerance)
