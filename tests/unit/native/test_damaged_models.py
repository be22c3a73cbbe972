"""Damaged models through the adapter's `open`: each ends in a typed error or in a model that
serves, within a bound of time and memory."""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Engine
from tokenizers.models import WordLevel

from superfluid_adapter_native import loading
from superfluid_adapter_native.kernels.engine import Kernels
from superfluid_compat.errors import ModelError, ModelNotFound, SuperfluidError
from superfluid_workerd.adapter import Feed
from support.gguf_writer import TensorData, random_tensor, tensor, write_gguf, write_split
from support.mutations import mutated
from support.native_models import ignore, opened, whole
from support.safetensors_writer import write_folder
from support.tiny_models import TinyModel, model_metadata, model_tensors, write_model

SPEC = TinyModel("llama", layers=2, width=32, heads=2, kv_heads=1, ff=32, types={"*": "Q8_0"})
MIXTURE = TinyModel("qwen3moe", layers=2, width=32, heads=2, kv_heads=1, ff=32, expert_ff=32)
EACH_S = 5.0
GROWTH_BYTES = 128 << 20
MIB = 1 << 20


@pytest.fixture
def open_quickly(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Compiled code is loaded once, not for each of a thousand models."""
    shared: dict[bool, Kernels] = {}
    closing = Kernels.close

    def once(*, threads: int, exact: bool, cache: Path | None) -> Kernels:
        if exact not in shared:
            shared[exact] = Kernels(threads=threads, exact=exact, cache=cache, writable=True)
        return shared[exact]

    monkeypatch.setattr(loading, "Kernels", once)
    monkeypatch.setattr(Kernels, "close", lambda self: None)
    yield kernels
    for one in shared.values():
        closing(one)


def outcome(model: Path, kernels: Path, **options: Any) -> str:
    """`served`, or the code of the error."""
    started = time.process_time()
    try:
        with opened(model, kernels, prepare=False, memory_budget=2048 * MIB, **options) as loaded:
            runtime = loaded.runtime
            feed = Feed(runtime.seq_create(), [3, 4, 5], 0)
            (row,) = runtime.step([feed], ignore)
            assert row is not None
            assert row.shape == (1, runtime.describe().vocabulary)
        found = "served"
    except SuperfluidError as error:
        found = error.code if "\n" not in error.line() else "an error of several lines"
    assert time.process_time() - started < EACH_S
    return found


def fuzz(target: Path, files: list[Path], kernels: Path, count: int, seed: int) -> dict[str, int]:
    """How often each outcome was seen; everything else that is raised fails the test."""
    rng = random.Random(seed)
    sound = {path: path.read_bytes() for path in files}
    seen: dict[str, int] = {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        path = rng.choice(files)
        path.write_bytes(mutated(sound[path], rng))
        cache: int | str = 0 if number % 2 else "auto"
        found = outcome(target, kernels, cache_bytes=cache)
        seen[found] = seen.get(found, 0) + 1
        path.write_bytes(sound[path])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < GROWTH_BYTES
    return seen


def gguf(folder: Path, spec: TinyModel = SPEC) -> tuple[Path, list[Path]]:
    path = write_model(folder / "m.gguf", spec)
    return path, [path]


def split(folder: Path) -> tuple[Path, list[Path]]:
    tensors = model_tensors(SPEC)
    parts = write_split(folder, "m", model_metadata(SPEC), [tensors[:9], tensors[9:]])
    return parts[0], parts


def mixture(folder: Path) -> tuple[Path, list[Path]]:
    return gguf(folder, MIXTURE)


def safetensors(folder: Path) -> tuple[Path, list[Path]]:
    target = write_folder(folder / "m", replace(SPEC, types={}), shards=2)
    engine = Engine(WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    engine.save(str(target / "tokenizer.json"))
    return target, sorted(target.iterdir())


Kind = Callable[[Path], tuple[Path, list[Path]]]
KINDS: tuple[Kind, ...] = (gguf, split, mixture, safetensors)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_mutations_end_in_a_model_or_a_typed_error(
    kind: Kind, tmp_path: Path, open_quickly: Path
) -> None:
    target, files = kind(tmp_path)
    assert outcome(target, open_quickly) == "served"
    seen = fuzz(target, files, open_quickly, 400, seed=3)
    assert seen["served"] > 20
    assert "an error of several lines" not in seen
    assert sum(seen.values()) - seen["served"] > 100


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_many_mutations(kind: Kind, seed: int, tmp_path: Path, open_quickly: Path) -> None:
    target, files = kind(tmp_path)
    fuzz(target, files, open_quickly, 1500, seed=100 + seed)


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_K", "MXFP4", "F16"])
def test_scales_that_are_no_numbers_serve_without_a_trace_elsewhere(
    quant: str, tmp_path: Path, kernels: Path
) -> None:
    """The model is what it is: its logits are no numbers, the process and other models stand."""
    spec = TinyModel("llama", width=256, heads=4, kv_heads=2, head_dim=64, ff=256)
    rng = np.random.default_rng(1)
    tensors: list[TensorData] = []
    for one in model_tensors(spec):
        if one.name == "blk.1.ffn_up.weight":
            shaped = random_tensor(one.name, quant, one.shape, rng)
            tensors.append(replace(shaped, raw=b"\xff" * len(shaped.raw)))
        else:
            tensors.append(one)
    path = write_gguf(tmp_path / "m.gguf", model_metadata(spec), tensors)
    sound = write_model(tmp_path / "sound.gguf", spec)
    with opened(path, kernels) as loaded, opened(sound, kernels) as other:
        before = whole(other.runtime, [3, 4, 5])
        assert not np.isfinite(whole(loaded.runtime, [3, 4, 5])).all()
        assert np.array_equal(whole(other.runtime, [3, 4, 5]), before)


def test_a_vocabulary_that_contradicts_the_embedding(tmp_path: Path, kernels: Path) -> None:
    shorter = [
        tensor(one.name, np.zeros((one.shape[0] - 3, one.shape[1]), np.float32))
        if one.name == "token_embd.weight"
        else one
        for one in model_tensors(SPEC)
    ]
    path = write_gguf(tmp_path / "m.gguf", model_metadata(SPEC), shorter)
    with pytest.raises(ModelError, match=r"token_embd\.weight|vocabulary"), opened(path, kernels):
        pass


def test_files_that_are_none(tmp_path: Path, kernels: Path) -> None:
    target, files = split(tmp_path)
    files[1].unlink()
    with pytest.raises(ModelNotFound, match="00002-of-00002"), opened(target, kernels):
        pass
    files[1].symlink_to(files[1].name)
    with pytest.raises(ModelError), opened(target, kernels):
        pass
    files[1].unlink()
    os.mkfifo(files[1])
    with pytest.raises(ModelNotFound, match="FIFO"), opened(target, kernels):
        pass
    folder, names = safetensors(tmp_path)
    next(path for path in names if path.suffix == ".safetensors").unlink()
    with pytest.raises(ModelNotFound), opened(folder, kernels):
        pass


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
             "chat_template.jinja", "model.safetensors.index.json"],
)  # fmt: skip
def test_no_file_of_a_folder_is_waited_for(name: str, tmp_path: Path, kernels: Path) -> None:
    folder, _ = safetensors(tmp_path)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match=name), opened(folder, kernels):
        pass
    (folder / name).unlink()
    (folder / name).symlink_to(name)
    with pytest.raises(ModelError, match=name), opened(folder, kernels):
        pass
