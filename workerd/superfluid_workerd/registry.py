"""Adapters by id, from the entry points of the group `superfluid.adapters`, and their options."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from superfluid_compat import numbers
from superfluid_compat.entrypoints import ADAPTERS
from superfluid_compat.errors import RuntimeBroken, SuperfluidError, UnknownAdapter
from superfluid_compat.verdicts import require_number
from superfluid_workerd.adapter import Adapter
from superfluid_workerd.link.refusals import in_words
from superfluid_workerd.options import nearest, resolve


def load_adapter(name: str, installed: Path | None = None) -> Adapter:
    """The adapter of that id, told its install; no other is imported.

    Raises `UnknownAdapter`, `RuntimeBroken` (two distributions claim the id, its code fails, it
    is no adapter or another one), `ContractRefused` (another kit number).
    """
    point = _find(name)
    try:
        adapter = point.load()()
        info = adapter.info()
        require_number("adapter kit", found=info.kit, wanted=numbers.KIT)
    except SuperfluidError:
        raise
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        raise RuntimeBroken(
            f"adapter {name} of {_distribution(point)} does not start: {in_words(error)}",
            fix=f"reinstall {_distribution(point)}",
        ) from error
    if not isinstance(adapter, Adapter) or info.id != name:
        found = f"a {type(adapter).__name__} with id {info.id}"
        raise RuntimeBroken(
            f"entry point {point.value} of {_distribution(point)} gave {found}, wanted an Adapter "
            f"with id {name}",
            fix=f"reinstall {_distribution(point)}",
        )
    adapter.installed = installed
    return adapter


def checked_options(adapter: Adapter, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of the adapter with its value. Raises `UnknownOption`, `BadOptionValue`."""
    named = {name: value for name, value in given.items() if value is not None}
    resolved = resolve(adapter.options(), [("daemon", named)])
    return {name: found.value for name, found in resolved.items()}


def _find(name: str) -> EntryPoint:
    known = entry_points(group=ADAPTERS)
    found = list(known.select(name=name))
    if not found:
        near = nearest(name, known.names)
        raise UnknownAdapter(
            f"no runtime is called {name}; here are {', '.join(sorted(known.names)) or 'none'}",
            fix=f"did you mean {near}?" if near else None,
        )
    if len(found) > 1:
        claims = " and ".join(sorted(_distribution(point) for point in found))
        raise RuntimeBroken(
            f"{claims} both provide a runtime called {name}", fix="uninstall one of them"
        )
    return found[0]


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.value
