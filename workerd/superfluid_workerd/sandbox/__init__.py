"""What a worker process may do: asked by the daemon, applied before anything else, told to all.

Standard library only, down to the last module: it runs before the worker is one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

from superfluid_workerd.sandbox.rights import Level, Reached, Rights


@dataclass(slots=True)
class _Current:
    reached: Reached
    spawns: bool = False


_current = _Current(Reached(asked="none", level="none"))


def reached() -> Reached:
    """What this process runs under."""
    return _current.reached


def apply(rights: Rights, again: Callable[[], None]) -> Reached:
    """Narrow this process, which must have one thread, as far as asked and possible.

    `again` is called after a change of user, which undoes what the kernel ties to the old one.
    """
    _current.spawns = rights.spawn
    if rights.level == "none":
        _current.reached = Reached(asked="none", level="none")
        if rights.group:
            from superfluid_workerd.sandbox import linux

            with contextlib.suppress(OSError):
                linux.join(rights.group)
    elif sys.platform == "linux":
        from superfluid_workerd.sandbox import linux

        _current.reached = linux.apply(rights, again)
    elif sys.platform == "darwin":
        from superfluid_workerd.sandbox import macos

        _current.reached = macos.apply(rights)
    else:
        _current.reached = Reached(
            asked=rights.level, level="none", missing=(f"a way on {sys.platform}",)
        )
    return _current.reached


def loaded() -> None:
    """The model is loaded: a worker that could start processes no longer can, from any thread."""
    if _current.spawns and "system call filter" in _current.reached.means:
        from superfluid_workerd.sandbox import seccomp

        seccomp.install()


__all__ = ["Level", "Reached", "Rights", "apply", "loaded", "reached"]
