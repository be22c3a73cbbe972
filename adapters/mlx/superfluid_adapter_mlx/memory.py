"""What a load may take, and what sequences fit beside the weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from superfluid_adapter_mlx.folder import Folder
from superfluid_compat.errors import DoesNotFit
from superfluid_workerd.adapter import OpenRequest

RESERVE: Final = 384 << 20
"""The interpreter with mlx-lm in it, a chunk's activations and logits, the self-test."""

DEFAULT_CONTEXT: Final = 4096
"""Longest stream where neither the user nor the model says."""

_SHARE: Final = 0.8
"""Of the memory that is free, what a plan may take where no budget was given."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a plan may take, and whether the user set that bound."""

    bytes: int
    given: bool

    def refusal(self, wanted: int, what: str) -> DoesNotFit:
        """Why `wanted` bytes are too many."""
        whose = "the memory budget is" if self.given else "free here are"
        return DoesNotFit(f"{what} take {wanted >> 20} MiB, {whose} {self.bytes >> 20} MiB")


def room(budget: int | None) -> Room:
    return Room(budget, True) if budget is not None else Room(int(_free() * _SHARE), False)


def require_weights(folder: Folder, within: Room) -> dict[str, int]:
    """The plan's parts that the header tells. Raises `DoesNotFit`, before anything is read."""
    parts = {"weights": folder.weights, "reserve": RESERVE}
    if sum(parts.values()) > within.bytes:
        raise within.refusal(sum(parts.values()), f"{folder.path}'s weights and a reserve")
    return parts


def fit_context(
    folder: Folder, request: OpenRequest, token_bytes: int, *, left: int, within: Room
) -> int:
    """The context that every lane gets, of `left` bytes for all.

    Raises `DoesNotFit` when what was asked is too much."""
    asked, lanes = request.context, request.lanes
    trained = folder.number("max_position_embeddings")
    if trained and asked > trained:
        raise DoesNotFit(
            f"a context of {asked} was asked for, the model was made for {trained}",
            fix=f"give --context {trained} or less",
            param="context",
        )
    fits = left // max(1, token_bytes * lanes)
    wanted = asked or min(trained or DEFAULT_CONTEXT, max(1, fits))
    if wanted > fits:
        raise within.refusal(
            within.bytes - left + wanted * lanes * token_bytes,
            f"the weights, a reserve and {lanes} lanes of {wanted} tokens",
        )
    return wanted


def _free(status: Path = Path("/proc/meminfo")) -> int:
    """What the machine can give, or half of the whole where it does not say."""
    try:
        told: Mapping[str, str] = dict(
            line.split(":", 1) for line in status.read_text().splitlines() if ":" in line
        )
        return int(told["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") // 2 * os.sysconf("SC_PAGE_SIZE")
