"""The default model, and generated ones: random weights of a real model's shape, kept."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from support.tiny_models import TinyModel, write_model

_HOME: Final = Path(__file__).parents[2] / ".cache" / "test-home"
_COMMON: Final = TinyModel(head_dim=64, context=2048, vocabulary_size=32_000)
SHAPES: Final = {
    "125M": replace(_COMMON, layers=12, width=768, heads=12, kv_heads=4, ff=2048),
    "1B": replace(_COMMON, layers=16, width=2048, heads=32, kv_heads=8, ff=8192),
}
"""125M has 125 million weights, 1B has 1.1 billion."""


def default_model() -> Path:
    """The default model: `SUPERFLUID_TEST_MODEL`, or where the product's own pull puts it."""
    given = os.environ.get("SUPERFLUID_TEST_MODEL")
    if given:
        return Path(given)
    pull = [sys.executable, "-m", "superfluid", "models", "pull", "gemma-3-270m"]
    home = {**os.environ, "SUPERFLUID_HOME": str(_HOME)}
    done = subprocess.run(pull, env=home, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


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
