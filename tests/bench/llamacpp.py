"""llama.cpp through the whole of superfluid, beside the same library's own loop."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import httpx
import msgspec
import psutil

from bench import files
from bench.bare import Ask, Loop, Open
from bench.rows import MIB, Bench, Row, alternate, ratios
from superfluid_workerd.adapter import LoadedModel
from support.llama_libraries import BUILD, library
from support.llama_models import write_encoder
from support.llama_runtime import opened
from support.server import serving

STREAMS: Final = (1, 2, 4, 8)
_CONTEXT: Final = 1024
_FEW: Final = 4
_WORDS: Final = (
    "river", "stone", "world", "tree", "house", "green", "seven", "music", "paper", "light",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shot:
    """Some requests together: seconds by the clock, of the daemon's processor and the worker's."""

    elapsed_s: float
    daemon_cpu_s: float
    worker_cpu_s: float
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Side:
    """One sample of either side, for as many streams: a rate, and processor seconds a turn."""

    rate: float
    turn_cpu_s: float
    daemon_turn_cpu_s: float = 0.0


def rows(bench: Bench) -> Iterator[Row]:
    """Decode and prompt rates of both, what a turn costs outside the engine, embeddings."""
    model, shared = files.default_model(), bench.place("llamacpp")
    words = [str(model), "--threads", "1", "--lanes", str(STREAMS[-1])]
    words += ["--context", str(_CONTEXT), "--llamacpp-lib", str(library(BUILD))]
    with _Bare(model, shared) as bare, serving(words, bench.place("home")) as server:
        whole = _Whole(server.url, server.pid)
        for streams in STREAMS:
            yield from _decode(bench, whole, bare, streams)
        yield from _prompts(bench, whole, bare)
        conditions = {"file": model.name, "threads": 1, "lanes": STREAMS[-1]}
        yield Row(name="worker's peak RSS", unit="MiB", samples=[whole.peak_rss() / MIB],
                  conditions=conditions)  # fmt: skip
        yield Row(name="bare process's peak RSS", unit="MiB",
                  samples=[bare.ask(1, 8, 1).peak_rss / MIB], conditions=conditions)  # fmt: skip
    yield from _embeddings(bench)


def _decode(bench: Bench, whole: _Whole, bare: _Bare, streams: int) -> Iterator[Row]:
    tokens = 8 if bench.quick else 32
    found = alternate(
        5 * bench.rounds,
        {
            "whole": partial(_whole_decode, whole, streams, tokens),
            "bare": partial(_bare_decode, bare, streams, tokens),
        },
    )
    conditions = {"file": "default model", "threads": 1, "streams": streams, "tokens": tokens}
    for name, samples in found.items():
        yield Row(name=f"{name}: decode", unit="tok/s", samples=[it.rate for it in samples],
                  conditions=conditions)  # fmt: skip
    ours, theirs = found["whole"], found["bare"]
    yield Row(
        name="whole over bare",
        unit="x",
        samples=ratios([it.rate for it in ours], [it.rate for it in theirs]),
        wanted="0.97 or more",
        conditions=conditions,
    )
    yield Row(
        name="the same by processor time",
        unit="x",
        samples=ratios([it.turn_cpu_s for it in theirs], [it.turn_cpu_s for it in ours]),
        conditions=conditions,
    )
    outside = [
        1e3 * (one.turn_cpu_s - other.turn_cpu_s) for one, other in zip(ours, theirs, strict=True)
    ]
    yield Row(
        name="outside the engine, a turn: processor time",
        unit="ms",
        samples=outside,
        note="of it the daemon's "
        f"{1e3 * sum(it.daemon_turn_cpu_s for it in ours) / len(ours):.2g} ms",
        conditions=conditions,
    )


def _whole_decode(whole: _Whole, streams: int, tokens: int) -> Side:
    few, many = whole.shot(streams, 12, _FEW), whole.shot(streams, 12, _FEW + tokens)
    daemon = (many.daemon_cpu_s - few.daemon_cpu_s) / tokens
    worker = (many.worker_cpu_s - few.worker_cpu_s) / tokens
    return Side(streams * tokens / (many.elapsed_s - few.elapsed_s), daemon + worker, daemon)


def _bare_decode(bare: _Bare, streams: int, tokens: int) -> Side:
    loop = bare.ask(streams, 16, tokens)
    return Side(streams * tokens / loop.decode_s, loop.decode_cpu_s / tokens)


def _prompts(bench: Bench, whole: _Whole, bare: _Bare) -> Iterator[Row]:
    for words, name in ((8, "first token of a short prompt"), (300, "a prompt")):
        samples: dict[str, list[float]] = {"whole": [], "bare": []}
        for _ in range(5 * bench.rounds):
            for side in ("whole", "bare", "bare", "whole"):
                shot = whole.shot(1, words, 1)
                length = shot.prompt_tokens
                elapsed = shot.elapsed_s if side == "whole" else bare.ask(1, length, 0).prompt_s
                samples[side].append(length / elapsed if words > 100 else 1e3 * elapsed)
        unit = "tok/s" if words > 100 else "ms"
        for side, figures in samples.items():
            yield Row(name=f"{side}: {name}", unit=unit, samples=figures,
                      conditions={"threads": 1, "words": words})  # fmt: skip
        if words > 100:
            yield Row(name="prompt, whole over bare", unit="x", wanted="0.97 or more",
                      samples=ratios(samples["whole"], samples["bare"]))  # fmt: skip


def _embeddings(bench: Bench) -> Iterator[Row]:
    """Texts through HTTP, many in a request and one, beside the library's own calls."""
    model = write_encoder(bench.place("models") / "encoder-384x6.gguf", width=384, layers=6)
    texts = [" ".join(_WORDS[:9])] * 64
    words = [str(model), "--threads", "1", "--lanes", "8", "--context", "256"]
    words += ["--llamacpp-lib", str(library(BUILD))]
    with (
        serving(words, bench.place("embeddings-home")) as server,
        opened(model, bench.place("llamacpp"), context=256, lanes=8) as loaded,
    ):
        whole = _Whole(server.url, server.pid)
        tokens = [loaded.tokenizer.encode(text) for text in texts]
        sides = {
            "whole": partial(whole.embedded, texts, len(texts)),
            "bare": partial(_bare_embedded, loaded, tokens, len(texts)),
            "whole, one by one": partial(whole.embedded, texts[:16], 1),
            "bare, one by one": partial(_bare_embedded, loaded, tokens[:16], 1),
        }
        found = alternate(2 * bench.rounds, sides)
    conditions = {"file": model.name, "tokens": len(tokens[0]), "threads": 1}
    for name, samples in found.items():
        yield Row(name=f"{name}: embeddings", unit="texts/s", conditions=conditions,
                  samples=[it.rate for it in samples])  # fmt: skip
    for name in ("", ", one by one"):
        ours, theirs = found[f"whole{name}"], found[f"bare{name}"]
        yield Row(name=f"embeddings{name}, whole over bare", unit="x", conditions=conditions,
                  samples=ratios([it.rate for it in ours], [it.rate for it in theirs]))  # fmt: skip
        yield Row(name="the same by processor time", unit="x", conditions=conditions,
                  samples=ratios([it.turn_cpu_s for it in theirs],
                                 [it.turn_cpu_s for it in ours]))  # fmt: skip


def _bare_embedded(loaded: LoadedModel, tokens: Sequence[Sequence[int]], at_once: int) -> Side:
    start, cpu = time.perf_counter(), time.process_time()
    for place in range(0, len(tokens), at_once):
        loaded.runtime.embed(tokens[place : place + at_once], lambda: None)
    elapsed_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    return Side(len(tokens) / elapsed_s, cpu_s / len(tokens))


class _Whole:
    """A server, asked by as many clients as there are streams."""

    def __init__(self, url: str, pid: int) -> None:
        self._client = httpx.Client(base_url=url, timeout=600)
        self._daemon = psutil.Process(pid)
        self._worker = next(it for it in self._daemon.children(recursive=True))
        self._random = random.Random(1)

    def shot(self, streams: int, words: int, tokens: int) -> Shot:
        """`streams` completions together, of prompts that were never sent before."""
        prompts = [" ".join(self._random.choices(_WORDS, k=words)) for _ in range(streams)]
        before, start = self._cpu(), time.perf_counter()
        with ThreadPoolExecutor(streams) as pool:
            counts = list(pool.map(partial(self._complete, tokens=tokens), prompts))
        elapsed, after = time.perf_counter() - start, self._cpu()
        return Shot(elapsed, after[0] - before[0], after[1] - before[1], counts[0])

    def embedded(self, texts: Sequence[str], at_once: int) -> Side:
        """A rate, and processor seconds a text, by so many of them in a request."""
        before, start = self._cpu(), time.perf_counter()
        for place in range(0, len(texts), at_once):
            body = {"input": texts[place : place + at_once], "encoding_format": "base64"}
            self._client.post("/v1/embeddings", json=body).raise_for_status()
        elapsed_s, after = time.perf_counter() - start, self._cpu()
        return Side(len(texts) / elapsed_s, (sum(after) - sum(before)) / len(texts))

    def peak_rss(self) -> int:
        """The worker's, in bytes."""
        lines = Path(f"/proc/{self._worker.pid}/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024

    def _complete(self, prompt: str, tokens: int) -> int:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self._client.post("/v1/completions", json=body).raise_for_status().json()
        if answer["usage"]["completion_tokens"] != tokens:
            raise RuntimeError(f"{tokens} tokens were wanted, the server says {answer['usage']}")
        return int(answer["usage"]["prompt_tokens"])

    def _cpu(self) -> tuple[float, float]:
        daemon, worker = self._daemon.cpu_times(), self._worker.cpu_times()
        return daemon.user + daemon.system, worker.user + worker.system


class _Bare(contextlib.AbstractContextManager["_Bare"]):
    """The process of the library's own loop."""

    def __init__(self, model: Path, shared: Path) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "bench.bare"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._send(Open(str(model), str(shared), _CONTEXT, STREAMS[-1], 1))

    def ask(self, streams: int, prompt: int, tokens: int) -> Loop:
        """One run of the loop."""
        self._send(Ask(streams, prompt, tokens))
        if self._child.stdout is None:
            raise RuntimeError("the bare process has no output")
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the bare process ended with code {self._child.wait()}")
        return msgspec.json.decode(line, type=Loop)

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()

    def _send(self, message: msgspec.Struct) -> None:
        if self._child.stdin is None:
            raise RuntimeError("the bare process has no input")
        self._child.stdin.write(msgspec.json.encode(message) + b"\n")
        self._child.stdin.flush()
