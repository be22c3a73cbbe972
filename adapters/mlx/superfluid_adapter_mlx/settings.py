"""The options that only this runtime takes."""

from __future__ import annotations

from typing import Final

from superfluid_workerd.adapter import Option
from superfluid_workerd.options import Kind, Scope

OPTIONS: Final = (
    Option("venv", Kind.PATH, "a virtual environment of your own that holds mlx and mlx-lm, in "
           "place of an install", scope=Scope.RUNTIME),
    Option("prefill-chunk", Kind.INTEGER, "most tokens of a prompt computed at once; another size "
           "moves some models' logits", 512, minimum=1, maximum=1 << 16, unit="tokens"),
    Option("cache-limit-mb", Kind.INTEGER, "most freed memory that MLX keeps for itself; left out, "
           "what MLX chooses", minimum=0, maximum=1 << 24, unit="MiB"),
    Option("compile", Kind.BOOLEAN, "let MLX compile kernels while it runs; on a CPU that takes a "
           "C++ compiler and some seconds for each architecture", default=True),
    Option("foreign-state", Kind.BOOLEAN, "take sequences that another version of mlx-lm exported; "
           "right only for models whose computation did not change", default=False),
    Option("trust-model-code", Kind.BOOLEAN, "run the Python code that a model's folder names",
           default=False),
)  # fmt: skip
