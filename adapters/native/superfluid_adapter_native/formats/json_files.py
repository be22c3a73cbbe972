"""JSON of a model folder: bounded, without the things JSON lets slip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from superfluid_adapter_native.formats.files import read_small
from superfluid_compat.errors import ModelDamaged


def json_object(raw: bytes, where: str) -> dict[str, Any]:
    """The object that `raw` holds. Raises `ModelDamaged` for anything else: other JSON, a key
    twice in one object, NaN or infinity, nesting without end, numbers of thousands of digits."""
    try:
        found = json.loads(raw, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ModelDamaged(f"{where}: is not the JSON that was wanted: {error!s:.120}") from error
    if not isinstance(found, dict):
        raise ModelDamaged(f"{where}: holds {type(found).__name__}, an object was wanted")
    return found


def read_object(path: Path, limit_bytes: int) -> dict[str, Any]:
    """The object in the file `path`. Raises `ModelNotFound`, `ModelDamaged`."""
    return json_object(read_small(path, limit_bytes), str(path))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r:.60} is there twice")
        found[key] = value
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
