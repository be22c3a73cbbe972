"""What a worker started and left behind: ended with it, wherever it hides from its session.

At `strict` there is none. Elsewhere a control group finds everything; without one, what kept the
folder for temporary files that its worker gave it, which ordinary programs do.
"""

from __future__ import annotations

import contextlib
import os
import signal

import psutil

from superfluid.supervisor import pids


def end(group: str, temporary: str, spare: int = 0) -> bool:
    """Kill all that a worker left but `spare`, by its control group or its folder for temporary
    files; whether all could be. Never raises."""
    try:
        if group:
            return pids.end(group, spare)
        if temporary:
            below(temporary, spare)
    except (OSError, psutil.Error):  # out of descriptors, say: nobody can be looked for
        return False
    return True


def below(folder: str, spare: int = 0) -> list[int]:
    """Kill this user's processes whose folder for temporary files is or lies in `folder`."""
    found = []
    for process in psutil.process_iter():
        if process.pid not in (spare, os.getpid()) and _lies_in(_temporary(process), folder):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
                found.append(process.pid)
    return found


def _lies_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _temporary(process: psutil.Process) -> str:
    try:
        return process.environ().get("TMPDIR", "")
    except (psutil.Error, OSError):
        return ""
