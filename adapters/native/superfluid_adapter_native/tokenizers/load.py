"""The door: which tokenizer a model file asks for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from superfluid_adapter_native.formats.source import ModelSource
from superfluid_adapter_native.tokenizers import metadata as read
from superfluid_compat.errors import UnsupportedArchitecture
from superfluid_workerd.adapter import Tokenizer

_BY_MODEL: Final = {
    "llama": ("sentencepiece", "SentencePieceTokenizer"),
    "gpt2": ("bytepair", "BytePairTokenizer"),
    "bert": ("wordpiece", "WordPieceTokenizer"),
}
"""Module and class by `tokenizer.ggml.model`; imported when asked for, as one model needs one."""


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of a model that is opened; see `tokenizer_at`."""
    if source.format == "safetensors":
        return tokenizer_at(source.path if source.path.is_dir() else source.path.parent)
    return tokenizer_at(source.metadata)


def tokenizer_at(place: Path | Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that GGUF's metadata describe, or `tokenizer.json` and its neighbours in a
    folder.

    Raises `ModelDamaged` where what is there contradicts itself, and `UnsupportedArchitecture`
    for a tokenizer or pre-tokenizer of a name not known."""
    if isinstance(place, Path):
        from superfluid_workerd.tokenizing.folder import FolderTokenizer

        return FolderTokenizer(place)
    name = read.text(place, "model")
    if name not in _BY_MODEL:
        raise UnsupportedArchitecture(
            f"the file names the tokenizer {name!r}, known are {', '.join(_BY_MODEL)}",
            fix="serve the model with another runtime, or choose another model",
        )
    module, kind = _BY_MODEL[name]
    loaded = importlib.import_module(f"superfluid_adapter_native.tokenizers.{module}")
    tokenizer: Tokenizer = getattr(loaded, kind)(place)
    return tokenizer
