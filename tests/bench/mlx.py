"""The default model as an MLX folder: superfluid beside `mlx_lm.server` of the same version."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx

from bench import files
from bench.rows import Bench, Row, alternate, ratios
from support.mlx_environments import GENERATIONS, HOME, interpreter
from support.mlx_folder import write_folder
from support.server import serving

STREAMS: Final = (1, 4, 8)
_CONTEXT: Final = 512
_SHORT: Final = 4
_LONG: Final = 32
_TOKENS: Final = 8
_START_S: Final = 300.0
PARTS: Final = ("load", "prefill", *(f"decode{streams}" for streams in STREAMS), "one-thread")
_NUMBERS: Final = iter(range(1000, 1_000_000, 7))
"""Where each prompt's numbers start, so that no prompt's beginning was seen before."""

_Ask = Callable[[Path], contextlib.AbstractContextManager[str]]


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer: tokens read and written, seconds from asking to its first text and to
    its end."""

    prompt_tokens: int
    tokens: int
    first_s: float
    end_s: float

    @property
    def rate(self) -> float:
        """Tokens a second, after the first."""
        return (self.tokens - 1) / (self.end_s - self.first_s)


def rows(bench: Bench) -> Iterator[Row]:
    """Load, prompt and decode rates, and first tokens, in both generations of mlx-lm. A part is a
    version of mlx-lm, one of `PARTS`, or both."""
    known = {*GENERATIONS.values(), *PARTS}
    if unknown := set(bench.parts) - known:
        raise ValueError(f"no part {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    folder = bench.place("models") / "gemma-3-270m-mlx"
    if not folder.exists():
        write_folder(files.default_model(), folder)
    versions = [it for it in GENERATIONS.values() if it in bench.parts]
    parts = [it for it in PARTS if it in bench.parts]
    for generation, version in GENERATIONS.items():
        if not versions or version in versions:
            python = interpreter(generation)
            yield from _version(bench, version, folder, python, parts or PARTS)


def _version(
    bench: Bench, version: str, folder: Path, python: Path, parts: Collection[str]
) -> Iterator[Row]:
    home = _home(bench)
    sides: dict[str, _Ask] = {
        "superfluid": partial(_ours, folder, version, home, 0),
        "mlx_lm.server": partial(_theirs, folder, python),
    }
    if "load" in parts:
        yield from _loads(bench, version, sides)
    streams = [each for each in STREAMS if f"decode{each}" in parts]
    if streams or "prefill" in parts:
        with _all(sides) as urls:
            if "prefill" in parts:
                yield from _prompts(bench, version, urls)
            for each in streams:
                yield from _decode(bench, version, urls, each)
    if "one-thread" in parts:
        # MLX's own server computes on one thread and takes no number of them.
        alone: dict[str, _Ask] = {
            **sides,
            "superfluid": partial(_ours, folder, version, home, 1),
        }
        with _all(alone) as urls:
            yield from _decode(bench, version, urls, STREAMS[-1], threads=1)


@contextlib.contextmanager
def _all(sides: dict[str, _Ask]) -> Iterator[dict[str, str]]:
    """Both servers at once, warm."""
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = {name: stack.enter_context(start(scratch)) for name, start in sides.items()}
        for url in urls.values():
            _together(url, 2, 2, _SHORT)
        yield urls


def _home(bench: Bench) -> Path:
    """A home whose installs are those of the tests."""
    home = bench.place("mlx-home")
    installs = home / "data" / "runtimes"
    installs.parent.mkdir(exist_ok=True)
    if not installs.exists():
        installs.symlink_to(HOME / "data" / "runtimes")
    return home


def _loads(bench: Bench, version: str, sides: dict[str, _Ask]) -> Iterator[Row]:
    found = alternate(
        _rounds(bench), {name: partial(_load, start) for name, start in sides.items()}
    )
    yield from _beside("start to the first token", "s", version, found, "", {"kernels": "cold"})


def _rounds(bench: Bench) -> int:
    """Six samples at the least: their least and most then hold the median at 96 %."""
    return 1 if bench.quick else 3


def _load(start: _Ask) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        with start(Path(scratch)) as url:
            _complete(url, _SHORT, 1)
            return time.perf_counter() - began


def _prompts(bench: Bench, version: str, urls: dict[str, str]) -> Iterator[Row]:
    found = alternate(_rounds(bench), {name: partial(_prompt, url) for name, url in urls.items()})
    yield from _beside("a prompt", "tok/s", version, found, "1 or more", {"numbers": _LONG})


def _prompt(url: str) -> float:
    answer = _complete(url, _LONG, 1)
    return answer.prompt_tokens / answer.first_s


def _decode(
    bench: Bench, version: str, urls: dict[str, str], streams: int, **facts: int
) -> Iterator[Row]:
    found = alternate(
        _rounds(bench),
        {name: partial(_together, url, streams, _TOKENS, _SHORT) for name, url in urls.items()},
    )
    facts = {"streams": streams, "tokens": _TOKENS, **facts}
    rates = {name: [sum(it.rate for it in shot) for shot in its] for name, its in found.items()}
    yield from _beside("decode", "tok/s", version, rates, "1 or more", facts)
    first = {
        name: [statistics.median(it.first_s for it in shot) for shot in shots]
        for name, shots in found.items()
    }
    yield from _beside("the median stream's first token", "s", version, first, "1 or less", facts)


def _beside(
    what: str,
    unit: str,
    version: str,
    found: dict[str, list[float]],
    wanted: str,
    facts: dict[str, Any],
) -> Iterator[Row]:
    conditions = {"mlx-lm": version, "file": "default model, F32", **facts}
    for name, samples in found.items():
        yield Row(name=f"{name}: {what}", unit=unit, samples=samples, conditions=conditions)
    ours, theirs = found.values()
    yield Row(name=f"{what}: ours over theirs", unit="x", samples=ratios(ours, theirs),
              wanted=wanted, conditions=conditions)  # fmt: skip


# Either server.


@contextlib.contextmanager
def _ours(folder: Path, version: str, home: Path, threads: int, _scratch: Path) -> Iterator[str]:
    words = [str(folder), "--runtime", f"mlx@{version}", "--lanes", str(STREAMS[-1])]
    words += ["--context", str(_CONTEXT), "--threads", str(threads)]
    with serving(words, home) as server:
        yield server.url


@contextlib.contextmanager
def _theirs(folder: Path, python: Path, scratch: Path) -> Iterator[str]:
    """`mlx_lm.server`; it compiles its kernels into `scratch`, as a worker does into its own."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    with (scratch / "log").open("w") as log:
        process = subprocess.Popen(
            [python, "-I", "-m", "mlx_lm.server", "--model", folder, "--port", str(port)],
            env={**kept, "HF_HUB_OFFLINE": "1", "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        _await(process, port, scratch / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _await(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"mlx_lm.server did not start: {log.read_text()[-500:]}")


# One client for both.


def _together(url: str, streams: int, tokens: int, numbers: int) -> list[Answer]:
    with ThreadPoolExecutor(streams) as pool:
        return list(pool.map(lambda _: _complete(url, numbers, tokens), range(streams)))


def _complete(url: str, numbers: int, tokens: int) -> Answer:
    """A greedy answer to a row of numbers, which goes on and does not end by itself."""
    start = next(_NUMBERS)
    prompt = "".join(f"{number}, " for number in range(start, start + numbers))
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    began, first_s, end_s, usage = time.perf_counter(), 0.0, 0.0, {"completion_tokens": 0}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code} {answer.read().decode()[:300]}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            if any(
                choice.get("text") or choice.get("finish_reason") for choice in event["choices"]
            ):
                end_s = time.perf_counter() - began
                first_s = first_s or end_s
    if usage["completion_tokens"] != tokens:
        raise RuntimeError(f"{tokens} tokens were wanted, the server says {usage}")
    return Answer(usage["prompt_tokens"], tokens, first_s, end_s)
