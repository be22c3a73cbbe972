"""Generated llama-shaped models: random weights of a real model's shape, kept between runs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from support.tiny_models import TinyModel, write_model

_COMMON: Final = TinyModel(head_dim=64, context=2048, vocabulary_size=32_000)
SHAPES: Final = {
    "125M": replace(_COMMON, layers=12, width=768, heads=12, kv_heads=4, ff=2048),
    "1B": replace(_COMMON, layers=16, width=2048, heads=32, kv_heads=8, ff=8192),
}
"""125M has 125 million weights, 1B has 1.1 billion."""


def model(folder: Path, shape: str, kind: str) -> Path:
    """The file of `shape` with every matrix of type `kind`, written unless it is there.

    Each has a folder of its own, since the seed runtime looks at a file's neighbours."""
    path = folder / f"{shape}-{kind}" / f"llama-{shape}-{kind}.gguf"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        write_model(fresh, replace(SHAPES[shape], types={"*": kind})).rename(path)
    return path


def make_cold(path: Path) -> None:
    """Have the system forget the file's pages, as far as it can be asked to."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
