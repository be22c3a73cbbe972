"""Every option of the llama.cpp runtime reaches its check and every worker that is started."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from superfluid_adapter_llamacpp.settings import OPTIONS
from superfluid_compat.errors import BadOptionValue
from support.house import House, Open
from support.kills import PATIENT, spec_of
from support.llama_libraries import INSTALLED, library
from support.tiny_models import TinyModel, write_model

LIB: Final = str(library(INSTALLED))
GIVEN: Final[Mapping[str, tuple[str, Any]]] = {
    "lib": (LIB, LIB),
    "n-gpu-layers": ("0", 0),
    "split-mode": ("none", "none"),
    "tensor-split": ("1", "1"),
    "load-mode": ("none", "none"),
    "lazy-mode": ("off", "off"),
    "repack": ("false", False),
    "threads": ("1", 1),
    "threads-batch": ("2", 2),
    "batch-size": ("64", 64),
    "ubatch-size": ("32", 32),
    "flash-attn": ("on", "on"),
    "cache-type-k": ("q8_0", "q8_0"),
    "cache-type-v": ("f32", "f32"),
    "kv-offload": ("false", False),
    "op-offload": ("false", False),
    "swa-full": ("true", True),
    "rope-scaling": ("yarn", "yarn"),
    "rope-scale": ("4", 4.0),
    "rope-freq-base": ("5000", 5000.0),
    "yarn-orig-ctx": ("128", 128),
    "yarn-ext-factor": ("0", 0.0),
    "yarn-attn-factor": ("1.5", 1.5),
    "yarn-beta-fast": ("16", 16.0),
    "yarn-beta-slow": ("2", 2.0),
}
APART: Final[Mapping[str, tuple[str, str]]] = {
    "main-gpu": ("0", "finds 0 GPUs"),
    "rope-freq-scale": ("0.5", "says the same in another way"),
}
"""What a machine without GPUs, or the others, do not go with; and what the check says to it."""

GOT: Final[Mapping[str, object]] = {
    "library": LIB,
    "n-gpu-layers": 0,
    "threads": 1,
    "threads-batch": 2,
    "ubatch-size": 32,
    "cache-type-k": "q8_0",
    "cache-type-v": "f32",
}


async def house_with(folder: Path, house: Open, options: Mapping[str, object]) -> House:
    home = folder / "home"
    home.mkdir()
    model = write_model(folder / "m.gguf", TinyModel(head_dim=32))
    spec = await spec_of(home, model, "llamacpp", options, lanes="2", context="1024")
    return house(spec=spec, limits=PATIENT)


def test_every_option_is_tried() -> None:
    assert sorted([*GIVEN, *APART]) == sorted(option.name for option in OPTIONS)


async def test_every_option_reaches_every_worker(house: Open, tmp_path: Path) -> None:
    served = await house_with(tmp_path, house, {name: text for name, (text, _) in GIVEN.items()})
    said = list[str]()
    for _ in range(2):
        said.append(await served.text())
        description = served.host.description
        assert description is not None
        asked, got = description.record.asked, description.record.got
        assert {name: asked[name] for name in GIVEN} == {n: it for n, (_, it) in GIVEN.items()}
        assert {name: got[name] for name in GOT} == GOT
        os.kill(served.note(), signal.SIGKILL)
    assert said[0] == said[1]
    assert served.host.spawned >= 2


@pytest.mark.parametrize("name", APART)
async def test_the_check_refuses_what_does_not_go_with_this_machine(
    name: str, house: Open, tmp_path: Path
) -> None:
    value, words = APART[name]
    options = {"lib": LIB, "rope-scale": "4", name: value}
    with pytest.raises(BadOptionValue, match=words):
        await house_with(tmp_path, house, options)
