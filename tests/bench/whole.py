"""A server of ours: what its clients get in a time, and what it takes of the processors."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

WORDS: Final = (
    "river", "stone", "world", "tree", "house", "green", "seven", "music", "paper", "light",
)  # fmt: skip
_PROMPT_WORDS: Final = 12
_WAIT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Instant:
    """A clock, what the turn loop has counted, and processor seconds: of both processes, and of
    whatever else is counted."""

    time_s: float
    counted: dict[str, Any]
    daemon_cpu_s: float
    worker_cpu_s: float
    spent_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Window:
    """Between two instants, while streams decode and nothing else happens: tokens a second, and
    processor seconds a turn."""

    rate: float
    daemon_cpu_s: float
    worker_cpu_s: float
    spent_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Share:
    """Texts a second, and processor seconds a text."""

    rate: float
    cpu_s: float


class Whole:
    """A server, asked by as many streaming clients as there are to be streams. `spent` tells
    processor seconds by part, where something counts them."""

    def __init__(self, url: str, pid: int, spent: Callable[[], Mapping[str, float]] = dict) -> None:
        self._spent = spent
        self._client = httpx.Client(base_url=url, timeout=_WAIT_S)
        self._daemon = psutil.Process(pid)
        self._worker = self._daemon.children(recursive=True)[0]
        self._random = random.Random(1)

    def decode(self, streams: int, turns: int) -> Window:
        """`turns` turns or some more in which `streams` streams decode together."""
        begun, moved, over = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

        def follow(prompt: str, told: threading.Semaphore | None) -> None:
            body = {"prompt": prompt, "max_tokens": 4 * turns + 100, "ignore_eos": True}
            with self._streamed(body) as events:
                for number, _ in enumerate(events):
                    if number == 0:
                        begun.release()
                    if told is not None:
                        told.release()
                    if over.is_set():
                        return

        with ThreadPoolExecutor(streams) as pool:
            clients = [
                pool.submit(follow, self._prompt(_PROMPT_WORDS), None if at else moved)
                for at in range(streams)
            ]
            try:
                _await(begun, streams)
                before = self.instant()
                while moved.acquire(blocking=False):
                    pass
                _await(moved, turns)
                after = self.instant()
            finally:
                over.set()
            for client in clients:
                client.result()
        self._await_idle()
        return _between(before, after, streams)

    def first_tokens(self, streams: int, words: int) -> tuple[int, float]:
        """Tokens of `streams` prompts sent together, and seconds until each has its first token."""

        def first(prompt: str) -> tuple[int, float]:
            options = {"stream_options": {"include_usage": True}}
            with self._streamed({"prompt": prompt, "max_tokens": 1, **options}) as events:
                said = next(events)
                came_s = time.perf_counter()
                said += b"".join(events)
            counted = said.split(b'"prompt_tokens":')[1]
            return int(counted.split(b",")[0]), came_s

        prompts = [self._prompt(words) for _ in range(streams)]
        with ThreadPoolExecutor(streams) as pool:
            list(pool.map(lambda _: None, prompts))
            start_s = time.perf_counter()
            found = list(pool.map(first, prompts))
        self._await_idle()
        return sum(tokens for tokens, _ in found), max(came_s for _, came_s in found) - start_s

    def embedded(self, texts: Sequence[str], at_once: int) -> Share:
        """`texts`, so many of them in a request."""
        before, start_s = self.cpu_s(), time.perf_counter()
        for place in range(0, len(texts), at_once):
            body = {"input": texts[place : place + at_once], "encoding_format": "base64"}
            self._client.post("/v1/embeddings", json=body).raise_for_status()
        elapsed_s, after = time.perf_counter() - start_s, self.cpu_s()
        return Share(len(texts) / elapsed_s, (sum(after) - sum(before)) / len(texts))

    def instant(self) -> Instant:
        """Now, as the turn loop answers it at the next beginning of a turn."""
        models = self._client.get("/v1/superfluid/stats").raise_for_status().json()["models"]
        counted: dict[str, Any] = next(iter(models.values()))
        return Instant(time.perf_counter(), counted, *self.cpu_s(), self._spent())

    def peak_rss(self) -> int:
        """The worker's, in bytes."""
        lines = Path(f"/proc/{self._worker.pid}/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024

    def cpu_s(self) -> tuple[float, float]:
        """Processor seconds so far, of the daemon and of the worker."""
        return cpu_s(self._daemon), cpu_s(self._worker)

    def _prompt(self, words: int) -> str:
        """One that was never sent before."""
        return " ".join(self._random.choices(WORDS, k=words))

    @contextlib.contextmanager
    def _streamed(self, body: dict[str, Any]) -> Iterator[Iterator[bytes]]:
        """What comes of the answer, from its first event on."""
        body = {**body, "stream": True, "temperature": 0}
        with self._client.stream("POST", "/v1/completions", json=body) as answer:
            parts = answer.raise_for_status().iter_raw()
            yield (part for part in parts if b"data: " in part)

    def _await_idle(self) -> None:
        deadline = time.monotonic() + _WAIT_S
        while (counted := self.instant().counted)["free_lanes"] < counted["lanes"]:
            if time.monotonic() > deadline:
                raise RuntimeError("streams that nobody reads still run")


def _await(semaphore: threading.Semaphore, count: int) -> None:
    for _ in range(count):
        if not semaphore.acquire(timeout=_WAIT_S):
            raise RuntimeError("a stream stood still")


def _between(before: Instant, after: Instant, streams: int) -> Window:
    turns = after.counted["turns"] - before.counted["turns"]
    tokens = after.counted["decode_tokens"] - before.counted["decode_tokens"]
    if not turns or tokens != streams * turns:
        raise RuntimeError(f"{turns} turns gave {tokens} tokens to {streams} streams")
    return Window(
        rate=tokens / (after.time_s - before.time_s),
        daemon_cpu_s=(after.daemon_cpu_s - before.daemon_cpu_s) / turns,
        worker_cpu_s=(after.worker_cpu_s - before.worker_cpu_s) / turns,
        spent_s={name: (it - before.spent_s[name]) / turns for name, it in after.spent_s.items()},
    )


def cpu_s(process: psutil.Process) -> float:
    """Seconds of the processor so far, on Linux to the nanosecond (`clock_getcpuclockid`)."""
    if sys.platform == "linux":
        return time.clock_gettime(~process.pid << 3 | 2)
    times = process.cpu_times()
    return float(times.user + times.system)


__all__ = ["WORDS", "Share", "Whole", "Window"]
