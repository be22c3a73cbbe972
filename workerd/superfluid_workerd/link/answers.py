"""What `superfluid-workerd ID info|compat|options|versions|plan|check|facts` answer, as JSON.

Adapters build these records, the daemon reads them; neither side needs the other's code.
"""

from __future__ import annotations

from typing import Any

import msgspec

from superfluid_compat import numbers


class Rights(msgspec.Struct, frozen=True, kw_only=True):
    """What an adapter's worker needs beyond its model (read), its install (read) and its scratch.

    `read` and `devices` are absolute paths; `spawn` allows child processes while it loads.
    """

    read: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    spawn: bool = False


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """How the daemon recognises a model without parsing it.

    A file by its first bytes (`magic`, in hex), a folder by `holds`: patterns, each of which must
    match a name in it.
    """

    name: str
    magic: str = ""
    holds: tuple[str, ...] = ()


GGUF = Format(name="gguf", magic=b"GGUF".hex())
SAFETENSORS = Format(name="safetensors", holds=("config.json", "*.safetensors"))


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a runtime is: its id, the formats it reads, what its worker may touch."""

    id: str
    summary: str
    formats: tuple[Format, ...]
    aliases: tuple[str, ...] = ()
    kit: int = numbers.KIT
    version: str = ""
    rights: Rights = msgspec.field(default_factory=Rights)


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a runtime that an adapter installs on its own, newest first in a list.

    `here` is None when it installs on this machine, else the reason why not.
    """

    version: str
    backend: str = ""
    here: str | None = None
    contract: int | None = None


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to fetch: a requirement of the package index or an https URL, with its digest."""

    source: str
    name: str
    size: int
    sha256: str


class InstallPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What installing means: the daemon fetches and verifies, the adapter finishes the staged."""

    version: str
    backend: str = ""
    artifacts: tuple[Artifact, ...] = ()
    notes: tuple[str, ...] = ()


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """Something a runtime computes on; `memory` in bytes, 0 when it is the host's own."""

    name: str
    kind: str = "cpu"
    memory: int = 0


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What `check` found: the runtime's version, its contract number if it has one, its devices.

    `problem` is None when the runtime works here, else one sentence; `rule` is its reason code.
    """

    version: str
    abi: int | None = None
    devices: tuple[Device, ...] = ()
    problem: str | None = None
    rule: str = "ok"
    fix: str = ""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A model by its header alone. `parameters` counts weights; `bytes` is what lies on disk."""

    format: str
    architecture: str
    name: str = ""
    parameters: int = 0
    bytes: int = 0
    context: int = 0
    vocabulary: int = 0
    layers: int = 0
    types: dict[str, int] = {}
    """Tensors by their type's name."""
    template: bool = False
    detail: dict[str, Any] = {}


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An error as it crosses a process boundary; `code` names the class in the error tree."""

    code: str
    message: str
    fix: str = ""
    param: str | None = None
    dossier: str | None = None
