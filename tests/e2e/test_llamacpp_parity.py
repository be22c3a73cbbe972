"""llama.cpp through its runtime and the native one on the default model: two that know nothing of
each other agree over a real text that passes the sliding window, and a fault in either shows.

Measures and limits are those of `test_parity.py`, where llama.cpp's bare loop is the judge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from superfluid_adapter_native import loading
from superfluid_adapter_native.config import ModelConfig, configure
from superfluid_adapter_native.formats.source import ModelSource
from support import llama_runtime, native_models
from support.parity import Logits, Parity, compare, forced

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

FED: Final = 800
FIRST: Final = 480
"""From here on logits are compared: the positions before cost nothing but their keys and values."""

TEXT: Final = Path(__file__).parents[2] / "LICENSE"
MOST_KL: Final = 0.04
MOST_DISAGREEMENT: Final = 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


def through_llamacpp(
    model: Path, folder: Path, tokens: list[int], **options: Any
) -> Iterator[Logits]:
    with llama_runtime.opened(model, folder, lanes=1, context=1024, **options) as loaded:
        yield from forced(loaded.runtime, tokens, first=FIRST)


def through_native(model: Path, folder: Path, tokens: list[int]) -> Iterator[Logits]:
    with native_models.opened(model, folder, lanes=1, context=1024) as loaded:
        yield from forced(loaded.runtime, tokens, first=FIRST)


@pytest.fixture(scope="module")
def tokens(default_model: Path, folder: Path) -> list[int]:
    with llama_runtime.opened(default_model, folder, lanes=1, context=1024) as loaded:
        found = loaded.tokenizer.encode(TEXT.read_text())[:FED]
    with native_models.opened(default_model, folder, lanes=1, context=1024) as loaded:
        assert loaded.tokenizer.encode(TEXT.read_text())[:FED] == found
    return found


@pytest.fixture(scope="module")
def native(default_model: Path, folder: Path, tokens: list[int]) -> Logits:
    return np.concatenate(list(through_native(default_model, folder, tokens)))


@pytest.fixture(scope="module")
def llamacpp(default_model: Path, folder: Path, tokens: list[int]) -> Logits:
    return np.concatenate(list(through_llamacpp(default_model, folder, tokens)))


def test_two_runtimes_predict_alike(native: Logits, llamacpp: Logits) -> None:
    found = compare(iter([llamacpp]), native)
    assert found.positions == FED - FIRST
    assert found.clear > (FED - FIRST) // 3
    assert found.kl < MOST_KL
    assert found.disagreement < MOST_DISAGREEMENT


def past_twice_the_limits(found: Parity) -> bool:
    return found.kl > 2 * MOST_KL and found.disagreement > 2 * MOST_DISAGREEMENT


def test_a_fault_in_llamacpps_positions_is_caught(
    default_model: Path, folder: Path, tokens: list[int], native: Logits
) -> None:
    faulty = through_llamacpp(default_model, folder, tokens, rope_freq_base=10_000.0)
    assert past_twice_the_limits(compare(faulty, native))


def test_a_fault_in_the_native_runtimes_positions_is_caught(
    default_model: Path,
    folder: Path,
    tokens: list[int],
    llamacpp: Logits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def faulty(source: ModelSource) -> ModelConfig:
        config = configure(source)
        layers = [replace(one, rope=replace(one.rope, base=10_000.0)) for one in config.layers]
        return replace(config, layers=tuple(layers))

    monkeypatch.setattr(loading, "configure", faulty)
    found = through_native(default_model, folder, tokens)
    assert past_twice_the_limits(compare(found, llamacpp))
