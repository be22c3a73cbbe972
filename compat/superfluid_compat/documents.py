"""The JSON documents that host applications read, and their schemas.

`compat`, `runtimes`, `versions`, `options`, `serves` and `plan`. Each carries `schema`, the number
of its layout; `schemas/NAME-NUMBER.json` beside this file is its JSON schema. Within one number
fields are only added.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from superfluid_compat import numbers
from superfluid_compat.verdicts import Requirement, State


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """A version that the adapter installs on its own, and the contract number it has."""

    version: str
    backend: str
    contract: int | None = None


class VersionRow(Build, frozen=True, kw_only=True):
    """The same on this machine; `reason` says why it does not install here."""

    installs_here: bool
    reason: str | None = None
    installed: bool = False


class OptionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A declared option, with the names it has as a flag and in the environment."""

    name: str
    flag: str
    variable: str
    type: str
    help: str
    default: Any
    minimum: float | None
    maximum: float | None
    choices: list[str]
    keywords: list[str]
    unit: str
    scope: str


class RuntimeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One runtime and install. `install` is None for what ships with its adapter, or is not here.

    `rule` is the reason code of `state`; `abi` the contract number found, `requires` the one this
    build was made for. `installable` is the newest version that installs on this machine.
    """

    id: str
    install: str | None
    state: State
    rule: str
    problem: str | None
    fix: str
    version: str
    abi: int | None
    requires: Requirement | None
    formats: list[str]
    devices: list[str]
    sandbox: str
    installable: str | None
    in_use: bool
    pinned: bool
    aliases: list[str]
    distribution: str
    options: list[OptionRow]


class Runtimes(msgspec.Struct, frozen=True, kw_only=True):
    """`superfluid runtimes --json`."""

    superfluid: str
    runtimes: list[RuntimeRow]
    schema: int = numbers.COMPAT_SCHEMA


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """What one runtime makes of a model; `code` is the error's when it would refuse it."""

    id: str
    install: str | None
    serves: bool
    code: str | None = None
    reason: str = ""
    fix: str = ""
    exit_code: int = 0


class Serves(msgspec.Struct, frozen=True, kw_only=True):
    """`superfluid runtimes MODEL --json`: which runtime serves it and why."""

    model: str
    runtime: str | None
    install: str | None
    why: str
    exit_code: int
    candidates: list[Candidate]
    schema: int = numbers.COMPAT_SCHEMA


class RuntimeCompat(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter's half of its contracts; `contract` is what it says itself."""

    distribution: str
    distribution_version: str
    version: str = ""
    kit: int | None = None
    requires: Requirement | None = None
    formats: list[str] = []
    installs: list[Build] = []
    contract: dict[str, Any] = {}
    problem: str | None = None


class Compat(msgspec.Struct, frozen=True, kw_only=True):
    """`superfluid compat --json`, and `compat.json` beside a released wheel."""

    superfluid: str
    runtimes: dict[str, RuntimeCompat]
    link: int = numbers.LINK
    kit: int = numbers.KIT
    schema: int = numbers.COMPAT_SCHEMA


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """`superfluid runtime versions ID --json`."""

    runtime: str
    versions: list[VersionRow]
    schema: int = numbers.COMPAT_SCHEMA


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`superfluid runtime options ID --json`."""

    runtime: str
    options: list[OptionRow]
    schema: int = numbers.COMPAT_SCHEMA


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """An option's value, and where it comes from."""

    value: Any
    origin: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`superfluid serve MODEL --plan --json`: what would serve, and how.

    `options` go by their names as flags; `memory` holds bytes by part, none where the runtime
    makes no plan; `sandbox` is the best level that this machine reaches.
    """

    model: str
    path: str
    runtime: str
    install: str | None
    version: str
    why: str
    state: State
    rule: str
    sandbox: str
    options: dict[str, Setting]
    memory: dict[str, int]
    schema: int = numbers.COMPAT_SCHEMA


DOCUMENTS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "compat": Compat,
    "runtimes": Runtimes,
    "serves": Serves,
    "versions": Versions,
    "options": Options,
    "plan": Plan,
}
FOLDER: Final = Path(__file__).with_name("schemas")


def schema_name(document: str) -> str:
    """`compat-1.json`."""
    return f"{document}-{numbers.COMPAT_SCHEMA}.json"


def schema_text(document: str) -> str:
    """The JSON schema of a document, as it is shipped."""
    body = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"superfluid:{schema_name(document)}",
        **msgspec.json.schema(DOCUMENTS[document]),
    }
    return msgspec.json.format(msgspec.json.encode(body), indent=2).decode() + "\n"
