"""`superfluid serve [MODEL]`."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperCommand

from superfluid.config import SERVE, adapter_variables, server_name, settle
from superfluid_compat.errors import UsageError
from superfluid_workerd.options import COMMON, Kind, Option, Resolved, nearest, unknown_option

if TYPE_CHECKING:
    from superfluid.daemon import ServeSettings, Sources
    from superfluid.models.resolve import Located

_EXTRA: Final = "superfluid.extra"


class ServeCommand(TyperCommand):
    """Sets aside what it does not know: `--ID-NAME VALUE` belongs to the adapter ID."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {flag for parameter in self.params for flag in parameter.opts}
        known.update(ctx.help_option_names)
        kept, extra = split_unknown(args, known)
        ctx.meta[_EXTRA] = extra
        return super().parse_args(ctx, kept)


def split_unknown(
    arguments: Sequence[str], known: Iterable[str]
) -> tuple[list[str], list[tuple[str, str | None]]]:
    """The arguments without unknown long flags, and those flags with their values.

    A flag's value follows `=` or is the next argument; None when there is none.
    """
    names, kept, extra = set(known), list[str](), list[tuple[str, str | None]]()
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*kept, argument, *rest], extra
        name, equals, value = argument.partition("=")
        if not argument.startswith("--") or name in names:
            kept.append(argument)
            # The value of a known flag is no flag, whatever it looks like.
            if name in names and not equals and rest and name != "--offline":
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
            "without it the shelf's default."
        ),
    ] = None,
    **given: Any,
) -> None:
    """Serve a model to OpenAI clients.

    Options of a runtime are given as --ID-NAME VALUE, such as --native-cache-bytes 512M.
    """
    flags = {name.replace("_", "-"): value for name, value in given.items() if value is not None}
    values = settle(SERVE, flags)
    adapters = adapter_options(invocation.meta[_EXTRA])
    server_name(_text(values["name"]))
    _set_up_logs(values)
    _run(model, values, adapters)


def adapter_options(given: Sequence[tuple[str, str | None]]) -> dict[str, Sources]:
    """What flags and environment give for each adapter, by its id; the adapter's worker says
    later which names it has.

    Raises `UnknownOption` for a flag that is of no adapter, `UsageError` for one without value.
    """
    ids = sorted(adapter_ids(), key=len, reverse=True)
    flags: dict[str, dict[str, object]] = {id_: {} for id_ in ids}
    for flag, value in given:
        id_ = next((id_ for id_ in ids if flag.startswith(f"--{id_}-")), None)
        if id_ is None:
            raise unknown_option(flag, _known_flags(flag, ids), "flag")
        if value is None:
            raise UsageError(f"{flag} has no value, wanted one", fix=f"give {flag} VALUE")
        flags[id_][flag.removeprefix(f"--{id_}-")] = value
    return {
        id_: (("flag", flags[id_]), ("environment", adapter_variables(id_))) for id_ in sorted(ids)
    }


def adapter_ids() -> list[str]:
    """Ids of the installed adapters, by their entry points' names."""
    return [point.name for point in importlib.metadata.entry_points(group="superfluid.adapters")]


def _known_flags(flag: str, ids: Sequence[str]) -> list[str]:
    """Flags that `flag` may have meant; with a mistyped adapter, the same name at the right one."""
    word, _, name = flag.removeprefix("--").partition("-")
    near = nearest(word, ids)
    return [option.flag() for option in SERVE] + ([f"--{near}-{name}"] if near and name else [])


def _set_up_logs(values: Mapping[str, Resolved]) -> None:
    from superfluid.logs import Level, set_up

    file = values["log-file"].value
    set_up(Level(_text(values["log-level"])), Path(str(file)) if file else None)


def _run(
    model: str | None, values: Mapping[str, Resolved], adapters: Mapping[str, Sources]
) -> None:
    located = _locate(model, offline=bool(values["offline"].value))

    from superfluid.daemon import run

    raise typer.Exit(run(settings(located, values, adapters)))


def _locate(model: str | None, *, offline: bool) -> Located:
    from superfluid.cli.terminal import pull_reports
    from superfluid.models.resolve import locate
    from superfluid.models.shelf import DEFAULT
    from superfluid.models.store import Store
    from superfluid.paths import Paths

    name = DEFAULT if model is None else model
    with pull_reports(name) as reports:
        return locate(name, Store(Paths.find()), reports, offline=offline)


def settings(
    located: Located, values: Mapping[str, Resolved], adapters: Mapping[str, Sources]
) -> ServeSettings:
    """The daemon's settings from resolved options."""
    from superfluid.daemon import ServeSettings
    from superfluid.paths import Paths
    from superfluid_workerd.link.frames import CLASSES

    paths, runtime = Paths.find(), values["runtime"].value
    return ServeSettings(
        model=located.path,
        model_name=located.name,
        common={option.name: values[option.name] for option in COMMON},
        state=paths.state,
        cache=paths.cache,
        host=_text(values["host"]),
        port=int(_text(values["port"])),
        server=_text(values["name"]),
        runtime=str(runtime) if runtime is not None else None,
        service_class=CLASSES[_text(values["qos"])],
        adapter_options=adapters,
    )


def _text(resolved: Resolved) -> str:
    return str(resolved.value)


def _parameter(option: Option) -> inspect.Parameter:
    flag = option.kind is Kind.BOOLEAN
    text = f"{option.help[0].upper()}{option.help[1:]}."
    if option.default is not None and not flag:
        text += f" [default: {option.default}]"
    declared = typer.Option(
        option.flag(), help=text, metavar=None if flag else _metavar(option), show_default=False
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


def _with_options() -> inspect.Signature:
    """`serve`'s signature with one parameter for each declared option in place of `given`."""
    own = inspect.signature(serve, eval_str=True)
    fixed = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    return own.replace(parameters=[*fixed, *(_parameter(option) for option in SERVE)])


serve.__signature__ = _with_options()  # type: ignore[attr-defined]  # what typer reads
