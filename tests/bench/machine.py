"""What the figures were taken on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any, Final

import psutil

_PACKAGES: Final = ("superfluid", "numpy", "numba", "xllamacpp")


def describe() -> dict[str, Any]:
    """Facts for the JSON file; `load` is the run queue per core, over 1 the figures are noisy."""
    cores = os.cpu_count() or 1
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": cores,
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "load_per_core": round(os.getloadavg()[0] / cores, 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "commit": _commit(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str:
    git = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
