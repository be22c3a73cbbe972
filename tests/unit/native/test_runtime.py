"""What the native runtime does past the kit's suite: its limits, its failures, its imports."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from superfluid_adapter_native.memory import MemoryManager
from superfluid_compat.errors import Capacity, Fault, OutOfBoundary, Unsupported
from superfluid_workerd.adapter import Feed
from support.native_models import ignore, opened, whole
from support.tiny_models import TinyModel, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf", TinyModel("llama"))


PROMPT = list(range(5, 45))


def test_a_long_feed_is_cut_into_passes_without_a_trace(
    model: Path, kernels: Path, tmp_path: Path
) -> None:
    long = [int(x) for x in np.random.default_rng(3).integers(3, 300, 1100)]
    spec = TinyModel("llama", context=2048)
    path = write_model(tmp_path / "m.gguf", spec)
    with opened(path, kernels) as loaded:
        runtime = loaded.runtime
        at_once = whole(runtime, long)
        sequence = runtime.seq_create()
        first = whole(runtime, long[:700], sequence)
        rest = whole(runtime, long[700:], sequence)
    assert np.array_equal(at_once, np.concatenate([first, rest]))


def test_an_unreadable_weight_is_a_fault_and_the_sequence_stays(
    model: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(model, kernels, cache_bytes=0) as loaded:
        runtime = loaded.runtime
        sequence = runtime.seq_create()
        whole(runtime, PROMPT, sequence)
        right = MemoryManager.acquire

        def failing(self: MemoryManager, name: str) -> object:
            if name == "blk.1.ffn_up.weight":
                raise OSError(5, "Input/output error")
            return right(self, name)

        with monkeypatch.context() as patched:
            patched.setattr(MemoryManager, "acquire", failing)
            with pytest.raises(Fault, match="Input/output error"):
                runtime.step([Feed(sequence, [7], 40)], ignore)
        assert runtime.seq_length(sequence) == 40
        after = whole(runtime, [7], sequence)
        assert np.array_equal(after, whole(runtime, [*PROMPT, 7])[-1:])


def test_kv_rows_are_counted_over_all_sequences(model: Path, kernels: Path) -> None:
    with opened(model, kernels, context=512, lanes=1) as loaded:
        runtime = loaded.runtime
        assert runtime.describe().context == 512
        first, second = runtime.seq_create(), runtime.seq_create()
        whole(runtime, PROMPT * 12, first)
        with pytest.raises(Capacity, match="KV rows"):
            runtime.step([Feed(second, PROMPT * 12, 0, "none")], ignore)
        assert runtime.seq_length(second) == 0
        runtime.seq_free(first)
        runtime.step([Feed(second, PROMPT * 12, 0, "none")], ignore)


def test_an_export_opens_only_with_the_same_settings(
    model: Path, kernels: Path, tmp_path: Path
) -> None:
    with opened(model, kernels) as loaded:
        sequence = loaded.runtime.seq_create()
        whole(loaded.runtime, PROMPT, sequence)
        payload = loaded.runtime.seq_export(sequence)
    other = write_model(tmp_path / "m.gguf", TinyModel("llama", seed=2))
    cases: list[tuple[Path, dict[str, Any]]] = [
        (model, {"kv_type": "f16"}),
        (model, {"layers": (0,)}),
        (other, {}),
    ]
    for path, options in cases:
        with (
            opened(path, kernels, **options) as loaded,
            pytest.raises(Unsupported, match="another model or other settings"),
        ):
            loaded.runtime.seq_import(payload)
    with opened(model, kernels) as loaded:
        sequence = loaded.runtime.seq_import(payload)
        found = whole(loaded.runtime, [9], sequence)
        assert np.array_equal(found, whole(loaded.runtime, [*PROMPT, 9])[-1:])


def test_a_sequence_fed_twice_in_a_step_is_refused(model: Path, kernels: Path) -> None:
    with opened(model, kernels) as loaded:
        sequence = loaded.runtime.seq_create()
        with pytest.raises(OutOfBoundary, match="twice"):
            loaded.runtime.step([Feed(sequence, [3], 0), Feed(sequence, [4], 0)], ignore)


def test_closing_ends_the_reader_and_every_map(model: Path, kernels: Path) -> None:
    with opened(model, kernels, cache_bytes=0) as loaded:
        whole(loaded.runtime, PROMPT)
        assert any(thread.name == "read-ahead" for thread in threading.enumerate())
    assert not any(thread.name == "read-ahead" for thread in threading.enumerate())


def test_what_the_daemon_asks_of_an_adapter_loads_no_engine() -> None:
    program = """
import sys
from superfluid_adapter_native import adapter
made = adapter()
made.info(), made.options(), made.compat(), made.versions()
heavy = {"numpy", "numba", "llvmlite", "tokenizers", "psutil"} & set(sys.modules)
print(sorted(heavy))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
