"""A library of no known layout is told of what differs from the layout that it is nearest to."""

from __future__ import annotations

import pytest

from superfluid_adapter_llamacpp.contracts import Contract, Layout, contracts, served
from superfluid_adapter_llamacpp.evidence import Evidence, Written
from superfluid_adapter_llamacpp.judge import judge
from superfluid_workerd.adapter import Device


def defaults(layout: Layout, **changed: float) -> str:
    raw = bytearray(256)
    for field in layout.fields.values():
        field.write(raw, changed.get(field.name, field.defaults[0]))
    return raw.hex()


def evidence(contract: Contract, *, sized: bool, longer: int = 0, **changed: float) -> Evidence:
    """Of a library that differs from `contract` in defaults of its context, and in its size."""
    context, model = contract.context, contract.model
    return Evidence(
        path="libllama.so",
        stage="done",
        devices=(Device(name="cpu"),),
        context_defaults=defaults(context, **changed),
        model_defaults=defaults(model),
        context_written=Written(context.written + longer, ()) if sized else None,
        model_written=Written(model.written, ()) if sized else None,
    )


@pytest.mark.parametrize("number", served())
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_what_fits_no_layout_is_compared_with_the_nearest(number: int, sized: bool) -> None:
    """Whichever contract it is nearest to; without the sizes, where the platform hides them."""
    found = judge(evidence(contracts()[number], sized=sized, n_ctx=513))
    assert found.reason == "unknown-abi"
    assert f"(contract {number}: context defaults: n_ctx reads 513, wanted 512)" in found.sentence


def test_a_size_that_none_has_is_told_before_members() -> None:
    found = judge(evidence(contracts()[7], sized=True, longer=24, n_ctx=513))
    assert found.sentence.endswith("context defaults end at byte 184, wanted 160)")
