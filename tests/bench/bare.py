"""A library's own loop, in a process of its own: batches in, the largest logit out, no more.

Reads `Ask`s as lines of JSON and answers each with a `Loop`. The context is opened as the runtime
opens it, so that both sides ask the same of the engine.
"""

from __future__ import annotations

import ctypes as ct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from bench.engines import peak_rss, prompt_of
from superfluid_adapter_llamacpp.context import Piece
from superfluid_adapter_llamacpp.runtime import LlamaRuntime
from support.llama_runtime import opened


class Open(msgspec.Struct, frozen=True):
    """What to load."""

    model: str
    shared: str
    context: int
    lanes: int
    threads: int


class Ask(msgspec.Struct, frozen=True):
    """Sequences, the length of each one's prompt, and the tokens to say after it."""

    streams: int
    prompt: int
    tokens: int


class Loop(msgspec.Struct, frozen=True):
    """Seconds by the clock and of the processor, for the prompts and for the turns."""

    prompt_s: float
    prompt_cpu_s: float
    decode_s: float
    decode_cpu_s: float
    peak_rss: int


def _loop(runtime: LlamaRuntime, ask: Ask) -> Loop:
    context = runtime._context
    for sequence in range(context.sequences):
        context.remove(sequence, 0)
    start, cpu = time.perf_counter(), time.process_time()
    last = [_prompt(runtime, sequence, ask.prompt) for sequence in range(ask.streams)]
    prompt_s, prompt_cpu_s = time.perf_counter() - start, time.process_time() - cpu
    start, cpu = time.perf_counter(), time.process_time()
    for turn in range(ask.tokens):
        place = ask.prompt + turn
        pieces = [Piece(it, it, [token], place, 1) for it, token in enumerate(last)]
        last = _decoded(runtime, pieces, range(ask.streams))
    decode_s, decode_cpu_s = time.perf_counter() - start, time.process_time() - cpu
    return Loop(prompt_s, prompt_cpu_s, decode_s, decode_cpu_s, peak_rss())


def _prompt(runtime: LlamaRuntime, sequence: int, count: int) -> int:
    context = runtime._context
    tokens = prompt_of(count, context.vocabulary, sequence)
    last: list[int] = []
    for start in range(0, count, context.ubatch):
        part = tokens[start : start + context.ubatch]
        wanted = int(start + len(part) == count)
        pieces = [Piece(0, sequence, part, start, wanted)]
        last = _decoded(runtime, pieces, [len(part) - 1] if wanted else [])
    return last[0]


def _decoded(runtime: LlamaRuntime, pieces: Sequence[Piece], rows: Sequence[int]) -> list[int]:
    context = runtime._context
    code = context.decode(pieces)
    if code:
        raise RuntimeError(f"llama_decode returned {code}")
    call, found = context._call, list[int]()
    for row in rows:
        address = call.llama_get_logits_ith(context.pointer, row)
        pointer = ct.cast(address, ct.POINTER(ct.c_float))
        view = np.ctypeslib.as_array(pointer, shape=(context.vocabulary,))
        found.append(int(view.argmax()))
    return found


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Open)
    with opened(
        Path(order.model), Path(order.shared), context=order.context, lanes=order.lanes,
        threads=order.threads,
    ) as loaded:  # fmt: skip
        runtime = loaded.runtime
        if not isinstance(runtime, LlamaRuntime):
            raise TypeError("no llama.cpp runtime")
        for line in sys.stdin.buffer:
            answer = _loop(runtime, msgspec.json.decode(line, type=Ask))
            sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
