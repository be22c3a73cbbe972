"""What this adapter's environment must hold. Run by the kit's `bridge.py` before anything of ours
can be imported: standard library only."""

from __future__ import annotations

import sys
from typing import Final

MODULES: Final = {
    "mlx": "mlx[cpu]" if sys.platform == "linux" else "mlx",
    "mlx_lm": "mlx-lm",
    "tokenizers": "tokenizers",
}
"""The modules beside the kit's own dependencies, and what pip brings each by."""
