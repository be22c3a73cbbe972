"""What a worker's death costs its client, and what the sandbox costs, on each runtime."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from bench import files
from bench.rows import Bench, Row, alternate, interval, ratios
from support.llama_libraries import INSTALLED, library
from support.mlx_environments import GENERATIONS, HOME, interpreter
from support.mlx_folder import write_folder
from support.server import Server, serving

_LEVELS: Final = ("none", "strict")
_TOKENS: Final = 64
_KILL_AT: Final = 24
_STATE: Final = re.compile(r"^(\S+Z) debug .*: worker (\S+) → (\S+)$", re.MULTILINE)
_SPANS: Final = ("another started", "loaded", "replayed", "together")


@dataclass(frozen=True, slots=True)
class _Engine:
    """A runtime serving the default model."""

    name: str
    words: Sequence[str]
    home: Path

    def row(
        self, name: str, unit: str, samples: list[float], wanted: str = "", **facts: Any
    ) -> Row:
        if samples:
            least, most = interval(samples)
            facts |= {"95 %": f"{least:.4g} to {most:.4g}", "samples": len(samples)}
        conditions = {"runtime": self.name, **facts}
        return Row(name=name, unit=unit, samples=samples, wanted=wanted, conditions=conditions)


def rows(bench: Bench) -> Iterator[Row]:
    """Starts, rates and pauses. A part is one of these, a runtime, or both."""
    engines = dict(_engines(bench))
    if unknown := set(bench.parts) - {*PARTS, *engines}:
        known = ", ".join((*PARTS, *engines))
        raise ValueError(f"no part {', '.join(unknown)}; there are {known}")
    parts = [it for it in PARTS if it in bench.parts] or PARTS
    for engine in [it for name, it in engines.items() if name in bench.parts] or engines.values():
        for part in parts:
            yield from PARTS[part](bench, engine)


def _engines(bench: Bench) -> Iterator[tuple[str, _Engine]]:
    model, home = files.default_model(), bench.place("supervised")
    llama = [str(model), "--llamacpp-lib", str(library(INSTALLED))]
    yield "native", _Engine("native", [str(model), "--runtime", "native"], home)
    yield "llamacpp", _Engine("llamacpp", llama, home)
    folder = bench.place("models") / "gemma-3-270m-mlx"
    if not folder.exists():
        write_folder(model, folder)
    installs = home / "data" / "runtimes"
    installs.parent.mkdir(exist_ok=True)
    if not installs.exists():
        installs.symlink_to(HOME / "data" / "runtimes")
    for generation, version in GENERATIONS.items():
        interpreter(generation)
        yield (
            f"mlx-{version}",
            _Engine(f"mlx {version}", [str(folder), "--runtime", f"mlx@{version}"], home),
        )


def _starts(bench: Bench, engine: _Engine) -> Iterator[Row]:
    _start(engine, "none")
    found = alternate(3 * bench.rounds, {it: partial(_start, engine, it) for it in _LEVELS})
    yield engine.row("start to serving without a sandbox", "s", found["none"])
    more = [one - other for one, other in zip(found["strict"], found["none"], strict=True)]
    yield engine.row("what a strict one adds", "s", more, "nil")


def _start(engine: _Engine, level: str) -> float:
    start = time.perf_counter()
    with serving([*engine.words, "--sandbox", level], engine.home) as server:
        httpx.get(server.url + "/health").raise_for_status()
        return time.perf_counter() - start


def _rates(bench: Bench, engine: _Engine) -> Iterator[Row]:
    with ExitStack() as stack:
        servers = {
            level: stack.enter_context(
                serving([*engine.words, "--sandbox", level, "--name", level], engine.home)
            )
            for level in _LEVELS
        }
        for server in servers.values():
            _rate(server)
        calls = {level: partial(_rate, it) for level, it in servers.items()}
        found = alternate(5 * bench.rounds, calls)
    yield engine.row("tokens per second without a sandbox", "tok/s", found["none"], tokens=_TOKENS)
    more = ratios(found["strict"], found["none"])
    yield engine.row("in a strict one, to those", "x", more, "1", tokens=_TOKENS)


def _body(tokens: int) -> dict[str, object]:
    return {"prompt": "The city", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def _rate(server: Server) -> float:
    start = time.perf_counter()
    url = f"{server.url}/v1/completions"
    httpx.post(url, json=_body(_TOKENS), timeout=120).raise_for_status()
    return _TOKENS / (time.perf_counter() - start)


def _pauses(bench: Bench, engine: _Engine) -> Iterator[Row]:
    log = engine.home / "supervision.log"
    log.unlink(missing_ok=True)
    words = [*engine.words, "--log-level", "debug", "--log-file", str(log)]
    with serving(words, engine.home) as server:
        found = [_pause(server, log) for _ in range(5 * bench.rounds)]
    for name in _SPANS:
        samples = [each[name] for each in found]
        yield engine.row(f"pause at a worker's kill: {name}", "s", samples, token=_KILL_AT)
    yield engine.row("usual time between tokens", "s", [each["usual"] for each in found])


def _pause(server: Server, log: Path) -> dict[str, float]:
    """Seconds from a kill to its stream's next token, by what they went for."""
    heard: list[float] = []
    seen, killed = log.stat().st_size, 0.0
    body = {**_body(_TOKENS), "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {") or not json.loads(line[6:])["choices"]:
                continue
            heard.append(time.time())
            if len(heard) == _KILL_AT:
                (worker,) = psutil.Process(server.pid).children()
                killed = time.time()
                os.kill(worker.pid, signal.SIGKILL)
    gaps = [after - before for before, after in itertools.pairwise(heard)]
    # What was on its way when the worker died comes first.
    longest = max(range(len(gaps)), key=gaps.__getitem__)
    started, serving_at = _reached(log, seen)
    spans = (started - killed, serving_at - started, heard[longest + 1] - serving_at)
    return {
        **dict(zip(_SPANS, (*spans, sum(spans)), strict=True)),
        "usual": statistics.median(gaps),
    }


def _reached(log: Path, seen: int) -> tuple[float, float]:
    """When the next worker said hello and when it served."""
    text = log.read_bytes()[seen:].decode()
    at = {
        after: datetime.fromisoformat(when).timestamp() for when, _, after in _STATE.findall(text)
    }
    return at["handshaken"], at["serving"]


PARTS: Final[Mapping[str, Callable[[Bench, _Engine], Iterator[Row]]]] = {
    "start": _starts,
    "rate": _rates,
    "pause": _pauses,
}
