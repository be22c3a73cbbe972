"""Bounds that llama.cpp dies of or answers wrong past, and what is left when a call fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from superfluid_adapter_llamacpp import plan
from superfluid_adapter_llamacpp.context import Context, Piece
from superfluid_adapter_llamacpp.runtime import LlamaRuntime
from superfluid_adapter_llamacpp.state import seal
from superfluid_compat.errors import Capacity, Fault, Unsupported
from superfluid_workerd.adapter import Feed
from support.llama_runtime import opened
from support.tiny_models import TinyModel, write_model

UBATCH = 64
Logits = NDArray[np.float32]


def ignore() -> None:
    """A tick that does nothing."""


def drawn(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(5, 300, count)]


@contextlib.contextmanager
def runtime_of(model: Path, shared: Path, **options: Any) -> Iterator[LlamaRuntime]:
    with opened(model, shared, **options) as loaded:
        assert isinstance(loaded.runtime, LlamaRuntime)
        yield loaded.runtime


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf", TinyModel(context=2048))


@pytest.fixture
def runtime(model: Path, shared: Path) -> Iterator[LlamaRuntime]:
    with runtime_of(model, shared, context=512, lanes=2, ubatch_size=UBATCH) as opened_runtime:
        yield opened_runtime


def makeable(runtime: LlamaRuntime) -> int:
    """How many sequences can still be made; as many as before afterwards."""
    made = list[int]()
    try:
        while len(made) < 1000:
            made.append(runtime.seq_create())
    except Capacity:
        pass
    for sequence in made:
        runtime.seq_free(sequence)
    return len(made)


def fed(runtime: LlamaRuntime, tokens: Sequence[int]) -> int:
    sequence = runtime.seq_create()
    runtime.step([Feed(sequence, list(tokens), 0, "none")], ignore)
    return sequence


# What fails leaves no sequence behind.


def test_an_import_that_fails_leaves_no_sequence(runtime: LlamaRuntime) -> None:
    kept = fed(runtime, drawn(20))
    left = makeable(runtime)
    assert left == runtime.describe().sequences - 1
    for _ in range(3):
        with pytest.raises(Unsupported, match="does not take this state"):
            runtime.seq_import(seal(runtime._loaded.key, 20, b"\xff" * 64))
        assert makeable(runtime) == left
    assert runtime.seq_length(kept) == 20


def test_a_copy_that_fails_leaves_no_sequence(
    runtime: LlamaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise Fault("told to fail")

    kept = fed(runtime, drawn(20))
    left = makeable(runtime)
    monkeypatch.setattr(runtime._context, "share", fails)
    with pytest.raises(Fault, match="told to fail"):
        runtime.seq_copy(kept, 20)
    assert makeable(runtime) == left


# Imports.


def test_an_import_longer_than_the_context_is_refused(model: Path, shared: Path) -> None:
    with runtime_of(model, shared, context=256, lanes=1) as long:
        payloads = [long.seq_export(fed(long, drawn(count))) for count in (100, 101)]
    with runtime_of(model, shared, context=100, lanes=4) as short:
        assert short.describe().context == 100
        held = short.seq_import(payloads[0])
        assert short.seq_length(held) == 100
        left = makeable(short)
        with pytest.raises(Unsupported, match="has 101 tokens, the context is 100"):
            short.seq_import(payloads[1])
        assert makeable(short) == left


@pytest.mark.parametrize("said", [1, 19, 21, 400])
def test_a_state_of_another_length_than_is_said_is_refused(
    said: int, runtime: LlamaRuntime
) -> None:
    sequence = fed(runtime, drawn(20))
    state = bytes(runtime._context.export(sequence))
    left = makeable(runtime)
    with pytest.raises(Unsupported, match="does not take this state"):
        runtime.seq_import(seal(runtime._loaded.key, said, state))
    assert makeable(runtime) == left
    assert runtime.seq_length(runtime.seq_import(seal(runtime._loaded.key, 20, state))) == 20


# Steps.


def test_a_step_has_at_most_the_batch_size(model: Path, shared: Path) -> None:
    with runtime_of(model, shared, context=512, batch_size=48, ubatch_size=32) as runtime:
        assert runtime.describe().step_tokens == 48
        one, two = runtime.seq_create(), runtime.seq_create()
        for counts in ((49,), (24, 25)):
            feeds = [
                Feed(it, drawn(count), 0)
                for it, count in zip((one, two), counts, strict=False)
            ]  # fmt: skip
            with pytest.raises(Capacity, match="49 tokens in a step, 48 may be"):
                runtime.step(feeds, ignore)
            assert (runtime.seq_length(one), runtime.seq_length(two)) == (0, 0)
        runtime.step([Feed(one, drawn(24), 0), Feed(two, drawn(24), 0)], ignore)
        assert (runtime.seq_length(one), runtime.seq_length(two)) == (24, 24)


def crowd(runtime: LlamaRuntime, left: int) -> int:
    """Fill the cache through the engine, without a word to the runtime, but for `left` cells."""
    place = runtime.describe().sequences - 1
    tokens = drawn(runtime._context.cells - left)
    for start in range(0, len(tokens), UBATCH):
        piece = Piece(0, place, tokens[start : start + UBATCH], start, 0)
        assert runtime._context.decode([piece]) == 0
    return place


def test_an_engine_without_room_is_capacity_and_nothing_has_changed(runtime: LlamaRuntime) -> None:
    sequence = fed(runtime, drawn(10))
    crowd(runtime, 10 + 20)
    with pytest.raises(Capacity, match="finds no room"):
        runtime.step([Feed(sequence, drawn(21), 10)], ignore)
    assert runtime.seq_length(sequence) == 10
    (rows,) = runtime.step([Feed(sequence, drawn(20), 10)], ignore)
    assert rows is not None


def test_no_room_for_the_second_call_of_a_step_is_a_fault(runtime: LlamaRuntime) -> None:
    """Some of the step has gone in, so that it cannot be taken again as it was."""
    sequence = runtime.seq_create()
    crowd(runtime, UBATCH + 20)
    with pytest.raises(Fault, match="llama_decode returned 1"):
        runtime.step([Feed(sequence, drawn(UBATCH + 21), 0)], ignore)
    assert runtime.seq_length(sequence) == UBATCH


@pytest.mark.parametrize("code", [1, 2, -2])
def test_after_a_call_that_fails_lengths_are_what_the_cache_holds(
    code: int, runtime: LlamaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp keeps what it had computed of a call when the rest fails."""
    decode, tokens = runtime._context.decode, drawn(50)
    other, sequence = fed(runtime, drawn(30, 1)), fed(runtime, tokens[:5])

    def half(pieces: Sequence[Piece]) -> int:
        first, second = pieces
        assert decode([first]) == 0
        assert decode([Piece(1, second.sequence, second.tokens[:15], second.start, 0)]) == 0
        return code

    monkeypatch.setattr(runtime._context, "decode", half)
    with pytest.raises(Fault, match=f"llama_decode returned {code}"):
        runtime.step([Feed(other, [7, 8], 30), Feed(sequence, tokens[5:], 5)], ignore)
    monkeypatch.undo()
    assert (runtime.seq_length(other), runtime.seq_length(sequence)) == (32, 20)
    (rows,) = runtime.step([Feed(sequence, tokens[20:], 20)], ignore)
    assert rows is not None
    found = rows[-1].copy()
    (wanted,) = runtime.step([Feed(runtime.seq_create(), tokens, 0)], ignore)
    assert wanted is not None
    np.testing.assert_allclose(found, wanted[-1], rtol=0, atol=0.02)


ROWS = 7


def test_no_call_gives_more_rows_than_there_is_room_for(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp dies of one more. A large vocabulary gets fewer rows than a micro-batch."""
    path = write_model(tmp_path / "m.gguf", TinyModel(context=512))
    calls = list[list[Piece]]()
    with runtime_of(path, shared, context=256, lanes=1, ubatch_size=UBATCH) as runtime:
        vocabulary = runtime.describe().vocabulary
        (rows,) = runtime.step([Feed(runtime.seq_create(), drawn(80), 0, "all")], ignore)
        assert rows is not None
        wanted = rows.copy()
    monkeypatch.setattr(plan, "OUTPUT_BYTES", ROWS * 4 * vocabulary + 3)
    members = dict[str, float]()
    start, decode = Context.__init__, Context.decode

    def started(self: Context, model: Any, given: Any) -> None:
        members.update(given)
        start(self, model, given)

    def counted(self: Context, pieces: Sequence[Piece]) -> int:
        calls.append(list(pieces))
        assert sum(piece.wanted for piece in pieces) <= ROWS
        return decode(self, pieces)

    monkeypatch.setattr(Context, "__init__", started)
    monkeypatch.setattr(Context, "decode", counted)
    with runtime_of(path, shared, context=256, lanes=1, ubatch_size=UBATCH) as runtime:
        assert members["n_outputs_max"] == ROWS
        one, two, three = (runtime.seq_create() for _ in range(3))
        feeds = [Feed(one, drawn(80), 0, "all"), Feed(two, drawn(30, 1), 0), Feed(three, [9], 0)]
        all_rows, last, single = runtime.step(feeds, ignore)
        assert all_rows is not None
        assert last is not None
        assert single is not None
        np.testing.assert_allclose(all_rows, wanted, rtol=0, atol=0.02)
        assert (len(last), len(single)) == (1, 1)
        # 80 rows take 12 calls, whose last has room for the others'.
        assert [sum(it.wanted for it in call) for call in calls] == [ROWS] * 11 + [5]
