"""`superfluid serve --plan`: what would serve, with which options, in how much memory."""

from __future__ import annotations

import asyncio

from superfluid.catalog.standing import Choice
from superfluid.cli.runtimes import print_json
from superfluid.cli.terminal import say
from superfluid.daemon import Choosing, ServeSettings, reading
from superfluid.models.pull import size_text
from superfluid.supervisor import confine
from superfluid_compat.documents import Plan, Setting
from superfluid_compat.errors import one_line


def show_plan(settings: ServeSettings, *, as_json: bool) -> None:
    """Print the plan. Raises what keeps `serve` from choosing, or the plan from fitting."""
    plan = asyncio.run(_plan(settings))
    if as_json:
        print_json(plan)
    else:
        _print(plan)


async def _plan(settings: ServeSettings) -> Plan:
    choosing = Choosing(settings, reading(settings), say)
    choice = await choosing.choose()
    await choosing.facts(choice)
    memory = await choosing.memory(choice)
    standing = choice.standing
    return Plan(
        model=settings.model_name,
        path=str(settings.model),
        runtime=standing.row.id,
        install=standing.install.name if standing.install else None,
        version=standing.probe.version if standing.probe else "",
        why=choice.why,
        state=standing.verdict.state,
        rule=standing.verdict.rule,
        sandbox=confine.best(),
        options=_options(settings, choice),
        memory=memory,
    )


def _options(settings: ServeSettings, choice: Choice) -> dict[str, Setting]:
    own = {f"{choice.standing.row.id}-{name}": found for name, found in choice.options.items()}
    return {
        name: Setting(value=found.value, origin=found.origin)
        for name, found in {**settings.common, **own}.items()
    }


def _print(plan: Plan) -> None:
    print(f"model    {one_line(plan.model)}  {one_line(plan.path)}")
    print(f"runtime  {plan.runtime} {plan.version} ({plan.why})")
    print(f"install  {plan.install or 'none is needed'}")
    print(f"verdict  {plan.state}: {plan.rule}")
    print(f"sandbox  {plan.sandbox} is the best here")
    for name, found in plan.options.items():
        print(f"option   {name} = {shown(found.value)}  ({found.origin})")
    for part, size in plan.memory.items():
        print(f"memory   {part}: {size_text(size)}")
    total = size_text(sum(plan.memory.values()))
    print(f"memory   total: {total}" if plan.memory else "memory   unplanned")


def shown(value: object) -> str:
    """A value as a person reads it."""
    if value is None:
        return "unset"
    return ",".join(str(each) for each in value) if isinstance(value, tuple) else str(value)


__all__ = ["show_plan", "shown"]
