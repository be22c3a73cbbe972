"""The environment a worker gets: an allow-list, so that no credential reaches what runs a model."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from superfluid_workerd.options import WORKER

ALLOWED: Final[Mapping[str, str]] = {
    "PATH": "engines look tools up",
    "LANG": "the language and encoding of messages",
    "LC_*": "the language and encoding of messages",
    "TZ": "times in what an engine prints",
    "OMP_*": "a user's tuning of an engine's thread pool",
    "KMP_*": "a user's tuning of an engine's thread pool",
    "OPENBLAS_*": "a user's tuning of matrix products",
    **{option.variable(): f"a worker's setting: {option.help}" for option in WORKER},
}
"""Pattern and reason. Not here, among others: `HOME` (everything of a worker's own is in its
scratch), `PYTHON*` and `LD_*` (they load code), `NUMBA_*` (the kernel cache is ours to place)."""


def worker_environment(
    scratch: Path | None = None, source: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What of `source` (the process's own) is allowed, with temporary files going to `scratch`."""
    given = os.environ if source is None else source
    kept = {name: value for name, value in given.items() if _allowed(name)}
    if scratch is not None:
        kept["TMPDIR"] = str(scratch)
    return kept


def _allowed(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in ALLOWED)
