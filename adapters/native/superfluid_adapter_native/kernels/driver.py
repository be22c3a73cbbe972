"""Runs a kernel's tasks on several threads.

A *kernel* is compiled code `(parameters, task, thread)`; `parameters` is the address of 64-bit
words. Threads take the next task until none is left, and the caller returns when every task taken
is done: a helper that the system has put aside holds nothing up unless it sits on a task. Which
thread ran a task never shows in its result. Helpers look for work for a moment, giving way to
others, then sleep.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import llvmlite.binding as llvm
import numba
import numpy as np
from numba.core import types
from numba.core.ccallback import CFunc
from numba.extending import register_jitable
from numpy.typing import NDArray

from superfluid_adapter_native.kernels.atomics import add, call, library, read, swap, write
from superfluid_adapter_native.kernels.cache import KernelCache

WORDS: Final = 24
"""Parameters that a kernel may have."""

_TICKET: Final = 0
"""Number of the job times 2^20, plus its tasks not yet taken: one word, so that a helper late from
an earlier job takes nothing from this one by mistake."""
_DONE: Final = 8
_SLEEPERS: Final = 16
_STOP: Final = 17
_KERNEL: Final = 24
_PARAMETERS: Final = 25
_TASKS: Final = 26
_LOCK: Final = 32
_BELL: Final = 48
_STATE_WORDS: Final = 64
_LEFT: Final = (1 << 20) - 1
_LOOKS: Final = 100_000
_SPINS: Final = 500

_give_way = library("sched_yield", "")
_lock = library("pthread_mutex_lock", "lock")
_unlock = library("pthread_mutex_unlock", "lock")
_wait = library("pthread_cond_wait", "bell lock")
_ring = library("pthread_cond_broadcast", "bell")

_OPTIONS: Final = {"error_model": "numpy", "boundscheck": False}


@register_jitable
def _take(state: int, thread: int) -> bool:
    ticket = read(state, _TICKET)
    while ticket & _LEFT:
        if swap(state, _TICKET, ticket, ticket - 1):
            task = read(state, _TASKS) - (ticket & _LEFT)
            call(read(state, _KERNEL), read(state, _PARAMETERS), task, thread)
            add(state, _DONE, 1)
            return True
        ticket = read(state, _TICKET)
    return False


def _run_alone(kernel: int, parameters: int, tasks: int) -> None:
    for task in range(tasks):
        call(kernel, parameters, task, 0)


def _run_together(state: int, kernel: int, parameters: int, tasks: int) -> None:
    write(state, _KERNEL, kernel)
    write(state, _PARAMETERS, parameters)
    write(state, _TASKS, tasks)
    write(state, _DONE, 0)
    write(state, _TICKET, (read(state, _TICKET) | _LEFT) + 1 + tasks)
    if read(state, _SLEEPERS):
        _lock(state + 8 * _LOCK)
        _ring(state + 8 * _BELL)
        _unlock(state + 8 * _LOCK)
    while _take(state, 0):
        pass
    spins = 0
    while read(state, _DONE) < tasks:
        spins += 1
        if spins > _SPINS:
            _give_way()


def _help(state: int, thread: int) -> None:
    looks = 0
    while not read(state, _STOP):
        if _take(state, thread):
            looks = 0
        elif looks < _LOOKS:
            looks += 1
        else:
            looks = 0
            _lock(state + 8 * _LOCK)
            add(state, _SLEEPERS, 1)
            while not (read(state, _TICKET) & _LEFT or read(state, _STOP)):
                _wait(state + 8 * _BELL, state + 8 * _LOCK)
            add(state, _SLEEPERS, -1)
            _unlock(state + 8 * _LOCK)


class Driver:
    """Compiles kernels and runs them on `threads` threads; called by one thread at a time.

    The helpers end with the driver.
    """

    def __init__(self, store: KernelCache, threads: int) -> None:
        self.threads = threads
        self._store = store
        self._kept: list[Any] = []
        words = np.zeros(WORDS, np.int64)
        self._words = words.data
        self._address = int(words.ctypes.data)
        llvm.initialize_native_asmparser()
        self._alone = self._compile("run_alone", _run_alone, 3)
        self._together = self._compile("run_together", _run_together, 4)
        help_ = self._compile("help", _help, 2)
        state, self._state = _new_state()
        helpers = [
            threading.Thread(target=help_, args=(self._state, i), name=f"kernels-{i}", daemon=True)
            for i in range(1, threads)
        ]
        for helper in helpers:
            helper.start()
        weakref.finalize(self, _stop, state, helpers)

    def _compile(self, name: str, function: Callable[..., None], arguments: int) -> Any:
        dispatcher: Any = numba.njit(nogil=True)(function)
        dispatcher._cache = self._store.slot(name)
        dispatcher.compile(types.void(*([types.intp] * arguments)))
        return dispatcher

    def kernel(self, name: str, function: Callable[[int, int, int], None]) -> int:
        """The address of `function` compiled; `name` is its key on disk."""
        arguments = (types.intp, types.intp, types.intp)
        compiled: Any = CFunc(function, (arguments, types.void), {}, dict(_OPTIONS))
        compiled._cache = self._store.slot(name)
        compiled.compile()
        self._kept.append(compiled)
        return int(compiled.address)

    def run(self, kernel: int, words: Sequence[int], tasks: int, *, alone: bool = False) -> None:
        """All tasks of a kernel, fewer than 2^20, with `words` for parameters."""
        struct.pack_into(f"{len(words)}q", self._words, 0, *words)
        if alone or tasks < 2 or self.threads < 2:
            self._alone(kernel, self._address, tasks)
        else:
            self._together(self._state, kernel, self._address, tasks)


def _new_state() -> tuple[NDArray[np.int64], int]:
    """What threads share: words at an address of whole cache lines, its lock and bell made."""
    raw = np.zeros(_STATE_WORDS + 8, np.int64)
    state = raw[-(raw.ctypes.data // 8) % 8 :][:_STATE_WORDS]
    address = int(state.ctypes.data)
    c_library = ctypes.CDLL(None)
    c_library.pthread_mutex_init(ctypes.c_void_p(address + 8 * _LOCK), None)
    c_library.pthread_cond_init(ctypes.c_void_p(address + 8 * _BELL), None)
    return state, address


def _stop(state: NDArray[np.int64], helpers: Sequence[threading.Thread]) -> None:
    state[_STOP] = 1
    c_library, address = ctypes.CDLL(None), int(state.ctypes.data)
    c_library.pthread_mutex_lock(ctypes.c_void_p(address + 8 * _LOCK))
    c_library.pthread_cond_broadcast(ctypes.c_void_p(address + 8 * _BELL))
    c_library.pthread_mutex_unlock(ctypes.c_void_p(address + 8 * _LOCK))
    for helper in helpers:
        helper.join()
