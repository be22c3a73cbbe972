"""One engine in a process of its own: `measure` starts it, `python -m bench.engines` is it."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

Engine = Literal["native", "llamacpp"]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `cap` is native's `cache-bytes`, `budget` the plan's bound, in bytes.

    `repack` is llama.cpp's own arrangement of weights, without it the file is only mapped.
    `group` is a cgroup to join first. `prepare` compiles what lacks: a run of its own, since a
    worker that holds a model only reads.
    """

    engine: Engine
    model: str
    shared: str
    threads: int = 2
    context: int = 512
    prompt: int = 128
    tokens: int = 32
    sequences: int = 1
    cap: int | None = None
    budget: int | None = None
    exact: bool = False
    kv_type: str = "f32"
    repack: bool = True
    cold: bool = False
    group: str | None = None
    prepare: bool = False


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """`turn_s` is the median time of one decoding step, all sequences together; `turn_cpu_s` the
    processor time of one, which on one thread says what a quiet machine would take."""

    load_s: float
    prompt_rate: float
    turn_s: float
    turn_cpu_s: float
    rate: float
    peak_rss: int
    plan: int = 0
    streamed: int = 0


class Clock:
    """Times of turns, by the wall and by this process's processors. The first is a warm-up."""

    def __init__(self) -> None:
        self.turns: list[float] = []
        self.cpu: list[float] = []
        self._last = (time.perf_counter(), time.process_time())

    def lap(self) -> None:
        """A turn ended."""
        now = (time.perf_counter(), time.process_time())
        self.turns.append(now[0] - self._last[0])
        self.cpu.append(now[1] - self._last[1])
        self._last = now


class Killed(RuntimeError):
    """The system ended the process."""


def prepare(order: Order) -> None:
    """Have what `order` needs compiled, in a process that measures nothing."""
    measure(msgspec.structs.replace(order, prepare=True, tokens=1, group=None, budget=None))


def measure(order: Order, timeout_s: float = 900.0) -> Measured:
    """`order` in a fresh process. Raises `Killed`, or `RuntimeError` with its last words."""
    one = str(order.threads)
    done = subprocess.run(
        [sys.executable, "-m", "bench.engines"],
        input=msgspec.json.encode(order),
        capture_output=True,
        timeout=timeout_s,
        env={**os.environ, "OPENBLAS_NUM_THREADS": one, "OMP_NUM_THREADS": one},
        check=False,
    )
    if done.returncode == -signal.SIGKILL:
        raise Killed(f"{order.engine} was killed")
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"{order.engine}: {words[-1] if words else done.returncode}")
    return msgspec.json.decode(done.stdout, type=Measured)


def prompt_of(count: int, vocabulary: int, seed: int = 1) -> list[int]:
    """`count` random ids."""
    chosen = random.Random(seed)
    return [chosen.randrange(3, vocabulary) for _ in range(count)]


def peak_rss() -> int:
    """The most this program had in memory, in bytes; not what it was started by."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


def _native(order: Order) -> Measured:
    from superfluid_adapter_native.native import OPTIONS, NativeAdapter
    from superfluid_workerd.adapter import Feed, OpenRequest
    from support.native_models import ignore

    shared, model = Path(order.shared), Path(order.model)
    options = {one.name: one.default for one in OPTIONS}
    options |= {"exact": order.exact, "kv-type": order.kv_type}
    if order.cap is not None:
        options["cache-bytes"] = order.cap
    adapter = NativeAdapter()
    if order.prepare:
        adapter.prepare(adapter.facts(model), options, shared, lambda done, total: None)
    start = time.perf_counter()
    loaded = adapter.open(
        OpenRequest(
            model=model,
            scratch=shared,
            shared=shared,
            context=order.context,
            lanes=order.sequences,
            threads=order.threads,
            memory_budget=order.budget,
            options=options,
        )
    )
    load_s = time.perf_counter() - start
    with contextlib.closing(loaded.runtime):
        # As a worker does.
        gc.collect()
        gc.freeze()
        runtime = loaded.runtime
        size = runtime.describe().vocabulary
        sequences = [runtime.seq_create() for _ in range(order.sequences)]
        last: list[int] = []
        start = time.perf_counter()
        for place, sequence in enumerate(sequences):
            tokens = prompt_of(order.prompt, size, place)
            (row,) = runtime.step([Feed(sequence, tokens, 0)], ignore)
            last.append(int(row.argmax()) if row is not None else 0)
        prompt_s = time.perf_counter() - start
        clock = Clock()
        for turn in range(order.tokens + 1):
            at = order.prompt + turn
            feeds = [Feed(one, [token], at) for one, token in zip(sequences, last, strict=True)]
            rows = runtime.step(feeds, ignore)
            last = [int(row.argmax()) for row in rows if row is not None]
            clock.lap()
        streamed = _streamed(Path(order.model), loaded.record.got)
        plan = sum(loaded.plan.values())
    return _measured(order, load_s, prompt_s, clock, plan, streamed)


def _streamed(model: Path, got: Mapping[str, Any]) -> int:
    """Bytes read in one turn, all layers being alike: the layers and the head that do not stay."""
    from superfluid_adapter_native.formats.open import open_source
    from superfluid_adapter_native.weights import head_name

    source = open_source(model)
    head = source.tensors[head_name(source)].bytes
    layers = [one for name, one in source.tensors.items() if name.startswith("blk.")]
    count = len({one.name.split(".")[1] for one in layers})
    share = 1 - int(got["layers-resident"]) / count
    return int(share * sum(one.bytes for one in layers)) + (0 if got["head-resident"] else head)


def _llamacpp(order: Order) -> Measured:
    from support.llamacpp import LlamaCpp

    start = time.perf_counter()
    with LlamaCpp(
        Path(order.model),
        vocab_only=False,
        context=order.context,
        threads=order.threads,
        repack=order.repack,
    ) as model:
        load_s = time.perf_counter() - start
        tokens = prompt_of(order.prompt, model.size, 0)
        start = time.perf_counter()
        last = int(model.step(tokens, 0).argmax())
        prompt_s = time.perf_counter() - start
        clock = Clock()
        for turn in range(order.tokens + 1):
            last = int(model.step([last], order.prompt + turn).argmax())
            clock.lap()
    return _measured(order, load_s, prompt_s, clock, 0, 0)


def _measured(
    order: Order,
    load_s: float,
    prompt_s: float,
    clock: Clock,
    plan: int,
    streamed: int,
) -> Measured:
    turns, cpu = clock.turns[1:], clock.cpu[1:]
    return Measured(
        load_s=load_s,
        prompt_rate=order.prompt * order.sequences / prompt_s,
        turn_s=statistics.median(turns),
        turn_cpu_s=statistics.median(cpu),
        rate=order.sequences * len(turns) / sum(turns),
        peak_rss=peak_rss(),
        plan=plan,
        streamed=streamed,
    )


def main() -> None:
    """Read an order from standard input, write what was measured."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    if order.group is not None:
        (Path(order.group) / "cgroup.procs").write_text(str(os.getpid()))
    if order.cold:
        from bench.files import make_cold

        make_cold(Path(order.model))
    found = _native(order) if order.engine == "native" else _llamacpp(order)
    sys.stdout.buffer.write(msgspec.json.encode(found))
    sys.stdout.flush()
    # llama.cpp's own exit handlers are not part of the measurement.
    os._exit(0)


if __name__ == "__main__":
    main()
