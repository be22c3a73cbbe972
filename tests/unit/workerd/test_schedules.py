"""Random schedules of the turn loop over the hash-chain fake, against the solo oracle.

Streams join, sit out, cancel, share beginnings, are copied, truncated, exported, imported and
preempted, and steps fail. Any state of one stream that reaches another is a plain mismatch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from superfluid_adapter_fake.orders import Orders

from superfluid_compat.errors import Fault
from superfluid_workerd.link.frames import Class, GenerationRequest, TurnStats
from superfluid_workerd.turns import Policy
from support.turn_loop import Loop, alone, request

CONTEXT = 256
CLASSES: tuple[Class, ...] = ("interactive", "completion", "agent", "background")


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
            retry=dice.random() < 0.5,
        )
        self.policy = Policy(
            max_seats=dice.choice([2, 3, 256]),
            turn_tokens=dice.choice([3, 16, 64]),
            prompt_chunk=dice.choice([2, 33, 64]),
            class_ageing_ms=dice.choice([0, 1, 10_000]),
            background_lanes=dice.choice([0, 1]),
            prefix_cache_bytes=dice.choice([0, 1500, 1 << 20]),
            parked_bytes=dice.choice([0, 2000, 1 << 20]),
        )
        self.lanes = dice.randint(2, 6)
        shared = [[dice.randrange(256) for _ in range(120)] for _ in range(2)]
        self.wanted = {number: self._request(number, shared) for number in range(self._count())}

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

    def run(self) -> TurnStats:
        """Run it, compare every stream with the oracle; the counters at its end."""
        dice, wanted = self.dice, self.wanted
        loop = Loop(self.orders, lanes=self.lanes, policy=self.policy)
        left, cancelled = list(wanted), set[int]()

        def join() -> None:
            number = left.pop(0)
            loop.join(number, wanted[number])

        def before(_turn: int) -> None:
            if left and dice.random() < 0.3:
                join()
            if dice.random() < 0.08:
                loop.runtime.fail_next.append(Fault("drawn"))
            if loop.heard and dice.random() < 0.1:
                number = dice.choice(list(loop.heard))
                cancelled.add(number)
                loop.cancel(number)

        def idle() -> None:
            if left:
                loop.idle = idle
                join()
            else:
                loop.stop()

        loop.runtime.before, loop.idle = before, idle
        for _ in range(min(3, len(left))):
            join()
        loop.run()

        failed = {n for n in wanted if loop.heard[n].error is not None}
        for number, ask in wanted.items():
            heard, expected = loop.heard[number], alone(ask, self.orders, CONTEXT)
            assert heard.over
            assert heard.tokens == expected[: len(heard.tokens)]
            assert heard.tokens == expected or number in cancelled | failed
            assert heard.error in (None, "fault")
        assert loop.leaked == 0
        for number in wanted:
            loop.executor.expect(number)  # Every number is free again.
        return loop.stats_at_end


def _check(seeds: range) -> None:
    all_stats = [Drawn(seed).run() for seed in seeds]
    turns = sum(stats.turns for stats in all_stats)
    assert sum(stats.seats for stats in all_stats) > 1.3 * turns, "next to nothing was batched"
    assert sum(stats.shared_tokens for stats in all_stats) > 0
    assert sum(stats.preempted for stats in all_stats) > 0
    assert sum(stats.failed_turns for stats in all_stats) > 0


@pytest.mark.parametrize("block", range(10))
def test_random_schedules_equal_the_solo_oracle(block: int) -> None:
    _check(range(30 * block, 30 * block + 30))


@pytest.mark.soak
def test_ten_thousand_random_schedules_leak_nothing() -> None:
    _check(range(10_000))
