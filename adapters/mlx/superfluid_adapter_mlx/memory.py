"""What a load may take, and what sequences fit beside the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from superfluid_adapter_mlx.folder import Folder
from superfluid_compat.errors import DoesNotFit
from superfluid_workerd.adapter import OpenRequest
from superfluid_workerd.limits import available_bytes

RESERVE: Final = 384 << 20
"""The interpreter with mlx-lm in it, a chunk's activations and logits, the self-test."""

GROWTH: Final = 256
"""Tokens by which buffers grow at once: room that each lane may have and not use."""

_DEFAULT_CONTEXT: Final = 4096
"""Longest stream where neither the user nor the model says."""

_LEAST_CONTEXT: Final = 512
"""Shorter ones are not chosen, only taken when asked for."""

_SHARE: Final = 0.8
"""Of the memory that is free, what a plan may take where no budget was given."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What every lane gets, and bytes: what the whole takes, what there is for it."""

    context: int
    weights: int
    sequences: int
    room: int

    @property
    def parts(self) -> dict[str, int]:
        return {"weights": self.weights, "reserve": RESERVE, "sequences": self.sequences}

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def make_plan(folder: Folder, request: OpenRequest, token_bytes: int) -> Plan:
    """The plan of a load in which a token of a sequence takes `token_bytes`: the context asked
    for, else as much of the model's own as fits.

    Raises `DoesNotFit` with the budget that would do."""
    asked, trained = request.context, folder.number("max_position_embeddings")
    if asked > trained > 0:
        raise DoesNotFit(
            f"a context of {asked} was asked for, the model was made for {trained}",
            fix=f"give --context {trained} or less",
            param="context",
        )
    given = request.memory_budget
    room = given if given is not None else int(available_bytes() * _SHARE)
    each = token_bytes * request.lanes
    fits = (room - folder.weights - RESERVE) // max(1, each) - GROWTH
    most = asked or trained or _DEFAULT_CONTEXT
    context = max(asked or min(most, _LEAST_CONTEXT), min(most, fits))
    plan = Plan(context, folder.weights, each and (context + GROWTH) * each, room)
    if plan.total > room:
        raise _too_much(folder, request, plan)
    return plan


def _too_much(folder: Folder, request: OpenRequest, plan: Plan) -> DoesNotFit:
    lanes = f"{request.lanes} lane{'s' * (request.lanes > 1)} of {plan.context} tokens"
    parts = ", ".join(f"{_mib(size)} for {name}" for name, size in plan.parts.items())
    whose = "free here are" if request.memory_budget is None else "the memory budget is"
    return DoesNotFit(
        f"{folder.path} with {lanes} takes {_mib(plan.total)} ({parts}), {whose} "
        f"{plan.room >> 20} MiB",
        fix=f"give --memory-budget {-(-plan.total >> 20)}M if that is there, or fewer --lanes, or "
        "less --context",
        param="memory-budget",
    )


def _mib(size: int) -> str:
    return f"{-(-size >> 20)} MiB"
