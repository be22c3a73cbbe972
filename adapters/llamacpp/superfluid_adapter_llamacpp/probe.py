"""Judging a library in throwaway processes, and remembering what was found.

A library may crash or hang whoever loads it, so it is loaded here only after it has been judged:
once for its evidence and once for the canary, each in a child under a time limit. What serves is
kept, by the real paths, sizes and times of its files and the library's digest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from superfluid_adapter_llamacpp.canary import Sung
from superfluid_adapter_llamacpp.contained import Ended, ask
from superfluid_adapter_llamacpp.contracts import known
from superfluid_adapter_llamacpp.evidence import STAGES, Evidence, digest
from superfluid_adapter_llamacpp.judge import Judgement, Reason, judge
from superfluid_adapter_llamacpp.library import NotLoadable, companions, find
from superfluid_compat.errors import RuntimeBroken
from superfluid_workerd.link.answers import Device

LIMIT_S: Final = 10.0
_SHOWN_WORDS: Final = 300
_PARTIAL: Final = ".probe-"
_PARTIAL_S: Final = 60.0
_EVIDENCE: Final = "superfluid_adapter_llamacpp.evidence"
_CANARY: Final = "superfluid_adapter_llamacpp.canary"
_AGAIN: Final = "serve it again: it is then judged anew"
_STAGES: Final = {
    "start": "before it was read",
    "look": "while it was read",
    "load": "while it loaded",
    "defaults": "while it gave its defaults",
    "done": "at its end",
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one library file; `reason` is None when it serves by `contract`."""

    path: str
    contract: int | None = None
    reason: Reason | None = None
    sentence: str = ""
    fix: str = ""
    version: str = ""
    devices: tuple[Device, ...] = ()
    gpu_offload: bool = False
    digest: str = ""
    tested: bool = False
    files: tuple[str, ...] = ()
    """All that it took to load it."""
    folder: str = ""
    """Where it loads its backends from."""

    @property
    def judgement(self) -> Judgement:
        return Judgement(self.contract, self.reason, self.sentence, self.fix)


class _Kept(msgspec.Struct, frozen=True):
    identity: list[tuple[str, int, int]]
    digest: str
    code: int
    finding: Finding


def examine(named: Path, cache: Path | None = None, limit_s: float = LIMIT_S) -> Finding:
    """The finding on the library that `named` (a file or a folder) means; from `cache` when the
    files are those of last time, and kept there when that can be written. Only what serves is
    kept: the cause of a failure may lie elsewhere, or be over."""
    kept = _recall(cache, named)
    if kept is not None and _changed(kept) is None and _same(named, kept):
        return kept.finding
    finding = _probe(named, limit_s)
    if finding.reason is None:
        _keep(cache, named, finding)
    return finding


def recall(named: Path, cache: Path | None) -> Finding:
    """What `examine` kept of the library, for a process that may start none.

    Raises `RuntimeBroken` when it kept nothing, or of other files than are there now."""
    kept = _recall(cache, named)
    if kept is None:
        raise RuntimeBroken(f"{named} was not judged before it was to be loaded", fix=_AGAIN)
    changed = _changed(kept)
    if changed is not None:
        raise RuntimeBroken(f"{changed} since {named} was judged", fix=_AGAIN)
    return kept.finding


def record(named: Path, cache: Path) -> Path:
    """The file in `cache` that holds the finding on `named`."""
    name = hashlib.sha256(os.fsencode(named.absolute())).hexdigest()
    return cache / f"probe-{name[:32]}.json"


@functools.lru_cache(maxsize=8)
def _digest(path: Path, _identity: tuple[tuple[str, int, int], ...]) -> str:
    """A process that asks again of the same file need not read it again."""
    return digest(path)


def investigate(path: Path, limit_s: float = LIMIT_S) -> tuple[Evidence, Judgement]:
    """What the library that `path` means shows of itself, and what follows of that and of the
    canary."""
    ended = ask([_EVIDENCE, STAGES, str(path)], limit_s)
    found = _decoded(ended, path)
    judgement = _died(found, ended) if ended.how or not found.complete else judge(found)
    if judgement.reason is None:
        judgement = _sing(Path(found.path), judgement, limit_s)
    return found, judgement


def _probe(path: Path, limit_s: float) -> Finding:
    found, judgement = investigate(path, limit_s)
    fits = judgement.reason in (None, "canary-failed")
    own = digest(Path(found.path)) if fits else ""
    published = known().get(own)
    return Finding(
        path=found.path,
        contract=judgement.contract,
        reason=judgement.reason,
        sentence=judgement.sentence,
        fix=judgement.fix,
        version=published.build if published else _version(found),
        devices=found.devices,
        gpu_offload=found.gpu_offload,
        digest=own,
        tested=published is not None,
        files=found.files,
        folder=found.folder,
    )


def _version(found: Evidence) -> str:
    """What the library calls itself, as one word; builds that differ may say the same."""
    return found.version or (f"ggml-{found.ggml_version}" if found.ggml_version else "")


def _decoded(ended: Ended, path: Path) -> Evidence:
    for line in reversed(ended.lines):
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(line, type=Evidence)
    return Evidence(path=str(path))


def _died(found: Evidence, ended: Ended) -> Judgement:
    how = ended.how or "ended with code 0"
    words = " ".join(ended.said.split()[-40:])[-_SHOWN_WORDS:]
    said = f" ({words})" if words else ""
    return Judgement(
        reason="cannot-load",
        sentence=f"{found.path} {how} {_STAGES[found.stage]}, in a process of its own{said}",
        fix="get a build for this processor and system, or run superfluid runtime install llamacpp",
    )


def _sing(path: Path, judgement: Judgement, limit_s: float) -> Judgement:
    """The canary's word on a contract that the evidence fits."""
    ended = ask([_CANARY, str(path), str(judgement.contract)], limit_s)
    wrong = f"it {ended.how}" if ended.how else _sung(ended)
    if not wrong:
        return judgement
    return Judgement(
        contract=judgement.contract,
        reason="canary-failed",
        sentence=f"{path} has the defaults of contract {judgement.contract}, but not its "
        f"behaviour: {wrong}",
        fix="run superfluid runtime install llamacpp, and report this with the output of python "
        f"-m superfluid_adapter_llamacpp.evidence {path}",
    )


def _sung(ended: Ended) -> str:
    try:
        return msgspec.json.decode(ended.lines[-1], type=Sung).wrong
    except (IndexError, msgspec.MsgspecError):
        return "it ended with code 0 before all was tried"


# What was found before.


def _identity(paths: Iterable[str]) -> list[tuple[str, int, int]]:
    """Files with size and time."""
    stats = [(one, Path(one).stat()) for one in sorted(set(paths))]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _changed(kept: _Kept) -> str | None:
    """What of the files that were judged is not as it was, in words that `since` goes on from."""
    for name, size, modified in kept.identity:
        try:
            found = Path(name).stat()
        except OSError as error:
            return f"{name} is out of reach ({error.strerror})"
        if (found.st_size, found.st_mtime_ns) != (size, modified):
            return f"{name} has changed"
    real = Path(kept.finding.path).resolve()
    try:
        same = _digest(real, tuple(kept.identity)) == kept.digest
    except OSError as error:
        return f"{real} is out of reach ({error.strerror})"
    return None if same else f"{real} has changed"


def _same(named: Path, kept: _Kept) -> bool:
    """Whether `named` means that library still, with the same files beside it."""
    try:
        path = find(named)
        beside = {str(one) for one in companions(path)}
    except (NotLoadable, OSError):
        return False
    return str(path) == kept.finding.path and beside <= {name for name, _, _ in kept.identity}


def _code() -> int:
    """When the code that judges last changed."""
    return max(one.stat().st_mtime_ns for one in Path(__file__).parent.glob("*.*"))


def _recall(cache: Path | None, named: Path) -> _Kept | None:
    if cache is None:
        return None
    try:
        kept = msgspec.json.decode(record(named, cache).read_bytes(), type=_Kept)
    except (OSError, msgspec.MsgspecError):
        return None
    return kept if kept.code == _code() else None


def _keep(cache: Path | None, named: Path, finding: Finding) -> None:
    if cache is None:
        return
    with contextlib.suppress(OSError):
        real = str(Path(finding.path).resolve())
        kept = _Kept(_identity([real, *finding.files]), finding.digest, _code(), finding)
        _sweep(cache)
        with tempfile.NamedTemporaryFile(dir=cache, prefix=_PARTIAL, delete=False) as file:
            file.write(msgspec.json.encode(kept))
        Path(file.name).replace(record(named, cache))


def _sweep(cache: Path) -> None:
    """Remove what processes left that were killed while they wrote."""
    for one in cache.glob(f"{_PARTIAL}*"):
        if time.time() - one.stat().st_mtime > _PARTIAL_S:
            one.unlink(missing_ok=True)
