"""`superfluid why`, `status`, `ps` and `drain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from superfluid_compat.errors import one_line

if TYPE_CHECKING:
    from superfluid.control import ServerReport
    from superfluid.supervisor.dossiers import Dossier

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Name = Annotated[str, typer.Option("--name", help="The server's name.")]


def why(
    dossier: Annotated[str, typer.Argument(help="A dossier's id, or last.")] = "last",
    as_json: Json = False,
) -> None:
    """Say why a worker died, and what was done about it."""
    from superfluid.paths import Paths
    from superfluid.supervisor.dossiers import Dossiers
    from superfluid_compat.errors import UnknownDossier

    found = Dossiers(Paths.find().state / "dossiers").find(dossier)
    if found is None:
        told = "no worker has died here" if dossier == "last" else f"no dossier is called {dossier}"
        raise UnknownDossier(told)
    if as_json:
        _print_json(found)
        return
    for line in told_dossier(found):
        indent = line[: len(line) - len(line.lstrip(" "))]
        print(indent + one_line(line))


def told_dossier(dossier: Dossier) -> list[str]:
    """A dossier in words."""
    memory = dossier.out_of_memory or "no kill for memory was counted"
    lines = [
        f"dossier {dossier.id}, {dossier.time}",
        f"{dossier.model} on {dossier.runtime}, worker {dossier.pid or '-'}: {dossier.exit}",
        f"while: {dossier.stage}, {dossier.uptime_s:g} s after its start",
        f"reason: {dossier.reason}",
        f"then: {dossier.then}",
        f"memory: peak {_size(dossier.peak_rss_bytes)}; {memory}",
        f"sandbox: {_sandbox(dossier.sandbox)}",
        f"install: {dossier.install or 'none was needed'}",
        "options:",
        *(f"  {name} {_option(it)}" for name, it in sorted(dossier.options.items())),
    ]
    if dossier.stderr:
        lines += ["last lines:", *(f"  {line}" for line in dossier.stderr)]
    return lines


def _option(found: Any) -> str:
    return (
        f"{found.get('value')} ({found.get('origin')})" if isinstance(found, dict) else str(found)
    )


def _sandbox(found: dict[str, Any]) -> str:
    told = f"{found.get('level', 'not reached yet')} (asked: {found.get('asked', 'none')})"
    missing = ", ".join(found.get("missing", ()))
    return f"{told}; missing: {missing}" if missing else told


def status(as_json: Json = False) -> None:
    """Show the servers that run on this home and the models they serve."""
    servers = _running()
    if as_json:
        _print_json(servers)
        return
    for server in servers:
        if server.problem:
            print(f"{one_line(server.name)}  problem: {one_line(server.problem)}")
            continue
        print(f"{server.name}  {server.url}  pid {server.pid}")
        for model in server.models:
            load = f"{model.streams} streams, {model.lanes} lanes"
            print(f"  {one_line(model.model)} on {model.runtime}: {model.state}, {load}")
            print(f"    sandbox {one_line(_sandbox(model.sandbox))}")
            if model.problem:
                print(f"    problem: {model.problem}")


def ps(as_json: Json = False) -> None:
    """List the worker processes of the servers that run on this home."""
    from superfluid.cli.terminal import say

    servers = _running()
    if as_json:
        _print_json([model for server in servers for model in server.models])
        return
    row = "{:>8}  {:<12}  {:<24}  {:<16}  {:<10}  {:>9}  {:>9}"
    print(row.format("pid", "server", "model", "runtime", "state", "memory", "up"))
    for server in servers:
        if server.problem:
            say(f"superfluid: {one_line(f'{server.name}: {server.problem}')}")
        for it in server.models:
            up, size = f"{it.uptime_s:.0f} s", _size(it.rss_bytes)
            pid = it.pid or "-"
            model = one_line(it.model)
            print(row.format(pid, server.name, model, it.runtime, it.state, size, up))


def drain(
    model: Annotated[str | None, typer.Argument(help="The model; all without it.")] = None,
    name: Name = "default",
) -> None:
    """Take no new requests, finish those that run, then end."""
    from superfluid.control import Request, ask
    from superfluid.paths import Paths

    report = ask(Paths.find().state / "servers" / name, Request("drain", model))
    for it in report.models:
        print(f"{one_line(it.model)}: {it.state}, {it.streams} streams to finish")


def _running() -> list[ServerReport]:
    from superfluid.control import running
    from superfluid.paths import Paths
    from superfluid_compat.errors import NotRunning

    found = running(Paths.find().state / "servers")
    if not found:
        raise NotRunning("no server runs on this home")
    return found


def _print_json(value: Any) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value)).decode())


def _size(size_bytes: int) -> str:
    from superfluid.models.pull import size_text

    return size_text(size_bytes)
