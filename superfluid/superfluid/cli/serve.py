"""`superfluid serve [MODEL]`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer import core

from superfluid import signals
from superfluid.cli.completion import option_flags, option_values, runtime_choices, words_of
from superfluid.cli.settled import Settled, settled
from superfluid.config import SERVE, server_name
from superfluid_compat.errors import ExitCode, UsageError
from superfluid_workerd.options import COMMON, Kind, Option, Resolved

if TYPE_CHECKING:
    from superfluid.daemon import ServeSettings
    from superfluid.models.resolve import Located

_EXTRA: Final = "superfluid.extra"


class ServeCommand(core.TyperCommand):
    """Sets aside what it does not know: `--ID-NAME VALUE` belongs to the adapter ID."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {flag: _takes_value(each) for each in self.params for flag in each.opts}
        known.update(dict.fromkeys(ctx.help_option_names, False))
        kept, extra = split_unknown(args, known)
        ctx.meta[_EXTRA] = extra
        return super().parse_args(ctx, kept)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Its own options, and those of every runtime with their values."""
        item: Any = vars(core)["CompletionItem"]  # typer has no public name for it
        found = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("-"):
            found += [item(flag, help=text) for flag, text in option_flags(incomplete)]
        return found + [item(word) for word in _pending(ctx, incomplete)]


def _pending(ctx: Any, incomplete: str) -> list[str]:
    """Values of a runtime's option that stands last and has none yet."""
    extra = ctx.meta.get(_EXTRA)
    flag, value = extra[-1] if extra else ("", "")
    return option_values(flag, incomplete) if value is None else []


def _takes_value(parameter: Any) -> bool:
    return not getattr(parameter, "is_flag", False)


def split_unknown(
    arguments: Sequence[str], known: Mapping[str, bool]
) -> tuple[list[str], list[tuple[str, str | None]]]:
    """The arguments without unknown long flags, and those flags with their values.

    `known` says of each other flag whether it takes a value. A flag's value follows `=` or is the
    next argument; None when there is none.
    """
    kept, extra = list[str](), list[tuple[str, str | None]]()
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*kept, argument, *rest], extra
        name, equals, value = argument.partition("=")
        if not argument.startswith("--") or name in known:
            kept.append(argument)
            # The value of a known flag is no flag, whatever it looks like.
            if known.get(name) and not equals and rest:
                kept.append(rest.pop(0))
        elif equals or not rest or rest[0].startswith("--"):
            extra.append((name, value if equals else None))
        else:
            extra.append((name, rest.pop(0)))
    return kept, extra


def serve(
    invocation: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A path, a name of the shelf, or a hub id org/model[:file-or-quant]; "
            "without it the shelf's default.",
            autocompletion=_pending,
        ),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print what would serve and how; start nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    **given: Any,
) -> None:
    """Serve a model to OpenAI clients.

    Options of a runtime are given as --ID-NAME VALUE, such as --native-cache-bytes 512M.
    """
    if as_json and not plan:
        raise UsageError("--json prints a plan, wanted --plan beside it", fix="give --plan --json")
    flags = {name.replace("_", "-"): value for name, value in given.items() if value is not None}
    told = settled(model, flags, invocation.meta[_EXTRA])
    with told.traced():
        code = _served(told, plan=plan, as_json=as_json)
    raise typer.Exit(code)


def _served(told: Settled, *, plan: bool, as_json: bool) -> ExitCode:
    server_name(_text(told.values["name"]))
    _set_up_logs(told.values)
    if plan:
        from superfluid.cli.plan import show_plan

        with signals.heard():
            located = _locate(told.argument, offline=True, because="--plan")
            show_plan(settings(located, told), as_json=as_json)
        return ExitCode.OK
    try:
        with signals.interrupting():
            located = _locate(told.argument, offline=bool(told.values["offline"].value))
    except KeyboardInterrupt:
        # The daemon does not hear signals yet; being stopped as asked is a clean end.
        return ExitCode.OK
    from superfluid.daemon import run

    return run(settings(located, told))


def _set_up_logs(values: Mapping[str, Resolved]) -> None:
    from superfluid.logs import Level, set_up

    file = values["log-file"].value
    set_up(Level(_text(values["log-level"])), Path(str(file)) if file else None)


def _locate(model: str | None, *, offline: bool, because: str = "--offline") -> Located:
    from superfluid.cli.terminal import pull_reports
    from superfluid.models.resolve import locate
    from superfluid.models.shelf import DEFAULT
    from superfluid.models.store import Store
    from superfluid.paths import Paths

    name = DEFAULT if model is None else model
    with pull_reports(name) as reports:
        return locate(name, Store(Paths.find()), reports, offline=offline, because=because)


def settings(located: Located, told: Settled) -> ServeSettings:
    """The daemon's settings from what was told."""
    from superfluid.catalog.standing import Wanted
    from superfluid.daemon import ServeSettings
    from superfluid.paths import Paths
    from superfluid_workerd.link.frames import CLASSES

    paths, values, name = Paths.find(), told.values, told.name or located.name
    runtime = values["runtime"].value
    return ServeSettings(
        model=located.path,
        model_name=name,
        common={option.name: values[option.name] for option in COMMON},
        state=paths.state,
        cache=paths.cache,
        runtimes=paths.runtimes,
        host=_text(values["host"]),
        port=int(_text(values["port"])),
        server=_text(values["name"]),
        wanted=Wanted.parse(str(runtime) if runtime is not None else None, name),
        untested=bool(values["untested"].value),
        service_class=CLASSES[_text(values["qos"])],
        adapter_options=told.adapters,
    )


def _text(resolved: Resolved) -> str:
    return str(resolved.value)


def _parameter(option: Option) -> inspect.Parameter:
    flag = option.kind is Kind.BOOLEAN
    text = f"{option.help[0].upper()}{option.help[1:]}."
    if option.default is not None and not flag:
        text += f" [default: {option.default}]"
    declared = typer.Option(
        option.flag(),
        help=text,
        metavar=None if flag else _metavar(option),
        show_default=False,
        **_completion(option),
    )
    annotation: Any = Annotated[bool | None if flag else str | None, declared]
    return inspect.Parameter(
        option.name.replace("-", "_"),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=annotation,
    )


def _metavar(option: Option) -> str:
    return "|".join(option.choices) if option.choices else option.kind.value.upper()


def _completion(option: Option) -> dict[str, Any]:
    if option.name == "runtime":
        return {"autocompletion": runtime_choices}

    def words(incomplete: str) -> list[str]:
        return words_of(option, incomplete)

    return {"autocompletion": words} if words("") else {}


def _with_options() -> inspect.Signature:
    """`serve`'s signature with one parameter for each declared option in place of `given`."""
    own = inspect.signature(serve, eval_str=True)
    fixed = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    return own.replace(parameters=[*fixed, *(_parameter(option) for option in SERVE)])


serve.__signature__ = _with_options()  # type: ignore[attr-defined]  # what typer reads
