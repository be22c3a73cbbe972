"""What a worker's death costs its client, and what the sandbox costs."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import psutil

from bench import files
from bench.rows import Bench, Row, alternate, ratios
from support.server import Server, serving

_LEVELS = ("none", "basic", "strict")
_TOKENS = 64
_KILL_AT = 24


def rows(bench: Bench) -> Iterator[Row]:
    """Pauses, starts and rates of the default model."""
    home, model = bench.place("supervised"), files.default_model()
    _start(model, home, "none")
    yield from _starts(bench, model, home)
    yield from _rates(bench, model, home)
    yield from _pauses(bench, model, home)


def _starts(bench: Bench, model: Path, home: Path) -> Iterator[Row]:
    calls = {level: partial(_start, model, home, level) for level in _LEVELS}
    found = alternate(2 * bench.rounds, calls)
    for level in _LEVELS[1:]:
        yield Row(
            name=f"start with sandbox {level}, less that without",
            unit="s",
            samples=[more - less for more, less in zip(found[level], found["none"], strict=True)],
            wanted="nil",
            conditions={"file": model.name, "start": "warm"},
        )


def _start(model: Path, home: Path, level: str) -> float:
    start = time.perf_counter()
    with serving([str(model), "--sandbox", level], home) as server:
        httpx.get(server.url + "/health").raise_for_status()
        return time.perf_counter() - start


def _rates(bench: Bench, model: Path, home: Path) -> Iterator[Row]:
    with ExitStack() as stack:
        servers = {
            level: stack.enter_context(
                serving([str(model), "--sandbox", level, "--name", level], home)
            )
            for level in _LEVELS
        }
        for server in servers.values():
            _rate(server)
        found = alternate(
            4 * bench.rounds, {level: partial(_rate, it) for level, it in servers.items()}
        )
    for level in _LEVELS[1:]:
        yield Row(
            name=f"tokens per second with sandbox {level}, to those without",
            unit="",
            samples=ratios(found[level], found["none"]),
            wanted="1",
            conditions={"file": model.name, "tokens": _TOKENS, "median": _middle(found[level])},
        )


def _middle(samples: list[float]) -> float:
    return round(statistics.median(samples), 1)


def _body(tokens: int) -> dict[str, object]:
    return {"prompt": "The city", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def _rate(server: Server) -> float:
    start = time.perf_counter()
    url = f"{server.url}/v1/completions"
    httpx.post(url, json=_body(_TOKENS), timeout=120).raise_for_status()
    return _TOKENS / (time.perf_counter() - start)


def _pauses(bench: Bench, model: Path, home: Path) -> Iterator[Row]:
    with serving([str(model)], home) as server:
        pauses = [_pause(server) for _ in range(3 * bench.rounds)]
    yield Row(
        name="longest gap in a stream whose worker is killed",
        unit="s",
        samples=[longest for longest, _ in pauses],
        conditions={"file": model.name, "killed at token": _KILL_AT, "start": "warm"},
    )
    yield Row(
        name="usual gap in the same streams",
        unit="s",
        samples=[usual for _, usual in pauses],
    )


def _pause(server: Server) -> tuple[float, float]:
    """The longest and the median time between what a client hears."""
    gaps: list[float] = []
    body, last = {**_body(_TOKENS), "stream": True}, 0.0
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            if last:
                gaps.append(now - last)
            last = now
            if len(gaps) == _KILL_AT:
                (worker,) = psutil.Process(server.pid).children()
                os.kill(worker.pid, signal.SIGKILL)
    return max(gaps), statistics.median(gaps)
