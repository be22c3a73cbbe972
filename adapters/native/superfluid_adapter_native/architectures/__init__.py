"""The architectures we serve: one file each, found by being here."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from superfluid_adapter_native.architectures.description import Architecture
from superfluid_compat.errors import UnsupportedArchitecture


@functools.cache
def served() -> dict[str, Architecture]:
    """Every description by the name that `general.architecture` has."""
    found: dict[str, Architecture] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        described = getattr(importlib.import_module(module.name), "ARCHITECTURE", None)
        if isinstance(described, Architecture):
            found[described.name] = described
    return found


def architecture(name: str) -> Architecture:
    """The description of `name`. Raises `UnsupportedArchitecture` with the list of those served."""
    try:
        return served()[name]
    except KeyError:
        raise UnsupportedArchitecture(
            f"the model's architecture is {name!r}, the native runtime serves "
            + ", ".join(sorted(served()))
        ) from None
