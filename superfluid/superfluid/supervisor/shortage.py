"""What keeps a worker from being started: for now, or for good."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Final

from superfluid_compat.errors import (
    RuntimeBroken,
    RuntimeUnavailable,
    SuperfluidError,
    WorkerGaveUp,
)
from superfluid_workerd.link.refusals import in_words

_DISK: Final = "free disk space, in the folder for temporary files (TMPDIR) and in the home"
_FILES: Final = "raise the limit of open files (ulimit -n), or end what holds so many"
_PROCESSES: Final = "raise the limit of processes (ulimit -u, pids.max), or end what runs beside"
_FIXES: Final[Mapping[int | None, str]] = {
    errno.ENOSPC: _DISK,
    errno.EDQUOT: _DISK,
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.EAGAIN: _PROCESSES,
    errno.ENOMEM: "end what takes memory beside it, or serve with a smaller --memory-budget",
}


def not_started(model: str, error: Exception, remedy: str | None) -> SuperfluidError:
    """`RuntimeBroken` with `remedy` where another try ends alike, `WorkerGaveUp` where what is
    short now may be there again."""
    found = f"the worker of {model} could not be started: "
    if isinstance(error, RuntimeUnavailable):
        return RuntimeBroken(found + error.message, fix=error.fix)
    if not isinstance(error, OSError):
        return WorkerGaveUp(found + in_words(error))
    if error.errno in _FIXES:
        return WorkerGaveUp(found + (error.strerror or str(error)), fix=_FIXES[error.errno])
    return RuntimeBroken(found + str(error), fix=remedy)
