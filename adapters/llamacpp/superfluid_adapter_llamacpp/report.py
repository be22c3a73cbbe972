"""The evidence on one library as one JSON document, for people who add a build to `contracts.json`.

    python -m superfluid_adapter_llamacpp.evidence LIB [--build BUILD] [--source SOURCE]

The library runs in processes that are thrown away, within the probe's limits. Exit codes: 0 for a
library that keeps a contract we serve, 4 for any other, 2 for words that are not understood. The
document comes with 0 and with 4; each of its members stands on a line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from superfluid_adapter_llamacpp.contracts import Known, known
from superfluid_adapter_llamacpp.elf import here
from superfluid_adapter_llamacpp.evidence import Evidence, digest
from superfluid_adapter_llamacpp.judge import Judgement, nearest
from superfluid_adapter_llamacpp.library import companions
from superfluid_adapter_llamacpp.probe import LIMIT_S, investigate
from superfluid_compat.errors import ExitCode


def report(
    named: Path, build: str = "", source: str = "", limit_s: float = LIMIT_S
) -> tuple[Judgement, Mapping[str, Any]]:
    """The judgement on the library that `named` means, and the document: the judgement, the
    nearest contract with all that differs from it, the row for `known` where the contract is one
    we know, the evidence, the digests of its files."""
    found, judgement = investigate(named, limit_s)
    evidence: dict[str, Any] = msgspec.to_builtins(found)
    near, differences = nearest(found) if found.context_defaults else (None, ())
    digests = dict(_digests([] if found.not_library else companions(Path(found.path))))
    return judgement, {
        "path": evidence.pop("path"),
        "contract": judgement.contract,
        "reason": judgement.reason,
        "sentence": judgement.sentence,
        "fix": judgement.fix,
        "nearest": near,
        "differences": differences,
        "known": _row(found, judgement, digests, build, source),
        **evidence,
        "digests": digests,
    }


def _digests(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for one in files:
        with contextlib.suppress(OSError):
            yield one.name, digest(one)


def _row(
    found: Evidence, judgement: Judgement, digests: Mapping[str, str], build: str, source: str
) -> Mapping[str, Any] | None:
    """The entry for `known`: the one that is there, or a new one. No library says which build it
    is, or whose."""
    own = digests.get(Path(found.path).resolve().name)
    if own is None or judgement.contract is None or judgement.reason == "canary-failed":
        return None
    platform = f"{sys.platform}-{here()}"
    new = Known(build, source, judgement.contract, platform, own)
    row: dict[str, Any] = msgspec.to_builtins(known().get(own, new))
    return row


def _text(document: Mapping[str, Any]) -> str:
    """JSON with a line for each member, so that a row is written as it stands in the file."""
    lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in document.items())
    return "{\n" + ",\n".join(lines) + "\n}"


def main(words: Sequence[str]) -> NoReturn:
    parser = argparse.ArgumentParser(
        prog="python -m superfluid_adapter_llamacpp.evidence",
        description="What a libllama shows of itself, as one JSON document. Exit code 0: it keeps "
        "a contract that is served; 4: it does not, and the document says why.",
    )
    parser.add_argument("lib", type=Path, metavar="LIB", help="the library's file or folder")
    parser.add_argument("--build", default="", help="which build it is, for its row in known")
    parser.add_argument("--source", default="", help="where it comes from, for its row in known")
    given = parser.parse_args(words)
    judgement, document = report(given.lib, given.build, given.source)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(_text(document))
    sys.exit(ExitCode.OK if judgement.reason is None else ExitCode.RUNTIME)
