"""The door: a model by its path, whatever its format, told by what is there and not by names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from superfluid_adapter_native.formats.files import is_folder, opened
from superfluid_adapter_native.formats.gguf import read_gguf, read_metadata
from superfluid_adapter_native.formats.source import ModelSource
from superfluid_compat.errors import ModelNotFound

_LATER_PART: Final = "-of-"


def open_source(path: Path) -> ModelSource:
    """The header of the model at `path`: a GGUF file, any part of a split one, a folder with
    `config.json` and `*.safetensors` or one of its weight files, or a folder with one GGUF model.

    Raises `ModelNotFound`, `ModelDamaged`, `UnsupportedType`, and `UnsupportedArchitecture` for
    a folder whose tensors we cannot name.
    """
    place = _place(path)
    return _safetensors(place) if is_folder(place) else read_gguf(place)


def open_vocabulary(path: Path) -> Path | Mapping[str, Any]:
    """Where the tokenizer of the model at `path` is described: a GGUF file's metadata, or the
    folder of safetensors. Neither tensors nor configuration are read, so those that we do not
    serve, or that are not there, are no matter.

    Raises `ModelNotFound`, `ModelDamaged`."""
    place = _place(path)
    return place if is_folder(place) else read_metadata(place)


def _place(path: Path) -> Path:
    """The GGUF file, or the folder of safetensors, that `path` means."""
    if is_folder(path):
        return _folder(path)
    return path.parent if _is_safetensors(path) else path


def _is_safetensors(path: Path) -> bool:
    with opened(path) as descriptor:
        start = os.pread(descriptor, 9, 0)
        size = os.fstat(descriptor).st_size
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") <= size - 8


def _safetensors(folder: Path) -> ModelSource:
    # Most models are GGUF files and need none of it.
    from superfluid_adapter_native.formats.safetensors import read_safetensors

    return read_safetensors(folder)


def _folder(path: Path) -> Path:
    try:
        names = sorted(os.listdir(path))  # noqa: PTH208  # names, not paths, are wanted
    except OSError as error:
        raise ModelNotFound(f"{path}: cannot be listed: {error.strerror}") from error
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return path
    models = [name for name in names if name.endswith(".gguf") and _begins_a_model(name)]
    if len(models) == 1:
        return path / models[0]
    raise ModelNotFound(f"{path}: {_found(models)}", fix="name the model's file")


def _begins_a_model(name: str) -> bool:
    return _LATER_PART not in name or "-00001-of-" in name


def _found(models: Sequence[str]) -> str:
    if models:
        shown = ", ".join(models[:4]) + (", ..." if len(models) > 4 else "")
        return f"holds {len(models)} models ({shown}), one was wanted"
    return "holds no model, a *.gguf file or config.json with *.safetensors was wanted"
