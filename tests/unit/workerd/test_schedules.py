"""Random schedules of the turn loop over the hash-chain fake, against the solo oracle.

Streams join, sit out, cancel, run out of time, share beginnings, are copied, truncated, exported,
imported and preempted, and steps fail. Any state of one stream that reaches another is a plain
mismatch. What happened is counted: an operation that never takes place proves nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

import pytest
from superfluid_adapter_fake.orders import Orders

from superfluid_compat.errors import Capacity, Fault
from superfluid_workerd import sequences
from superfluid_workerd.adapter import Feed, SequenceId, Tick
from superfluid_workerd.link.frames import Class, GenerationRequest, TurnStats
from superfluid_workerd.turns import Policy
from support.clock import Clock, held
from support.turn_loop import Loop, Stage, alone, request

if TYPE_CHECKING:
    from superfluid_workerd.adapter import Logits

T = TypeVar("T")
CONTEXT = 256
CLASSES: tuple[Class, ...] = ("interactive", "completion", "agent", "background")
_LEAST_TOKENS = 32
"""Of prompts, that every turn takes where it may; see `pace`."""


class Counted(Stage):
    """Counts what was done to its sequences."""

    def __init__(self, orders: Orders, sequences: int) -> None:
        super().__init__(orders, sequences)
        self.done: Counter[str] = Counter()
        self.within_a_turn = False
        self._failed: dict[SequenceId, int] = {}

    def step(self, feeds: Sequence[Feed], tick: Tick) -> Sequence[Logits | None]:
        self._failed = {}
        try:
            found = super().step(feeds, tick)
        except Capacity:
            self.within_a_turn = True
            raise
        except Fault:
            self._failed = {feed.sequence: feed.start for feed in feeds if feed.start}
            self.within_a_turn = False
            raise
        self.within_a_turn = False
        return found

    def seq_copy(self, sequence: SequenceId, length: int) -> SequenceId:
        found = super().seq_copy(sequence, length)
        self.done["copied"] += length > 0
        return found

    def seq_export(self, sequence: SequenceId) -> bytes:
        found = super().seq_export(sequence)
        self.done["exported"] += 1
        return found

    def seq_import(self, payload: bytes) -> SequenceId:
        found = super().seq_import(payload)
        self.done["imported"] += self.seq_length(found) > 0
        return found

    def seq_truncate(self, sequence: SequenceId, length: int) -> None:
        shorter = 0 < length < self.seq_length(sequence)
        super().seq_truncate(sequence, length)
        self.done["truncated"] += shorter
        self.done["went back after a failed step"] += shorter and (
            self._failed.pop(sequence, None) == length
        )


@dataclass
class Drawn:
    """One schedule by its seed: what is served, on what, and what befalls it."""

    seed: int

    def __post_init__(self) -> None:
        self.dice = dice = random.Random(self.seed)
        self.orders = Orders(
            context=CONTEXT,
            truncate=dice.choice(["any", "any", "zero"]),
            copy=dice.random() < 0.6,
            export=dice.random() < 0.6,
            spare=dice.choice([0, 0, 1, 4, 10]),
            tokens=dice.choice([0, 0, CONTEXT, 2 * CONTEXT]),
            tells=dice.random() < 0.5,
            swap=dice.choice([0, 3000, 1 << 20]),
            retry=dice.random() < 0.5,
        )
        self.policy = Policy(
            max_seats=dice.choice([2, 3, 256]),
            turn_tokens=dice.choice([3, 16, 64]),
            prompt_chunk=dice.choice([2, 33, 64]),
            class_ageing_ms=dice.choice([0, 1, 50, 10_000]),
            background_lanes=dice.choice([0, 1]),
            prefix_cache_bytes=dice.choice([0, 1500, 1 << 20]),
            parked_bytes=dice.choice([0, 2000, 1 << 20]),
        )
        self.lanes = dice.randint(2, 6)
        shared = [[dice.randrange(256) for _ in range(120)] for _ in range(2)]
        self.wanted = {number: self._request(number, shared) for number in range(self._count())}
        self.patience_s = {
            number: dice.choice([0.0, 0.02, 0.1]) for number in self.wanted if dice.random() < 0.15
        }
        self.clock = Clock()
        self.rest = dice.choice([0, 16, 256])

    def _count(self) -> int:
        return self.dice.randint(3, 14)

    def _request(self, number: int, shared: list[list[int]]) -> GenerationRequest:
        dice = self.dice
        head = dice.choice(shared)[: dice.choice([0, 40, 64, 119])]
        own = [dice.randrange(256) for _ in range(dice.randint(1, 60))]
        return request(
            head + own,
            dice.randint(1, 30),
            dice.choice(CLASSES),
            seed=number,
            temperature=dice.choice([0.0, 1.0]),
        )

    def run(self) -> tuple[TurnStats, Counter[str]]:
        """Run it, compare every stream with the oracle; the counters at its end, and how often
        each kind of thing took place."""
        with held(self.clock), mock.patch.object(sequences, "_REST", self.rest):
            return self._run()

    def _run(self) -> tuple[TurnStats, Counter[str]]:
        dice, wanted, clock = self.dice, self.wanted, self.clock
        loop = Loop(self.orders, lanes=self.lanes, policy=self.policy, stage=Counted)
        runtime = loop.runtime
        assert isinstance(runtime, Counted)
        left, done = list(wanted), runtime.done
        deadlines: dict[int, float] = {}
        had_at_cancel: dict[int, int] = {}
        outlived: set[int] = set()
        left_empty: list[int] = []

        def join() -> None:
            number = left.pop(0)
            if number in self.patience_s:
                deadlines[number] = clock.now_s + self.patience_s[number]
            loop.join(number, wanted[number], deadline=deadlines.get(number))

        def cancel(place: str) -> None:
            running = [number for number, heard in loop.heard.items() if not heard.over]
            if running:
                number = dice.choice(running)
                if number not in had_at_cancel:
                    done[place] += 1
                    had_at_cancel[number] = len(loop.heard[number].tokens)
                loop.cancel(number)

        def before(turn: int) -> None:
            if not self.orders.tokens and not self._full(loop, runtime.attempts[-1]):
                left_empty.append(turn)
            if not runtime.within_a_turn:
                late = [number for number, at in deadlines.items() if at <= clock.now_s]
                unwanted = {*had_at_cancel, *late}
                outlived.update(number for number in unwanted if not loop.heard[number].over)
            clock.now_s += dice.choice([0.001, 0.003, 0.01])
            if left and dice.random() < 0.3:
                join()
            if dice.random() < 0.08:
                runtime.fail_next.append(Fault("drawn"))
            if dice.random() < 0.08:
                cancel("cancelled as a step began")

        def within(_turn: int) -> None:
            if dice.random() < 0.02:
                cancel("cancelled inside a step")

        def idle() -> None:
            if left:
                loop.idle = idle
                join()
            else:
                loop.stop()

        runtime.before, runtime.within, loop.idle = before, within, idle
        for _ in range(min(3, len(left))):
            join()
        kept = loop.executor.sequences
        with (
            mock.patch.object(kept, "_swap_out", _counting(done, "swapped out", kept._swap_out)),
            mock.patch.object(kept, "_swapped_in", _counting(done, "swapped in", kept._swapped_in)),
        ):
            loop.run()

        for number, ask in wanted.items():
            heard, expected = loop.heard[number], alone(ask, self.orders, CONTEXT)
            assert heard.over
            assert heard.error in (None, "fault")
            assert heard.tokens == expected[: len(heard.tokens)]
            if heard.finish == "cancelled":
                assert len(heard.tokens) < len(expected)
                assert number in had_at_cancel or clock.now_s >= deadlines[number]
                done["ended by a cancel" if number in had_at_cancel else "ended by a deadline"] += 1
            elif heard.error is None:
                assert heard.tokens == expected
            if number in had_at_cancel:
                assert heard.finish == "cancelled" or heard.error
                assert len(heard.tokens) == had_at_cancel[number], "it went on after its cancel"
        assert not left_empty, "somebody sat out beside an empty seat"
        assert not outlived, "they went on after a turn that nobody wanted them in"
        assert loop.leaked == 0
        for number in wanted:
            loop.executor.expect(number)  # Every number is free again.
        return loop.stats_at_end, done

    def _full(self, loop: Loop, feeds: Sequence[Feed]) -> bool:
        """Whether all sit who have a lane, or there were no more seats or tokens."""
        now = loop.executor.stats()
        least = min(self.policy.turn_tokens, _LEAST_TOKENS)
        enough = len(feeds) == min(self.policy.max_seats, now.lanes - now.free_lanes)
        return enough or sum(len(feed.tokens) for feed in feeds) >= least


def _counting(done: Counter[str], what: str, call: Callable[..., T]) -> Callable[..., T]:
    """`call`, counted where it did what it is for."""

    def counted(*given: Any) -> T:
        found = call(*given)
        done[what] += bool(found) if isinstance(found, bool) else found is not None
        return found

    return counted


EXPECTED = (
    "copied",
    "copied by export and import",
    "parked",
    "resumed",
    "swapped out",
    "swapped in",
    "truncated",
    "went back after a failed step",
    "cancelled as a step began",
    "cancelled inside a step",
    "ended by a cancel",
    "ended by a deadline",
    "failed turns",
    "preempted",
    "shared tokens",
    "sat out",
)


def _check(seeds: range) -> None:
    total: Counter[str] = Counter()
    for seed in seeds:
        drawn = Drawn(seed)
        stats, done = drawn.run()
        # A runtime that copies exports nothing but what is parked or swapped out.
        by_export = not drawn.orders.copy
        done["copied by export and import"] = done["imported"] if by_export else 0
        done["parked"] = 0 if by_export else done["exported"] - done["swapped out"]
        done["resumed"] = 0 if by_export else done["imported"] - done["swapped in"]
        # With room for all tokens no lane is taken for want of memory.
        done["preempted"] = 0 if drawn.orders.tokens else stats.preempted
        done["failed turns"], done["shared tokens"] = stats.failed_turns, stats.shared_tokens
        done["sat out"] = stats.ready - stats.seats
        done["runs with company"] = stats.seats > stats.turns
        total += done
        total["turns"] += stats.turns
        total["seats"] += stats.seats
    assert not [name for name in EXPECTED if total[name] <= 0]
    assert total["seats"] > 1.3 * total["turns"], "next to nothing was batched"
    assert total["runs with company"] > 0.8 * len(seeds)


@pytest.mark.parametrize("block", range(5))
def test_random_schedules_equal_the_solo_oracle(block: int) -> None:
    _check(range(60 * block, 60 * block + 60))


@pytest.mark.soak
def test_ten_thousand_random_schedules_leak_nothing() -> None:
    _check(range(10_000))
