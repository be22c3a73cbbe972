"""The sandbox on Linux: what is taken away, in the order in which it can be."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Callable, Iterator
from typing import Final

from superfluid_workerd.sandbox import landlock, seccomp
from superfluid_workerd.sandbox.rights import SYSTEM, Reached, Rights, interpreter

STRICT_ABI: Final = 6
"""The first Landlock that keeps signals and abstract sockets in."""

_FILES: Final = 4096
_CLONE_NEWIPC: Final = 0x08000000
_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_PR_CAPBSET_DROP: Final = 24
_PR_SET_SECUREBITS: Final = 28
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_AMBIENT_CLEAR: Final = 4
_NO_ROOT: Final = 0b1110_1111
"""No capabilities by being root, none kept, none raised; each locked."""
_CAPSET: Final = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION: Final = 0x20080522

_libc: Final = ctypes.CDLL(None, use_errno=True)


class _Account:
    """What was reached so far."""

    def __init__(self) -> None:
        self.means: list[str] = []
        self.missing: list[str] = []

    def attempt(self, name: str, act: Callable[[], str | None]) -> bool:
        """Note `name` as had, or why not. What `act` returns is added to the name."""
        try:
            more = act()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            self.missing.append(f"{name} ({reason})")
            return False
        self.means.append(f"{name} {more}" if more else name)
        return True


def apply(rights: Rights, again: Callable[[], None]) -> Reached:
    """See `sandbox.apply`. Each step is tried, and what fails is missing."""
    account = _Account()
    _limit(rights)
    strict = rights.level in ("auto", "strict")
    bounded = bool(rights.group) and account.attempt("control group", lambda: join(rights.group))
    own = strict and account.attempt("network and IPC namespaces", lambda: _namespaces(rights))
    was_root = os.geteuid() == 0
    whole = account.attempt("user", lambda: _user(rights))
    again()
    if not (bounded or (own and not was_root) or (was_root and os.geteuid() != 0)):
        account.missing.append("bound on threads (no control group, no user namespace)")
    whole &= account.attempt("no new privileges", _no_new_privileges)
    version = landlock.abi()
    whole &= account.attempt(f"Landlock ABI {version}", lambda: _landlock(version, rights))
    whole &= version >= STRICT_ABI
    if 0 < version < STRICT_ABI:
        account.missing.append(f"Landlock ABI {STRICT_ABI} (scoped signals and sockets)")
    if strict:
        whole &= account.attempt("system call filter", lambda: seccomp.install(spawn=rights.spawn))
    return _judged(rights, account, strict=strict and whole)


def join(group: str) -> None:
    """Enter a control group, so that what this process starts is found by it."""
    _write(f"{group}/cgroup.procs", "0")


def _judged(rights: Rights, account: _Account, *, strict: bool) -> Reached:
    level = "strict" if strict else "basic"
    if "no new privileges" not in account.means:
        level = "none"
    problem = ""
    if rights.level not in ("auto", level) and not (rights.level == "basic" and strict):
        missing = ", ".join(account.missing) or "no new privileges"
        problem = (
            f"a {rights.level} sandbox was asked for and {level} is what this machine gives; "
            f"missing: {missing}"
        )
    return Reached(
        asked=rights.level,
        level=level,
        means=tuple(account.means),
        missing=tuple(account.missing),
        problem=problem,
    )


def _limit(rights: Rights) -> None:
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _FILES,
        resource.RLIMIT_FSIZE: rights.file_bytes,
        resource.RLIMIT_DATA: rights.data_bytes,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for which, most in wanted.items():
        if most or which == resource.RLIMIT_CORE:
            _, hard = resource.getrlimit(which)
            bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(which, (bound, bound))


def _call(function: str, *arguments: int) -> None:
    if getattr(_libc, function)(*(ctypes.c_ulong(each) for each in arguments)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _namespaces(rights: Rights) -> None:
    if os.geteuid() == 0:
        _call("unshare", _CLONE_NEWNET | _CLONE_NEWIPC)
        return
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")
    if rights.threads:
        # Counted within the new user namespace, so by this worker alone.
        resource.setrlimit(resource.RLIMIT_NPROC, (rights.threads, rights.threads))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _user(rights: Rights) -> str:
    told = f"{os.geteuid()}, every capability cleared"
    if os.geteuid() == 0 and rights.user is not None:
        user, group = rights.user
        _drop_bounding()
        os.setgroups([])
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
        if rights.threads:
            resource.setrlimit(resource.RLIMIT_NPROC, (rights.threads, rights.threads))
        return f"{user} instead of 0, every capability cleared"
    _drop_bounding()
    _clear_capabilities()
    return told


def _drop_bounding() -> None:
    """All that a later program could gain; refused to one who has nothing to lose."""
    with contextlib.suppress(OSError):
        _call("prctl", _PR_CAP_AMBIENT, _AMBIENT_CLEAR, 0, 0, 0)
    with contextlib.suppress(OSError):
        for capability in range(64):
            _call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)
    with contextlib.suppress(OSError):
        _call("prctl", _PR_SET_SECUREBITS, _NO_ROOT, 0, 0, 0)


def _clear_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if _libc.syscall(ctypes.c_long(_CAPSET[os.uname().machine]), header, nothing) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _no_new_privileges() -> None:
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _landlock(version: int, rights: Rights) -> None:
    if version == 0:
        raise OSError(0, "the kernel has none")
    landlock.restrict(version, _allowed(rights))


def _allowed(rights: Rights) -> Iterator[tuple[str, int]]:
    run = landlock.EXECUTE if rights.spawn else 0
    for path in (*SYSTEM, *interpreter()):
        yield path, landlock.READ | run
    for path in rights.read:
        yield path, landlock.READ | run
    for path in rights.write:
        yield path, landlock.WRITE
    for path in ("/dev/null", *rights.devices):
        yield path, landlock.DEVICE
