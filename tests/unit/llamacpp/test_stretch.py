"""Which settings let a context pass the trained one: those by which llama.cpp turns positions as
little as it did in training, and no others."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from superfluid_adapter_llamacpp.gguf import read_header
from superfluid_adapter_llamacpp.llamacpp import LlamaCppAdapter
from superfluid_adapter_llamacpp.settings import Settings
from superfluid_adapter_llamacpp.stretch import check_context
from superfluid_compat.errors import DoesNotFit, ModelDamaged
from superfluid_workerd.adapter import Feed
from superfluid_workerd.registry import checked_options
from support.llama_models import write_recurrent
from support.llama_runtime import opened
from support.tiny_models import TinyModel, write_model

TRAINED = 128
LONGER = 512
MODEL = TinyModel(head_dim=32, context=TRAINED)
YARN = {"rope_scaling": "yarn", "rope_scale": 4.0}
CHANGES_NOTHING: list[dict[str, Any]] = [
    {},
    {"rope_scaling": "none"},
    {"rope_scaling": "linear"},
    {"rope_scaling": "yarn"},
    {"rope_freq_base": 0.0},
    {"rope_freq_base": 10_000.0},
    {"rope_freq_scale": 0.0},
    {"rope_freq_scale": 1.0},
    {"rope_scale": 1.0},
    {"yarn_orig_ctx": 64},
    {"yarn_ext_factor": -1.0},
    {"yarn_attn_factor": 1.0, "yarn_ext_factor": 0.0},
    {"rope_scaling": "yarn", "yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0},
]
STRETCHES: list[dict[str, Any]] = [
    {"rope_scale": 4.0},
    {"rope_freq_scale": 0.25},
    {"rope_scaling": "linear", "rope_scale": 4.0},
    YARN,
    {**YARN, "yarn_orig_ctx": 64},
    {**YARN, "yarn_ext_factor": 0.0},
    {"rope_freq_base": 10_000.0 * 4.0 ** (32 / 30) * 1.001},
    {"rope_freq_base": 1e6},
    {"rope_scale": 2.0, "rope_freq_base": 10_000.0 * 2.0 ** (32 / 30) * 1.001},
]
TOO_LITTLE: list[dict[str, Any]] = [
    {"rope_scale": 3.9},
    {"rope_scale": 0.5},
    {"rope_freq_scale": 2.0},
    {"rope_freq_base": 1.0},
    {"rope_freq_base": 10_000.0 * 4.0 ** (32 / 30) * 0.99},
    {"rope_scaling": "none", "rope_freq_base": 20_000.0},
    {"rope_scale": 4.0, "rope_freq_base": 5_000.0},
]
LEAVES_ALL_ALONE: list[dict[str, Any]] = [
    {**YARN, "yarn_orig_ctx": 1 << 24},
    {**YARN, "yarn_beta_fast": 1e-9, "yarn_beta_slow": 1e-10},
    {**YARN, "yarn_beta_fast": 0.0, "yarn_beta_slow": 0.0},
]
"""Of these YaRN changes nothing but how sharp attention is."""


def settings(options: dict[str, Any]) -> Settings:
    named = {name.replace("_", "-"): value for name, value in options.items()}
    return Settings.of(checked_options(LlamaCppAdapter(), named))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf", MODEL)


def row(model: Path, shared: Path, **options: Any) -> NDArray[np.float32]:
    """Logits far into the trained context."""
    tokens = [int(token) for token in np.random.default_rng(5).integers(5, 300, TRAINED - 8)]
    with opened(model, shared, context=TRAINED, lanes=1, flash_attn="off", **options) as loaded:
        feed = Feed(loaded.runtime.seq_create(), tokens, 0)
        (rows,) = loaded.runtime.step([feed], lambda: None)
        assert rows is not None
        return np.array(rows[-1])


@pytest.mark.parametrize("options", CHANGES_NOTHING)
def test_what_changes_no_logit_stretches_nothing(
    options: dict[str, Any], model: Path, shared: Path
) -> None:
    np.testing.assert_array_equal(row(model, shared, **options), row(model, shared))
    with pytest.raises(DoesNotFit, match="was trained for 128") as refused:
        check_context(read_header(model), settings(options), LONGER)
    assert refused.value.param == "context"
    check_context(read_header(model), settings(options), TRAINED)


@pytest.mark.parametrize("options", STRETCHES)
def test_what_stretches_changes_logits_and_serves_the_longer_context(
    options: dict[str, Any], model: Path, shared: Path
) -> None:
    assert np.abs(row(model, shared, **options) - row(model, shared)).max() > 0.05
    with opened(model, shared, context=LONGER, lanes=1, **options) as loaded:
        assert loaded.runtime.describe().context == LONGER


@pytest.mark.parametrize("options", [*TOO_LITTLE, *LEAVES_ALL_ALONE])
def test_what_stretches_too_little_is_refused(options: dict[str, Any], model: Path) -> None:
    with pytest.raises(DoesNotFit, match="a context of 512 tokens was asked for"):
        check_context(read_header(model), settings(options), LONGER)


@pytest.mark.parametrize("options", LEAVES_ALL_ALONE)
def test_limits_that_leave_every_pair_alone_change_no_position(
    options: dict[str, Any], model: Path, shared: Path
) -> None:
    """YaRN's attention factor is left: that of pairs that are all mixed in full."""
    longer = {**options, "yarn_orig_ctx": 1 << 23}
    np.testing.assert_allclose(
        row(model, shared, **options), row(model, shared, **longer), rtol=0, atol=1e-5
    )


def test_a_refusal_says_how_far_the_settings_reach(model: Path) -> None:
    with pytest.raises(DoesNotFit, match="the settings stretch it to 256") as refused:
        check_context(read_header(model), settings({"rope_scale": 2.0}), LONGER)
    assert refused.value.fix is not None
    assert "--context 256 or less" in refused.value.fix
    check_context(read_header(model), settings({"rope_scale": 2.0}), 256)


OWN: list[dict[str, Any]] = [
    {},
    {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
     "rope.scaling.original_context_length": 32},
    {"rope.scale_linear": 3.0},
    {"rope.freq_base": 1e6},
    {"rope.freq_base": 20.0},
]  # fmt: skip


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("asked", [TRAINED + 1, 300, LONGER, 1000])
def test_the_remedy_works(own: dict[str, Any], asked: int, tmp_path: Path) -> None:
    metadata = {f"llama.{key}": value for key, value in own.items()}
    spec = TinyModel(head_dim=32, context=TRAINED, metadata=metadata)
    header = read_header(write_model(tmp_path / "m.gguf", spec))
    with pytest.raises(DoesNotFit) as refused:
        check_context(header, settings({}), asked)
    words = shlex.split(refused.value.fix or "")
    given = {
        word.removeprefix("--llamacpp-"): words[at + 1]
        for at, word in enumerate(words)
        if word.startswith("--llamacpp-")
    }
    assert set(given) == {"rope-scaling", "rope-scale"}
    options = {"rope-scaling": given["rope-scaling"], "rope-scale": float(given["rope-scale"])}
    check_context(header, Settings.of(checked_options(LlamaCppAdapter(), options)), asked)


def test_the_models_own_stretch_counts_as_trained(tmp_path: Path, shared: Path) -> None:
    """Its context is stated with it; a scale given takes its place."""
    own = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    spec = TinyModel(head_dim=32, context=TRAINED, metadata=own)
    model = write_model(tmp_path / "m.gguf", spec)
    np.testing.assert_array_equal(row(model, shared, rope_scale=4.0), row(model, shared))
    with pytest.raises(DoesNotFit, match="was trained for 128"):
        check_context(read_header(model), settings({"rope_scale": 4.0}), LONGER)
    check_context(read_header(model), settings({"rope_scale": 16.0}), LONGER)


FACTOR: dict[str, Any] = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
BY_OWN: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({"rope.freq_base": 1e6}, {"rope_freq_base": 1e6}, False),
    ({"rope.freq_base": 1e6}, {"rope_freq_base": 1e7}, True),
    ({"rope.scale_linear": 3.0}, {"rope_scale": 11.9}, False),
    ({"rope.scale_linear": 3.0}, {"rope_scale": 12.0}, True),
    (FACTOR, {"rope_freq_base": 60_000.0}, True),
    (FACTOR, {"rope_freq_base": 60_000.0, "rope_scaling": "none"}, False),
    (FACTOR, {"rope_freq_base": 600_000.0, "rope_scaling": "none"}, True),
]


@pytest.mark.parametrize(("own", "options", "enough"), BY_OWN)
def test_settings_are_held_against_the_models_own(
    own: dict[str, Any], options: dict[str, Any], enough: bool, tmp_path: Path
) -> None:
    metadata = {f"llama.{key}": value for key, value in own.items()}
    spec = TinyModel(head_dim=32, context=TRAINED, metadata=metadata)
    header = read_header(write_model(tmp_path / "m.gguf", spec))
    if enough:
        check_context(header, settings(options), LONGER)
        return
    with pytest.raises(DoesNotFit):
        check_context(header, settings(options), LONGER)


def test_where_yarn_leaves_every_pair_alone_the_remedy_is_linear(tmp_path: Path) -> None:
    """Within a long trained context, and by a small base, the slowest pair goes round often."""
    spec = TinyModel(head_dim=32, context=1 << 15, metadata={"llama.rope.freq_base": 20.0})
    header = read_header(write_model(tmp_path / "m.gguf", spec))
    with pytest.raises(DoesNotFit) as refused:
        check_context(header, settings({}), 1 << 16)
    assert "--llamacpp-rope-scaling linear --llamacpp-rope-scale 2 " in (refused.value.fix or "")
    check_context(header, settings({"rope_scaling": "linear", "rope_scale": 2.0}), 1 << 16)


def test_what_turns_no_position_is_not_stretched(tmp_path: Path) -> None:
    header = read_header(write_recurrent(tmp_path / "m.gguf"))
    with pytest.raises(DoesNotFit) as refused:
        check_context(header, settings({"rope_scale": 8.0}), 1024)
    assert "rope" not in (refused.value.fix or "")


def test_a_scale_that_is_no_number_is_damage(tmp_path: Path) -> None:
    spec = TinyModel(context=TRAINED, metadata={"llama.rope.scaling.factor": "four"})
    header = read_header(write_model(tmp_path / "m.gguf", spec))
    with pytest.raises(ModelDamaged, match="a number was wanted"):
        check_context(header, settings({}), LONGER)
