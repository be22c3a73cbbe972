"""Compiled kernels on disk: written by a process that holds no model, read by those that do.

A file is a pickle, so whoever may write one runs code in every reader: only a writer that never
saw an untrusted model is opened `writable`. numba's own cache tries a probe file before it trusts a
folder and falls back to another; this one reads exactly one folder and writes only if told to.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any


@cache
def version_key() -> str:
    """Names everything that compiled code depends on: numba, LLVM, Python, processor, source."""
    import llvmlite
    import llvmlite.binding as llvm
    import numba

    from superfluid_adapter_native.quants import types

    features = llvm.get_host_cpu_features().flatten()
    parts = [numba.__version__, llvmlite.__version__, sys.version]
    parts += [llvm.get_process_triple(), llvm.get_host_cpu_name(), features]
    digest = hashlib.sha256("\n".join(parts).encode())
    for source in [*sorted(Path(__file__).parent.glob("*.py")), Path(types.__file__)]:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


class KernelCache:
    """Compile results by name in one folder, or nowhere at all; numba calls load and save.

    `compiled` counts what was not found. A damaged file counts as not found.
    """

    def __init__(self, folder: Path | None, *, writable: bool) -> None:
        self.folder = None if folder is None else folder / f"kernels-{version_key()}"
        self.writable = writable
        self.compiled = 0
        self.loaded = 0
        if self.folder is not None and writable:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def slot(self, name: str) -> Slot:
        """What numba asks for one kernel."""
        return Slot(self, name)

    def read(self, name: str) -> Any:
        if self.folder is None:
            return None
        try:
            return pickle.loads((self.folder / name).read_bytes())  # noqa: S301 - ours alone
        except (OSError, EOFError, pickle.UnpicklingError):
            return None

    def write(self, name: str, payload: Any) -> None:
        """Whole or not at all: a reader beside us sees the old file or the new."""
        if self.folder is None or not self.writable:
            return
        from numba.core import serialize

        dumps: Any = serialize.dumps
        handle, scratch = tempfile.mkstemp(dir=self.folder, prefix=f".{name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(dumps(payload))
        Path(scratch).replace(self.folder / name)


class Slot:
    """numba's cache protocol for one function."""

    cache_path = ""

    def __init__(self, store: KernelCache, name: str) -> None:
        self._store = store
        self._name = name

    def load_overload(self, _signature: Any, target_context: Any) -> Any:
        from numba.core import compiler

        result: Any = compiler.CompileResult
        target_context.refresh()
        payload = self._store.read(self._name)
        if payload is None:
            self._store.compiled += 1
            return None
        self._store.loaded += 1
        return result._rebuild(target_context, *payload)

    def save_overload(self, _signature: Any, result: Any) -> None:
        if not self._store.writable:
            return
        self._store.write(self._name, result._reduce())
