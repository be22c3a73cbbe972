"""Finding, loading and silencing one libllama. One worker loads one library, once.

The order matters: the library's own libggml files first, by full path; its log taken before its
backends load; backends from its own folder only, and only when it has none built in.
"""

from __future__ import annotations

import ctypes as ct
import os
import stat
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from superfluid_adapter_llamacpp.elf import NotElf, read_elf
from superfluid_adapter_llamacpp.search import NotFound, library_in
from superfluid_adapter_llamacpp.symbols import BACKEND, OPTIONAL, REQUIRED, LogCallback, Signature
from superfluid_workerd.adapter import Device

_ERROR: Final = 4
_CONTINUED: Final = 5
_KEPT_LINES: Final = 8
_KINDS: Final = {0: "cpu", 1: "gpu", 2: "gpu", 3: "accelerator"}


MOST_BYTES: Final = 16 << 30


class NotLoadable(Exception):
    """The library does not load, or lacks what we call; the message is the loader's."""


class MissingSymbols(NotLoadable):
    """Functions that are not there."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"{len(names)} functions are missing: {', '.join(names)}")
        self.names = names


class Log:
    """What the library says: the last error lines are kept, the rest is dropped."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._level = 0
        self.callback = LogCallback(self._take)

    def _take(self, level: int, text: bytes, _data: object) -> None:
        self._level = self._level if level == _CONTINUED else level
        if self._level != _ERROR or not text:
            return
        words = text.decode(errors="replace")
        if level == _CONTINUED and self._lines:
            self._lines[-1] += words
        else:
            self._lines.append(words)

    def clear(self) -> None:
        """Forget what was said so far."""
        self._lines.clear()

    def reason(self, otherwise: str) -> str:
        """The kept lines as one, or `otherwise` when there are none."""
        lines = [" ".join(line.split()) for line in self._lines]
        return "; ".join(dict.fromkeys(line for line in lines if line)) or otherwise


@dataclass(frozen=True, slots=True)
class Library:
    """A loaded library; `call` holds its functions, typed. Attributes of `call` are functions."""

    path: Path
    call: Any
    log: Log
    loads_backends: bool = False
    """Whether its backends came from its folder."""

    def listen(self) -> None:
        """Take the library's messages, whoever in this process took them before."""
        self.call.llama_log_set(ct.cast(self.log.callback, ct.c_void_p), None)

    def text(self, name: str) -> str:
        """What an optional function without arguments says, or nothing."""
        function = getattr(self.call, name, None)
        said = function() if function is not None else None
        return said.decode(errors="replace") if isinstance(said, bytes) else ""

    def devices(self) -> tuple[Device, ...]:
        """What it can compute on."""
        return tuple(self._devices())

    def _devices(self) -> Iterator[Device]:
        call = self.call
        for index in range(call.ggml_backend_dev_count()):
            device = call.ggml_backend_dev_get(index)
            kind = _KINDS.get(call.ggml_backend_dev_type(device), "other")
            free, total = ct.c_size_t(), ct.c_size_t()
            call.ggml_backend_dev_memory(device, ct.byref(free), ct.byref(total))
            yield Device(
                name=_words(call.ggml_backend_dev_description(device))
                or _words(call.ggml_backend_dev_name(device)),
                kind=kind,
                memory=0 if kind == "cpu" else int(total.value),
            )


class _Functions:
    """Functions by name."""

    llama_log_set: Any
    ggml_backend_dev_count: Any

    def __init__(self, found: Mapping[str, Any]) -> None:
        self.__dict__.update(found)


def find(named: Path) -> Path:
    """The library that `named` means: a file itself, or the one in a folder or below it.

    Raises `NotLoadable` when there is none, or several that differ.
    """
    try:
        holds = named.is_dir()
    except OSError as error:
        raise NotLoadable(error.strerror or str(error)) from error
    if not holds:
        return _regular(named.absolute())
    try:
        return _regular(library_in(named.absolute()))
    except NotFound as error:
        raise NotLoadable(str(error)) from error


def _regular(path: Path) -> Path:
    """`path`, which may be opened: neither a pipe nor a device, and of a size to read."""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise NotLoadable("there is no such file") from error
    except OSError as error:
        raise NotLoadable(error.strerror or str(error)) from error
    if not stat.S_ISREG(found.st_mode):
        raise NotLoadable("no regular file")
    if found.st_size > MOST_BYTES:
        raise NotLoadable(f"a file of {found.st_size} bytes, the largest builds have a tenth")
    return path


def family(path: Path) -> list[Path]:
    """The libraries of `path`'s own folder that it loads, dependencies first, itself last."""
    real = path.resolve()
    order: list[Path] = []

    def visit(file: Path) -> None:
        if file in order:
            return
        for name in _needed(file):
            beside = real.parent / name
            if beside.exists() and beside.resolve() != file:
                visit(beside.resolve())
        order.append(file)

    visit(real)
    return order


def companions(path: Path) -> list[Path]:
    """Every file of this llama.cpp: itself, and each libggml beside it, backends included."""
    beside = path.resolve().parent.glob("libggml*")
    return sorted({path.resolve(), *(one.resolve() for one in beside if one.is_file())})


def load(path: Path) -> Library:
    """Load `path`, silent from its first byte; again, the one that is loaded.

    Raises `NotLoadable`, also for a second library: two builds in a process share what they must
    not, and crash.
    """
    for loaded in _KEPT:
        if loaded.path.resolve() == path.resolve():
            loaded.listen()
            return loaded
        raise NotLoadable(f"{loaded.path} is loaded already, a process holds one llama.cpp")
    # Without this a failed assertion forks a debugger that attaches to us.
    os.environ["GGML_NO_BACKTRACE"] = "1"
    handles = [_open(file) for file in family(path)]
    typed, missing = _bind(handles[-1:], REQUIRED)
    optional, _ = _bind(handles, OPTIONAL)
    backend, lacking = _bind(list(reversed(handles)), BACKEND)
    if missing or lacking:
        raise MissingSymbols([*missing, *lacking])
    functions, log = _Functions({**typed, **optional, **backend}), Log()
    functions.llama_log_set(ct.cast(log.callback, ct.c_void_p), None)
    bare = functions.ggml_backend_dev_count() == 0
    library = Library(path, functions, log, bare)
    _KEPT.append(library)
    if bare:
        library.call.ggml_backend_load_all_from_path(os.fsencode(path.resolve().parent))
    library.call.llama_backend_init()
    return library


_KEPT: Final[list[Library]] = []
"""Libraries stay loaded, and their callbacks alive, as long as the process."""


def _open(file: Path) -> ct.CDLL:
    try:
        return ct.CDLL(str(file))
    except OSError as error:
        raise NotLoadable(str(error)) from error


def _bind(
    handles: list[ct.CDLL], wanted: Mapping[str, Signature]
) -> tuple[dict[str, Any], list[str]]:
    """The functions `wanted`, each from the first of `handles` that has it; and who has none."""
    found: dict[str, Any] = {}
    for name, (result, arguments) in wanted.items():
        for handle in handles:
            function = getattr(handle, name, None)
            if function is not None:
                function.restype, function.argtypes = result, arguments
                found[name] = function
                break
    return found, [name for name in wanted if name not in found]


def _needed(file: Path) -> tuple[str, ...]:
    if sys.platform != "linux":
        return ()
    try:
        return read_elf(file).needed
    except (NotElf, OSError):
        return ()


def _words(said: bytes | None) -> str:
    return said.decode(errors="replace").strip() if said else ""
