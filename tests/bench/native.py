"""The native runtime on generated models: resident, streaming, in little memory."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bench import cgroups, files, reading, seed
from bench.engines import Killed, Measured, Order, measure, prepare
from bench.rows import MIB, Bench, Row, alternate, ratios

_MANY = 8
_SHORT, _LONG = 32, 1500
_MARGIN = 16 * MIB
"""What a cgroup counts beside the process itself."""


def rows(bench: Bench) -> Iterator[Row]:
    """Every figure of the native runtime's own."""
    for kind in ("Q4_K", "Q8_0"):
        yield from _resident(bench, kind)
    yield from _long(bench)
    yield from _streaming(bench)
    yield from _little_memory(bench)


def _order(bench: Bench, model: Path, **more: Any) -> Order:
    shared = str(bench.place("kernels"))
    tokens = 8 if bench.quick else 32
    plain = Order(engine="native", model=str(model), shared=shared, tokens=tokens)
    return msgspec.structs.replace(plain, **more)


def _resident(bench: Bench, kind: str) -> Iterator[Row]:
    model = files.model(bench.place("models"), "125M", kind)
    prepare(_order(bench, model))
    for threads in (1, 2):
        conditions = {"file": model.name, "types": kind, "threads": threads, "start": "warm"}
        ours = _order(bench, model, threads=threads)
        theirs = msgspec.structs.replace(ours, engine="llamacpp")
        calls = {"native": partial(measure, ours), "llamacpp": partial(measure, theirs)}
        found = alternate(bench.rounds, calls)
        for name, samples in found.items():
            yield from _figures(f"{name}, resident", samples, conditions)
        first, second = found["native"], found["llamacpp"]
        yield Row(
            name="native decode over llama.cpp's",
            unit="x",
            samples=ratios([one.rate for one in first], [one.rate for one in second]),
            wanted="0.5 or more",
            conditions=conditions,
        )
        if threads == 1:
            yield Row(
                name="the same by processor time",
                unit="x",
                samples=ratios(
                    [one.turn_cpu_s for one in second], [one.turn_cpu_s for one in first]
                ),
                conditions=conditions,
            )


def _figures(name: str, samples: list[Measured], conditions: dict[str, Any]) -> Iterator[Row]:
    yield Row(
        name=f"{name}: load", unit="s", samples=[one.load_s for one in samples],
        conditions=conditions,
    )  # fmt: skip
    yield Row(
        name=f"{name}: prompt", unit="tok/s", samples=[one.prompt_rate for one in samples],
        conditions=conditions,
    )  # fmt: skip
    yield Row(
        name=f"{name}: decode", unit="tok/s", samples=[one.rate for one in samples],
        conditions=conditions,
    )  # fmt: skip
    yield Row(
        name=f"{name}: peak RSS", unit="MiB", samples=[one.peak_rss / MIB for one in samples],
        note=f"plan {samples[0].plan >> 20} MiB" if samples[0].plan else "",
        conditions=conditions,
    )  # fmt: skip


def _long(bench: Bench) -> Iterator[Row]:
    """What a token costs late in a stream, over what it costs early."""
    model = files.model(bench.place("models"), "125M", "Q4_K")
    early = _order(bench, model, threads=1, prompt=_SHORT, context=_LONG + 64)
    for engine in ("native", "llamacpp"):
        first = msgspec.structs.replace(early, engine=engine)
        late = msgspec.structs.replace(first, prompt=_LONG)
        found = alternate(
            bench.rounds, {"early": partial(measure, first), "late": partial(measure, late)}
        )
        yield Row(
            name=f"{engine}, token {_LONG} over token {_SHORT}, processor time",
            unit="x",
            samples=ratios(
                [one.turn_cpu_s for one in found["late"]],
                [one.turn_cpu_s for one in found["early"]],
            ),
            conditions={"file": model.name, "threads": 1, "kv": early.kv_type},
        )


def _streaming(bench: Bench) -> Iterator[Row]:
    """Half of the file may stay; the rest passes through, from a page cache that holds it."""
    model = files.model(bench.place("models"), "125M", "Q4_K")
    cap = model.stat().st_size // 2
    one = _order(bench, model, cap=cap)
    prepare(one)
    conditions = {
        "file": model.name,
        "cap_mib": cap >> 20,
        "threads": one.threads,
        "file_is": "warm",
    }
    calls = {
        1: partial(measure, one),
        _MANY: partial(measure, msgspec.structs.replace(one, sequences=_MANY)),
    }
    found = alternate(bench.rounds, {str(key): call for key, call in calls.items()})
    for count, samples in found.items():
        yield from _figures(f"native, streaming, {count} sequences", samples, conditions)
    yield from _sharing(bench, model, one, found["1"], found[str(_MANY)], conditions)
    yield from _seed(bench, model, cap, statistics.median(it.rate for it in found["1"]), conditions)


def _sharing(
    bench: Bench,
    model: Path,
    order: Order,
    single: list[Measured],
    many: list[Measured],
    conditions: dict[str, Any],
    group: Path | None = None,
) -> Iterator[Row]:
    """How much of what reading and computing allow the eight sequences reach."""
    resident = msgspec.structs.replace(order, cap=None, budget=None, group=None, cold=False)
    calls = {
        "C": partial(measure, resident),
        "C8": partial(measure, msgspec.structs.replace(resident, sequences=_MANY)),
    }
    computed = alternate(bench.rounds, calls)
    samples = {
        "R, time to read": reading.seconds(model, single[0].streamed, group),
        "C, time to compute one row": [it.turn_s for it in computed["C"]],
        f"C8, time to compute {_MANY} rows": [it.turn_s for it in computed["C8"]],
        "turn of one sequence": [it.turn_s for it in single],
        f"turn of {_MANY} sequences": [it.turn_s for it in many],
    }
    for name, some in samples.items():
        note = f"{single[0].streamed >> 20} MiB" if name.startswith("R") else ""
        yield Row(name=name, unit="s", samples=some, note=note, conditions=conditions)
    r, c, c8, t, t8 = (statistics.median(some) for some in samples.values())
    for name, turn, bound in (
        ("one sequence", t, max(r, c)),
        (f"{_MANY} sequences", t8, max(r, c8)),
    ):
        yield Row(
            name=f"turn of {name} over what bounds it",
            unit="x",
            samples=[turn / bound],
            note="the longer of reading and computing",
            conditions=conditions,
        )
    allowed = _MANY * max(r, c) / max(r, c8)
    reached = _MANY * t / t8
    yield Row(
        name=f"gain of {_MANY} sequences over one, of the allowed",
        unit="x",
        samples=[reached / allowed],
        wanted="0.8 or more",
        note=f"reached {reached:.2f} of {allowed:.2f}",
        conditions=conditions,
    )


def _seed(
    bench: Bench, model: Path, cap: int, ours: float, conditions: dict[str, Any]
) -> Iterator[Row]:
    try:
        program = seed.install(bench.folder / f"flatrun-{seed.VERSION}")
    except subprocess.CalledProcessError:
        yield Row(name="seed runtime", unit="", samples=[], note="cannot be installed here")
        return
    rates = [seed.streaming_rate(program, model, cap) for _ in range(bench.rounds)]
    named = {**conditions, "flatrun": seed.VERSION}
    yield Row(name="seed, streaming: decode", unit="tok/s", samples=rates, conditions=named)
    yield Row(
        name="native streaming decode over the seed's",
        unit="x",
        samples=[ours / rate for rate in rates],
        wanted="30 or more",
        conditions=named,
    )


def _little_memory(bench: Bench) -> Iterator[Row]:
    """A memory cgroup of 60 % of a 1B-parameter file, everything cold."""
    model = files.model(bench.place("models"), "1B", "Q4_K")
    limit = model.stat().st_size * 6 // 10
    with cgroups.limited(limit) as group:
        if group is None:
            yield Row(name="in a cgroup", unit="", samples=[], note="none can be had here")
            return
        order = _order(
            bench, model, context=32, prompt=8, tokens=4 if bench.quick else 8, cold=True,
            budget=limit - _MARGIN, group=str(group), kv_type="f16",
        )  # fmt: skip
        prepare(order)
        conditions = {"file": model.name, "cgroup_mib": limit >> 20, "file_is": "cold"}
        plain = msgspec.structs.replace(order, engine="llamacpp", repack=False)
        calls = {"native": partial(measure, order), "llamacpp": partial(measure, plain)}
        try:
            found = alternate(bench.rounds, calls)
        except Killed as error:
            yield Row(name="in a cgroup", unit="", samples=[], note=str(error))
            return
        for name, samples in found.items():
            yield from _figures(f"{name}, in a cgroup", samples, conditions)
        single = found["native"]
        yield Row(
            name="native decode over llama.cpp's plain map",
            unit="x",
            samples=ratios([one.rate for one in single], [one.rate for one in found["llamacpp"]]),
            wanted="1.5 or more",
            conditions=conditions,
        )
        eight = msgspec.structs.replace(order, sequences=_MANY)
        many = [measure(eight) for _ in range(2 * bench.rounds)]
        yield from _figures(f"native, {_MANY} sequences, in a cgroup", many, conditions)
        yield from _sharing(bench, model, order, single, many, conditions, group)
