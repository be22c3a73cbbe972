"""Who sits in a turn, and with how many tokens: pure planning over plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from superfluid_compat.errors import BadOptionValue
from superfluid_workerd.link.frames import Class
from superfluid_workerd.options import WORKER, Option

_LONGEST_SHOWN: Final = 80


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings' values; see `options.WORKER`."""

    max_seats: int = 256
    turn_linger_us: int = 0
    turn_tokens: int = 512
    prompt_chunk: int = 512
    turn_target_ms: int = 200
    max_waiting: int = 256
    class_ageing_ms: int = 10_000
    interactive_lanes: int = 0
    completion_lanes: int = 0
    agent_lanes: int = 0
    background_lanes: int = 0
    prefix_cache_bytes: int = 1 << 30
    parked_bytes: int = 64 << 20

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Policy:
        """Raises `BadOptionValue`."""
        found = {
            option.name.replace("-", "_"): _setting(option, environment[option.variable()])
            for option in WORKER
            if option.variable() in environment
        }
        return cls(**found)

    def most_lanes(self, service_class: Class) -> int:
        """Lanes that streams of this class may hold at once, 0 for no bound."""
        bounds: dict[Class, int] = {
            "interactive": self.interactive_lanes,
            "completion": self.completion_lanes,
            "agent": self.agent_lanes,
            "background": self.background_lanes,
        }
        return bounds[service_class]


def _setting(option: Option, text: str) -> int:
    variable, wanted = option.variable(), option.accepts()
    try:
        value = option.parse(text)
    except BadOptionValue as error:
        raise BadOptionValue(
            f"{variable} is {text[:_LONGEST_SHOWN]!r}, wanted {wanted}",
            fix=f"set {variable} to {wanted}, or leave it unset",
            param=variable,
        ) from error
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is no integer")
    return value


@dataclass(frozen=True, slots=True)
class Ready:
    """A stream that could sit in the turn: `pending` tokens to feed, and its place in line.

    `order` is its admission, older streams have the lower; `seated` is the turn it last sat in.
    `due` is its place among prompts, the lower the sooner. A stream that decodes has its one drawn
    token to feed.
    """

    order: int
    pending: int
    decodes: bool
    seated: int = -1
    due: float = 0.0


@dataclass(frozen=True, slots=True)
class Seat:
    """How many tokens of the stream with this `order` the turn takes."""

    order: int
    tokens: int


def plan(ready: Sequence[Ready], policy: Policy, step_tokens: int) -> list[Seat]:
    """The seats of one turn: decoding streams first, then prompts, the first due first.

    Of more decoders than seats, those that waited longest sit, and leave one seat to the prompts; a
    turn of a single seat goes to whoever waited longest. Prompts take what is left of the token
    budget first come first served, so that on average first tokens come soonest; but where the
    first due has a long way to go, half of it goes to those with at most half that way, the
    shortest first. The first due thus always gets half or more, whoever comes: it ends, and the
    next is first. Never empty when `ready` is not.
    """
    budget = min(policy.turn_tokens, step_tokens)
    most = min(policy.max_seats, budget)
    decoding = sorted((it for it in ready if it.decodes), key=lambda it: (it.seated, it.order))
    prompts = sorted((it for it in ready if not it.decodes), key=lambda it: (it.due, it.order))
    if len(decoding) >= most and prompts and (most > 1 or prompts[0].seated < decoding[0].seated):
        decoding = decoding[: most - 1]
    seats = [Seat(it.order, 1) for it in sorted(decoding[:most], key=lambda it: it.order)]
    return seats + _shared(prompts, most - len(seats), budget - len(seats), policy.prompt_chunk)


def _shared(line: Sequence[Ready], most: int, budget: int, chunk: int) -> list[Seat]:
    """At most `most` seats and `budget` tokens, in the order of `line`."""
    if not most or not line:
        return []
    quick = sorted(
        (it for it in line[1:] if 2 * it.pending <= line[0].pending), key=lambda it: it.pending
    )
    taken: dict[int, int] = {}
    _fill(taken, quick, most - 1, budget // 2, chunk)
    _fill(taken, line, most, budget, chunk)
    return [Seat(it.order, taken[it.order]) for it in line if it.order in taken]


def _fill(taken: dict[int, int], line: Sequence[Ready], most: int, budget: int, chunk: int) -> None:
    """Give each of `line` what it wants, until `most` streams have `budget` tokens between them."""
    left = budget - sum(taken.values())
    for it in line:
        more = min(it.pending, chunk) - taken.get(it.order, 0)
        if min(more, left) > 0 and (it.order in taken or len(taken) < most):
            taken[it.order] = taken.get(it.order, 0) + min(more, left)
            left -= min(more, left)


def linger_s(ready: int, active: int, policy: Policy) -> float:
    """How long to wait for more before a turn, in seconds.

    `active` counts all streams that are or will soon be ready. Nothing when all of them are, when
    the seats are full, or for a lone stream.
    """
    if active <= 1 or ready >= min(active, policy.max_seats):
        return 0.0
    return policy.turn_linger_us / 1_000_000
