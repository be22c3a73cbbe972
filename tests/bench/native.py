"""The native runtime on generated models: resident, streaming, in little memory."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from bench import cgroups, files, reading, seed
from bench.engines import Killed, Measured, Order, measure, prepare
from bench.rows import MIB, Bench, Row, alternate, ratios

_MANY = 8
_SHORT, _LONG = 32, 1500
_ROUNDS = 3
"""There and back: six samples, between whose least and most the median lies at 95 %."""
_MARGIN = 16 * MIB
"""What a cgroup counts beside the process itself."""


def rows(bench: Bench) -> Iterator[Row]:
    """Every figure of the native runtime's own, or those of some of `PARTS`."""
    for part in bench.parts or PARTS:
        yield from PARTS[part](bench)


def _streaming_rounds(bench: Bench) -> int:
    return 1 if bench.quick else _ROUNDS


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
    conditions = {"file": model.name, "cap_mib": cap >> 20, "threads": one.threads, "start": "warm"}
    found = alternate(_streaming_rounds(bench), _sharers(one, model))
    yield from _figures("native, streaming", found["t"], conditions)
    yield from _figures(f"native, streaming, {_MANY} sequences", found["t8"], conditions)
    yield from _sharing(model, found, conditions)


def _sharers(order: Order, model: Path) -> dict[str, Callable[[], Measured]]:
    """What `_sharing` compares: one and eight sequences, streaming as ordered, and resident from
    `model`."""
    resident = msgspec.structs.replace(
        order, model=str(model), cap=None, budget=None, group=None, cold=False
    )
    orders = {
        "t": order,
        "t8": msgspec.structs.replace(order, sequences=_MANY),
        "c": resident,
        "c8": msgspec.structs.replace(resident, sequences=_MANY),
    }
    return {name: partial(measure, one) for name, one in orders.items()}


def _sharing(
    model: Path,
    found: Mapping[str, list[Measured]],
    conditions: dict[str, Any],
    group: Path | None = None,
) -> Iterator[Row]:
    """How much of what reading and computing allow the eight sequences reach."""
    streamed = found["t"][0].streamed
    reads = reading.seconds(model, streamed, group)
    turns = {name: [one.turn_s for one in samples] for name, samples in found.items()}
    for name, samples, note in (
        ("R, time to read", reads, f"{streamed >> 20} MiB"),
        ("C, time to compute one row", turns["c"], ""),
        (f"C8, time to compute {_MANY} rows", turns["c8"], ""),
        ("turn of one sequence", turns["t"], ""),
        (f"turn of {_MANY} sequences", turns["t8"], ""),
    ):
        yield Row(name=name, unit="s", samples=samples, note=note, conditions=conditions)
    r = statistics.median(reads)
    bound = [max(r, c) for c in turns["c"]]
    bound8 = [max(r, c8) for c8 in turns["c8"]]
    over, over8 = ratios(turns["t"], bound), ratios(turns["t8"], bound8)
    for name, samples in (("one sequence", over), (f"{_MANY} sequences", over8)):
        yield Row(
            name=f"turn of {name} over what bounds it",
            unit="x",
            samples=samples,
            conditions=conditions,
        )
    # 8 t / t8 over 8 max(R, C) / max(R, C8).
    yield Row(
        name=f"gain of {_MANY} sequences over one, of the allowed",
        unit="x",
        samples=ratios(over, over8),
        wanted="0.8 or more",
        conditions=conditions,
    )


def _seed(bench: Bench) -> Iterator[Row]:
    """Streaming as above, beside the seed runtime with the same cap."""
    model = files.model(bench.place("models"), "125M", "Q4_K")
    cap = model.stat().st_size // 2
    order = _order(bench, model, cap=cap)
    prepare(order)
    try:
        program = seed.install(bench.folder / f"flatrun-{seed.VERSION}")
    except subprocess.CalledProcessError:
        yield Row(name="seed runtime", unit="", samples=[], note="cannot be installed here")
        return
    tokens = 8 if bench.quick else 16
    found: dict[str, list[float]] = alternate(
        _streaming_rounds(bench),
        {
            "native": lambda: measure(order).rate,
            "seed": lambda: seed.streaming_rate(program, model, cap, tokens),
        },
    )
    named = {
        "file": model.name, "cap_mib": cap >> 20, "threads": order.threads, "start": "warm",
        "flatrun": seed.VERSION, "seed_tokens": tokens,
    }  # fmt: skip
    yield Row(name="seed, streaming: decode", unit="tok/s", samples=found["seed"], conditions=named)
    yield Row(
        name="native streaming decode beside it",
        unit="tok/s",
        samples=found["native"],
        conditions=named,
    )
    yield Row(
        name="native streaming decode over the seed's",
        unit="x",
        samples=ratios(found["native"], found["seed"]),
        wanted="30 or more",
        conditions=named,
    )


def _little_memory(bench: Bench) -> Iterator[Row]:
    """A memory cgroup of 60 % of a 1B-parameter file, everything cold."""
    model = files.model(bench.place("models"), "1B", "Q4_K")
    # Read outside the group, a file would be in a cache that the group's limit does not count.
    twin = files.model(bench.place("twins"), "1B", "Q4_K")
    files.make_cold(model)
    limit = model.stat().st_size * 6 // 10
    with cgroups.limited(limit) as group:
        if group is None:
            yield Row(name="in a cgroup", unit="", samples=[], note="none can be had here")
            return
        order = _order(
            bench, model, context=32, prompt=8, tokens=4 if bench.quick else 8, cold=True,
            budget=limit - _MARGIN, group=str(group), kv_type="f16",
        )  # fmt: skip
        prepare(msgspec.structs.replace(order, model=str(twin)))
        conditions = {"file": model.name, "cgroup_mib": limit >> 20, "start": "cold"}
        plain = msgspec.structs.replace(order, engine="llamacpp", repack=False)
        calls = _sharers(order, twin)
        calls["llamacpp"] = partial(measure, plain)
        try:
            found = alternate(_streaming_rounds(bench), calls)
        except Killed as error:
            yield Row(name="in a cgroup", unit="", samples=[], note=str(error))
            return
        for key, name in (
            ("t", "native"),
            ("llamacpp", "llamacpp, plain map"),
            ("t8", f"native, {_MANY} sequences"),
        ):
            yield from _figures(f"{name}, in a cgroup", found[key], conditions)
        yield Row(
            name="native decode over llama.cpp's plain map",
            unit="x",
            samples=ratios(
                [one.rate for one in found["t"]], [one.rate for one in found["llamacpp"]]
            ),
            wanted="1.5 or more",
            conditions=conditions,
        )
        yield from _sharing(model, found, conditions, group)


def _both(bench: Bench) -> Iterator[Row]:
    for kind in ("Q4_K", "Q8_0"):
        yield from _resident(bench, kind)


PARTS: Final[Mapping[str, Callable[[Bench], Iterator[Row]]]] = {
    "resident": _both,
    "long": _long,
    "streaming": _streaming,
    "seed": _seed,
    "cgroup": _little_memory,
}
