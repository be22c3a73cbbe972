"""Runs a kernel's tasks on several threads.

A *kernel* is compiled code `(parameters, task, thread)`; `parameters` is the address of 64-bit
words. Threads take the next task until none is left, and the caller returns when every task taken
is done: a helper that the system has put aside holds nothing up unless it sits on a task. Which
thread ran a task never shows in its result. Helpers look for work for a moment, giving way to
others, then sleep.
"""

from __future__ import annotations

import atexit
import ctypes
import os
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

from superfluid_adapter_native.kernels.atomics import add, call, library, read, swap, word, write
from superfluid_adapter_native.kernels.cache import KernelCache
from superfluid_adapter_native.kernels.tape import HEAD, JOB, WORDS, Tape

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
_RING_S: Final = 0.1

_give_way = library("sched_yield", "")
_lock = library("pthread_mutex_lock", "lock")
_unlock = library("pthread_mutex_unlock", "lock")
_wait = library("pthread_cond_wait", "bell lock")
_ring = library("pthread_cond_broadcast", "bell")

_PACK: Final = tuple(struct.Struct(f"{count}q") for count in range(WORDS + 1))
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


@register_jitable
def _run_alone(kernel: int, parameters: int, tasks: int) -> None:
    for task in range(tasks):
        call(kernel, parameters, task, 0)


@register_jitable
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


def _run_jobs(state: int, jobs: int, count: int, together: int) -> None:
    for job in range(jobs, jobs + 8 * JOB * count, 8 * JOB):
        kernel, tasks, parameters = word(job, 0), word(job, 1), job + 8 * HEAD
        if together and not word(job, 2):
            _run_together(state, kernel, parameters, tasks)
        else:
            _run_alone(kernel, parameters, tasks)


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

    `close` ends the helpers, and without it they end soon after the driver is gone; what runs
    afterwards, or in a forked child, which has no helpers, runs on the caller alone.
    """

    def __init__(self, store: KernelCache, threads: int) -> None:
        self.threads = threads
        self._store = store
        self._kept: list[Any] = []
        self.tape: Tape | None = None
        words = np.zeros(WORDS, np.int64)
        self._words = words.data
        self._address = int(words.ctypes.data)
        llvm.initialize_native_asmparser()
        self._alone = self._compile("run_alone", _run_alone, 3)
        self._together = self._compile("run_together", _run_together, 4)
        self._jobs = self._compile("run_jobs", _run_jobs, 4)
        help_ = self._compile("help", _help, 2)
        self._team = _Team(help_, threads - 1)
        self._end = weakref.finalize(self, self._team.dismiss)
        # By then compiled code may be gone under a helper: `_close_all` waits for them instead.
        self._end.atexit = False
        _drivers.add(self)

    def close(self) -> None:
        """End the helpers; returns when they have ended."""
        if self._end.detach() is not None:
            self._team.end()
        self.threads = 1

    def forked(self) -> None:
        """The helpers stayed in the parent, perhaps with the lock in hand."""
        self._end.detach()
        self.threads = 1

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
        """All tasks of a kernel, fewer than 2^20, with `words` for parameters; written down too
        where there is a tape."""
        alone = alone or tasks < 2
        if self.tape is not None:
            self.tape.add(kernel, tasks, alone, words)
        _PACK[len(words)].pack_into(self._words, 0, *words)
        if alone or self.threads < 2:
            self._alone(kernel, self._address, tasks)
        else:
            self._together(self._team.address, kernel, self._address, tasks)

    def replay(self, tape: Tape, segment: int) -> None:
        """The calls of a segment once more."""
        together = int(self.threads > 1)
        self._jobs(self._team.address, *tape.segment(segment), together)


class _Team:
    """Helper threads and what they share: words at an address of whole cache lines, among them a
    lock and a bell. Each helper keeps the words, and the code that it runs, until it has ended."""

    def __init__(self, help_: Callable[[int, int], None], count: int) -> None:
        raw = np.zeros(_STATE_WORDS + 8, np.int64)
        self._words = raw[-(raw.ctypes.data // 8) % 8 :][:_STATE_WORDS]
        self.address = int(self._words.ctypes.data)
        _c_library.pthread_mutex_init(self._pointer(_LOCK), None)
        _c_library.pthread_cond_init(self._pointer(_BELL), None)
        self._help = help_
        self._helpers = [
            threading.Thread(target=self._work, args=(i,), name=f"kernels-{i}", daemon=True)
            for i in range(1, count + 1)
        ]
        for helper in self._helpers:
            helper.start()

    def _work(self, thread: int) -> None:
        self._help(self.address, thread)

    def _pointer(self, word: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.address + 8 * word)

    def dismiss(self) -> None:
        """Have the helpers end. Waits for none of them: the garbage collector calls this in any
        thread, with any lock held, and a helper's end takes the compiler's lock."""
        self._words[_STOP] = 1
        _c_library.pthread_mutex_lock(self._pointer(_LOCK))
        _c_library.pthread_cond_broadcast(self._pointer(_BELL))
        _c_library.pthread_mutex_unlock(self._pointer(_LOCK))

    def end(self) -> None:
        """`dismiss` and wait."""
        for helper in self._helpers:
            while helper.is_alive():
                # Again and again, since some C libraries lose a broadcast once in a blue moon.
                self.dismiss()
                helper.join(_RING_S)


_c_library: Final = ctypes.CDLL(None)
_drivers: Final[weakref.WeakSet[Driver]] = weakref.WeakSet()


def _close_all() -> None:
    for driver in list(_drivers):
        driver.close()


def _forked() -> None:
    for driver in list(_drivers):
        driver.forked()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
