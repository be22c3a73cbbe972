"""What the llama.cpp runtime does past the kit's suite: where llama.cpp would answer wrong, die
or wait without end."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from superfluid_adapter_llamacpp import loading
from superfluid_adapter_llamacpp.llamacpp import LlamaCppAdapter
from superfluid_adapter_llamacpp.runtime import LlamaRuntime
from superfluid_adapter_llamacpp.settings import POSITIONS
from superfluid_adapter_llamacpp.state import seal
from superfluid_compat.errors import (
    BadOptionValue,
    Capacity,
    DoesNotFit,
    ModelDamaged,
    ModelError,
    ModelNotFound,
    OutOfBoundary,
    Unsupported,
    UnsupportedArchitecture,
)
from superfluid_workerd.adapter import Feed, Runtime
from superfluid_workerd.registry import checked_options
from support.gguf_writer import Kind, Typed, tensor, write_gguf
from support.llama_models import write_hybrid, write_recurrent
from support.llama_runtime import opened
from support.tiny_models import TinyModel, model_metadata, model_tensors, write_model

Logits = NDArray[np.float32]
WINDOW = 64
WINDOWED = TinyModel("gemma3", layers=2, window=WINDOW, context=2048)
TOLERANCE = 0.02
"""Flash attention rounds by the number of tokens it is given, by 0.008 here; a state that is wrong
by a single token differs by 0.1 and more."""


def ignore() -> None:
    """A tick that does nothing."""


def drawn(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(5, 300, count)]


def last(runtime: Runtime, sequence: int, tokens: list[int]) -> Logits:
    feed = Feed(sequence, tokens, runtime.seq_length(sequence))
    (rows,) = runtime.step([feed], ignore)
    assert rows is not None
    row: Logits = rows[-1].copy()
    return row


def close(found: Logits, wanted: Logits) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.fixture
def plain(tmp_path: Path, shared: Path) -> Iterator[LlamaRuntime]:
    model = write_model(tmp_path / "m.gguf", TinyModel(context=2048))
    with opened(model, shared, context=1024, lanes=2, ubatch_size=64) as loaded:
        assert isinstance(loaded.runtime, LlamaRuntime)
        yield loaded.runtime


# Going back: what llama.cpp would do without a word, and answer wrong.


def test_a_window_that_is_gone_is_refused_and_what_is_held_goes_back_exactly(
    tmp_path: Path, shared: Path
) -> None:
    model, tokens, tail = write_model(tmp_path / "m.gguf", WINDOWED), drawn(1500), drawn(3, 1)
    with opened(model, shared, context=2048, lanes=2, ubatch_size=64) as loaded:
        runtime = loaded.runtime
        sequence, fresh = runtime.seq_create(), runtime.seq_create()
        runtime.step([Feed(sequence, tokens, 0, "none")], ignore)
        refused = 0
        for length in (700, 1000, 1200, 1490):
            try:
                runtime.seq_truncate(sequence, length)
            except Unsupported:
                refused += 1
                assert runtime.seq_length(sequence) == 1500
                continue
            runtime.step([Feed(fresh, tokens[:length], 0, "none")], ignore)
            close(last(runtime, sequence, tail), last(runtime, fresh, tail))
            break
        assert 1 <= refused <= 3


def test_a_branch_within_what_is_held_is_copied_and_one_before_it_costs_nothing(
    tmp_path: Path, shared: Path
) -> None:
    model, tokens, tail = write_model(tmp_path / "m.gguf", WINDOWED), drawn(1500), drawn(3, 1)
    with opened(model, shared, context=2048, lanes=3, ubatch_size=64) as loaded:
        runtime = loaded.runtime
        sequence, fresh = runtime.seq_create(), runtime.seq_create()
        runtime.step([Feed(sequence, tokens, 0, "none")], ignore)
        branches: dict[int, Logits] = {}
        refused = 0
        for length in (1499, 1490, 1450, 1400, 1300, 1200, 1000, 700, 100) * 2:
            try:
                copy = runtime.seq_copy(sequence, length)
            except Unsupported:
                refused += 1
                continue
            branches[length] = last(runtime, copy, tail)
            runtime.seq_free(copy)
        assert refused >= 2
        assert len(branches) >= 2
        for length, row in branches.items():
            runtime.step([Feed(fresh, tokens[:length], 0, "none")], ignore)
            close(row, last(runtime, fresh, tail))
            runtime.seq_truncate(fresh, 0)
        assert runtime.seq_length(sequence) == 1500
        made = [runtime.seq_create() for _ in range(runtime.describe().sequences - 2)]
        assert len(set(made)) == len(made)


def test_copies_that_are_given_back_leave_nothing(tmp_path: Path, shared: Path) -> None:
    model, tokens = write_model(tmp_path / "m.gguf", WINDOWED), drawn(1500)
    with opened(model, shared, context=2048, lanes=3, ubatch_size=64) as loaded:
        runtime = loaded.runtime
        sequence = runtime.seq_create()
        runtime.step([Feed(sequence, tokens, 0, "none")], ignore)
        before, times, state = runtime.memory(), 1500, len(runtime.seq_export(sequence))

        def copy_back(count: int) -> int:
            """The process's bytes afterwards."""
            for turn in range(count):
                with contextlib.suppress(Unsupported):
                    copy = runtime.seq_copy(sequence, 1500 - 700 * (turn % 2) - turn % 20)
                    runtime.seq_free(runtime.seq_import(runtime.seq_export(copy)))
                    runtime.seq_free(copy)
            return int(psutil.Process().memory_info().rss)

        grown = -copy_back(200) + copy_back(times)
        assert runtime.memory() == before
        assert grown < times * state // 4
        made = [runtime.seq_create() for _ in range(runtime.describe().sequences - 1)]
        assert len(set(made)) == len(made)


@pytest.mark.parametrize("seed", range(3))
def test_windows_that_interleave_and_are_copied_go_back_exactly_or_not_at_all(
    seed: int, tmp_path: Path, shared: Path
) -> None:
    """All sequences share one cache, in which each one's old cells are taken by the others."""
    model, rng = write_model(tmp_path / "m.gguf", WINDOWED), np.random.default_rng(seed)
    with opened(model, shared, context=1024, lanes=4, ubatch_size=32) as loaded:
        runtime = loaded.runtime
        fresh = runtime.seq_create()
        fed = {runtime.seq_create(): list[int]() for _ in range(3)}
        for turn in range(30):
            feeds = []
            for sequence, tokens in fed.items():
                more = drawn(int(rng.integers(1, 30)), seed=100 * turn + sequence)
                feeds.append(Feed(sequence, more, len(tokens), "none"))
                tokens.extend(more)
            runtime.step(feeds, ignore)
        for sequence in list(fed):
            copy = runtime.seq_copy(sequence, len(fed[sequence]))
            fed[copy] = list(fed[sequence])
        gone = 0
        for sequence, tokens in fed.items():
            for back in (1, 3, 9, 40):
                length = len(tokens) - back
                try:
                    runtime.seq_truncate(sequence, length)
                except Unsupported:
                    continue
                gone += 1
                del tokens[length:]
                tail = drawn(3, seed=back)
                runtime.step([Feed(fresh, tokens, 0, "none")], ignore)
                close(last(runtime, sequence, tail), last(runtime, fresh, tail))
                runtime.seq_truncate(fresh, 0)
                tokens.extend(tail)
        assert gone


def test_a_full_window_cache_goes_back_anywhere(tmp_path: Path, shared: Path) -> None:
    model, tokens, tail = write_model(tmp_path / "m.gguf", WINDOWED), drawn(900), drawn(3, 1)
    with opened(model, shared, context=1024, lanes=2, swa_full=True) as loaded:
        runtime = loaded.runtime
        assert runtime.describe().truncate == "any"
        sequence, fresh = runtime.seq_create(), runtime.seq_create()
        runtime.step([Feed(sequence, tokens, 0, "none")], ignore)
        runtime.seq_truncate(sequence, 100)
        runtime.step([Feed(fresh, tokens[:100], 0, "none")], ignore)
        close(last(runtime, sequence, tail), last(runtime, fresh, tail))


@pytest.mark.parametrize("write", [write_recurrent, write_hybrid])
def test_a_recurrent_state_goes_back_to_nothing_only(
    write: Callable[[Path], Path], tmp_path: Path, shared: Path
) -> None:
    model = write(tmp_path / "m.gguf")
    with opened(model, shared, context=128, lanes=3) as loaded:
        runtime = loaded.runtime
        assert runtime.describe().truncate == "zero"
        sequence = runtime.seq_create()
        before = last(runtime, sequence, drawn(9))
        for length in (8, 4, 1):
            with pytest.raises(Unsupported, match="recurrent state"):
                runtime.seq_truncate(sequence, length)
            with pytest.raises(Unsupported, match="recurrent state"):
                runtime.seq_copy(sequence, length)
        assert runtime.seq_length(sequence) == 9
        copy = runtime.seq_copy(sequence, 9)
        close(last(runtime, copy, [7]), last(runtime, sequence, [7]))
        runtime.seq_truncate(sequence, 0)
        close(last(runtime, sequence, drawn(9)), before)


@pytest.mark.parametrize("swa_full", [False, True], ids=["own-cache", "one-cache"])
def test_an_export_right_after_a_copy_holds_the_copy(
    swa_full: bool, tmp_path: Path, shared: Path
) -> None:
    model, tokens = write_model(tmp_path / "m.gguf", WINDOWED), drawn(40)
    with opened(model, shared, context=256, lanes=3, swa_full=swa_full) as loaded:
        runtime = loaded.runtime
        sequence = runtime.seq_create()
        last(runtime, sequence, tokens)
        other = runtime.seq_create()
        last(runtime, other, drawn(40, 5))
        runtime.seq_free(other)
        copy = runtime.seq_copy(sequence, 30)
        moved = runtime.seq_import(runtime.seq_export(copy))
        runtime.seq_truncate(sequence, 30)
        close(last(runtime, moved, [9]), last(runtime, sequence, [9]))


def test_a_state_that_llamacpp_refuses_leaves_the_others_as_they_were(
    plain: LlamaRuntime,
) -> None:
    kept = plain.seq_create()
    tokens = drawn(20)
    last(plain, kept, tokens)
    state = bytes(plain._context.export(kept))
    held = plain.memory()
    for wrong in (state[:-8], b"\xff" * len(state), b""):
        with pytest.raises(Unsupported, match="does not take this state"):
            plain.seq_import(seal(plain._loaded.key, 20, wrong))
    assert plain.memory() == held
    again = plain.seq_create()
    last(plain, again, tokens)
    close(last(plain, kept, [9]), last(plain, again, [9]))


def test_a_window_is_not_taken_for_a_whole_cache(tmp_path: Path, shared: Path) -> None:
    """llama.cpp takes either's state for the other's, and then goes back to what is not there."""
    model, exported = write_model(tmp_path / "m.gguf", WINDOWED), list[bytes]()
    for swa_full in (False, True):
        with opened(model, shared, context=1024, lanes=2, swa_full=swa_full) as loaded:
            runtime = loaded.runtime
            for payload in exported:
                with pytest.raises(Unsupported, match="other settings"):
                    runtime.seq_import(payload)
            sequence = runtime.seq_create()
            runtime.step([Feed(sequence, drawn(900), 0, "none")], ignore)
            exported.append(runtime.seq_export(sequence))
    with opened(model, shared, context=1024, lanes=2) as loaded:
        assert loaded.runtime.seq_length(loaded.runtime.seq_import(exported[0])) == 900
        with pytest.raises(Unsupported, match="other settings"):
            loaded.runtime.seq_import(exported[1])


YARN: Final = {"rope_scaling": "yarn", "rope_scale": 4.0, "yarn_orig_ctx": 128}
UNMIXED: Final = {**YARN, "yarn_ext_factor": 0.0}
TURNS: Final[list[tuple[dict[str, Any], dict[str, Any]]]] = [
    ({}, {"rope_freq_base": 2000.0}),
    ({}, {"rope_freq_scale": 0.5}),
    ({}, {"rope_scale": 4.0}),
    ({}, YARN),
    ({"rope_scale": 4.0}, YARN),
    (YARN, {"yarn_orig_ctx": 64}),
    (YARN, {"yarn_ext_factor": 0.5}),
    (YARN, {"yarn_beta_fast": 4.0}),
    (YARN, {"yarn_beta_slow": 8.0}),
    (UNMIXED, {"yarn_attn_factor": 2.0}),
]


@pytest.mark.parametrize(("before", "more"), TURNS)
def test_each_option_that_turns_positions_reaches_the_engine(
    before: dict[str, Any], more: dict[str, Any], tmp_path: Path, shared: Path
) -> None:
    model = write_model(tmp_path / "m.gguf", TinyModel(head_dim=32))
    rows, key = list[Logits](), b""
    for options in (before, {**before, **more}):
        with opened(model, shared, context=256, lanes=1, **options) as loaded:
            runtime = loaded.runtime
            if key:
                with pytest.raises(Unsupported, match="other settings"):
                    runtime.seq_import(key)
            sequence = runtime.seq_create()
            rows.append(last(runtime, sequence, drawn(60)))
            key = runtime.seq_export(sequence)
    assert np.abs(rows[0] - rows[1]).max() > 0.1


def test_positions_are_the_subject_of_every_option_about_them() -> None:
    tried = {name.replace("_", "-") for before, more in TURNS for name in (*before, *more)}
    assert tried == set(POSITIONS)


def test_a_state_of_other_settings_or_another_model_is_refused(
    tmp_path: Path, shared: Path
) -> None:
    model = write_model(tmp_path / "m.gguf", TinyModel(head_dim=32))
    other = write_model(tmp_path / "other.gguf", TinyModel(head_dim=32, seed=2))

    def exported(path: Path, **options: Any) -> bytes:
        with opened(path, shared, context=128, lanes=2, **options) as loaded:
            sequence = loaded.runtime.seq_create()
            last(loaded.runtime, sequence, drawn(8))
            return loaded.runtime.seq_export(sequence)

    foreign = [
        exported(other),
        exported(model, cache_type_k="q8_0"),
        exported(model, rope_freq_base=5000.0),
    ]
    own = exported(model)
    with opened(model, shared, context=256, lanes=2) as loaded:
        for payload in foreign:
            with pytest.raises(Unsupported, match="another library, model or other settings"):
                loaded.runtime.seq_import(payload)
        assert loaded.runtime.seq_length(loaded.runtime.seq_import(own)) == 8


# Steps: bounds that abort the process when they are passed to llama.cpp.


def test_ids_and_positions_are_checked_before_the_engine_sees_them(plain: LlamaRuntime) -> None:
    sequence = plain.seq_create()
    vocabulary = plain.describe().vocabulary
    for tokens in ([-1], [vocabulary], [1 << 31], []):
        with pytest.raises(OutOfBoundary):
            plain.step([Feed(sequence, tokens, 0)], ignore)
    with pytest.raises(OutOfBoundary):
        plain.step([Feed(sequence, [1], 0), Feed(sequence, [1], 0)], ignore)
    last(plain, sequence, [1])


def test_more_tokens_than_a_micro_batch_and_more_rows_than_there_is_room_for(
    plain: LlamaRuntime,
) -> None:
    tokens = drawn(200)
    at_once, pieces = plain.seq_create(), plain.seq_create()
    ticks: list[int] = []
    (every,) = plain.step([Feed(at_once, tokens, 0, "all")], lambda: ticks.append(1))
    assert every is not None
    assert every.shape == (200, plain.describe().vocabulary)
    assert len(ticks) == 4
    for start in range(0, 200, 50):
        (rows,) = plain.step([Feed(pieces, tokens[start : start + 50], start, "all")], ignore)
        assert rows is not None
        close(rows, every[start : start + 50])
    with pytest.raises(Capacity):
        plain.step([Feed(plain.seq_create(), drawn(1000), 0) for _ in range(3)], ignore)


def test_ragged_feeds_cut_across_micro_batches_give_each_what_it_gets_alone(
    plain: LlamaRuntime,
) -> None:
    streams = [drawn(count, seed) for seed, count in enumerate((1, 90, 3, 61))]
    sequences = [plain.seq_create() for _ in streams]
    feeds = [Feed(it, tokens, 0) for it, tokens in zip(sequences, streams, strict=True)]
    together = [None if rows is None else rows.copy() for rows in plain.step(feeds, ignore)]
    for sequence in sequences:
        plain.seq_truncate(sequence, 0)
    for sequence, tokens, rows in zip(sequences, streams, together, strict=True):
        assert rows is not None
        close(rows[-1], last(plain, sequence, tokens))


def test_a_cancel_is_heard_between_micro_batches(plain: LlamaRuntime) -> None:
    class Cancelled(Exception):
        pass

    ticks: list[int] = []

    def tick() -> None:
        ticks.append(1)
        if len(ticks) == 3:
            raise Cancelled

    tokens = drawn(300)
    sequence = plain.seq_create()
    with pytest.raises(Cancelled):
        plain.step([Feed(sequence, tokens, 0)], tick)
    assert plain.seq_length(sequence) == 128
    plain.seq_truncate(sequence, 100)
    fresh = plain.seq_create()
    last(plain, fresh, tokens[:100])
    close(last(plain, sequence, [9]), last(plain, fresh, [9]))


def test_cells_run_out_as_capacity_and_nothing_has_changed(plain: LlamaRuntime) -> None:
    sequences = [plain.seq_create() for _ in range(3)]
    for sequence in sequences[:2]:
        plain.step([Feed(sequence, drawn(1024), 0, "none")], ignore)
    with pytest.raises(Capacity, match="tokens are held"):
        plain.step([Feed(sequences[2], drawn(300), 0)], ignore)
    assert plain.seq_length(sequences[2]) == 0
    with pytest.raises(Capacity):
        plain.seq_copy(sequences[0], 1024)
    plain.seq_free(sequences[0])
    last(plain, sequences[2], drawn(300))


# Loading.


def test_the_record_says_what_was_asked_and_got(tmp_path: Path, shared: Path) -> None:
    model = write_model(tmp_path / "m.gguf", TinyModel(head_dim=32, context=4096))
    with opened(model, shared, lanes=2, threads=1, cache_type_k="q8_0") as loaded:
        asked, got = loaded.record.asked, loaded.record.got
        assert (asked["context"], got["context"]) == (0, 4096)
        assert (asked["threads"], got["threads"], got["threads-batch"]) == (1, 1, 1)
        assert (asked["cache-type-k"], got["cache-type-k"]) == ("q8_0", "q8_0")
        assert got["n-gpu-layers"] == 0
        assert got["cells"] >= 2 * 4096


def test_a_budget_shrinks_what_was_left_open_and_refuses_what_was_asked(
    tmp_path: Path, shared: Path
) -> None:
    model = write_model(tmp_path / "m.gguf", TinyModel(context=1 << 17, layers=8, kv_heads=4))
    with opened(model, shared, lanes=1, memory_budget=1 << 32) as loaded:
        described, total = loaded.runtime.describe(), sum(loaded.plan.values())
        assert described.context == 1 << 17
        assert described.swap_bytes == (1 << 32) - total
        least = sum(loaded.plan.values()) - loaded.plan["kv"] // 2
    with opened(model, shared, lanes=1, memory_budget=least) as loaded:
        assert loaded.runtime.describe().context < 1 << 17
    with (
        pytest.raises(DoesNotFit, match="MiB at the least"),
        opened(model, shared, context=1 << 17, lanes=1, memory_budget=least),
    ):
        pass
    with (
        pytest.raises(DoesNotFit, match="was trained for"),
        opened(model, shared, context=1 << 18, lanes=1),
    ):
        pass


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q5_1", "q4_0", "iq4_nl"])
def test_each_cache_type_serves(kind: str, tmp_path: Path, shared: Path) -> None:
    model = write_model(tmp_path / "m.gguf", TinyModel(head_dim=32))
    with opened(model, shared, context=128, cache_type_k=kind, cache_type_v=kind) as loaded:
        row = last(loaded.runtime, loaded.runtime.seq_create(), drawn(20))
        assert np.isfinite(row).all()


def test_a_block_type_that_does_not_fit_the_heads_is_refused(tmp_path: Path, shared: Path) -> None:
    model = write_model(tmp_path / "m.gguf", TinyModel(head_dim=16))
    with (
        pytest.raises(BadOptionValue, match="multiples of 32, the model has 16"),
        opened(model, shared, context=128, cache_type_v="q8_0"),
    ):
        pass
    adapter = LlamaCppAdapter()
    with pytest.raises(BadOptionValue, match="the model has 16") as refused:
        adapter.vet(model, checked_options(adapter, {"cache-type-v": "q8_0"}))
    assert refused.value.param == "cache-type-v"


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("n_gpu_layers", 4, "finds 0 GPUs"),
        ("n_gpu_layers", "all", "finds 0 GPUs"),
        ("main_gpu", 0, "finds 0 GPUs"),
        ("tensor_split", "1,1", "finds 0 GPUs"),
        ("split_mode", "tensor", "finds 0 GPUs"),
    ],
)
def test_gpus_that_are_not_here_are_refused(
    option: str, value: object, words: str, tmp_path: Path, shared: Path
) -> None:
    model = write_model(tmp_path / "m.gguf", TinyModel())
    given: dict[str, Any] = {option: value}
    with pytest.raises(BadOptionValue, match=words), opened(model, shared, **given):
        pass


# Files that no model loads from.


def test_a_fifo_is_no_model_and_nobody_waits_for_it(tmp_path: Path, shared: Path) -> None:
    path = tmp_path / "m.gguf"
    os.mkfifo(path)
    with pytest.raises(ModelNotFound, match="no regular file"), opened(path, shared):
        pass


def test_weights_that_are_no_numbers_are_found_while_loading(tmp_path: Path, shared: Path) -> None:
    spec = TinyModel()
    tensors = model_tensors(spec)
    broken = next(it for it in tensors if it.name == "blk.1.ffn_up.weight")
    values = np.full(broken.shape, np.nan, np.float32)
    tensors[tensors.index(broken)] = tensor(broken.name, values)
    path = write_gguf(tmp_path / "m.gguf", model_metadata(spec), tensors)
    with pytest.raises(ModelDamaged, match="invalid data"), opened(path, shared):
        pass


def test_an_unknown_architecture_is_named(tmp_path: Path, shared: Path) -> None:
    spec = TinyModel()
    metadata = model_metadata(spec) | {"general.architecture": "nosuch"}
    metadata |= {
        key.replace("llama.", "nosuch.", 1): value
        for key, value in metadata.items()
        if key.startswith("llama.")
    }
    path = write_gguf(tmp_path / "m.gguf", metadata, model_tensors(spec))
    with pytest.raises(UnsupportedArchitecture, match="nosuch"), opened(path, shared):
        pass


@pytest.mark.parametrize("missing", ["blk.1.ffn_up.weight", "token_embd.weight"])
def test_a_missing_tensor_is_the_librarys_own_reason(
    missing: str, tmp_path: Path, shared: Path
) -> None:
    spec = TinyModel()
    tensors = [it for it in model_tensors(spec) if it.name != missing]
    path = write_gguf(tmp_path / "m.gguf", model_metadata(spec), tensors)
    with pytest.raises(ModelError, match=missing), opened(path, shared):
        pass


@pytest.mark.parametrize("wrong", ["architecture", "tensor"])
def test_the_engine_says_before_it_loads_what_it_would_not_open(
    wrong: str, tmp_path: Path, shared: Path, lib: Path
) -> None:
    spec = TinyModel()
    metadata, tensors = model_metadata(spec), model_tensors(spec)
    if wrong == "architecture":
        metadata = {key.replace("llama.", "nosuch.", 1): it for key, it in metadata.items()}
        metadata["general.architecture"] = "nosuch"
    else:
        tensors = tensors[:-1]
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors)
    adapter = LlamaCppAdapter()
    adapter.shared = shared
    adapter.facts(path)
    with pytest.raises(ModelError, match=r"nosuch|blk\.1\.ffn_down"):
        adapter.vet(path, checked_options(adapter, {"lib": str(lib)}))


ODD: dict[str, dict[str, object]] = {
    "no-blocks": {"llama.block_count": None},
    "0-blocks": {"llama.block_count": 0},
    "most-blocks": {"llama.block_count": (1 << 32) - 1},
    "many-blocks": {"llama.block_count": 200_000_000},
    "no-width": {"llama.embedding_length": None},
    "bool-heads": {"llama.attention.head_count": True},
    "no-heads-each": {"llama.attention.head_count": Typed(Kind.U32, [], array=True)},
    "most-heads": {"llama.attention.head_count": (1 << 32) - 1},
    "text-context": {"llama.context_length": "long"},
}


def array(kind: Kind, *items: object) -> Typed:
    return Typed(kind, list(items), array=True)


TOKENS = len(model_metadata(TinyModel())["tokenizer.ggml.tokens"])
CONTRADICTIONS: list[tuple[str, Typed, str]] = [
    ("llama.attention.head_count", array(Kind.U32, 4), "1 entries, by llama.block_count 2"),
    ("llama.attention.head_count_kv", array(Kind.U32, 2, 2, 2), "3 entries"),
    ("llama.attention.head_count_kv", array(Kind.F32, 2.0, 2.0), "other things than integers"),
    ("llama.feed_forward_length", array(Kind.I32, 128), "1 entries"),
    ("llama.attention.sliding_window_pattern", array(Kind.BOOL, True), "1 entries"),
    ("tokenizer.ggml.scores", array(Kind.F32, 0.0), "1 entries, by tokenizer.ggml.tokens"),
    ("tokenizer.ggml.scores", array(Kind.U8, *[0] * TOKENS), "other things than floats"),
    ("tokenizer.ggml.token_type", array(Kind.I32), "0 entries"),
    ("tokenizer.ggml.tokens", array(Kind.I32, *[1] * TOKENS), "other things than texts"),
    ("tokenizer.ggml.merges", array(Kind.I32, 1), "other things than texts"),
]


@pytest.mark.parametrize(("key", "value", "words"), CONTRADICTIONS)
def test_an_array_that_contradicts_the_rest_is_refused_before_the_engine_sees_it(
    key: str, value: Typed, words: str, tmp_path: Path
) -> None:
    """Some builds die of these."""
    metadata = {**model_metadata(TinyModel()), key: value}
    path = write_gguf(tmp_path / "m.gguf", metadata, model_tensors(TinyModel()))
    with pytest.raises(ModelDamaged, match=f"{key} .*{words}"):
        LlamaCppAdapter().facts(path)
    if key.startswith("tokenizer"):
        with pytest.raises(ModelDamaged, match=words):
            LlamaCppAdapter().tokenizer(path, {})


NO_NUMBERS: list[tuple[str, object]] = [
    *(("attention.layer_norm_rms_epsilon", it) for it in (math.nan, math.inf, -math.inf, -1e-5)),
    ("attention.layer_norm_epsilon", -1e-5),
    ("attention.group_norm_epsilon", math.nan),
    *(("rope.freq_base", it) for it in (math.nan, math.inf, -1e4, 0.0)),
    ("rope.freq_base_swa", -1.0),
    *((f"rope.{key}", it) for key in ("scaling.factor", "scale_linear") for it in (math.nan, -2.0)),
    ("rope.scaling.attn_factor", math.inf),
    ("attn_logit_softcapping", math.nan),
    ("logit_scale", math.nan),
    ("xielu.alpha_p", array(Kind.F32, 1.0, math.nan)),
]


@pytest.mark.parametrize(("key", "value"), NO_NUMBERS)
def test_a_number_that_computes_nothing_is_damage(key: str, value: object, tmp_path: Path) -> None:
    metadata = {**model_metadata(TinyModel()), f"llama.{key}": value}
    path = write_gguf(tmp_path / "m.gguf", metadata, model_tensors(TinyModel()))
    with pytest.raises(ModelDamaged, match=rf"llama\.{key} is \S+, a finite number.* was wanted"):
        LlamaCppAdapter().facts(path)


def test_numbers_at_their_least_serve(tmp_path: Path, shared: Path) -> None:
    keys = {"attention.layer_norm_rms_epsilon": 0.0, "rope.scaling.factor": 0.0}
    given = {f"llama.{key}": value for key, value in keys.items()}
    model = write_model(tmp_path / "m.gguf", TinyModel(metadata=given))
    with opened(model, shared, context=128) as loaded:
        assert np.isfinite(last(loaded.runtime, loaded.runtime.seq_create(), drawn(20))).all()


@pytest.mark.parametrize("odd", sorted(ODD))
def test_a_header_that_makes_no_model_is_damage(odd: str, tmp_path: Path, shared: Path) -> None:
    spec = TinyModel()
    metadata = {**model_metadata(spec), **ODD[odd]}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    path = write_gguf(tmp_path / "m.gguf", metadata, model_tensors(spec))
    with pytest.raises(ModelDamaged), opened(path, shared):
        pass


@pytest.mark.parametrize("name", ["clip", "t5", "made-up"])
def test_what_is_never_served_is_refused_by_its_header(name: str, tmp_path: Path) -> None:
    metadata = model_metadata(TinyModel()) | {"general.architecture": name}
    path = write_gguf(tmp_path / "m.gguf", metadata, model_tensors(TinyModel()))
    with pytest.raises(UnsupportedArchitecture, match=name):
        LlamaCppAdapter().facts(path)


def test_weights_are_locked_or_refused_whoever_runs_it(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "m.gguf", TinyModel())
    monkeypatch.setattr("resource.getrlimit", lambda _limit: (4096, 4096))
    monkeypatch.setattr(loading, "_may_lock", lambda: False)
    with (
        pytest.raises(DoesNotFit, match="a worker may lock 4096"),
        opened(model, shared, load_mode="mlock"),
    ):
        pass
