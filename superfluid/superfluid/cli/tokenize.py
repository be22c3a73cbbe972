"""`superfluid tokenize MODEL`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from superfluid_workerd.link.answers import Piece

_TIMEOUT_S: Final = 120.0


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
) -> None:
    """Print the token ids of the text on standard input.

    Of the model only its vocabulary is read, so a file that has nothing else serves.
    """
    import asyncio

    flags = [flag for flag, on in (("--special", special), ("--plain", plain)) if on]
    found = asyncio.run(_ask(model, runtime, flags, sys.stdin.buffer.read()))
    if as_json:
        print(json.dumps([_record(one) for one in found] if pieces else [it.id for it in found]))
    elif pieces:
        for one in found:
            print(f"{one.id}\t{json.dumps(_text(one, 'backslashreplace'), ensure_ascii=False)}")
    else:
        print(*(one.id for one in found))


async def _ask(model: str, runtime: str | None, flags: Sequence[str], given: bytes) -> list[Piece]:
    from superfluid.catalog.catalog import Catalog
    from superfluid.cli.terminal import pull_reports
    from superfluid.models.resolve import locate
    from superfluid.models.store import Store
    from superfluid.paths import Paths
    from superfluid_workerd.link.answers import Piece

    with pull_reports(model) as reports:
        path = locate(model, Store(Paths.find()), reports, offline=False).path
    catalog = Catalog()
    rows = await catalog.candidates(path, runtime)
    # One that ships needs no install to read a vocabulary.
    row = next((row for row in rows if row.info is not None and row.info.bundled), rows[0])
    words = ["tokenize", str(path), "--pieces", *flags]
    return await catalog.workerd.ask(
        row.id, words, list[Piece], given=given, timeout_s=_TIMEOUT_S, model=path
    )


def _record(one: Piece) -> dict[str, Any]:
    return {"id": one.id, "text": _text(one, "replace"), "bytes": list(one.text)}


def _text(one: Piece, errors: str) -> str:
    return one.text.decode(errors=errors)
