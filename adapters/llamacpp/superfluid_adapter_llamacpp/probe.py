"""Judging a library in throwaway processes, and remembering what was found.

A library may crash or hang whoever loads it, so it is loaded here only after it has been judged:
once for its evidence and once for the canary, each in a child under a time limit. What was found
is kept by the file's real path, size, time and digest.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from superfluid_adapter_llamacpp.canary import Sung
from superfluid_adapter_llamacpp.contracts import known
from superfluid_adapter_llamacpp.evidence import Evidence, digest
from superfluid_adapter_llamacpp.judge import Judgement, Reason, judge
from superfluid_adapter_llamacpp.library import NotLoadable, companions, find
from superfluid_adapter_llamacpp.tiny import write_tiny
from superfluid_workerd.link.answers import Device

LIMIT_S: Final = 10.0
_SHOWN_WORDS: Final = 300
_EVIDENCE: Final = "superfluid_adapter_llamacpp.evidence"
_CANARY: Final = "superfluid_adapter_llamacpp.canary"
_STAGES: Final = {
    "start": "before it was read",
    "look": "while it was read",
    "load": "while it loaded",
    "defaults": "while it gave its defaults",
    "digests": "after it gave its defaults",
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

    @property
    def judgement(self) -> Judgement:
        return Judgement(self.contract, self.reason, self.sentence, self.fix)


class _Kept(msgspec.Struct, frozen=True):
    identity: list[tuple[str, int, int]]
    digest: str
    code: int
    finding: Finding


@dataclass(frozen=True, slots=True)
class _Ended:
    lines: list[bytes]
    how: str
    """Empty for an exit with code 0."""


def examine(named: Path, cache: Path | None = None, limit_s: float = LIMIT_S) -> Finding:
    """The finding on the library that `named` (a file or a folder) means; from `cache` when the
    files are those of last time, and kept there when that can be written."""
    try:
        path = find(named)
        identity = _identity(path)
    except (NotLoadable, OSError):
        return _probe(named, limit_s)
    kept = _recall(cache, path)
    own = _digest(path, tuple(identity))
    if kept is not None and kept.identity == identity and kept.digest == own:
        return kept.finding
    finding = _probe(path, limit_s)
    _keep(cache, path, _Kept(identity, own, _code(), finding))
    return finding


@functools.lru_cache(maxsize=8)
def _digest(path: Path, identity: tuple[tuple[str, int, int], ...]) -> str:
    """A process that asks again of the same file need not read it again."""
    return digest(path)


def _probe(path: Path, limit_s: float) -> Finding:
    ended = _child([_EVIDENCE, str(path)], limit_s)
    found = _decoded(ended, path)
    judgement = judge(found) if not ended.how else _died(found, ended)
    if judgement.reason is None and judgement.contract is not None:
        judgement = _sing(Path(found.path), judgement, limit_s)
    own = found.digests.get(Path(found.path).resolve().name, "")
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
    )


def _version(found: Evidence) -> str:
    """What the library calls itself, as one word; builds that differ may say the same."""
    return found.version or (f"ggml-{found.ggml_version}" if found.ggml_version else "")


def _decoded(ended: _Ended, path: Path) -> Evidence:
    for line in reversed(ended.lines):
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(line, type=Evidence)
    return Evidence(path=str(path))


def _died(found: Evidence, ended: _Ended) -> Judgement:
    return Judgement(
        reason="cannot-load",
        sentence=f"{found.path} {ended.how} {_STAGES[found.stage]}, in a process of its own",
        fix="get a build for this processor and system, or superfluid runtime install llamacpp",
    )


def _sing(path: Path, judgement: Judgement, limit_s: float) -> Judgement:
    """The canary's word on a contract that the evidence fits."""
    with tempfile.TemporaryDirectory(prefix="canary-") as folder:
        model = write_tiny(Path(folder) / "canary.gguf")
        ended = _child([_CANARY, str(path), str(judgement.contract), str(model)], limit_s)
    wrong = ended.how or "said nothing"
    if not ended.how and ended.lines:
        wrong = msgspec.json.decode(ended.lines[-1], type=Sung).wrong
    if not wrong:
        return judgement
    return Judgement(
        contract=judgement.contract,
        reason="canary-failed",
        sentence=f"{path} looks like contract {judgement.contract}, but with a tiny model {wrong}",
        fix="report this with the output of python -m superfluid_adapter_llamacpp.evidence",
    )


def _child(words: list[str], limit_s: float) -> _Ended:
    """Run a module of ours; how it ended, if not well, in words that follow a file's name."""
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    command = [sys.executable, "-m", *words]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return _Ended((error.stdout or b"").splitlines(), f"did not answer for {limit_s:g} s")
    lines = done.stdout.splitlines()
    if done.returncode == 0:
        return _Ended(lines, "")
    said = " ".join(done.stderr.decode(errors="replace").split()[-40:])[-_SHOWN_WORDS:]
    how = _ending(done.returncode)
    return _Ended(lines, f"{how} ({said})" if said else how)


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"died by {signal.Signals(-code).name}"
    except ValueError:
        return f"died by signal {-code}"


# What was found before.


def _identity(path: Path) -> list[tuple[str, int, int]]:
    """Every file that takes part, with size and time."""
    stats = [(str(one), one.stat()) for one in companions(path)]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _code() -> int:
    """When the code that judges last changed."""
    return max(one.stat().st_mtime_ns for one in Path(__file__).parent.glob("*.*"))


def _place(cache: Path, path: Path) -> Path:
    from hashlib import sha256

    return cache / f"probe-{sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"


def _recall(cache: Path | None, path: Path) -> _Kept | None:
    if cache is None:
        return None
    try:
        kept = msgspec.json.decode(_place(cache, path).read_bytes(), type=_Kept)
    except (OSError, msgspec.MsgspecError):
        return None
    return kept if kept.code == _code() else None


def _keep(cache: Path | None, path: Path, kept: _Kept) -> None:
    if cache is None:
        return
    place = _place(cache, path)
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile(dir=cache, prefix=".probe-", delete=False) as file:
            file.write(msgspec.json.encode(kept))
        Path(file.name).replace(place)
