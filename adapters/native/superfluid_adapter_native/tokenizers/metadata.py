"""Typed reads of `tokenizer.ggml.*`: what is there has the type it must have, or is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from superfluid_compat.errors import ModelDamaged

PREFIX = "tokenizer.ggml."
ENTRIES_MAX = 1 << 22


def text(metadata: Mapping[str, Any], name: str, default: str = "") -> str:
    """A string, or `default` where the file has none."""
    value = metadata.get(PREFIX + name, default)
    if not isinstance(value, str):
        raise ModelDamaged(f"{PREFIX}{name} is {type(value).__name__}, wanted a string")
    return value


def flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    """A truth value, or `default` where the file has none."""
    value = metadata.get(PREFIX + name, default)
    if not isinstance(value, bool):
        raise ModelDamaged(f"{PREFIX}{name} is {type(value).__name__}, wanted true or false")
    return value


def token_id(metadata: Mapping[str, Any], name: str, size: int, default: int | None) -> int | None:
    """An id below `size`, or `default` where the file has none and the default is an id."""
    value = metadata.get(PREFIX + name)
    if value is None:
        return default if default is not None and default < size else None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelDamaged(f"{PREFIX}{name} is {type(value).__name__}, wanted a token id")
    if not 0 <= value < size:
        raise ModelDamaged(f"{PREFIX}{name} is {value}, the vocabulary ends at {size - 1}")
    return value


def texts(metadata: Mapping[str, Any], name: str) -> list[str]:
    """A list of strings; an absent one is refused."""
    found = list(_array(metadata, name))
    if set(map(type, found)) - {str}:
        raise ModelDamaged(f"{PREFIX}{name} does not hold strings only")
    return found


def numbers(metadata: Mapping[str, Any], name: str, count: int) -> NDArray[np.float64] | None:
    """At least `count` numbers, cut to `count`; None where the file has none."""
    if PREFIX + name not in metadata:
        return None
    values = _array(metadata, name)
    if len(values) < count:
        raise ModelDamaged(f"{PREFIX}{name} has {len(values)} entries for {count} tokens")
    try:
        found = np.asarray(values[:count])
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelDamaged(f"{PREFIX}{name} does not hold numbers: {error}") from error
    if found.ndim != 1 or (found.dtype.kind not in "iuf" and count):
        raise ModelDamaged(f"{PREFIX}{name} does not hold numbers only")
    # A signalling NaN is a value like others, for the caller to judge.
    with np.errstate(invalid="ignore"):
        return found.astype(np.float64)


def _array(metadata: Mapping[str, Any], name: str) -> Sequence[Any]:
    values = metadata.get(PREFIX + name)
    if values is None:
        raise ModelDamaged(f"{PREFIX}{name} is missing")
    if isinstance(values, str | bytes) or not isinstance(values, Sequence | np.ndarray):
        raise ModelDamaged(f"{PREFIX}{name} is {type(values).__name__}, wanted a list")
    if len(values) > ENTRIES_MAX:
        raise ModelDamaged(f"{PREFIX}{name} has {len(values)} entries, at most {ENTRIES_MAX}")
    return values  # type: ignore[return-value]  # an ndarray is used as a sequence here
