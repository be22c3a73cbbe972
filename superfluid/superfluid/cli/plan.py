"""`superfluid serve --plan`: what would serve, with which options, in how much memory."""

from __future__ import annotations

import asyncio
from typing import Any

from superfluid.catalog.catalog import Catalog
from superfluid.catalog.standing import Choice
from superfluid.cli.terminal import say
from superfluid.daemon import Choosing, ServeSettings
from superfluid.models.pull import size_text
from superfluid.supervisor import confine


def show_plan(settings: ServeSettings) -> None:
    """Print the plan. Raises what keeps `serve` from choosing, or the plan from fitting."""
    choosing = Choosing(settings, Catalog(), say)
    choice, memory = asyncio.run(_asked(choosing))
    standing = choice.standing
    version = standing.probe.version if standing.probe else ""
    print(f"model    {settings.model_name}  {settings.model}")
    print(f"runtime  {standing.row.id} {version} ({choice.why})")
    print(f"install  {standing.install.name if standing.install else 'ships with its adapter'}")
    print(f"verdict  {standing.verdict.state}: {standing.verdict.rule}")
    print(f"sandbox  {confine.best()} is the best here")
    for name, found in (*settings.common.items(), *_own(choice)):
        print(f"option   {name} = {shown(found.value)}  ({found.origin})")
    for part, size in memory.items():
        print(f"memory   {part}: {size_text(size)}")
    print(f"memory   total: {size_text(sum(memory.values()))}" if memory else "memory   unplanned")


async def _asked(choosing: Choosing) -> tuple[Choice, dict[str, int]]:
    choice = await choosing.choose()
    return choice, await choosing.memory(choice)


def _own(choice: Choice) -> list[tuple[str, Any]]:
    prefix = choice.standing.row.id
    return [(f"{prefix}-{name}", found) for name, found in choice.options.items()]


def shown(value: object) -> str:
    """A value as a person reads it."""
    if value is None:
        return "unset"
    return ",".join(str(each) for each in value) if isinstance(value, tuple) else str(value)


__all__ = ["show_plan", "shown"]
