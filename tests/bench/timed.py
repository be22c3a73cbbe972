"""A program of ours with clocks in it: `python timed.py FILE MODULE [ARGUMENTS]`.

What each part took of its thread's processor time, its own parts left out, adds up in FILE, which
whoever measures reads meanwhile. For a worker it stands in the place of its command, without a
sandbox, since it imports first what the sandbox would let in later.
"""

from __future__ import annotations

import importlib
import mmap
import runpy
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

Place: TypeAlias = tuple[str, str, str]
"""Module, class and method."""

_ENGINE: Final = ("llama_decode", "llama_get_logits_ith")
WORKER: Final[Mapping[str, tuple[Place, ...]]] = {
    "engine": (),
    "adapter": (("superfluid_adapter_llamacpp.runtime", "LlamaRuntime", "step"),),
    "sampling": (("superfluid_workerd.sampling.sampler", "Sampler", "draw"),),
    "detokenising": (("superfluid_workerd.stream", "Stream", "_take"),),
    "link": (("superfluid_workerd.link.transport", "Link", "send"),),
    "turn loop": (
        ("superfluid_workerd.executor", "Executor", "_turn"),
        ("superfluid_workerd.executor", "Executor", "_receive"),
    ),
}
DAEMON: Final[Mapping[str, tuple[Place, ...]]] = {
    "link": (("superfluid.supervisor.worker", "Worker", "_read"),),
    "streams": (("superfluid.supervisor.host", "ModelHost", "frame"),),
}
SIDES: Final = {"daemon": DAEMON, "worker": WORKER}
_CELL: Final = struct.Struct("=d")
FILE_BYTES: Final = 4096


class Clocks:
    """Seconds by part, in shared memory."""

    def __init__(self, path: Path, parts: Mapping[str, tuple[Place, ...]]) -> None:
        with path.open("r+b") as file:
            self._cells = mmap.mmap(file.fileno(), FILE_BYTES)
        self._parts = parts
        self._spent = [0.0] * len(parts)
        self._within = threading.local()

    def install(self) -> None:
        """Put a clock around every place."""
        for part, (_, places) in enumerate(self._parts.items()):
            for module, owner, method in places:
                kind = getattr(importlib.import_module(module), owner)
                setattr(kind, method, self.around(part, getattr(kind, method)))
        if "engine" in self._parts:
            kind = importlib.import_module("superfluid_adapter_llamacpp.context").Context
            kind.__init__ = self._opening(kind.__init__)

    def _opening(self, begin: Callable[..., None]) -> Callable[..., None]:
        """Clocks around the library's own functions, once a context has them."""

        def opened(context: Any, *arguments: Any) -> None:
            begin(context, *arguments)
            functions = vars(context._call)
            for name in _ENGINE:
                functions[name] = self.around(0, functions[name])

        return opened

    def around(self, part: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its time counted for `part` but for what inner clocks count."""
        within, spent, clock = self._within, self._spent, time.thread_time

        def timed(*arguments: Any, **named: Any) -> Any:
            outer, within.s = getattr(within, "s", 0.0), 0.0
            start = clock()
            try:
                return function(*arguments, **named)
            finally:
                took = clock() - start
                spent[part] += took - within.s
                within.s = outer + took
                _CELL.pack_into(self._cells, part * _CELL.size, spent[part])

        return timed


def read(path: Path, parts: Mapping[str, object]) -> dict[str, float]:
    """Seconds so far, by part."""
    cells = path.read_bytes()
    return {name: _CELL.unpack_from(cells, at * _CELL.size)[0] for at, name in enumerate(parts)}


def main() -> None:
    """Become the module, which sees its own arguments alone."""
    path, module = Path(sys.argv[1]), sys.argv[2]
    del sys.argv[1:3]
    if "serve" in sys.argv:
        Clocks(path, DAEMON if module == "superfluid" else WORKER).install()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
