"""Hugging Face folders: `config.json` beside one or more `*.safetensors`.

Layout of a file: the safetensors format (README.md of the `safetensors` project): the length of a
JSON header in 8 bytes, the header (dtype, shape and data_offsets by tensor name), the bytes.
Several files are listed by `model.safetensors.index.json`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from superfluid_adapter_native.formats.files import is_there, opened, read_small
from superfluid_adapter_native.formats.huggingface_config import header
from superfluid_adapter_native.formats.huggingface_names import IGNORED, gguf_name
from superfluid_adapter_native.formats.json_files import json_object, read_object
from superfluid_adapter_native.formats.source import ModelSource, Tensor
from superfluid_adapter_native.quants.types import BY_NAME
from superfluid_compat.errors import (
    ModelDamaged,
    ModelNotFound,
    UnsupportedArchitecture,
    UnsupportedType,
)

_TYPES: Final = ("F32", "F16", "BF16")
_MAX_HEADER_BYTES: Final = 1 << 25
_MAX_CONFIG_BYTES: Final = 1 << 24
_MAX_RANK: Final = 4
_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"


def read_safetensors(folder: Path) -> ModelSource:
    """The header of the model in `folder`, in GGUF's keys and tensor names.

    Raises `ModelNotFound` (no configuration, no weights, a shard missing), `ModelDamaged`,
    `UnsupportedType` for other dtypes, `UnsupportedArchitecture` for a `model_type`, a setting or
    a tensor we do not serve.
    """
    config = folder / "config.json"
    found = header(read_object(config, _MAX_CONFIG_BYTES), str(config))
    shards = _shards(folder)
    tensors: dict[str, Tensor] = {}
    total_bytes = 0
    for file, (path, promised) in enumerate(shards):
        named, size = _read_file(path, file)
        total_bytes += size
        missing = promised - named.keys()
        if missing:
            raise ModelDamaged(f"{path}: lacks tensor {min(missing)!r:.80}, which the index lists")
        for original, tensor in named.items():
            name = _name(original, found.architecture, path)
            if name is None or (name == "output.weight" and found.tied):
                continue
            if name in tensors:
                raise ModelDamaged(f"{path}: tensor {original!r:.80} is there twice")
            tensors[name] = dataclasses.replace(tensor, name=name)
    if "output.weight" not in tensors and found.tied is False:
        raise ModelDamaged(
            f"{folder}: has no lm_head.weight, and config.json says tie_word_embeddings false",
            fix="fetch a copy with its head, or correct config.json if the embedding is the head",
        )
    return ModelSource(
        path=folder,
        format="safetensors",
        files=tuple(path for path, _ in shards),
        architecture=found.architecture,
        metadata={**found.metadata, **_template(folder)},
        tensors=tensors,
        rotated="halves",
        total_bytes=total_bytes,
        norm_shift=1.0 if found.architecture.startswith("gemma") else 0.0,
        vectors=found.vectors,
    )


def _name(original: str, architecture: str, path: Path) -> str | None:
    """GGUF's name; None for a tensor that nothing needs."""
    if IGNORED.fullmatch(original):
        return None
    name = gguf_name(original, architecture)
    if name is None:
        raise UnsupportedArchitecture(
            f"{path}: tensor {original!r:.80} has no place in {architecture} as we know it"
        )
    return name


def _shards(folder: Path) -> list[tuple[Path, set[str]]]:
    """Each file of weights, in order, with the tensors that the index promises of it."""
    if is_there(folder / _INDEX):
        return _indexed(folder)
    if is_there(folder / _SINGLE):
        return [(folder / _SINGLE, set())]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        raise ModelNotFound(
            f"{folder}: holds {len(found)} *.safetensors, one or {_INDEX} was wanted"
        )
    return [(found[0], set())]


def _indexed(folder: Path) -> list[tuple[Path, set[str]]]:
    path = folder / _INDEX
    where = read_object(path, _MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ModelDamaged(f"{path}: has no weight_map from tensors to files")
    shards: dict[str, set[str]] = {}
    for tensor, file in where.items():
        plain = isinstance(file, str) and file.endswith(".safetensors") and "\0" not in file
        if not plain or os.path.basename(file) != file:  # noqa: PTH119  # a name, not a path
            raise ModelDamaged(f"{path}: file {file!r:.80} is no name of a *.safetensors beside it")
        shards.setdefault(file, set()).add(tensor)
    return [(folder / file, shards[file]) for file in sorted(shards)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _read_file(path: Path, file: int) -> tuple[dict[str, Tensor], int]:
    """The tensors of one file by the names they have in it, and the file's size."""
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        length = _header_length(path, os.pread(descriptor, 8, 0), size)
        raw = os.pread(descriptor, length, 8)
    entries = json_object(raw, f"{path}: its header")
    entries.pop("__metadata__", None)
    data = range(8 + length, size)
    tensors = {name: _tensor(path, file, name, one, data) for name, one in entries.items()}
    _apart(path, list(tensors.values()))
    return tensors, size


def _header_length(path: Path, raw: bytes, size: int) -> int:
    if len(raw) < 8:
        raise ModelDamaged(f"{path}: has {size} bytes, no safetensors file is that short")
    length: int = struct.unpack("<Q", raw)[0]
    if length > min(size - 8, _MAX_HEADER_BYTES):
        raise ModelDamaged(
            f"{path}: promises a header of {length} bytes, {size - 8} are left and at most "
            f"{_MAX_HEADER_BYTES} were wanted"
        )
    return length


def _tensor(path: Path, file: int, name: str, found: Any, data: range) -> Tensor:
    """The tensor that the header's entry `found` describes, proven to lie within `data`."""
    try:
        entry = msgspec.convert(found, _Entry)
    except msgspec.ValidationError as error:
        raise ModelDamaged(f"{path}: tensor {name!r:.80}: {error}") from error
    if entry.dtype not in _TYPES:
        raise UnsupportedType(
            f"{path}: tensor {name!r:.80} is of dtype {entry.dtype!r:.40}, one of "
            f"{', '.join(_TYPES)} was wanted"
        )
    kind = BY_NAME[entry.dtype]
    shape = tuple(entry.shape)
    if not 1 <= len(shape) <= _MAX_RANK or min(shape) < 1:
        raise ModelDamaged(
            f"{path}: tensor {name!r:.80} has shape {shape!s:.80}, 1 to {_MAX_RANK} positive "
            "dimensions were wanted"
        )
    start, end = entry.data_offsets
    length = math.prod(shape) * kind.bytes
    at = data.start + start
    if end - start != length or start < 0 or at + length > data.stop:
        raise ModelDamaged(
            f"{path}: tensor {name!r:.80} lies at {start} to {end} of {len(data)} bytes, "
            f"{length!s:.40} bytes within them were wanted"
        )
    return Tensor(name, kind, shape, file, at, length)


def _apart(path: Path, tensors: Sequence[Tensor]) -> None:
    ordered = sorted(tensors, key=lambda tensor: tensor.offset)
    for one, following in itertools.pairwise(ordered):
        if one.offset + one.bytes > following.offset:
            raise ModelDamaged(
                f"{path}: tensors {one.name!r:.80} and {following.name!r:.80} overlap"
            )


def _template(folder: Path) -> dict[str, str]:
    """The chat template, from a file of its own or from the tokenizer's configuration."""
    own = folder / "chat_template.jinja"
    if is_there(own):
        try:
            return {"tokenizer.chat_template": read_small(own, _MAX_CONFIG_BYTES).decode()}
        except UnicodeDecodeError as error:
            raise ModelDamaged(f"{own}: is not UTF-8 ({error.reason})") from error
    config = folder / "tokenizer_config.json"
    if not is_there(config):
        return {}
    found = read_object(config, _MAX_CONFIG_BYTES).get("chat_template")
    if isinstance(found, list):
        named = (one for one in found if isinstance(one, dict) and one.get("name") == "default")
        found = next(named, {}).get("template")
    return {"tokenizer.chat_template": found} if isinstance(found, str) else {}
