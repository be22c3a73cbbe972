"""The native runtime's memory plan, measured on whole processes that stream a model several times
larger than what it may keep."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from bench import cgroups
from superfluid_adapter_native.kernels.warm import warm
from superfluid_adapter_native.plan import LOGIT_BYTES
from superfluid_adapter_native.quants.types import BY_NAME
from support.server import serving
from support.tiny_models import TinyModel, write_model

MIB: Final = 1 << 20
CAP: Final = 24 * MIB
SPEC: Final = TinyModel(
    "llama", layers=26, width=768, heads=12, kv_heads=4, head_dim=64, ff=3072, context=1024,
    vocabulary_size=16_000, types={"*": "Q8_0"},
)  # fmt: skip
PAGES_BESIDE: Final = 8 * MIB
"""What a group counts beside a process's own pages: page tables, open files."""

PROGRAM: Final = """
import json, os, sys
from pathlib import Path

model, shared, group, budget, cap, context, rows = sys.argv[1:]
if group:
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
from superfluid_adapter_native import loading
from superfluid_adapter_native.native import OPTIONS, NativeAdapter
from superfluid_compat.errors import SuperfluidError
from superfluid_workerd.adapter import Feed, OpenRequest

imported = peak()
options = {one.name: one.default for one in OPTIONS}
if cap:
    options["cache-bytes"] = int(cap)
try:
    loaded = NativeAdapter().open(OpenRequest(
        model=Path(model), scratch=Path(shared), shared=Path(shared), context=int(context),
        lanes=4, threads=2, memory_budget=int(budget) if budget else None, options=options,
    ))
except SuperfluidError as error:
    print(json.dumps({"refused": error.line(), "grown": peak() - imported}))
    raise SystemExit
runtime = loaded.runtime
seats = [runtime.seq_create() for _ in range(4)]
prompt = [7 + i % 9000 for i in range(int(context) - 8)]
together = max(1, runtime.describe().step_tokens // len(prompt))
for first in range(0, 4, together):
    runtime.step([Feed(seat, prompt, 0) for seat in seats[first : first + together]], lambda: None)
for turn in range(3):
    runtime.step([Feed(seat, [11], len(prompt) + turn) for seat in seats], lambda: None)
runtime.seq_truncate(seats[0], 0)
if int(rows):
    runtime.step([Feed(seats[0], prompt[:int(rows)], 0, "all")], lambda: None)
print(json.dumps({
    "peak": peak(), "plan": loaded.plan, "kept": loaded.record.got["layers-resident"],
    "held": runtime.memory().weights,
}))
runtime.close()
"""
PEAK: Final = """
def peak():
    rows = [line.split() for line in open("/proc/self/status")]
    return next(int(row[1]) << 10 for row in rows if row[0] == "VmHWM:")
"""

pytestmark = pytest.mark.timeout(600)

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 220 MiB, nine times the cap."""
    path = write_model(tmp_path_factory.mktemp("large") / "m.gguf", SPEC)
    assert path.stat().st_size > 8 * CAP
    return path


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Serve four sequences in a process of its own, at the end one with `rows` rows of logits;
    what it said."""
    shared = tmp_path_factory.mktemp("kernels")
    warm([BY_NAME["Q8_0"], BY_NAME["F32"]], exact=False, caches=("f32",), folder=shared)

    def run(
        *, cap: int | None = None, budget: int | None = None, group: Path | None = None,
        context: int = 200, rows: int = 0,
    ) -> dict[str, Any]:  # fmt: skip
        named = [group or "", budget or "", cap if cap is not None else ""]
        words = [model, shared, *named, context, rows]
        done = subprocess.run(
            [sys.executable, "-c", PEAK + PROGRAM, *map(str, words)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (done.returncode, done.stderr)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


def test_a_model_of_nine_times_the_cap_peaks_under_its_plan(run: Run, model: Path) -> None:
    found = run(cap=CAP)
    assert 0 < found["kept"] < SPEC.layers // 2
    assert found["plan"]["resident weights"] <= CAP + MIB
    assert found["peak"] <= sum(found["plan"].values())
    everything = run()
    assert everything["kept"] == SPEC.layers
    assert everything["peak"] <= sum(everything["plan"].values())
    assert found["peak"] < everything["peak"] - model.stat().st_size // 2


def test_a_plan_is_not_much_more_than_the_most_that_can_be_asked_of_it(run: Run) -> None:
    """Every lane's context full, the longest pass, as many logits as a step may have."""
    rows = LOGIT_BYTES // (4 * SPEC.vocabulary_size)
    for cap in (None, 0):
        found = run(cap=cap, context=1024, rows=rows)
        assert 0.7 * sum(found["plan"].values()) < found["peak"] <= sum(found["plan"].values())


def test_it_serves_in_a_control_group_just_above_its_plan(
    run: Run, record_property: Callable[[str, object], None]
) -> None:
    """Where no group can be made the bound is what the process held at most, which the system
    counts in either case; the report says which it was."""
    plan = sum(run(cap=CAP)["plan"].values())
    with cgroups.limited(plan + PAGES_BESIDE) as group:
        record_property("memory bound", "peak RSS" if group is None else "control group")
        bounded = run(budget=plan, group=group)
    assert sum(bounded["plan"].values()) <= plan
    assert bounded["peak"] <= plan
    assert bounded["kept"] < SPEC.layers


def test_a_group_alone_makes_the_plan(run: Run, model: Path) -> None:
    """Nobody named a budget: the group that the process is in gives it."""
    limit = 400 * MIB
    with cgroups.limited(limit) as group:
        found = run(group=group)
    if group is not None:
        # The interpreter's own files may be charged to whoever read them first.
        assert sum(found["plan"].values()) - found["plan"]["interpreter"] <= limit
        assert found["kept"] < SPEC.layers
    assert found["peak"] <= sum(found["plan"].values())


def test_a_plan_that_cannot_work_is_refused_before_loading_with_the_number_that_would(
    run: Run, model: Path
) -> None:
    refused = run(budget=150 * MIB)
    found = re.search(r"--memory-budget (\d+)M", refused["refused"])
    assert found is not None
    assert refused["grown"] < 32 * MIB
    served = run(budget=int(found[1]) * MIB)
    # The number leaves room for what differs between processes, which a layer or two may take.
    assert served["kept"] < 4
    assert served["peak"] <= int(found[1]) * MIB


def test_longer_contexts_are_counted(run: Run) -> None:
    short, long = run(cap=0, context=256), run(cap=0, context=600)
    assert long["peak"] <= sum(long["plan"].values())
    grown = sum(long["plan"].values()) - sum(short["plan"].values())
    assert 0.3 * grown < long["peak"] - short["peak"] < 1.1 * grown


def test_the_plan_is_logged_and_in_the_list_of_models(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", TinyModel("llama"))
    with serving([str(model)], tmp_path / "home") as server:
        with urllib.request.urlopen(f"{server.url}/v1/models") as answer:
            (row,) = json.load(answer)["data"]
        ended = server.stop()
    plan = row["superfluid"]["plan"]
    assert {"interpreter", "tokenizer", "resident weights", "streamed weights"} < set(plan)
    assert {"read-ahead", "kv", "transient"} < set(plan)
    assert f"memory plan {sum(plan.values()) >> 20} MiB (interpreter" in ended.err
