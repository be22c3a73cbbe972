"""The one place where MLX and mlx-lm are imported; only `check`, `open` and their tests get here.

Both come without usable types and are not in the daemon's environment, hence `Any`.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, Final

# Read when huggingface_hub and transformers are imported, which mlx-lm does.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

mx: Final[Any] = importlib.import_module("mlx.core")
cache_module: Final[Any] = importlib.import_module("mlx_lm.models.cache")
utils: Final[Any] = importlib.import_module("mlx_lm.utils")


def _open(path: str | Path, mode: str = "r") -> Any:
    """`open` for mlx-lm's readers of JSON: of UTF-8, with a byte order mark or without."""
    return Path(path).open(mode, encoding="utf-8-sig" if mode == "r" else None)


utils.open = _open
