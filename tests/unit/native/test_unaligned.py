"""Weights that begin at odd places compute what they compute elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Engine
from tokenizers.models import WordLevel

from support.native_models import opened, whole
from support.safetensors_writer import shift_data, write_folder
from support.tiny_models import TinyModel

TOKENS = [int(token) for token in np.random.default_rng(5).integers(3, 300, 24)]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_unaligned_weights_give_the_same_logits(kind: str, tmp_path: Path, kernels: Path) -> None:
    folder = write_folder(tmp_path / "m", TinyModel("qwen3moe", layers=2), kind=kind)
    Engine(WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    ways: list[dict[str, Any]] = [{"cache_bytes": "auto"}, {"cache_bytes": 0}, {"exact": True}]
    wanted = []
    for way in ways:
        with opened(folder, kernels, **way) as loaded:
            wanted.append(whole(loaded.runtime, TOKENS))
    shift_data(folder / "model.safetensors", 1)
    for way, rows in zip(ways, wanted, strict=True):
        with opened(folder, kernels, **way) as loaded:
            assert np.array_equal(whole(loaded.runtime, TOKENS), rows)
