"""The commands of `superfluid runtime`: what there is, installing it, choosing among installs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from superfluid.cli import completion
from superfluid.cli.runtimes import Json, chooser, print_json, table
from superfluid_compat.errors import SuperfluidError, UnknownInstall, UsageError

if TYPE_CHECKING:
    from superfluid.catalog.catalog import Row
    from superfluid.installs.installer import Installer, Outcome
    from superfluid.installs.order import Order
    from superfluid.installs.store import Installs
    from superfluid_workerd.link.answers import InstallPlan

app = typer.Typer(help="Runtimes that are installed on their own.", rich_markup_mode=None)

Runtime = Annotated[
    str, typer.Argument(help="A runtime's id.", autocompletion=completion.runtime_ids)
]
AnInstall = Annotated[
    str | None,
    typer.Argument(
        help="An install, as superfluid runtimes names it.", autocompletion=completion.installs
    ),
]
Version = Annotated[
    str | None,
    typer.Option(
        "--version",
        help="Version to install; without it the newest that installs here.",
        autocompletion=completion.versions,
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        help="Backend to install; without it the first.",
        autocompletion=completion.backends,
    ),
]
Untested = Annotated[bool, typer.Option("--untested", help="Install a build that nobody tested.")]
JsonLines = Annotated[
    bool, typer.Option("--json", help="Print progress and outcome, a line of JSON each.")
]


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("versions")
def versions(runtime: Runtime, as_json: Json = False) -> None:
    """List what the runtime's adapter installs on its own, newest first; asks no network."""
    from superfluid.catalog.documents import versions_document

    document = versions_document(_row(runtime), _installs())
    if as_json:
        print_json(document)
        return
    for each in document.versions:
        told = "installed" if each.installed else (each.reason or "installs here")
        contract = "" if each.contract is None else f"contract {each.contract}"
        print("  ".join(filter(None, (each.version, each.backend, contract, told))))
    if not document.versions:
        print(f"{runtime} has no recipe to install from")


@app.command("options")
def options(runtime: Runtime, as_json: Json = False) -> None:
    """List the options that the runtime takes on serve, in the environment and in the file."""
    from superfluid.catalog.documents import options_document

    row = _row(runtime)
    document = options_document(row)
    if as_json:
        print_json(document)
        return
    accepts = {option.name: option.accepts() for option in row.options}
    for each in document.options:
        default = "no default" if each.default is None else f"default: {each.default}"
        print(f"{each.flag}  {accepts[each.name]}  [{default}]")
        print(f"    {each.help}")


@app.command("install")
def install(
    runtime: Runtime,
    *,
    version: Version = None,
    backend: Backend = None,
    source: Annotated[
        str | None,
        typer.Option("--from", help="An archive, wheel or folder, or an https URL of one."),
    ] = None,
    sha256: Annotated[
        str | None, typer.Option("--sha256", help="Digest that --from must have.")
    ] = None,
    untested: Untested = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be installed; fetch nothing.")
    ] = False,
    as_json: JsonLines = False,
) -> None:
    """Install a version of a runtime beside those that are here, and put it to use."""
    from superfluid.installs.order import Order

    order = Order(version, backend, source, sha256, untested)
    _install(runtime, order, as_json=as_json, dry_run=dry_run)


@app.command("update")
def update(runtime: Runtime, untested: Untested = False, as_json: JsonLines = False) -> None:
    """Install the newest version that installs here, of the backend in use."""
    from superfluid.installs.order import Order

    row = _row(runtime)
    used = _installs().in_use(row.id)
    known = [each.backend for each in row.about.versions] if row.about else []
    backend = used.manifest.backend if used and used.manifest else None
    order = Order(None, backend if backend in known else None, untested=untested)
    _install(runtime, order, as_json=as_json)


@app.command("use")
def use(
    runtime: Runtime,
    name: AnInstall = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Unpin; the newest install is used.")
    ] = False,
) -> None:
    """Pin an install, or with --auto leave the choice to superfluid."""
    row, kept = _row(runtime), _installs()
    if auto == (name is not None):
        raise UsageError("give an INSTALL or --auto", fix=f"see superfluid runtime use {row.id} -h")
    with _locked(kept, row.id):
        if name is None:
            kept.unpin(row.id)
        else:
            wanted = kept.get(row.id, name)
            kept.put_to_use(wanted)
            kept.pin(wanted)
        used = kept.in_use(row.id)
    print(f"{row.id} uses {used.name if used else 'nothing: no install is here'}")


@app.command("rollback")
def rollback(runtime: Runtime) -> None:
    """Put to use again what was in use before; a pin moves along."""
    row, kept = _row(runtime), _installs()
    with _locked(kept, row.id):
        before = kept.earlier(row.id)
        if before is None:
            raise UnknownInstall(
                f"runtime {row.id} has no install that was in use before",
                fix=f"pin one with superfluid runtime use {row.id} INSTALL",
            )
        gone = before.missing()
        if gone is not None:
            raise UnknownInstall(
                f"install {before.name} is not whole: {gone}",
                fix=f"run superfluid runtime repair {row.id} {before.name}",
            )
        kept.step_back(row.id, before)
    print(f"{row.id} uses {before.name}")


@app.command("repair")
def repair(runtime: Runtime, name: AnInstall = None, as_json: JsonLines = False) -> None:
    """Verify an install to the byte, and make it again from its source when it is not whole."""
    row = _row(runtime)
    with _installer(row, as_json=as_json) as (installer, done):
        kept = installer.installs
        wanted = kept.get(row.id, name) if name else kept.in_use(row.id)
        if wanted is None:
            raise UnknownInstall(f"runtime {row.id} has no install to repair")
        outcome = installer.repair(row, wanted)
        done(outcome, f"{row.id} {wanted.name} is {'made again' if outcome.fresh else 'whole'}")


@app.command("remove")
def remove(
    runtime: Runtime,
    name: AnInstall = None,
    every: Annotated[bool, typer.Option("--all", help="Remove every install of it.")] = False,
) -> None:
    """Remove an install; without INSTALL the only one."""
    kept = _installs()
    id_ = _id(runtime, kept)
    with _locked(kept, id_):
        found = kept.all(id_)
        if name is not None:
            found = [kept.get(id_, name)]
        elif len(found) != 1 and not every:
            names = ", ".join(each.name for each in found) or "none"
            raise UnknownInstall(
                f"runtime {id_} has installs {names}, wanted the name of one",
                fix="name one, or give --all",
            )
        for each in found:
            kept.remove(each)
            print(f"removed {id_} {each.name}")


def _install(runtime: str, order: Order, *, as_json: bool, dry_run: bool = False) -> None:
    from superfluid.installs.order import check_source, require_installable

    row = _row(runtime)
    require_installable(row)
    check_source(order)
    with _installer(row, as_json=as_json) as (installer, done):
        if dry_run:
            plans: list[InstallPlan] = []
            if order.source is None:
                plans = installer.plan(row, order)[:1]
            else:
                installer.require_source(row, order)
            if as_json:
                _tell_plan(row, plans, order)
            else:
                _print_plan(row, plans, order)
            return
        outcome = installer.install(row, order)
        what = "installed" if outcome.fresh else "is installed already"
        used = "" if outcome.in_use else f"; another is in use, see superfluid runtime use {row.id}"
        done(outcome, f"{row.id} {outcome.install.name} {what}{used}")


def _tell_plan(row: Row, plans: list[InstallPlan], order: Order) -> None:
    import msgspec

    told = {"runtime": row.id, "event": "plan", "source": order.source, "plans": plans}
    print(msgspec.json.encode(told).decode(), flush=True)


def _print_plan(row: Row, plans: list[InstallPlan], order: Order) -> None:
    from superfluid.models.pull import size_text
    from superfluid_workerd.link.answers import Archive

    if order.source is not None:
        print(f"{row.id} from {order.source}")
    for plan in plans:
        print(f"{row.id} {plan.version} {plan.backend}".rstrip())
        lines = [
            (each.url if isinstance(each, Archive) else f"{each.name} {each.version}",
             size_text(each.size), f"sha256:{each.sha256}")
            for each in (*plan.artifacts, *plan.environment)
        ]  # fmt: skip
        table(lines)
        for note in plan.notes:
            print(note)


Done = Callable[["Outcome", str], None]


@contextlib.contextmanager
def _installer(row: Row, *, as_json: bool) -> Iterator[tuple[Installer, Done]]:
    from superfluid.cli.terminal import install_reports
    from superfluid.installs.installer import Installer

    judge = chooser()
    with install_reports(row.id, as_json=as_json) as reports:

        def done(outcome: Outcome, line: str) -> None:
            reports.done(outcome, line)

        installer = Installer(
            judge.catalog, judge.installs, judge.preparations, reports, reports.waiting
        )
        try:
            yield installer, done
        except SuperfluidError as error:
            reports.failed(error)
            raise


@contextlib.contextmanager
def _locked(kept: Installs, runtime: str) -> Iterator[None]:
    from superfluid.cli.terminal import say
    from superfluid.installs.installer import failures

    with (
        failures(kept.root),
        kept.lock(runtime, lambda: say(f"{runtime}: another process works on it, waiting")),
    ):
        yield


def _installs() -> Installs:
    from superfluid.installs.store import Installs
    from superfluid.paths import Paths

    return Installs(Paths.find().runtimes)


def _row(runtime: str) -> Row:
    import asyncio

    from superfluid.catalog.catalog import Catalog

    return asyncio.run(Catalog().row(runtime))


def _id(runtime: str, kept: Installs) -> str:
    """The runtime's id; one whose adapter is gone can still be removed."""
    try:
        return _row(runtime).id
    except SuperfluidError:
        if "/" not in runtime and kept.all(runtime):
            return runtime
        raise
