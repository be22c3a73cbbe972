"""Which environments install on their own: pinned wheels by digest, for one Python and platform.

`recipes.json` holds, for each platform and Python, every wheel of every environment: the tested
pair, what it needs, and what superfluid's worker needs. Wheels for macOS are those that macOS 14
takes.
"""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Mapping
from importlib import resources
from typing import Final

import msgspec

from superfluid_compat.errors import Unsupported
from superfluid_workerd.adapter import InstallPlan, Version, Wheel

TESTED: Final = (("0.32.4", "0.32.2"), ("0.32.4", "0.32.0"), ("0.32.2", "0.31.3"))
"""Pairs of mlx and mlx-lm that were tested, the newest first; an install is named by mlx-lm's
version."""

_BACKENDS: Final = {"linux-x86_64": ("cpu", "mlx-cpu"), "darwin-arm64": ("metal", "mlx-metal")}
"""What MLX computes on, and the package that holds it, by platform."""


class _Pin(msgspec.Struct, frozen=True, array_like=True):
    name: str
    version: str
    size: int
    sha256: str


@functools.cache
def _pins() -> Mapping[str, tuple[_Pin, ...]]:
    """Wheels by platform and Python, such as `linux-x86_64/3.12`."""
    text = resources.files("superfluid_adapter_mlx").joinpath("recipes.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, tuple[_Pin, ...]])


def here() -> str:
    """This machine, as recipes name it."""
    return f"{sys.platform}-{platform.machine().lower()}"


def versions() -> list[Version]:
    """The tested environments, newest first, with the reason where one does not install here."""
    backend = _BACKENDS.get(here(), ("",))[0]
    reason = _refusal()
    return [Version(version=mlx_lm, backend=backend, here=reason) for _, mlx_lm in TESTED]


def plan(version: str, backend: str) -> InstallPlan:
    """How to install an environment here. Raises `Unsupported` for one that is not offered."""
    mlx = {mlx_lm: mlx for mlx, mlx_lm in TESTED}.get(version)
    if (reason := _refusal()) is not None:
        raise Unsupported(reason)
    own, engine = _BACKENDS[here()]
    if mlx is None or backend not in ("", own):
        raise Unsupported(f"there is no mlx-lm {version} {backend} for {here()}")
    chosen = {"mlx": mlx, "mlx-lm": version, engine: mlx}
    wheels = tuple(
        Wheel(name=pin.name, version=pin.version, size=pin.size, sha256=pin.sha256)
        for pin in _pins()[f"{here()}/{_python()}"]
        if pin.version == chosen.get(pin.name, pin.version)
    )
    return InstallPlan(
        version=version,
        backend=own,
        environment=wheels,
        notes=(f"mlx {mlx} with mlx-lm {version}: {len(wheels)} wheels",),
    )


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _refusal() -> str | None:
    """Why no environment installs here, or None."""
    if here() not in _BACKENDS:
        return f"MLX has no build for {here()}, wanted {' or '.join(_BACKENDS)}"
    if f"{here()}/{_python()}" not in _pins():
        return f"no environment is pinned for Python {_python()}"
    if sys.platform == "darwin" and _macos() < 14:
        return f"the pinned wheels need macOS 14, this is {platform.mac_ver()[0]}"
    return None


def _macos() -> int:
    return int(platform.mac_ver()[0].partition(".")[0] or 0)
