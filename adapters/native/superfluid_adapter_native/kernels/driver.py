"""Runs a kernel's tasks on several threads.

A *kernel* is compiled code `(parameters, task, thread)`: `parameters` is the address of 64-bit
words, of which the last counts tasks handed out. Threads take the next task until none is left, so
a thread that the system holds up delays one task, not a share of them all. Which thread ran a task
never shows in its result.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba.core import config, types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from superfluid_adapter_native.kernels.cache import KernelCache

_config: Any = config

WORDS: Final = 24
_COUNTER: Final = WORDS - 1
_ARGUMENTS: Final = (types.intp, types.intp, types.intp)
_OPTIONS: Final = {"error_model": "numpy", "boundscheck": False}


def _call(_typing: Any, kernel: Any, parameters: Any, task: Any, thread: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        word = ir.IntType(64)
        function = ir.FunctionType(ir.VoidType(), [word] * 3)
        builder.call(builder.inttoptr(values[0], function.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


def _next_task(_typing: Any, parameters: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        word = ir.IntType(64)
        words = builder.inttoptr(values[0], word.as_pointer())
        counter = builder.gep(words, [ir.Constant(word, _COUNTER)], source_etype=word)
        return builder.atomic_rmw("add", counter, ir.Constant(word, 1), "monotonic")

    return types.intp(types.intp), generate


def _word(_typing: Any, parameters: Any, index: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        word = ir.IntType(64)
        words = builder.inttoptr(values[0], word.as_pointer())
        return builder.load(builder.gep(words, [values[1]], source_etype=word), typ=word)

    return types.intp(types.intp, types.intp), generate


call: Any = intrinsic(_call)
next_task: Any = intrinsic(_next_task)
word: Any = intrinsic(_word)
"""Inside a kernel: one of its parameters."""


def _run_alone(kernel: int, parameters: int, tasks: int) -> None:
    for task in range(tasks):
        call(kernel, parameters, task, 0)


def _run_together(kernel: int, parameters: int, tasks: int, threads: int) -> None:
    for thread in numba.prange(threads):
        task = next_task(parameters)
        while task < tasks:
            call(kernel, parameters, task, thread)
            task = next_task(parameters)


class Driver:
    """Compiles kernels and runs them on `threads` threads; called by one thread at a time."""

    def __init__(self, store: KernelCache, threads: int) -> None:
        self.threads = threads
        self._store = store
        self._kept: list[Any] = []
        words = np.zeros(WORDS, np.int64)
        self._words = words.data
        self._address = int(words.ctypes.data)
        llvm.initialize_native_asmparser()
        self._alone = self._runner("run_alone", _run_alone, 3, parallel=False)
        self._together = None
        if threads > 1:
            _config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
            self._together = self._runner("run_together", _run_together, 4, parallel=True)
            numba.set_num_threads(min(threads, _config.NUMBA_NUM_THREADS))

    def _runner(
        self, name: str, function: Callable[..., None], arguments: int, *, parallel: bool
    ) -> Any:
        dispatcher: Any = numba.njit(nogil=True, parallel=parallel)(function)
        dispatcher._cache = self._store.slot(name)
        dispatcher.compile(types.void(*([types.intp] * arguments)))
        return dispatcher

    def kernel(self, name: str, function: Callable[[int, int, int], None]) -> int:
        """The address of `function` compiled; `name` is its key on disk."""
        compiled: Any = CFunc(function, (_ARGUMENTS, types.void), {}, dict(_OPTIONS))
        compiled._cache = self._store.slot(name)
        compiled.compile()
        self._kept.append(compiled)
        return int(compiled.address)

    def run(self, kernel: int, words: Sequence[int], tasks: int, *, alone: bool = False) -> None:
        """All tasks of a kernel with `words` for parameters; back when the last is done."""
        struct.pack_into(f"{len(words)}q", self._words, 0, *words)
        if alone or tasks < 2 or self._together is None:
            self._alone(kernel, self._address, tasks)
            return
        self._words[_COUNTER] = 0
        self._together(kernel, self._address, tasks, self.threads)
