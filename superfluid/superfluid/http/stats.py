"""What the turn loop counts, for clients."""

from __future__ import annotations

from typing import Any

from superfluid_workerd.link.frames import TurnStats


def told(stats: TurnStats) -> dict[str, Any]:
    """The counters by their names, and what they amount to: the mean occupancy of turns, against
    the streams that were ready, since the load and of the last turns; the mean wait for a lane."""
    counters = {name: getattr(stats, name) for name in stats.__struct_fields__}
    return counters | {
        "mean_occupancy": _mean(stats.seats, stats.turns),
        "mean_ready": _mean(stats.ready, stats.turns),
        "window_occupancy": _mean(stats.window_seats, stats.window_turns),
        "window_mean_ready": _mean(stats.window_ready, stats.window_turns),
        "mean_queued_s": _mean(stats.queued_s, stats.admitted),
    }


def _mean(total: float, count: int) -> float:
    return round(total / count, 6) if count else 0.0
