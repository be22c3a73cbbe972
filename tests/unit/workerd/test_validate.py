"""Requests that no model could serve are refused with the field named."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from superfluid_compat.errors import InvalidField
from superfluid_workerd.link.frames import GenerationRequest, Messages, Sampling, Text, Tokens
from superfluid_workerd.link.validate import check, check_request

HELLO = Text(text="hello")


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("temperature", value) for value in (math.nan, math.inf, -0.1, 101.0)),
        *(("top_k", value) for value in (-1, 2**40)),
        *(("top_p", value) for value in (0.0, -1.0, 1.01, math.nan)),
        *(("min_p", value) for value in (-0.1, 1.1, math.nan)),
        *(("typical_p", value) for value in (0.0, 1.1, math.nan)),
        *(("repetition_penalty", value) for value in (0.0, -1.0, 101.0, math.nan)),
        *(("presence_penalty", value) for value in (-2.1, 2.1, math.nan)),
        *(("frequency_penalty", value) for value in (-2.1, 2.1, math.nan)),
        *(("penalty_window", value) for value in (-1, 2**40)),
        *(("logit_bias", value) for value in ({-1: 0.0}, {2**31: 0.0}, {5: 100.5}, {5: math.nan})),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        *(("seed", value) for value in (-(2**63) - 1, 2**64)),
        *(("logprobs", value) for value in (-1, 21)),
    ],
)
def test_a_bad_setting_is_named(name: str, bad: Any) -> None:
    with pytest.raises(InvalidField) as caught:
        check(Sampling(**{name: bad}))
    assert caught.value.param == name
    assert name in caught.value.message


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x" * 1025,)}, "stop"),
        ({"stop": ("x",) * 65}, "stop"),
        ({"stop": ("\ud800",)}, "stop"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"deadline_s": math.nan}, "deadline_s"),
        ({"deadline_s": math.inf}, "deadline_s"),
        ({"sampling": Sampling(top_p=2.0)}, "top_p"),
        ({"prompt": Messages(messages=[])}, "messages"),
        ({"prompt": Text(text="a\udfff")}, "prompt"),
        ({"prompt": Tokens(tokens=[1, -1])}, "prompt"),
    ],
)
def test_a_bad_request_is_named(field: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        check_request(GenerationRequest(**{"prompt": HELLO, **field}))
    assert caught.value.param == param


def test_the_limits_themselves_are_taken() -> None:
    extreme = Sampling(
        temperature=100.0,
        top_k=2**31,
        top_p=1e-9,
        min_p=1.0,
        typical_p=1e-9,
        repetition_penalty=0.01,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        penalty_window=0,
        logit_bias={0: -100.0, 2**31 - 1: 100.0},
        seed=2**64 - 1,
        logprobs=20,
    )
    check_request(GenerationRequest(prompt=HELLO, sampling=extreme, max_tokens=1, deadline_s=1e-3))
    check_request(GenerationRequest(prompt=Tokens(tokens=[]), stop=("x" * 1024,) * 64))
    check(Sampling(temperature=0.0, seed=-(2**63)))


def test_the_daemon_can_check_without_numpy() -> None:
    code = (
        "import sys, superfluid_workerd.link.validate as v;"
        "sys.exit(bool({'numpy', 'jinja2', 'superfluid_workerd.adapter'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
