"""Whether the environment of this Python runs MLX, without a model."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from superfluid_adapter_mlx.needs import MODULES
from superfluid_adapter_mlx.recipes import TESTED
from superfluid_compat.verdicts import Rule, State
from superfluid_workerd.adapter import Options, Probe


def examine(options: Options, installed: Path | None) -> Probe:
    """Any problem is part of the answer."""
    venv = options.get("venv")
    if isinstance(venv, str) and not Path(venv, "bin", "python").exists():
        return _missing(f"{venv} has no bin/python", "give the folder of a virtual environment")
    lacking = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if lacking:
        return _missing(f"{_where(installed)} lacks {' and '.join(lacking)}", _remedy(lacking))
    found = _versions()
    try:
        from superfluid_adapter_mlx.engine import mx
        from superfluid_adapter_mlx.loading import device

        sums = mx.sum(mx.arange(10)).item()
    except Exception as error:  # noqa: BLE001  # recorded: whatever the engine raises is the answer
        told = " ".join(str(error).split())[:300]
        return _broken(found[1], f"it does not start: {type(error).__name__}: {told}")
    if sums != 45:
        return _broken(found[1], f"the sum of 0 to 9 is {sums} there")
    return Probe(version=found[1], devices=(device(mx),), tested=found in TESTED)


def _versions() -> tuple[str, str]:
    try:
        return version("mlx"), version("mlx-lm")
    except PackageNotFoundError:
        return "", "unknown"


def _where(installed: Path | None) -> str:
    return f"the install {installed.name}" if installed else f"the environment of {sys.executable}"


def _remedy(lacking: Sequence[str]) -> str:
    wanted = shlex.join(MODULES[name] for name in lacking)
    return (
        f"run {sys.executable} -m pip install {wanted}, or leave --mlx-venv out and run "
        "superfluid runtime install mlx"
    )


def _missing(problem: str, fix: str) -> Probe:
    return Probe(
        version="unknown",
        problem=problem,
        rule=Rule.NOT_INSTALLED,
        state=State.NOT_INSTALLED,
        fix=fix,
    )


def _broken(found: str, problem: str) -> Probe:
    return Probe(
        version=found,
        problem=problem,
        rule=Rule.ADAPTER_FAILED,
        state=State.BROKEN,
        fix="install it again with superfluid runtime install mlx",
    )
