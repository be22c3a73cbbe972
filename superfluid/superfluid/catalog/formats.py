"""Which format a model is in, by its first bytes or its folder's names; nothing is parsed."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Final

from superfluid_compat.errors import ModelError, ModelNotFound
from superfluid_workerd.link.answers import Format

_SHOWN_BYTES: Final = 8
_SHOWN_NAMES: Final = 5


def holds(model: Path, wanted: Format) -> bool:
    """Whether `model` looks like `wanted`. Raises `ModelNotFound`, `ModelError` (unreadable)."""
    try:
        if model.is_dir():
            return bool(wanted.holds) and all(
                any(fnmatch.fnmatch(name, pattern) for name in _names(model))
                for pattern in wanted.holds
            )
        magic = bytes.fromhex(wanted.magic)
        return bool(magic) and _head(model, len(magic)) == magic
    except OSError as error:
        raise _unreadable(model, error) from error


def found(model: Path) -> str:
    """What stands at `model`, in words."""
    if model.is_dir():
        names = _names(model)
        shown = ", ".join(names[:_SHOWN_NAMES]) + (", …" if len(names) > _SHOWN_NAMES else "")
        return f"a folder with {shown}" if names else "an empty folder"
    head = _head(model, _SHOWN_BYTES)
    return f"a file that begins with {head.hex(' ')}" if head else "an empty file"


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _head(file: Path, count: int) -> bytes:
    with file.open("rb") as stream:
        return stream.read(count)


def _unreadable(model: Path, error: OSError) -> ModelError:
    reason = (error.strerror or str(error)).lower()
    if isinstance(error, FileNotFoundError):
        return ModelNotFound(f"no model at {model}: {reason}", fix="give the path of a model")
    return ModelError(f"{model} cannot be read: {reason}", fix="make it readable for this user")
