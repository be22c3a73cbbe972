"""The runtime past the kit's suite: faults, threads, memory, sequences between steps."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from superfluid_adapter_mlx import adapter, shares
from superfluid_adapter_mlx.caches import arrays_in, held_arrays
from superfluid_adapter_mlx.engine import mx, utils
from superfluid_adapter_mlx.model import Model
from superfluid_compat.errors import Capacity, Fault, OutOfBoundary, Unsupported
from superfluid_workerd.adapter import Feed, LoadedModel, OpenRequest, Runtime
from superfluid_workerd.link.frames import Sampling
from superfluid_workerd.registry import checked_options
from superfluid_workerd.sampling import Sampler
from support.mlx_models import module, write_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")
    return lambda name: root / name if (root / name).exists() else write_folder(root / name, name)


def load(
    folder: Path, context: int = 64, lanes: int = 4, threads: int = 1, **options: Any
) -> LoadedModel:
    return adapter().open(
        OpenRequest(
            model=folder,
            scratch=folder,
            shared=folder,
            context=context,
            lanes=lanes,
            threads=threads,
            options=checked_options(adapter(), {"compile": False, **options}),
        )
    )


@pytest.fixture
def runtime(folders: Callable[[str], Path]) -> Iterator[Runtime]:
    made = load(folders("llama")).runtime
    yield made
    made.close()


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(each) for each in np.random.default_rng(seed).integers(0, 400, count)]


def step(runtime: Runtime, *fed: tuple[int, Sequence[int]]) -> Sequence[Any]:
    feeds = [Feed(sequence, ids, runtime.seq_length(sequence)) for sequence, ids in fed]
    return runtime.step(feeds, lambda: None)


def begun(runtime: Runtime, *counts: int) -> list[int]:
    made = [runtime.seq_create() for _ in counts]
    for sequence, count in zip(made, counts, strict=True):
        step(runtime, (sequence, tokens(count, seed=count)))
    return made


def alone(runtime: Runtime, ids: Sequence[int]) -> Any:
    sequence = runtime.seq_create()
    (row,) = step(runtime, (sequence, ids))
    runtime.seq_free(sequence)
    return row


# What would kill the process


@pytest.mark.parametrize("token", [-1, 400, 512, 2**31 - 1, 99999, -99999])
def test_an_id_outside_the_vocabulary_is_refused(runtime: Runtime, token: int) -> None:
    (sequence,) = begun(runtime, 3)
    with pytest.raises(OutOfBoundary, match="the model has 0 to 399"):
        step(runtime, (sequence, [1, token]))
    assert runtime.seq_length(sequence) == 3
    step(runtime, (sequence, [399]))


@pytest.mark.parametrize("name", ["deepseek_v32", "gemma3n", "mamba2", "qwen3_next"])
def test_every_architecture_takes_its_whole_vocabulary_and_no_more(
    folders: Callable[[str], Path], name: str
) -> None:
    runtime = load(folders(name), lanes=1).runtime
    sequence = runtime.seq_create()
    step(runtime, (sequence, [0, 399]))
    with pytest.raises(OutOfBoundary, match="0 to 399"):
        step(runtime, (sequence, [400]))


def test_nothing_to_feed_is_refused(runtime: Runtime) -> None:
    with pytest.raises(OutOfBoundary, match="no tokens"):
        step(runtime, (runtime.seq_create(), []))


def test_the_context_is_kept_whatever_the_model_would_take(runtime: Runtime) -> None:
    (sequence,) = begun(runtime, 63)
    step(runtime, (sequence, [1]))
    with pytest.raises(OutOfBoundary, match="0 more fit"):
        step(runtime, (sequence, [1]))


# Decoding together


def test_streams_that_join_leave_and_sit_out_decode_as_alone(runtime: Runtime) -> None:
    made = begun(runtime, 5, 9, 17, 2)
    fed = {it: tokens(count, count) for it, count in zip(made, (5, 9, 17, 2), strict=True)}
    rounds = [made[:2], made[:2], made[:3], made, made[1:], made[3:], made[:1] + made[2:], made]
    for turn, seated in enumerate(rounds):
        rows = step(runtime, *((sequence, [turn]) for sequence in seated))
        for row, sequence in zip(rows, seated, strict=True):
            fed[sequence].append(turn)
            np.testing.assert_allclose(row, alone(runtime, fed[sequence]), atol=2e-5)
    runtime.seq_free(made[1])
    (row,) = step(runtime, (made[0], [7]))
    np.testing.assert_allclose(row, alone(runtime, [*fed[made[0]], 7]), atol=2e-5)
    for sequence in (made[0], made[2], made[3]):
        runtime.seq_free(sequence)
    assert runtime.memory().sequences == 0


def test_a_batchs_rows_can_be_cut_copied_and_moved(runtime: Runtime) -> None:
    one, two, three = begun(runtime, 5, 9, 17)
    step(runtime, (one, [1]), (two, [1]), (three, [1]))
    copy = runtime.seq_copy(two, 4)
    there = runtime.seq_import(runtime.seq_export(three))
    runtime.seq_truncate(one, 2)
    rows = step(runtime, (one, [3]), (copy, [3]), (there, [3]), (two, [3]))
    wanted = [tokens(5, 5)[:2], tokens(9, 9)[:4], [*tokens(17, 17), 1], [*tokens(9, 9), 1]]
    for row, before in zip(rows, wanted, strict=True):
        np.testing.assert_allclose(row, alone(runtime, [*before, 3]), atol=2e-5)


def test_all_sequences_together_hold_what_the_plan_says(runtime: Runtime) -> None:
    assert runtime.describe().tokens == 256
    made = begun(runtime, 64, 64, 64, 64)
    with pytest.raises(Capacity, match="256 fit"):
        runtime.seq_copy(made[0], 1)
    with pytest.raises(Capacity):
        step(runtime, (runtime.seq_create(), [1]))
    runtime.seq_truncate(made[0], 10)
    assert runtime.seq_length(runtime.seq_copy(made[0], 10)) == 10


# All cores of a CPU


@pytest.mark.parametrize(("kind", "bits"), [("float32", 0), ("bfloat16", 0), ("float32", 4)])
def test_products_on_several_threads_are_the_same_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, bits: int
) -> None:
    monkeypatch.setattr(shares, "_LEAST_BYTES", 1)
    folder = write_folder(tmp_path / "model", "wide", kind, bits=bits)
    own = Model(utils.load_model(folder)[0], 400, 400)
    wanted = own.rows(tokens(12), own.fresh())
    rows = []
    for threads in (1, 2, 3):
        loaded: Any = load(folder, threads=threads)
        assert loaded.record.got["threads"] == threads
        model = loaded.runtime._model
        shared = [it for it in model.module.modules() if hasattr(it, "product")]
        assert bool(shared) == (threads > 1 or (kind == "float32" and not bits))
        assert loaded.runtime.memory().weights == loaded.facts.bytes - _header(folder)
        np.testing.assert_array_equal(model.rows(tokens(12), model.fresh()), wanted)
        one, two = begun(loaded.runtime, 5, 9)
        rows.append(step(loaded.runtime, (one, [1]), (two, [1])))
    for other in rows[1:]:
        np.testing.assert_array_equal(rows[0], other)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_laid_out_anew_are_those_that_were_there(
    threads: int, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "_LEAST_BYTES", 1)
    made, own = (module("wide", tie_word_embeddings=tied) for _ in range(2))
    held = sum(array.nbytes for array in arrays_in(own.parameters()))
    shares.share_out(made, threads)
    assert sum(array.nbytes for array in arrays_in(made.parameters())) == held
    embedding = made.model.embed_tokens
    assert ("weight" not in embedding) == tied
    for found, wanted in zip(made.modules(), own.modules(), strict=True):
        if "shares" in found:
            assert len(found.shares) == threads
            assert mx.array_equal(found.weight, wanted.weight).item()
    ids = mx.array([list(range(400)), list(reversed(range(400)))])
    assert mx.array_equal(embedding(ids), own.model.embed_tokens(ids)).item()


def test_small_products_stay_as_they_are(folders: Callable[[str], Path]) -> None:
    loaded: Any = load(folders("16-byte"), threads=2)
    assert not [it for it in loaded.runtime._model.module.modules() if hasattr(it, "product")]


def _header(folder: Path) -> int:
    (length,) = struct.unpack("<Q", (folder / "model.safetensors").read_bytes()[:8])
    return 8 + int(length)


# Faults


class _Breaks:
    """A model that raises in its first passes."""

    def __init__(self, inner: Any, times: int, error: Exception) -> None:
        self._inner, self._times, self._error = inner, times, error

    def __call__(self, ids: Any, cache: Any) -> Any:
        if self._times > 0:
            self._times -= 1
            self._inner(ids, cache=cache)
            raise self._error
        return self._inner(ids, cache=cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_pass_that_fails_costs_its_lanes_and_nobody_else(
    runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, other = begun(runtime, 5, 9, 7)
    model = runtime._model
    broken = Model(_Breaks(model.module, 1, RuntimeError("[eval] out of it")), 400, 400)
    monkeypatch.setattr(runtime, "_model", broken)
    with pytest.raises(Fault, match=r"RuntimeError: \[eval\] out of it"):
        step(runtime, (one, [1]), (two, [1]))
    for sequence, held in ((one, 5), (two, 9)):
        assert runtime.seq_length(sequence) > held
        with pytest.raises(Unsupported, match="lost its state"):
            runtime.seq_truncate(sequence, held)
        runtime.seq_truncate(sequence, 0)
        (row,) = step(runtime, (sequence, tokens(4)))
        np.testing.assert_allclose(row, alone(runtime, tokens(4)), atol=2e-5)
    (row,) = step(runtime, (other, [1]))
    np.testing.assert_allclose(row, alone(runtime, [*tokens(7, 7), 1]), atol=2e-5)


def test_a_spoilt_sequence_is_told_of_whenever_it_is_fed(
    runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sequence,) = begun(runtime, 5)
    broken = Model(_Breaks(runtime._model.module, 1, RuntimeError("over")), 400, 400)
    monkeypatch.setattr(runtime, "_model", broken)
    for held in (6, 7):
        with pytest.raises(Fault):
            step(runtime, (sequence, [1]))
        # Longer than its owner believes, who thus sees that it must be taken back.
        assert runtime.seq_length(sequence) == held
    assert runtime.describe().retry
    runtime.seq_truncate(sequence, 0)
    step(runtime, (sequence, [1]))


def test_rows_that_no_token_can_be_drawn_from_cost_their_round_and_no_other(
    runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, model = begun(runtime, 5, 9), runtime._model
    sampler = Sampler(Sampling(temperature=0), 400)
    with monkeypatch.context() as patched:
        nothing = Model(_Silent(model.module), 400, 400)
        patched.setattr(runtime, "_model", nothing)
        for row in step(runtime, *((sequence, [1]) for sequence in made)):
            with pytest.raises(Fault, match="largest logit"):
                sampler.draw(row[-1], 0, [1])
    runtime.seq_free(made[0])
    (row,) = step(runtime, (made[1], [2]))
    np.testing.assert_allclose(row, alone(runtime, [*tokens(9, 9), 1, 2]), atol=2e-5)
    assert 0 <= sampler.draw(row[-1], 1, [1]).token < 400


class _Silent:
    """A model whose logits are no numbers."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, ids: Any, cache: Any) -> Any:
        return self._inner(ids, cache=cache) * float("nan")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_prompt_that_fails_between_chunks_costs_itself(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime: Any = load(folders("llama"), **{"prefill-chunk": 4}).runtime
    (other,) = begun(runtime, 3)
    sequence = runtime.seq_create()
    ticks = iter([None, None])

    def abandon() -> None:
        if next(ticks, "over") == "over":
            raise KeyError("over")

    with pytest.raises(KeyError):
        runtime.step([Feed(sequence, tokens(30), 0)], abandon)
    assert runtime.seq_length(sequence) == 8
    runtime.seq_truncate(sequence, 6)
    (row,) = step(runtime, (sequence, [5]))
    np.testing.assert_allclose(row, alone(runtime, [*tokens(30)[:6], 5]), atol=2e-5)
    assert runtime.seq_length(other) == 3


# Threads and memory


def test_what_one_thread_computed_another_may_go_on_with(runtime: Runtime) -> None:
    made: list[int] = []
    first = threading.Thread(target=lambda: made.extend(begun(runtime, 5, 9)))
    first.start()
    first.join()
    rows = step(runtime, (made[0], [1]), (made[1], [1]))
    np.testing.assert_allclose(rows[1], alone(runtime, [*tokens(9, 9), 1]), atol=2e-5)
    moved: list[int] = []
    second = threading.Thread(
        target=lambda: moved.append(runtime.seq_import(runtime.seq_export(made[0])))
    )
    second.start()
    second.join()
    (row,) = step(runtime, (moved[0], [2]))
    np.testing.assert_allclose(row, alone(runtime, [*tokens(5, 5), 1, 2]), atol=2e-5)


def test_freed_sequences_and_released_caches_give_memory_back(
    folders: Callable[[str], Path],
) -> None:
    runtime = load(folders("16-byte"), context=16384, lanes=2).runtime
    runtime.release()
    before, sequence = mx.get_active_memory(), runtime.seq_create()
    for start in range(0, 16384, 2048):
        runtime.step([Feed(sequence, [1] * 2048, start, "none")], lambda: None)
    assert runtime.memory().sequences >= 16384 * 16
    runtime.seq_free(sequence)
    assert runtime.memory().sequences == 0
    assert runtime.memory().releasable > 0
    runtime.release()
    assert runtime.memory().releasable == 0
    assert mx.get_active_memory() <= before + 65536


def test_a_sequence_cut_to_nothing_starts_as_a_new_one(runtime: Runtime) -> None:
    (sequence,) = begun(runtime, 40)
    runtime.seq_truncate(sequence, 0)
    assert runtime.memory().sequences == 0
    (row,) = step(runtime, (sequence, tokens(6)))
    np.testing.assert_array_equal(row, alone(runtime, tokens(6)))


def test_models_that_do_not_go_back_say_so_and_are_unharmed(
    folders: Callable[[str], Path],
) -> None:
    for name in ("mamba2", "falcon_h1"):
        runtime = load(folders(name)).runtime
        assert runtime.describe().truncate == "zero"
        (sequence,) = begun(runtime, 8)
        with pytest.raises(Unsupported):
            runtime.seq_truncate(sequence, 5)
        copy = runtime.seq_copy(sequence, 8)
        (row,), (same,) = step(runtime, (sequence, [1])), step(runtime, (copy, [1]))
        np.testing.assert_array_equal(row, same)
        with pytest.raises(Unsupported):
            runtime.seq_copy(sequence, 5)


def test_a_window_that_has_wrapped_goes_back_to_nothing_or_not_at_all(
    folders: Callable[[str], Path],
) -> None:
    runtime = load(folders("gemma3")).runtime
    one, same = begun(runtime, 40, 40)
    for length in (1, 20, 39):
        with pytest.raises(Unsupported, match="RotatingKVCache has wrapped"):
            runtime.seq_truncate(one, length)
    runtime.seq_truncate(one, 40)
    (row,), (wanted,) = step(runtime, (one, [1])), step(runtime, (same, [1]))
    np.testing.assert_array_equal(row, wanted)
    runtime.seq_truncate(one, 0)
    (row,) = step(runtime, (one, tokens(40, 40)))
    np.testing.assert_allclose(row, alone(runtime, tokens(40, 40)), atol=2e-5)


def test_half_precision_weights_are_served_in_half_precision(tmp_path: Path) -> None:
    for kind in ("float16", "bfloat16"):
        runtime: Any = load(write_folder(tmp_path / kind, "llama", kind)).runtime
        one, two = begun(runtime, 5, 9)
        rows = step(runtime, (one, [1]), (two, [1]))
        assert all(row.dtype == np.float32 for row in rows)
        assert np.abs(rows[1] - alone(runtime, [*tokens(9, 9), 1])).max() < 0.05
        # One that holds nothing comes to those that decode, and changes nobody's type.
        step(runtime, (one, [4]), (two, [4]), (runtime.seq_create(), [4]))
        kept = runtime._batch.caches if runtime._batch else []
        assert {it.dtype for it in held_arrays(kept)} <= {getattr(mx, kind), mx.int32}
        assert kept
        there = runtime.seq_import(runtime.seq_export(one))
        np.testing.assert_array_equal(*[step(runtime, (it, [2]))[0] for it in (one, there)])


def test_a_quantized_folder_is_served(tmp_path: Path) -> None:
    loaded = load(write_folder(tmp_path / "q4", "wide", bits=4))
    assert loaded.facts.types["U32"] > 0
    assert loaded.record.got["decoding"] == "together"
    one, two = begun(loaded.runtime, 5, 9)
    rows = step(loaded.runtime, (one, [1]), (two, [1]))
    np.testing.assert_allclose(rows[0], alone(loaded.runtime, [*tokens(5, 5), 1]), atol=1e-4)


def test_a_model_that_batches_wrongly_is_served_one_sequence_per_call(
    folders: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    loaded = load(folders("afm7"), context=48)
    assert loaded.record.got["decoding"].startswith("one sequence per call: a batch")
    assert "mlx decodes one sequence per call" in capfd.readouterr().err
    one, two = begun(loaded.runtime, 5, 9)
    rows = step(loaded.runtime, (one, [1]), (two, [1]))
    np.testing.assert_allclose(rows[1], alone(loaded.runtime, [*tokens(9, 9), 1]), atol=2e-5)
