"""What `superfluid-workerd ID about|info|compat|options|versions|plan|check|facts|tokenize` answer.

Adapters build these records, the daemon reads them; neither side needs the other's code.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from superfluid_compat.verdicts import Requirement, State


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
    """What a runtime is: its id, the formats it reads, what its worker may touch.

    `kit` is the contract number that the adapter was written against, a literal in its source:
    `numbers.KIT` would only say which kit is installed. `bundled` says that the runtime is in the
    adapter's own package; else it needs an install. `requires` is the contract that its library
    must share. `streams` says that it serves models larger than memory. `own_option` names the
    option by which a user gives a runtime of his own (a library, a virtual environment) in place
    of an install.
    """

    id: str
    summary: str
    formats: tuple[Format, ...]
    aliases: tuple[str, ...] = ()
    kit: int
    version: str = ""
    rights: Rights = msgspec.field(default_factory=Rights)
    bundled: bool = True
    requires: Requirement | None = None
    streams: bool = False
    own_option: str | None = None


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a runtime that an adapter installs on its own, newest first in a list.

    `here` is None when it installs on this machine, else the reason why not.
    """

    version: str
    backend: str = ""
    here: str | None = None
    contract: int | None = None


class About(msgspec.Struct, frozen=True, kw_only=True):
    """All that an adapter answers from data, in one answer; `options` as `Option.describe`."""

    info: AdapterInfo
    options: tuple[dict[str, Any], ...] = ()
    compat: dict[str, Any] = {}
    versions: tuple[Version, ...] = ()


class Wheel(msgspec.Struct, frozen=True, kw_only=True, tag="wheel"):
    """A wheel of the user's package index, unpacked into the folder `into` of the install.

    `sha256` is of the file that fits this machine; `size` in bytes.
    """

    name: str
    version: str
    size: int
    sha256: str
    into: str = ""


class Archive(msgspec.Struct, frozen=True, kw_only=True, tag="archive"):
    """A tar or zip file at an https URL, unpacked into `into` without its first `strip` folders."""

    url: str
    size: int
    sha256: str
    strip: int = 0
    into: str = ""


Artifact: TypeAlias = Wheel | Archive


class InstallPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What installing means: the daemon fetches and verifies, the adapter finishes the staged.

    `environment` holds the wheels of a private virtual environment, made from the daemon's own
    Python in the folder `venv`; the install's workers then run under it. Of what a user gave in
    place of the recipe, the one file is the artifact, with the digest that was found; of a folder
    there is none.
    """

    version: str
    backend: str = ""
    artifacts: tuple[Artifact, ...] = ()
    environment: tuple[Wheel, ...] = ()
    notes: tuple[str, ...] = ()


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """Something a runtime computes on; `memory` in bytes, 0 when it is the host's own."""

    name: str
    kind: str = "cpu"
    memory: int = 0


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What `check` found: the runtime's version, its contract number if it has one, its devices.

    `abi` is what the library states, or what the adapter found by evidence. `tested` False says
    that nobody tried this build. `files` are those that a worker reads or goes by, absolute: when
    one of them changes the answer is void, and all may be read. `problem` is None when the runtime
    works here, else one sentence; then `rule` is its reason code and `state` what it makes of it.
    """

    version: str
    abi: int | None = None
    devices: tuple[Device, ...] = ()
    tested: bool = True
    files: tuple[str, ...] = ()
    problem: str | None = None
    rule: str = "works"
    state: State = State.BROKEN
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


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One token of a text: its id, and its bytes, which may be a part of a character."""

    id: int
    text: bytes


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An error as it crosses a process boundary; `code` names the class in the error tree."""

    code: str
    message: str
    fix: str = ""
    param: str | None = None
    dossier: str | None = None
