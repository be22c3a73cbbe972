"""The default model: prompt and decode rate in process, beside llama.cpp, and over HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx

from bench import files
from bench.engines import Engine, Measured, Order, measure, prepare
from bench.rows import Bench, Row, alternate, ratios
from support.server import serving

_ENGINES: tuple[Engine, ...] = ("native", "llamacpp")


def rows(bench: Bench) -> Iterator[Row]:
    """Rates, and ours over llama.cpp's, sample by sample."""
    shared, model = str(bench.place("kernels")), files.default_model()
    for threads in (1, 2):
        orders = {
            engine: Order(
                engine=engine,
                model=str(model),
                shared=shared,
                threads=threads,
                tokens=16 if bench.quick else 64,
            )
            for engine in _ENGINES
        }
        prepare(orders["native"])
        found = alternate(bench.rounds, {name: partial(measure, it) for name, it in orders.items()})
        yield from compare(found, {"file": model.name, "threads": threads, "kv": "f32"})
    yield from _over_http(bench, model)


def compare(found: dict[str, list[Measured]], conditions: dict[str, object]) -> Iterator[Row]:
    """Rows of both engines and their ratios. One thread's processor time sees no neighbours."""
    for name, samples in found.items():
        yield Row(
            name=f"{name} decode",
            unit="tok/s",
            samples=[one.rate for one in samples],
            conditions=conditions,
        )
        yield Row(
            name=f"{name} prompt",
            unit="tok/s",
            samples=[one.prompt_rate for one in samples],
            conditions=conditions,
        )
    ours, theirs = found["native"], found["llamacpp"]
    yield Row(
        name="native decode over llama.cpp's",
        unit="x",
        samples=ratios([one.rate for one in ours], [one.rate for one in theirs]),
        wanted="0.25 or more",
        conditions=conditions,
    )
    if conditions["threads"] == 1:
        yield Row(
            name="the same by processor time",
            unit="x",
            samples=ratios([one.turn_cpu_s for one in theirs], [one.turn_cpu_s for one in ours]),
            conditions=conditions,
        )
    yield Row(
        name="native prompt over llama.cpp's",
        unit="x",
        samples=ratios([one.prompt_rate for one in ours], [one.prompt_rate for one in theirs]),
        conditions=conditions,
    )


def _over_http(bench: Bench, model: Path) -> Iterator[Row]:
    few, many = 4, 36 if bench.quick else 132
    with (
        serving([str(model), "--threads", "2"], bench.place("home")) as server,
        httpx.Client(base_url=server.url, timeout=600) as client,
    ):
        _completion(client, few)
        rates: list[float] = []
        for _ in range(2 * bench.rounds):
            short, long = _completion(client, few), _completion(client, many)
            rates.append((many - few) / (long - short))
    yield Row(
        name="whole of superfluid, decode over HTTP",
        unit="tok/s",
        samples=rates,
        conditions={"file": model.name, "threads": 2, "streams": 1},
    )


def _completion(client: httpx.Client, tokens: int) -> float:
    body = {"prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0}
    start = time.perf_counter()
    answer = client.post("/v1/completions", json={**body, "ignore_eos": True}).raise_for_status()
    elapsed_s = time.perf_counter() - start
    if answer.json()["usage"]["completion_tokens"] != tokens:
        raise RuntimeError(f"{tokens} tokens were wanted, the server says {answer.text[-200:]}")
    return elapsed_s
