"""`superfluid models list|pull|show|remove`."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from superfluid_compat.errors import UsageError

if TYPE_CHECKING:
    from superfluid.models.shelf import ShelfModel
    from superfluid.models.store import Store, StoredModel

app = typer.Typer(help="Models kept on this machine.", rich_markup_mode=None)

Model = Annotated[str, typer.Argument(help="A name of the shelf or a hub id.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("list")
def list_models(as_json: Json = False) -> None:
    """List what is stored here and what the shelf offers."""
    from superfluid.models.shelf import SHELF

    records = [_stored(model) for model in _store().list()]
    known = {record["name"] for record in records}
    records += [_offered(model) for name, model in SHELF.items() if name not in known]
    if as_json:
        print(json.dumps(records, indent=2))
        return
    width = max([len(record["name"]) for record in records], default=0)
    for record in records:
        state = "stored" if record["stored"] else "to fetch"
        print(f"{record['name']:<{width}}  {_size(record):>8}  {state:<8}  {record['licence']}")


@app.command("pull")
def pull_model(model: Model) -> None:
    """Fetch a model, or take up a fetch that was cut short, and print its path."""
    from superfluid.cli.terminal import pull_reports
    from superfluid.models.pull import pull
    from superfluid.models.resolve import source_of

    if os.path.lexists(model):
        raise UsageError(
            f"{model} is on this machine already, pull fetches what is not",
            fix=f"serve it as it is: superfluid serve {model}",
        )
    with pull_reports(model) as reports:
        stored = pull(_store(), source_of(model), reports)
    print(stored.path)


@app.command("show")
def show_model(model: Model, as_json: Json = False) -> None:
    """Show where a model comes from, its licence, files and digests."""
    from superfluid.models.shelf import SHELF

    found = _store().find(model)
    if found is None and model in SHELF:
        record = _offered(SHELF[model])
    else:
        record = _stored(found or _store().get(model))
    if as_json:
        print(json.dumps(record, indent=2))
        return
    for key in ("name", "source", "licence", "path"):
        if record.get(key):
            print(f"{key:<8} {record[key]}")
    print(f"{'size':<8} {_size(record)}{'' if record['stored'] else ', not stored'}")
    for file in record["files"]:
        print(f"{'file':<8} {file['name']}  {file['size']} bytes  sha256:{file['sha256']}")


@app.command("remove")
def remove_model(model: Model) -> None:
    """Delete a stored model."""
    from superfluid.models.pull import size_text

    print(f"removed {model}, {size_text(_store().remove(model))} given back")


def _store() -> Store:
    from superfluid.models.store import Store
    from superfluid.paths import Paths

    return Store(Paths.find())


def _size(record: dict[str, Any]) -> str:
    from superfluid.models.pull import size_text

    return size_text(record["size"])


def _stored(model: StoredModel) -> dict[str, Any]:
    manifest = model.manifest
    return {
        "name": manifest.name,
        "stored": True,
        "size": manifest.size,
        "source": manifest.source,
        "licence": manifest.licence,
        "path": str(model.path),
        "files": [
            {"name": file.name, "size": file.size, "sha256": file.sha256} for file in manifest.files
        ],
    }


def _offered(model: ShelfModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "stored": False,
        "size": model.size,
        "source": f"shelf:{model.name}",
        "licence": f"{model.licence.name}, {model.licence.url}",
        "path": None,
        "files": [{"name": model.file, "size": model.size, "sha256": model.sha256}],
    }
