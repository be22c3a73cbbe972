"""Which library serves: the one an option names, the environment's, or the install's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from superfluid_adapter_llamacpp.probe import Finding, examine, recall
from superfluid_compat.errors import (
    ContractRefused,
    RuntimeBroken,
    RuntimeNotInstalled,
    RuntimeUnavailable,
)
from superfluid_compat.verdicts import State
from superfluid_workerd import sandbox
from superfluid_workerd.adapter import Options
from superfluid_workerd.values import Values

VARIABLE: Final = "SUPERFLUID_LLAMA_LIB"
INSTALL: Final = "superfluid runtime install llamacpp"


def named_library(options: Options, installed: Path | None) -> Path:
    """The file or folder to take the library from; nothing else is searched.

    Raises `RuntimeNotInstalled` when none is named.
    """
    given = Values(options).text("lib", None)
    if given is not None:
        return Path(given)
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    if installed is not None:
        return installed
    raise RuntimeNotInstalled(
        "llama.cpp is not installed",
        fix=f"run {INSTALL}, or name a library with --llamacpp-lib",
    )


def require(named: Path, cache: Path | None) -> Finding:
    """The finding on a library that may be loaded: a confined process starts none and goes by what
    was found before. Raises `RuntimeUnavailable` for any other."""
    confined = sandbox.reached().level != "none"
    finding = recall(named, cache) if confined else examine(named, cache)
    if finding.reason is not None:
        kind = _KINDS.get(finding.judgement.state, RuntimeBroken)
        raise kind(finding.sentence, fix=finding.fix or None)
    return finding


_KINDS: Final[dict[State, type[RuntimeUnavailable]]] = {State.REFUSED: ContractRefused}
