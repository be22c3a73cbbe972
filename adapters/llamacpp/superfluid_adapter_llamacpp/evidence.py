"""What one library shows of itself, gathered in a process that may die of it.

    python -m superfluid_adapter_llamacpp.evidence --stages LIB

prints a line of JSON after each stage, each with all that is known so far; its last line is the
whole evidence. Without `--stages` this is `report`, for people who add a build to `contracts.json`.
"""

from __future__ import annotations

import ctypes as ct
import hashlib
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from superfluid_adapter_llamacpp.contained import contain
from superfluid_adapter_llamacpp.elf import NotElf, read_elf
from superfluid_adapter_llamacpp.library import (
    MissingSymbols,
    NotLoadable,
    companions,
    family,
    find,
    load,
)
from superfluid_adapter_llamacpp.params import default_bytes
from superfluid_workerd.link.answers import Device

_BUFFER_BYTES: Final = 1024
_SHOWN_BYTES: Final = 256
_FILLS: Final = (0xAA, 0x55)
_GETTERS: Final = ("llama_model_default_params", "llama_context_default_params")
_READ_BYTES: Final = 1 << 20
STAGES: Final = "--stages"


class Written(msgspec.Struct, frozen=True):
    """Where the bytes that a getter wrote end, and which bytes before that it left alone."""

    end: int
    holes: tuple[int, ...]


class Evidence(msgspec.Struct, kw_only=True):
    """All that was found, up to `stage`. Default bytes are hex."""

    path: str
    stage: str = "start"
    not_library: str = ""
    machine: str = ""
    glibc: tuple[int, ...] = ()
    missing_libraries: tuple[str, ...] = ()
    load_error: str = ""
    missing_symbols: tuple[str, ...] = ()
    version: str = ""
    ggml_version: str = ""
    ggml_commit: str = ""
    model_defaults: str = ""
    context_defaults: str = ""
    model_written: Written | None = None
    context_written: Written | None = None
    devices: tuple[Device, ...] = ()
    gpu_offload: bool = False
    system: str = ""
    files: tuple[str, ...] = ()
    """Every file that it took to load it, itself among them."""
    folder: str = ""
    """Where its backends were loaded from, when they are not built in."""
    complete: bool = False
    """Whether this is the last line: what ends before has not answered."""


class _Stop(Exception):
    """What was found so far decides."""


def present_glibc() -> tuple[int, ...]:
    """This machine's glibc, or nothing where there is none."""
    name, version = platform.libc_ver()
    return tuple(int(part) for part in version.split(".")) if name == "glibc" else ()


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            found.update(block)
    return found.hexdigest()


def gather(path: Path, answers: int) -> None:
    """Everything about `path`, a line of JSON to the descriptor `answers` after each stage."""
    found = Evidence(path=str(path))
    try:
        for stage in (_look, _load, _defaults):
            found.stage = stage.__name__.strip("_")
            _say(found, answers)
            stage(Path(found.path), found)
    except _Stop:
        pass
    else:
        found.stage = "done"
    found.complete = True
    _say(found, answers)


def _say(found: Evidence, answers: int) -> None:
    os.write(answers, msgspec.json.encode(found) + b"\n")


def _mapped() -> set[str]:
    """Files in this process's memory, by their real paths; none where the system does not say."""
    if sys.platform != "linux":
        return set()
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    return {words[5] for line in lines if len(words := line.split(None, 5)) == 6}


def _look(path: Path, found: Evidence) -> None:
    """Read the file before anything of it runs."""
    try:
        path = find(path)
        found.path = str(path)
        if sys.platform == "linux":
            _look_elf(path, found)
    except (NotElf, NotLoadable) as error:
        found.not_library = str(error)
    except OSError as error:
        found.not_library = error.strerror or str(error)
    if found.not_library:
        raise _Stop


def _look_elf(path: Path, found: Evidence) -> None:
    from superfluid_adapter_llamacpp.elf import here

    elf = read_elf(path)
    found.machine = elf.machine
    if elf.machine != here():
        raise _Stop
    beside = [one for one in companions(path) if one != path.resolve() and ".so" in one.name]
    found.glibc = max([elf.glibc, *(read_elf(one).glibc for one in beside)])
    if found.glibc > present_glibc() > ():
        raise _Stop
    own = path.resolve().parent
    named = [re.sub(r"\$(\{ORIGIN\}|ORIGIN)", str(own), one) for one in elf.runpath]
    folders = [own, *map(Path, named)]
    found.missing_libraries = tuple(
        name for name in elf.needed if not any((folder / name).exists() for folder in folders)
        and not _loads(name)
    )  # fmt: skip
    if found.missing_libraries:
        raise _Stop


def _loads(name: str) -> bool:
    """Whether the system has a library of that name; this process is thrown away."""
    try:
        ct.CDLL(name)
    except OSError as error:
        return f"{name}: cannot open shared object file" not in str(error)
    return True


def _load(path: Path, found: Evidence) -> None:
    before = _mapped()
    try:
        library = load(path)
    except MissingSymbols as error:
        found.missing_symbols = tuple(error.names)
    except NotLoadable as error:
        found.load_error = str(error)
    else:
        found.version = library.text("llama_version")
        found.ggml_version = library.text("ggml_version")
        found.ggml_commit = library.text("ggml_commit")
        found.devices = library.devices()
        found.gpu_offload = bool(library.call.llama_supports_gpu_offload())
        new = {one for one in _mapped() - before if Path(one).is_file()}
        found.files = tuple(sorted({*new, *map(str, [*family(path), *companions(path)])}))
        found.folder = str(path.resolve().parent) if library.loads_backends else ""
        found.system = library.text("llama_print_system_info")
        _LOADED.append(library)
    if found.missing_symbols or found.load_error:
        raise _Stop


_LOADED: Final[list[Any]] = []


def _defaults(_path: Path, found: Evidence) -> None:
    model, context = (getattr(_LOADED[0].call, name) for name in _GETTERS)
    found.model_defaults = default_bytes(model)[:_SHOWN_BYTES].hex()
    found.context_defaults = default_bytes(context)[:_SHOWN_BYTES].hex()
    if sys.platform == "linux" and platform.machine() == "x86_64":
        found.model_written = _written(model)
        found.context_written = _written(context)


def _written(getter: Any) -> Written:
    """What the getter writes. A struct of more than 16 bytes is returned through a pointer that
    the System V x86-64 ABI passes as the first integer argument, so the buffer can be ours."""
    address = ct.cast(getter, ct.c_void_p).value or 0
    function = ct.CFUNCTYPE(ct.c_void_p, ct.c_void_p)(address)
    passes = []
    for fill in _FILLS:
        buffer = (ct.c_uint8 * _BUFFER_BYTES)(*[fill] * _BUFFER_BYTES)
        function(ct.addressof(buffer))
        passes.append(bytes(buffer))
    same = [at for at, (one, two) in enumerate(zip(*passes, strict=True)) if one == two]
    end = same[-1] + 1 if same else 0
    return Written(end, tuple(sorted(set(range(end)) - set(same))))


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == [STAGES]:
        contain(lambda answers: gather(Path(words[1]), answers))
    from superfluid_adapter_llamacpp.report import main as report

    report(words)


if __name__ == "__main__":
    main()
