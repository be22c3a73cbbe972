"""`superfluid tokenize MODEL`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from superfluid_compat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from superfluid_workerd.link.answers import Piece

_TIMEOUT_S: Final = 120.0
_TEXT_BYTES: Final = 1 << 20


def tokenize(
    model: Annotated[
        str,
        typer.Argument(help="A path, a name of the shelf, or a hub id org/model[:file-or-quant]."),
    ],
    *,
    pieces: Annotated[
        bool, typer.Option("--pieces", help="Print each token's text beside its id.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    special: Annotated[
        bool, typer.Option("--special", help="Read special tokens in the text as such.")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Add no token before or behind the text.")
    ] = False,
    runtime: Annotated[
        str | None, typer.Option("--runtime", help="The runtime whose tokenizer to ask.")
    ] = None,
    untested: Annotated[
        bool, typer.Option("--untested", help="Let a runtime answer that nobody tested.")
    ] = False,
) -> None:
    """Print the token ids of the text on standard input.

    Of the model only its vocabulary is read, so a file that has nothing else serves.
    """
    import asyncio

    given = sys.stdin.buffer.read(_TEXT_BYTES + 1)
    if len(given) > _TEXT_BYTES:
        raise UsageError(
            "standard input holds more than 1 MiB, wanted a text up to that", fix="give it in parts"
        )

    flags = [flag for flag, on in (("--special", special), ("--plain", plain)) if on]
    found = asyncio.run(_ask(model, runtime, flags, given, untested=untested))
    if as_json:
        print(json.dumps([_record(one) for one in found] if pieces else [it.id for it in found]))
    elif pieces:
        for one in found:
            print(f"{one.id}\t{json.dumps(_text(one, 'backslashreplace'), ensure_ascii=False)}")
    else:
        print(*(one.id for one in found))


async def _ask(
    model: str, runtime: str | None, flags: Sequence[str], given: bytes, *, untested: bool
) -> list[Piece]:
    import msgspec

    from superfluid.catalog.catalog import Catalog
    from superfluid.catalog.prepared import Preparations
    from superfluid.catalog.standing import Chooser, Wanted
    from superfluid.cli.settled import settled
    from superfluid.cli.terminal import pull_reports
    from superfluid.installs.store import Installs
    from superfluid.models.resolve import locate
    from superfluid.models.store import Store
    from superfluid.paths import Paths
    from superfluid_workerd.link.answers import Piece

    with pull_reports(model) as reports:
        path = locate(model, Store(Paths.find()), reports, offline=False).path
    paths, catalog, wanted = Paths.find(), Catalog(), Wanted.parse(runtime, model)
    rows = await catalog.candidates(path, wanted.runtime)
    words = ["tokenize", str(path), "--pieces", *flags]
    told = settled(model, {"untested": True} if untested else {})
    preparations, allowed = Preparations(paths.cache), bool(told.values["untested"].value)
    chooser = Chooser(
        catalog, Installs(paths.runtimes), preparations, told.adapters, untested=allowed
    )
    # One that ships needs no install, and no check, to read a vocabulary.
    ships = next((row.id for row in rows if row.info is not None and row.info.bundled), None)
    if ships is not None and not any(map(chooser.owned, rows)):
        return await catalog.workerd.ask(
            ships, words, list[Piece], given=given, timeout_s=_TIMEOUT_S, model=path
        )
    with told.traced():
        choice = await chooser.choose(path, wanted)
    standing, shared = choice.standing, preparations.shared(choice.standing.row.id)
    options = msgspec.json.encode(choice.values).decode()
    return await catalog.workerd.ask(
        standing.row.id,
        [*words, "--shared", str(shared), "--options", options],
        list[Piece],
        given=given,
        place=standing.place,
        timeout_s=_TIMEOUT_S,
        model=path,
        readable=[shared, *map(Path, standing.probe.files if standing.probe else ())],
    )


def _record(one: Piece) -> dict[str, Any]:
    return {"id": one.id, "text": _text(one, "replace"), "bytes": list(one.text)}


def _text(one: Piece, errors: str) -> str:
    return one.text.decode(errors=errors)
