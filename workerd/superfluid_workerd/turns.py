"""Who sits in a turn, and with how many tokens: pure planning over plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from superfluid_workerd.options import Kind, Option, Scope, Value, resolve

SETTINGS: Final = (
    Option("max-seats", Kind.INTEGER, "most streams in one turn", 256, minimum=1, maximum=4096,
           unit="streams", scope=Scope.RUNTIME),
    Option("turn-linger-us", Kind.INTEGER, "how long a turn waits for streams that are arriving",
           0, minimum=0, maximum=10_000_000, unit="microseconds", scope=Scope.RUNTIME),
    Option("turn-tokens", Kind.INTEGER, "most tokens in one turn, all streams together", 512,
           minimum=1, maximum=1 << 20, unit="tokens", scope=Scope.RUNTIME),
    Option("prompt-chunk", Kind.INTEGER, "most tokens of one prompt in one turn", 512, minimum=1,
           maximum=1 << 20, unit="tokens", scope=Scope.RUNTIME),
    Option("max-waiting", Kind.INTEGER, "streams that may wait for a lane", 256, minimum=0,
           maximum=1 << 20, unit="streams", scope=Scope.RUNTIME),
)  # fmt: skip
"""Settings of every worker, read from the environment: `SUPERFLUID_MAX_SEATS` and so on."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings' values; see `SETTINGS`."""

    max_seats: int = 256
    turn_linger_us: int = 0
    turn_tokens: int = 512
    prompt_chunk: int = 512
    max_waiting: int = 256

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Policy:
        """Raises `BadOptionValue`."""
        given: dict[str, Value] = {
            option.name: environment[option.variable()]
            for option in SETTINGS
            if option.variable() in environment
        }
        found = resolve(SETTINGS, [("environment", given)])
        return cls(**{name.replace("-", "_"): _integer(it.value) for name, it in found.items()})


def _integer(value: Value | None) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is no integer")
    return value


@dataclass(frozen=True, slots=True)
class Ready:
    """A stream that could sit in the turn: `pending` tokens to feed, and its place in line.

    `order` is its admission, older streams have the lower; `seated` is the turn it last sat in.
    A stream that decodes has its one drawn token to feed.
    """

    order: int
    pending: int
    decodes: bool
    seated: int = -1


@dataclass(frozen=True, slots=True)
class Seat:
    """How many tokens of the stream with this `order` the turn takes."""

    order: int
    tokens: int


def plan(ready: Sequence[Ready], policy: Policy, step_tokens: int) -> list[Seat]:
    """The seats of one turn: decoding streams first, then prompts, the oldest first.

    Of more decoders than seats, those that waited longest sit. What is left of the token budget
    is shared by the prompts evenly, so that a short one soon gets its first token, and what they
    leave goes to the oldest. Never empty when `ready` is not.
    """
    budget = min(policy.turn_tokens, step_tokens)
    decoding = sorted((it for it in ready if it.decodes), key=lambda it: (it.seated, it.order))
    seated = decoding[: min(policy.max_seats, budget)]
    seats = [Seat(it.order, 1) for it in sorted(seated, key=lambda it: it.order)]
    prompts = sorted((it for it in ready if not it.decodes), key=lambda it: it.order)
    prompts = prompts[: policy.max_seats - len(seats)]
    return seats + _shared(prompts, budget - len(seats), policy.prompt_chunk)


def _shared(prompts: Sequence[Ready], budget: int, chunk: int) -> list[Seat]:
    prompts = prompts[:budget]
    if not prompts:
        return []
    wanted = {it.order: min(it.pending, chunk) for it in prompts}
    share = budget // len(prompts)
    taken = {order: min(most, share) for order, most in wanted.items()}
    left = budget - sum(taken.values())
    for order, most in wanted.items():
        more = min(most - taken[order], left)
        taken[order] += more
        left -= more
    return [Seat(order, tokens) for order, tokens in taken.items()]


def linger_s(ready: int, active: int, policy: Policy) -> float:
    """How long to wait for more before a turn, in seconds.

    `active` counts all streams that are or will soon be ready. Nothing when all of them are, when
    the seats are full, or for a lone stream.
    """
    if active <= 1 or ready >= min(active, policy.max_seats):
        return 0.0
    return policy.turn_linger_us / 1_000_000
