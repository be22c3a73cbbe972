"""What a model's folder says: its configuration and its weights' headers. No engine, no weights.

Layout of a weights file: the safetensors format (README.md of the `safetensors` project): the
length of a JSON header in 8 bytes, the header (dtype, shape and data_offsets by name), the bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from superfluid_compat.errors import ModelDamaged, ModelError, ModelNotFound
from superfluid_workerd.link.answers import SAFETENSORS, Facts
from superfluid_workerd.tokenizing.folder import read_bytes, read_json, regular, unreadable

_HEADER_BYTES: Final = 1 << 27
_TEMPLATE_BYTES: Final = 1 << 24
_READ: Final = ("*.json", "*.jinja", "model*.safetensors")
"""What is read of a folder, by us and by mlx-lm, which would wait for a FIFO without end."""

_CODE: Final = ("model_file", "auto_map")
"""Keys by which a configuration names Python code of its own."""

_READ_BY_MLX: Final = ("generation_config.json", "hf_quant_config.json")
"""Beside `config.json`; what is wrong with one of them, it tells without a name."""

_INDEX: Final = "model.safetensors.index.json"
_LAYERS: Final = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
"""What mlx-lm's models call the number of layers, which it builds one by one."""

_NUMBERS: Final = re.compile(
    r"(?:num|n)_\w*(?:layer|head|expert)\w*|(?:hidden|intermediate|vocab)_size"
    r"|\w+_(?:dim|eps|epsilon|theta)"
)
"""Keys that never hold a text. mlx-lm does not look, and fails later without naming the key."""

_WHOLE: Final = "give the folder that holds config.json, model*.safetensors and tokenizer.json"
_TYPE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PACKED: Final = {"U32"}
_DETAIL: Final = {
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ff": "intermediate_size",
    "window": "sliding_window",
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor by its header: its type by the format's name."""

    type: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Folder:
    """A model by its headers. `digest` tells models apart; `code` names the Python it brings."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    weights: int
    digest: str
    code: tuple[str, ...]
    template: str | None

    @property
    def architecture(self) -> str:
        return str(self.config["model_type"])

    def number(self, name: str) -> int:
        """A whole number of the configuration or of the text model in it; 0 where there is none."""
        for config in _nested(self.config):
            found = config.get(name)
            if type(found) is int and found > 0:
                return found
        return 0

    def require_no_code(self, trusted: bool) -> None:
        """Raise `ModelError` when the folder would have its own code run and nobody trusts it."""
        if self.code and not trusted:
            raise ModelError(
                f"{self.path} names Python code of its own ({', '.join(self.code)}), which is not "
                "run",
                fix="choose another model, or give --mlx-trust-model-code true for code that you "
                "have read",
                param="trust-model-code",
            )


def read_folder(path: Path) -> Folder:
    """Raises `ModelNotFound`, `ModelDamaged`, each naming the file."""
    _require_files(path)
    config = read_json(path / "config.json")
    if config is None:
        raise ModelNotFound(f"{path} has no config.json", fix=_WHOLE)
    kind = config.get("model_type")
    if not isinstance(kind, str) or not _TYPE.fullmatch(kind):
        raise ModelDamaged(f"{path / 'config.json'}: model_type is {kind!r:.80}, wanted a name")
    files = sorted(path.glob("model*.safetensors"))
    if not files:
        raise ModelNotFound(f"{path} has no model*.safetensors", fix=_WHOLE)
    for name in _READ_BY_MLX:
        read_json(path / name)
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16)
    tensors: dict[str, Tensor] = {}
    for file in files:
        head, found = _read_weights(file)
        digest.update(head)
        tensors |= found
    _require_numbers(path / "config.json", config, len(tensors))
    _require_indexed(path / _INDEX, {file.name for file in files}, tensors)
    return Folder(
        path=path,
        config=config,
        tensors=tensors,
        weights=sum(file.stat().st_size for file in files),
        digest=digest.hexdigest(),
        code=tuple(dict.fromkeys([*_code(config), *_code(_tokenizer_config(path))])),
        template=_template(path),
    )


def _require_files(path: Path) -> None:
    """Raise unless this is a folder in which whatever is read is a regular file."""
    try:
        if not path.is_dir():
            raise ModelNotFound(
                f"{path} is no folder, wanted one with config.json and *.safetensors"
            )
        for file in sorted(found for kind in _READ for found in path.glob(kind)):
            if regular(file) is None:
                raise ModelDamaged(f"{file} is a link to nothing")
    except OSError as error:
        raise unreadable(path, error) from error


def _nested(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The configuration and that of the text model in it."""
    inner = config.get("text_config")
    return (config, inner) if isinstance(inner, dict) else (config,)


def _require_numbers(path: Path, config: Mapping[str, Any], tensors: int) -> None:
    """Raise `ModelDamaged` for a text where a number belongs, and for more layers than tensors."""
    for found in _nested(config):
        for key, value in found.items():
            if isinstance(value, str) and _NUMBERS.fullmatch(key):
                raise ModelDamaged(f"{path}: {key} is {value!r:.80}, wanted a number")
            if key in _LAYERS and isinstance(value, int) and value > tensors:
                raise ModelDamaged(
                    f"{path}: {key} is {value!s:.40}, the weights hold {tensors} tensors"
                )


def _require_indexed(path: Path, files: Set[str], tensors: Mapping[str, Tensor]) -> None:
    """Raise `ModelDamaged` unless an index that is there tells of `files` and `tensors`."""
    index = read_json(path)
    if index is None:
        return
    where = index.get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ModelDamaged(f"{path} has no weight_map from tensors to files")
    for tensor, file in where.items():
        if not isinstance(file, str) or file not in files:
            raise ModelDamaged(f"{path}: file {file!r:.80} is no model*.safetensors beside it")
        if tensor not in tensors:
            raise ModelDamaged(f"{path}: tensor {tensor!r:.80} is in none of the files")


def facts_of(folder: Folder) -> Facts:
    """The folder's facts. `parameters` does not count what quantized weights pack together."""
    plain = (it for it in folder.tensors.values() if it.type not in _PACKED)
    detail = {short: folder.number(key) for short, key in _DETAIL.items() if folder.number(key)}
    return Facts(
        format=SAFETENSORS.name,
        architecture=folder.architecture,
        name=folder.path.name,
        parameters=sum(math.prod(tensor.shape) for tensor in plain),
        bytes=folder.weights,
        context=folder.number("max_position_embeddings"),
        vocabulary=folder.number("vocab_size"),
        layers=folder.number("num_hidden_layers"),
        types=dict(Counter(tensor.type for tensor in folder.tensors.values())),
        template=folder.template is not None,
        detail=detail,
    )


def _template(path: Path) -> str | None:
    """The model's chat template."""
    own = path / "chat_template.jinja"
    beside = read_bytes(own, _TEMPLATE_BYTES)
    if beside is not None:
        try:
            return beside.decode()
        except UnicodeDecodeError as error:
            raise ModelDamaged(f"{own} is not UTF-8: {error.reason}") from error
    found = _tokenizer_config(path).get("chat_template")
    if isinstance(found, list):
        named = {it.get("name"): it.get("template") for it in found if isinstance(it, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _tokenizer_config(path: Path) -> dict[str, Any]:
    return read_json(path / "tokenizer_config.json") or {}


def _code(config: Mapping[str, Any]) -> Iterator[str]:
    yield from (key for key in _CODE if config.get(key))


def _read_weights(path: Path) -> tuple[bytes, dict[str, Tensor]]:
    """The header as it stands and its tensors, all of whose bytes are there."""
    size, head = _head(path)
    length = len(head)
    try:
        told = json.loads(head)
        entries = {name: entry for name, entry in told.items() if name != "__metadata__"}
        tensors = {name: _tensor(name, entry) for name, entry in entries.items()}
        ends = [int(entry["data_offsets"][1]) for entry in entries.values()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ModelDamaged(f"{path}: its header does not read: {error}") from error
    if 8 + length + max(ends, default=0) != size:
        raise ModelDamaged(
            f"{path} has {size} bytes, its header tells of {8 + length + max(ends, default=0)}"
        )
    return head, tensors


def _tensor(name: str, entry: Mapping[str, Any]) -> Tensor:
    shape = tuple(entry["shape"])
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"tensor {name!r:.80} has shape {shape!s:.80}, wanted whole numbers")
    return Tensor(str(entry["dtype"]), shape)


def _head(path: Path) -> tuple[int, bytes]:
    """The file's size and its header."""
    size = regular(path) or 0
    try:
        with path.open("rb") as file:
            first = file.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
            if not 2 <= length <= min(_HEADER_BYTES, size - 8):
                raise ModelDamaged(f"{path} has {size} bytes and no safetensors header")
            return size, file.read(length)
    except OSError as error:
        raise unreadable(path, error) from error
