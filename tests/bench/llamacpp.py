"""llama.cpp through the whole of superfluid, beside the same library's own loop."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from bench import files, timed
from bench.bare import Ask, Loop, Open
from bench.rows import MIB, Bench, Row, T, alternate, interval, ratios
from bench.whole import WORDS, Share, Whole, Window
from superfluid_workerd.adapter import LoadedModel
from support.llama_libraries import BUILD, library
from support.llama_models import write_encoder
from support.llama_runtime import opened
from support.server import serving

STREAMS: Final = (1, 2, 4, 8)
_CONTEXT: Final = 1024
_TURNS: Final = {1: 48}
_FEWER_TURNS: Final = 24
_PROMPT_TOKENS: Final = 512
_SHORT_WORDS: Final = 8
_SITTINGS: Final = 2
_FILLING: Final = 3
_SERVERS: Final = {"whole": {"SUPERFLUID_PREFIX_CACHE_BYTES": "0"}, "keeping": {}}
_BARE: Final = "bare"


def rows(bench: Bench) -> Iterator[Row]:
    """Decode and prompt rates, the first token, memory; what a turn costs outside the engine and
    what it is spent on; embeddings. Parts are those of `PARTS`."""
    if unknown := set(bench.parts) - set(PARTS):
        raise ValueError(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    for part in PARTS:
        if part in bench.parts or not bench.parts:
            yield from PARTS[part](bench)


@contextlib.contextmanager
def _sides(bench: Bench) -> Iterator[_Sides]:
    """Servers and the bare process, warm.

    The library's loop holds nothing but what it computes. So does one of the servers; the other
    keeps the sequences of streams that ended, as it does by default.
    """
    model, shared = files.default_model(), bench.place("llamacpp")
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(_Bare(model, shared))
        wholes = list[Whole]()
        for name, more in _SERVERS.items():
            server = stack.enter_context(serving(_words(model), bench.place(name), **more))
            wholes.append(Whole(server.url, server.pid))
            wholes[-1].decode(STREAMS[-1], 8)
        bare.ask(STREAMS[-1], 16, 8)
        yield _Sides(wholes[0], wholes[1], bare)


def _short(bench: Bench) -> Iterator[Row]:
    """The first token of a short prompt, and memory."""
    with _sides(bench) as sides:
        yield from _first_token(bench, sides.whole, sides.bare)
        yield Row(name="worker's peak RSS", unit="MiB", samples=[sides.keeping.peak_rss() / MIB])
        yield Row(name="bare process's peak RSS", unit="MiB",
                  samples=[sides.bare.ask(1, 8, 1).peak_rss / MIB])  # fmt: skip


def _words(model: Path) -> list[str]:
    words = [str(model), "--threads", "1", "--lanes", str(STREAMS[-1])]
    return [*words, "--context", str(_CONTEXT), "--llamacpp-lib", str(library(BUILD))]


def _rounds(bench: Bench) -> int:
    return 2 if bench.quick else 5 * bench.rounds


def _sat(
    bench: Bench, calls: Callable[[_Sides], Mapping[str, Callable[[], T]]]
) -> dict[str, list[T]]:
    """The rounds of `calls`, in two sittings of new processes: where one's memory happens to lie
    is worth a few percent."""
    found: dict[str, list[T]] = {}
    for _ in range(_SITTINGS):
        with _sides(bench) as sides:
            for name, samples in alternate(_rounds(bench) // _SITTINGS, calls(sides)).items():
                found.setdefault(name, []).extend(samples)
    return found


def _figure(name: str, unit: str, samples: Sequence[float], **more: Any) -> Row:
    """A row that says where the median lies."""
    low, high = interval(samples)
    note = "; ".join(filter(None, [f"median in {low:.4g} to {high:.4g}", more.pop("note", "")]))
    return Row(name=name, unit=unit, samples=list(samples), note=note, **more)


def _decode(streams: int, bench: Bench) -> Iterator[Row]:
    turns, at = _TURNS.get(streams, _FEWER_TURNS), {"streams": streams}

    def calls(sides: _Sides) -> dict[str, Callable[[], Window]]:
        def bare() -> Window:
            it = sides.bare.ask(streams, 16, turns)
            return Window(streams * turns / it.decode_s, 0.0, it.decode_cpu_s / turns, {})

        servers = {side: getattr(sides, side) for side in _SERVERS}
        return {
            **{side: partial(it.decode, streams, turns) for side, it in servers.items()},
            _BARE: bare,
        }

    found = _sat(bench, calls)
    yield from _rates("decode", {name: [it.rate for it in its] for name, its in found.items()}, at)
    worker = {name: [1e3 * it.worker_cpu_s for it in its] for name, its in found.items()}
    yield _figure("bare's turn: processor time", "ms", worker[_BARE], conditions=at)
    for side in _SERVERS:
        outside = [own - other for own, other in zip(worker[side], worker[_BARE], strict=True)]
        yield _figure(f"worker beyond bare, a turn: processor time, {side}", "ms", outside,
                      conditions=at)  # fmt: skip
        daemon = [1e3 * it.daemon_cpu_s for it in found[side]]
        yield _figure(f"daemon, a turn: processor time, {side}", "ms", daemon, conditions=at)


def _prompts(streams: int, bench: Bench) -> Iterator[Row]:
    """As many tokens however many prompts they are of."""
    words, length = _PROMPT_TOKENS // streams - 1, _PROMPT_TOKENS // streams

    def asked(whole: Whole) -> tuple[float, float]:
        before_s = whole.cpu_s()[1]
        tokens, elapsed_s = whole.first_tokens(streams, words)
        if tokens != _PROMPT_TOKENS:
            raise RuntimeError(f"the prompts have {tokens} tokens, wanted {_PROMPT_TOKENS}")
        return tokens / elapsed_s, whole.cpu_s()[1] - before_s

    def calls(sides: _Sides) -> dict[str, Callable[[], tuple[float, float]]]:
        # Past what would be new to either: the pace of such turns, and a full store.
        for whole in (sides.whole, *[sides.keeping] * _FILLING):
            asked(whole)

        def bare() -> tuple[float, float]:
            it = sides.bare.ask(streams, length, 0)
            return _PROMPT_TOKENS / it.prompt_s, it.prompt_cpu_s

        return {**{side: partial(asked, getattr(sides, side)) for side in _SERVERS}, _BARE: bare}

    at = {"streams": streams, "tokens": length}
    found = _sat(bench, calls)
    rates, cpu_s = ({name: [it[place] for it in its] for name, its in found.items()}
                    for place in (0, 1))  # fmt: skip
    yield from _rates("prompts", rates, at)
    for side in _SERVERS:
        yield _figure(f"the same by processor time, {side}", "x",
                      ratios(cpu_s[_BARE], cpu_s[side]), conditions=at)  # fmt: skip


def _rates(what: str, rates: Mapping[str, list[float]], at: dict[str, Any]) -> Iterator[Row]:
    for name, samples in rates.items():
        yield _figure(f"{name}: {what}", "tok/s", samples, conditions=at)
    for side in _SERVERS:
        yield _figure(f"{what}, {side} over bare", "x", ratios(rates[side], rates[_BARE]),
                      wanted="0.97 or more", conditions=at)  # fmt: skip


def _first_token(bench: Bench, whole: Whole, bare: _Bare) -> Iterator[Row]:
    length, _ = whole.first_tokens(1, _SHORT_WORDS)
    found: dict[str, list[float]] = alternate(
        _rounds(bench),
        {
            "whole": lambda: 1e3 * whole.first_tokens(1, _SHORT_WORDS)[1],
            "bare": lambda: 1e3 * bare.ask(1, length, 0).prompt_s,
        },
    )
    for side, samples in found.items():
        yield _figure(f"{side}: first token", "ms", samples, conditions={"tokens": length})


def _turn(bench: Bench) -> Iterator[Row]:
    """What a turn is spent on, by clocks in a server of its own; they are part of what they say."""
    with _clocked(bench, _words(files.default_model())) as whole:
        whole.decode(STREAMS[-1], 8)
        for streams in (STREAMS[0], STREAMS[-1]):
            found = [whole.decode(streams, _FEWER_TURNS) for _ in range(2 * _rounds(bench))]
            told = {name: [1e3 * it.spent_s[name] for it in found] for name in found[0].spent_s}
            for side in timed.SIDES:
                whole_ms = [1e3 * (it.daemon_cpu_s if side == "daemon" else it.worker_cpu_s)
                            for it in found]  # fmt: skip
                named = [samples for name, samples in told.items() if name.startswith(side)]
                told[f"{side}: all else"] = [
                    every - sum(parts) for every, *parts in zip(whole_ms, *named, strict=True)
                ]
            for name, samples in sorted(told.items()):
                yield _figure(f"a turn, {name}", "ms", samples, conditions={"streams": streams})


@contextlib.contextmanager
def _clocked(bench: Bench, served: Sequence[str]) -> Iterator[Whole]:
    program = [str(Path(timed.__file__).absolute())]
    kept = {side: bench.place("clocks") / side for side in timed.SIDES}
    for path in kept.values():
        path.write_bytes(bytes(timed.FILE_BYTES))

    def spent() -> Mapping[str, float]:
        return {
            f"{side}: {part}": seconds
            for side, path in kept.items()
            for part, seconds in timed.read(path, timed.SIDES[side]).items()
        }

    worker = [sys.executable, "-P", *program, str(kept["worker"]), "superfluid_workerd"]
    with serving(
        [*served, "--sandbox", "none"],
        bench.place("home"),
        program=["-P", *program, str(kept["daemon"]), "superfluid"],
        SUPERFLUID_WORKER_LLAMACPP=shlex.join(worker),
    ) as server:
        yield Whole(server.url, server.pid, spent)


def _embeddings(bench: Bench) -> Iterator[Row]:
    """Texts through HTTP, many in a request and one, beside the library's own calls."""
    model = write_encoder(bench.place("models") / "encoder-384x6.gguf", width=384, layers=6)
    texts = [" ".join(WORDS[:9])] * 64
    words = [str(model), "--threads", "1", "--lanes", "8", "--context", "256"]
    words += ["--llamacpp-lib", str(library(BUILD))]
    with (
        serving(words, bench.place("embeddings-home")) as server,
        opened(model, bench.place("llamacpp"), context=256, lanes=8) as loaded,
    ):
        whole = Whole(server.url, server.pid)
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
                  samples=ratios([it.cpu_s for it in theirs],
                                 [it.cpu_s for it in ours]))  # fmt: skip


def _bare_embedded(loaded: LoadedModel, tokens: Sequence[Sequence[int]], at_once: int) -> Share:
    start, cpu = time.perf_counter(), time.process_time()
    for place in range(0, len(tokens), at_once):
        loaded.runtime.embed(tokens[place : place + at_once], lambda: None)
    elapsed_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    return Share(len(tokens) / elapsed_s, cpu_s / len(tokens))


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


class _Sides(NamedTuple):
    whole: Whole
    keeping: Whole
    bare: _Bare


PARTS: Final[Mapping[str, Callable[[Bench], Iterator[Row]]]] = {
    **{f"decode{streams}": partial(_decode, streams) for streams in STREAMS},
    **{f"prompts{streams}": partial(_prompts, streams) for streams in STREAMS},
    "short": _short,
    "turn": _turn,
    "embeddings": _embeddings,
}
