"""Options: what they write into which struct, what does not go together, what a layout lacks."""

from __future__ import annotations

from typing import Any

import pytest

from superfluid_adapter_llamacpp import adapter
from superfluid_adapter_llamacpp.contracts import contracts, served
from superfluid_adapter_llamacpp.settings import OPTIONS, Settings, check_devices
from superfluid_compat.errors import BadOptionValue
from superfluid_workerd.registry import checked_options

SEVEN = contracts()[7]


def settings(**options: Any) -> Settings:
    named = {name.replace("_", "-"): value for name, value in options.items()}
    return Settings.of(checked_options(adapter(), named))


MODEL: list[tuple[str, Any, str, float]] = [
    ("n_gpu_layers", "auto", "n_gpu_layers", -1),
    ("n_gpu_layers", "all", "n_gpu_layers", -2),
    ("n_gpu_layers", 0, "n_gpu_layers", 0),
    ("main_gpu", 3, "main_gpu", 3),
    ("split_mode", "none", "split_mode", 0),
    ("split_mode", "layer", "split_mode", 1),
    ("split_mode", "row", "split_mode", 2),
    ("split_mode", "tensor", "split_mode", 3),
    ("load_mode", "auto", "load_mode", -1),
    ("load_mode", "none", "load_mode", 0),
    ("load_mode", "mmap", "load_mode", 1),
    ("load_mode", "mlock", "load_mode", 2),
    ("load_mode", "mmap+mlock", "load_mode", 3),
    ("load_mode", "dio", "load_mode", 4),
    ("lazy_mode", "off", "lazy_mode", 0),
    ("lazy_mode", "auto", "lazy_mode", 1),
    ("lazy_mode", "on", "lazy_mode", 2),
    ("repack", False, "use_extra_bufts", 0),
]
CONTEXT: list[tuple[str, Any, str, float]] = [
    ("flash_attn", "auto", "flash_attn_type", -1),
    ("flash_attn", "off", "flash_attn_type", 0),
    ("flash_attn", "on", "flash_attn_type", 1),
    ("cache_type_k", "q8_0", "type_k", 8),
    ("cache_type_v", "iq4_nl", "type_v", 20),
    ("kv_offload", False, "offload_kqv", 0),
    ("op_offload", False, "op_offload", 0),
    ("swa_full", True, "swa_full", 1),
    ("rope_scaling", "none", "rope_scaling_type", 0),
    ("rope_scaling", "linear", "rope_scaling_type", 1),
    ("rope_scaling", "yarn", "rope_scaling_type", 2),
    ("rope_scale", 4.0, "rope_freq_scale", 0.25),
    ("rope_freq_base", 5e5, "rope_freq_base", 5e5),
    ("rope_freq_scale", 0.5, "rope_freq_scale", 0.5),
    ("yarn_orig_ctx", 4096, "yarn_orig_ctx", 4096),
    ("yarn_ext_factor", 1.0, "yarn_ext_factor", 1.0),
    ("yarn_attn_factor", 0.7, "yarn_attn_factor", 0.7),
    ("yarn_beta_fast", 32.0, "yarn_beta_fast", 32.0),
    ("yarn_beta_slow", 1.0, "yarn_beta_slow", 1.0),
]


@pytest.mark.parametrize(("option", "value", "member", "written"), MODEL)
def test_model_options_are_written(option: str, value: Any, member: str, written: float) -> None:
    members = settings(**{option: value}).model_members(SEVEN)
    assert members[member] == written


@pytest.mark.parametrize(("option", "value", "member", "written"), CONTEXT)
def test_context_options_are_written(option: str, value: Any, member: str, written: float) -> None:
    members = settings(**{option: value}).context_members(SEVEN)
    assert members[member] == written


def test_every_member_written_is_in_every_served_layout_or_refused_by_name() -> None:
    """Nothing is dropped: for each contract a member is there, or its option is an error."""
    for number in served():
        contract = contracts()[number]
        for option, value, member, _ in (*MODEL, *CONTEXT):
            chosen = settings(**{option: value})
            name = option.replace("_", "-")
            fields = {**contract.model.fields, **contract.context.fields}
            if member in fields or name == "load-mode":
                written = {**chosen.model_members(contract), **chosen.context_members(contract)}
                assert set(written) <= set(fields)
                continue
            with pytest.raises(BadOptionValue, match=f"contract {number}") as refused:
                chosen.model_members(contract)
            assert refused.value.param == name


@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        ("auto", (1, 0, 0)), ("none", (0, 0, 0)), ("mmap", (1, 0, 0)), ("mlock", (0, 1, 0)),
        ("mmap+mlock", (1, 1, 0)), ("dio", (0, 0, 1)),
    ],
)  # fmt: skip
def test_a_layout_with_flags_gets_the_load_mode_as_flags(
    mode: str, flags: tuple[int, int, int]
) -> None:
    members = settings(load_mode=mode).model_members(contracts()[4])
    assert tuple(members[it] for it in ("use_mmap", "use_mlock", "use_direct_io")) == flags


def test_a_layout_without_an_automatic_load_mode_keeps_its_own_default() -> None:
    assert "load_mode" not in settings(load_mode="auto").model_members(contracts()[5])
    assert settings(load_mode="none").model_members(contracts()[5])["load_mode"] == 0


def test_lazy_mode_is_refused_where_there_is_none() -> None:
    with pytest.raises(BadOptionValue, match="lazy-mode needs lazy_mode") as refused:
        settings(lazy_mode="on").model_members(contracts()[5])
    assert refused.value.param == "lazy-mode"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tensor_split": "3,x"}, "tensor-split"),
        ({"tensor_split": "0,0"}, "tensor-split"),
        ({"tensor_split": "1,-1"}, "tensor-split"),
        ({"tensor_split": "nan"}, "tensor-split"),
        ({"batch_size": 64, "ubatch_size": 128}, "ubatch-size"),
        ({"flash_attn": "off", "cache_type_v": "q8_0"}, "cache-type-v"),
        ({"flash_attn": "off", "split_mode": "tensor"}, "split-mode"),
        ({"lazy_mode": "on", "load_mode": "none"}, "lazy-mode"),
        ({"rope_scale": 2.0, "rope_freq_scale": 0.5}, "rope-scale"),
        ({"rope_scaling": "none", "rope_scale": 4.0}, "rope-scale"),
        ({"rope_scaling": "none", "rope_freq_scale": 0.5}, "rope-freq-scale"),
        ({"rope_scaling": "yarn", "yarn_attn_factor": 2.0}, "yarn-attn-factor"),
        ({"yarn_ext_factor": 0.5, "yarn_attn_factor": 2.0}, "yarn-attn-factor"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(options: dict[str, Any], param: str) -> None:
    with pytest.raises(BadOptionValue) as refused:
        settings(**options)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"n_gpu_layers": 1}, 1), ({"n_gpu_layers": "all"}, 1), ({"main_gpu": 0}, 1),
        ({"main_gpu": 2}, 3), ({"tensor_split": "1,1"}, 2), ({"split_mode": "tensor"}, 1),
        ({"n_gpu_layers": 0}, 0), ({"n_gpu_layers": "auto"}, 0), ({"tensor_split": "1"}, 0),
        ({"split_mode": "layer"}, 0),
    ],
)  # fmt: skip
def test_gpus_that_are_not_here_are_refused(options: dict[str, Any], least: int) -> None:
    for gpus in range(4):
        if gpus >= least:
            check_devices(settings(**options), gpus)
            continue
        with pytest.raises(BadOptionValue, match=f"finds {gpus} GPUs") as refused:
            check_devices(settings(**options), gpus)
        assert refused.value.param == next(iter(options)).replace("_", "-")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("threads", "0"), ("threads", "-1"), ("threads-batch", "0"), ("batch-size", "0"),
        ("ubatch-size", "0"), ("n-gpu-layers", "-1"), ("cache-type-k", "i32"),
        ("cache-type-v", "q2_K"), ("split-mode", "rows"), ("load-mode", "mmapped"),
        ("rope-scaling", "longrope"), ("flash-attn", "maybe"), ("main-gpu", "-2"),
        ("rope-scale", "0"), ("yarn-orig-ctx", "-1"), ("swa-full", "perhaps"),
    ],
)  # fmt: skip
def test_values_that_llamacpp_would_take_and_should_not_are_refused(name: str, text: str) -> None:
    option = next(one for one in OPTIONS if one.name == name)
    with pytest.raises(BadOptionValue) as refused:
        option.parse(text)
    assert refused.value.param == name


@pytest.mark.parametrize("name", ["rope_freq_base", "rope_freq_scale", "yarn_attn_factor"])
def test_a_number_that_would_become_none_is_refused(name: str) -> None:
    with pytest.raises(BadOptionValue, match="from 0") as refused:
        settings(**{name: 1e-300})
    assert refused.value.param == name.replace("_", "-")


def test_with_no_option_given_positions_are_the_models_own() -> None:
    assert settings().positions() == ()
    assert settings(rope_freq_base=1e6).positions() == (("rope-freq-base", 1e6),)
