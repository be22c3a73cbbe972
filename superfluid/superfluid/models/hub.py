"""Models of a Hugging Face style hub: `org/model[:file-or-quant]`.

`huggingface_hub` does the talking (`HF_ENDPOINT`, `HF_TOKEN` and its other settings apply) and is
imported only when a hub is asked. Files are those of one commit, resumed by range, and checked
against the digest the hub states.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, Final, cast

from superfluid.models.pull import Offer, Progress, RemoteFile
from superfluid_compat.errors import FetchFailed, ModelNotFound, Offline, SuperfluidError
from superfluid_workerd.options import nearest

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_ID: Final = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([^:\x00-\x1f]+))?")
_PLAIN: Final = re.compile(r"[\w][\w.+ -]*")
_SPLIT: Final = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
_BESIDE_MODELS: Final = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_PREFERRED: Final = ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q4_0", "Q6_K", "Q8_0", "BF16", "F16", "F32")
_FOLDER_FILES: Final = re.compile(
    r"[^/]+\.safetensors(\.index\.json)?|(config|generation_config|tokenizer|tokenizer_config"
    r"|special_tokens_map|added_tokens|vocab|preprocessor_config)\.json|merges\.txt"
    r"|tokenizer\.model|chat_template\.(jinja|json)"
)


@dataclass(frozen=True, slots=True)
class HubId:
    """`repository` is `org/model`; `selector` names a file or a quantisation, or is empty."""

    repository: str
    selector: str = ""

    @classmethod
    def parse(cls, text: str) -> HubId | None:
        """None when `text` is no hub id."""
        match = _ID.fullmatch(text)
        # Two hyphens in a row are not allowed in an id, and keep names of folders apart.
        if match is None or "--" in match[1] or ".." in match[1]:
            return None
        return cls(match[1], match[2] or "")

    def __str__(self) -> str:
        return f"{self.repository}:{self.selector}" if self.selector else self.repository


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; `sha256` is empty for small ones, which the hub keeps in git."""

    path: str
    size: int
    sha256: str = ""

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


@dataclass(frozen=True, slots=True)
class HubModel:
    """A hub id as a source of `pull`."""

    id: HubId

    @property
    def name(self) -> str:
        return str(self.id)

    def offer(self) -> Offer:
        """Raises `ModelNotFound`, `FetchFailed`, `Offline`."""
        info = _model_info(self.id)
        chosen = choose(self.id, _files(info))
        return Offer(
            source=f"hub:{self.id.repository}@{info.sha}",
            licence=_licence(info),
            entry="" if _is_folder(chosen) else chosen[0].name,
            files=tuple(_remote(file) for file in chosen),
        )

    def staged(self, offer: Offer, folder: Path) -> int:
        commit = _commit(offer)
        return sum(_present(folder, file, commit) for file in offer.files)

    def fetch(self, offer: Offer, folder: Path, progress: Progress) -> None:
        """Raises `FetchFailed`, `ModelNotFound`, `Offline`, `OSError`."""
        commit, done = _commit(offer), 0
        for file in offer.files:
            if not (folder / file.name).exists():
                counted = _Counted(progress, done, offer.size)
                self._fetch_one(file, commit, _partial(folder, file, commit), counted)
                _partial(folder, file, commit).replace(folder / file.name)
            done += file.size
            progress(done, offer.size)

    def _fetch_one(self, file: RemoteFile, commit: str, partial: Path, counted: _Counted) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        url = hf_hub_url(self.id.repository, file.path, revision=commit, endpoint=_endpoint())
        with partial.open("ab") as out, hub_errors(self.id):
            http_get(
                url,
                cast(BinaryIO, counted.over(out)),
                resume_size=out.tell(),
                headers=build_hf_headers(),
                expected_size=file.size,
            )


@dataclass(slots=True)
class _Counted:
    """Reports the length of the file written to."""

    progress: Progress
    before: int
    total: int

    def over(self, out: io.BufferedWriter) -> _CountingFile:
        return _CountingFile(out, self)


class _CountingFile:
    """The part of a binary file that `http_get` uses, with each write reported."""

    def __init__(self, out: io.BufferedWriter, counted: _Counted) -> None:
        self._out, self._counted = out, counted
        self.seek, self.tell, self.truncate = out.seek, out.tell, out.truncate

    def write(self, data: bytes) -> int:
        written = self._out.write(data)
        # Unbuffered on purpose: what came in is what a resumed pull finds.
        self._out.flush()
        self._counted.progress(self._counted.before + self._out.tell(), self._counted.total)
        return written


def choose(wanted: HubId, files: Sequence[HubFile]) -> tuple[HubFile, ...]:
    """The files of the model that `wanted` names, the one to open first.

    Raises `ModelNotFound` listing what there is.
    """
    models = gguf_models(files)
    if wanted.selector.lower().endswith(".gguf"):
        return _named(wanted, models)
    if wanted.selector:
        return _of_quantisation(wanted, models)
    if len(models) == 1:
        return next(iter(models.values()))
    for quantisation in _PREFERRED:
        matching = _matching(quantisation, models)
        if matching:
            return matching
    folder = tuple(file for file in files if _FOLDER_FILES.fullmatch(file.path))
    if not models and _is_model_folder(folder):
        return folder
    raise ModelNotFound(
        f"{wanted} offers {_names(models) or 'no GGUF file and no safetensors folder'}",
        fix=f"name a file: {wanted.repository}:FILE" if models else "choose another repository",
    )


def gguf_models(files: Sequence[HubFile]) -> dict[str, tuple[HubFile, ...]]:
    """The GGUF models among `files` by path, the parts of a split one together, in order."""
    groups: dict[str, list[HubFile]] = {}
    for file in sorted(files, key=lambda file: file.path):
        if file.path.lower().endswith(".gguf") and not _BESIDE_MODELS.search(file.name):
            groups.setdefault(_SPLIT.sub("", file.path), []).append(file)
    return {path: tuple(parts) for path, parts in groups.items() if _complete(parts)}


def _complete(parts: Sequence[HubFile]) -> bool:
    numbers = [(m[1], m[2]) for part in parts if (m := _SPLIT.search(part.path))]
    return not numbers or [int(n) for n, _ in numbers] == list(range(1, int(numbers[0][1]) + 1))


def _named(wanted: HubId, models: Mapping[str, tuple[HubFile, ...]]) -> tuple[HubFile, ...]:
    for parts in models.values():
        if any(wanted.selector in (part.path, part.name) for part in parts):
            return parts
    raise _no_such(wanted, models)


def _of_quantisation(
    wanted: HubId, models: Mapping[str, tuple[HubFile, ...]]
) -> tuple[HubFile, ...]:
    found = _matching(wanted.selector, models)
    if not found:
        raise _no_such(wanted, models)
    return found


def _matching(
    quantisation: str, models: Mapping[str, tuple[HubFile, ...]]
) -> tuple[HubFile, ...] | None:
    """Of several files with the quantisation in their name, the one with the shortest name."""
    word = re.compile(rf"(^|[-._/]){re.escape(quantisation)}(?=[-._/]|$)", re.IGNORECASE)
    matching = sorted((path for path in models if word.search(path)), key=lambda p: (len(p), p))
    return models[matching[0]] if matching else None


def _no_such(wanted: HubId, models: Mapping[str, tuple[HubFile, ...]]) -> ModelNotFound:
    names = [PurePosixPath(path).name for path in models]
    near = nearest(wanted.selector, names)
    fix = f"did you mean {wanted.repository}:{near}?" if near else "name one of those"
    return ModelNotFound(
        f"{wanted.repository} has no {wanted.selector}; it offers {_names(models) or 'no GGUF'}",
        fix=fix,
    )


def _names(models: Mapping[str, tuple[HubFile, ...]]) -> str:
    names = [PurePosixPath(path).name for path in models]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _is_model_folder(files: Sequence[HubFile]) -> bool:
    names = [file.path for file in files]
    return "config.json" in names and any(name.endswith(".safetensors") for name in names)


def _is_folder(files: Sequence[HubFile]) -> bool:
    return not files[0].path.lower().endswith(".gguf")


def _remote(file: HubFile) -> RemoteFile:
    if not _PLAIN.fullmatch(file.name):
        raise FetchFailed(f"the hub offers a file of the name {file.name!r}, wanted a plain name")
    return RemoteFile(file.name, file.size, file.sha256, path=file.path)


def _commit(offer: Offer) -> str:
    return offer.source.rpartition("@")[2]


def _partial(folder: Path, file: RemoteFile, commit: str) -> Path:
    """Named by content, so that a file that changed at its source is not mixed with the old."""
    return folder / f"{file.name}.{(file.sha256 or commit)[:16]}.partial"


def _present(folder: Path, file: RemoteFile, commit: str) -> int:
    for path in (folder / file.name, _partial(folder, file, commit)):
        if path.is_file():
            return min(path.stat().st_size, file.size)
    return 0


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _model_info(wanted: HubId) -> ModelInfo:
    from huggingface_hub import HfApi

    with hub_errors(wanted):
        return HfApi(endpoint=_endpoint()).model_info(
            wanted.repository, files_metadata=True, timeout=30
        )


def _files(info: ModelInfo) -> list[HubFile]:
    return [
        HubFile(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else "")
        for file in info.siblings or ()
    ]


def _licence(info: ModelInfo) -> str:
    named = (tag.removeprefix("license:") for tag in info.tags or () if tag.startswith("license:"))
    return next(named, "not stated")


@contextlib.contextmanager
def hub_errors(wanted: HubId) -> Iterator[None]:
    """Map what `huggingface_hub` raises to our tree."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # The root of its HTTP library's errors; which library that is depends on its version.
    transport_error: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise Offline(
            f"{wanted} is not here and HF_HUB_OFFLINE forbids to fetch it", fix="unset it"
        ) from error
    except HfHubHTTPError as error:
        raise _refused(wanted, error) from error
    except transport_error as error:
        reason = str(error) or type(error).__name__
        raise FetchFailed(f"the hub cannot be reached for {wanted}: {reason}") from error
    except OSError as error:
        # http_get reports a body of another length than announced as a bare OSError.
        if error.errno is not None:
            raise
        raise FetchFailed(f"the hub sent another length than it announced for {wanted}") from error


def _refused(wanted: HubId, error: Exception) -> SuperfluidError:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    assert isinstance(error, HfHubHTTPError)
    status = error.response.status_code
    if isinstance(error, GatedRepoError) or status == 403:
        return FetchFailed(
            f"the hub refuses {wanted} ({status}): its licence must be accepted first",
            fix="accept it on the model's page and set HF_TOKEN to a token of that account",
        )
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        return ModelNotFound(
            f"the hub has no {wanted} ({status}), or shows it to its owners only",
            fix="check the name; for a private model set HF_TOKEN",
        )
    return FetchFailed(f"the hub answered {status} for {wanted}")
