"""How long a person waits: `--help`, a worker's `info`, `serve` until it answers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx

from bench import files
from bench.rows import Bench, Row, alternate
from support.server import serving


def rows(bench: Bench) -> Iterator[Row]:
    """Seconds of whole processes."""
    program = str(Path(sys.executable).with_name("superfluid"))
    commands = {
        "python, nothing else": [sys.executable, "-c", "pass"],
        "superfluid --help": [program, "--help"],
        "superfluid compat --json": [program, "compat", "--json"],
        "superfluid-workerd native info": [f"{program}-workerd", "native", "info"],
    }
    wanted = {
        "superfluid --help": "0.25 s or less",
        "superfluid compat --json": "1 s or less, warm",
    }
    found = alternate(3 * bench.rounds, {name: partial(_run, it) for name, it in commands.items()})
    for name, samples in found.items():
        yield Row(name=name, unit="s", samples=samples, wanted=wanted.get(name, ""))
    home, model = bench.place("home"), files.default_model()
    _ready(model, home)
    yield Row(
        name="superfluid serve until /health is ok",
        unit="s",
        samples=[_ready(model, home) for _ in range(2 * bench.rounds)],
        wanted="3 s or less",
        conditions={"file": model.name, "start": "warm"},
    )


def _run(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def _ready(model: Path, home: Path) -> float:
    start = time.perf_counter()
    with serving([str(model)], home) as server:
        httpx.get(server.url + "/health").raise_for_status()
        return time.perf_counter() - start
