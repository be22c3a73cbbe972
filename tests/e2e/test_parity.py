"""The default model against llama.cpp, over a real text that passes its sliding window.

The limits are half of what the smaller of two seeded faults causes, a wrong RoPE base and one
layer's norm skipped; the last test seeds them. A window off by one moves the mean divergence by a
hundredth of what llama.cpp's own rounding of activations does here, so that fault is caught where
neither side rounds: `unit/native/test_parity.py`, on a tiny model with F32 weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from superfluid_adapter_native import loading
from superfluid_adapter_native.config import ModelConfig, configure
from superfluid_adapter_native.formats.source import ModelSource
from superfluid_adapter_native.forward import Array, Forwarder
from support.llamacpp import LlamaCpp
from support.native_models import opened
from support.parity import Logits, Parity, compare, forced

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

POSITIONS = 800
TEXT = Path(__file__).parents[2] / "LICENSE"
MOST_KL = 0.04
MOST_DISAGREEMENT = 0.01
FAULTY_LAYER = 9


@pytest.fixture(scope="module")
def oracle(default_model: Path) -> tuple[list[int], Logits]:
    with LlamaCpp(default_model, vocab_only=False, context=POSITIONS) as llama:
        tokens = llama.tokenize(TEXT.read_text())[:POSITIONS]
        return tokens, llama.logits(tokens)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def measured(model: Path, kernels: Path, oracle: tuple[list[int], Logits]) -> Parity:
    tokens, wanted = oracle
    with opened(model, kernels, lanes=1, context=1024) as loaded:
        return compare(forced(loaded.runtime, tokens), wanted)


def test_predictions_are_llamacpps(
    default_model: Path, kernels: Path, oracle: tuple[list[int], Logits]
) -> None:
    found = measured(default_model, kernels, oracle)
    assert found.positions == POSITIONS
    assert found.clear > POSITIONS // 3
    assert found.kl < MOST_KL
    assert found.disagreement < MOST_DISAGREEMENT


@pytest.fixture
def wrong_rope_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Global layers turn by the local layers' base."""

    def faulty(source: ModelSource) -> ModelConfig:
        config = configure(source)
        layers = [replace(one, rope=replace(one.rope, base=10_000.0)) for one in config.layers]
        return replace(config, layers=tuple(layers))

    monkeypatch.setattr(loading, "configure", faulty)


@pytest.fixture
def norm_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer's attention takes its input as it is."""
    right: Callable[[Forwarder, Array, Array], Array] = Forwarder._norm

    def faulty(self: Forwarder, x: Array, weight: Array) -> Array:
        skipped = self._store.layer(FAULTY_LAYER, {}).vectors["attn_norm.weight"]
        return x.copy() if weight is skipped else right(self, x, weight)

    monkeypatch.setattr(Forwarder, "_norm", faulty)


@pytest.mark.parametrize("fault", ["wrong_rope_base", "norm_skipped"])
def test_each_seeded_fault_is_past_twice_the_limits(
    fault: str,
    default_model: Path,
    kernels: Path,
    oracle: tuple[list[int], Logits],
    request: pytest.FixtureRequest,
) -> None:
    request.getfixturevalue(fault)
    found = measured(default_model, kernels, oracle)
    assert found.kl > 2 * MOST_KL
    assert found.disagreement > 2 * MOST_DISAGREEMENT
