"""What clocks are read, and how time passes for who watches others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from superfluid.supervisor.clock import Clock

ROOT: Final = Path(__file__).parents[3]
WALL: Final = re.compile(
    r"time\.time(_ns)?\(|datetime\.now\(|datetime\.today|utcnow|localtime\(|gmtime\(|create_time\("
)
STAMPS: Final = {
    "adapters/llamacpp/superfluid_adapter_llamacpp/probe.py": "how old a file is that was left",
    "superfluid/superfluid/http/openai/common.py": "`created` of an answer",
    "superfluid/superfluid/logs.py": "when a line was logged",
    "superfluid/superfluid/models/store.py": "when a model came",
    "superfluid/superfluid/supervisor/dossiers.py": "when a worker died",
    "superfluid/superfluid/supervisor/host.py": "`created` of a model",
    "superfluid/superfluid/supervisor/ledger.py": "a start, where the system keeps no other",
    "workerd/superfluid_workerd/codec/templates.py": "what a chat template asks for",
}
"""All that reads the wall clock: what people are shown, and a file's age. Whatever waits
reads the monotonic one."""


def test_nothing_that_waits_reads_the_wall_clock() -> None:
    found = {
        str(path.relative_to(ROOT))
        for root in ("superfluid", "workerd", "compat", "adapters")
        for path in (ROOT / root).rglob("*.py")
        if WALL.search(path.read_text())
    }
    assert found == set(STAMPS)


@given(st.lists(st.floats(0, 1000), max_size=30))
def test_of_a_gap_no_more_than_the_bound_passes(gaps: list[float]) -> None:
    reading = 100.0
    clock = Clock(10.0, lambda: reading)
    passed, before = 0.0, clock.now()
    for gap in gaps:
        reading += gap
        passed += min(gap, 10.0)
        assert abs(clock.now() - before - passed) < 1e-6
