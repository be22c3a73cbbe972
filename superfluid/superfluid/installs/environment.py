"""A private virtual environment of pinned wheels."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from superfluid.index import failure, pip_environment, requirement
from superfluid_compat.errors import InstallFailed
from superfluid_workerd.link.answers import Wheel

_PIP: Final = (
    "install", "--no-deps", "--only-binary=:all:", "--require-hashes", "--no-cache-dir",
    "--no-input", "--disable-pip-version-check", "--no-compile", "--quiet",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Pinned:
    """A wheel as the index names it."""

    package: str
    version: str
    size: int
    sha256: str


def pinned(wheel: Wheel) -> _Pinned:
    """A wheel of a recipe as the index knows it."""
    return _Pinned(wheel.name, wheel.version, wheel.size, wheel.sha256)


def make_environment(venv: Path, wheels: tuple[Wheel, ...], staging: Path) -> None:
    """A virtual environment that holds exactly `wheels`, made from this Python.

    Raises `InstallFailed`, `ArtifactUnreachable`, `ArtifactMismatch`, `NoRoom`.
    """
    environment = {**pip_environment(), "TMPDIR": str(staging)}
    wanted = staging / "requirements.txt"
    wanted.write_text("".join(requirement(pinned(wheel)) for wheel in wheels))
    made = subprocess.run(
        [sys.executable, "-I", "-m", "venv", "--without-pip", str(venv)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if made.returncode != 0:
        raise InstallFailed(f"no virtual environment could be made: {_last(made.stderr)}")
    filled = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), *_PIP,
         "--requirement", str(wanted)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        check=False,
    )  # fmt: skip
    if filled.returncode != 0:
        raise failure(pinned(wheels[0]), filled.stdout.splitlines())


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it gave no reason"
