"""Landlock by its three system calls (linux/landlock.h, and the kernel's userspace-api page)."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterable
from typing import Final

_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_VERSION: Final = 1
_PATH_BENEATH: Final = 1

EXECUTE: Final = 1 << 0
WRITE_FILE: Final = 1 << 1
READ_FILE: Final = 1 << 2
READ_DIR: Final = 1 << 3
REMOVE_DIR: Final = 1 << 4
REMOVE_FILE: Final = 1 << 5
MAKE_DIR: Final = 1 << 7
MAKE_REG: Final = 1 << 8
TRUNCATE: Final = 1 << 14
IOCTL_DEV: Final = 1 << 15

READ: Final = READ_FILE | READ_DIR
WRITE: Final = READ | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | TRUNCATE
DEVICE: Final = READ_FILE | WRITE_FILE | IOCTL_DEV
_OF_FILES: Final = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV

_FILE_RIGHTS: Final = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many access rights of files each ABI knows, lowest bits first."""
_ALL_TCP: Final = 0b11
_ALL_SCOPES: Final = 0b11


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


_libc: Final = ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def abi() -> int:
    """The kernel's Landlock ABI, 0 where it has none or none is switched on."""
    try:
        return _call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    except OSError:
        return 0


def file_rights(version: int) -> int:
    """All rights of files that this ABI can take away."""
    return (1 << _FILE_RIGHTS[min(version, max(_FILE_RIGHTS))]) - 1


def restrict(version: int, allowed: Iterable[tuple[str, int]]) -> None:
    """Leave this thread the rights `allowed` beneath each path, no TCP, and no signal to or
    abstract socket of a process outside, as far as ABI `version` goes. Paths that are not there
    are passed over. Needs no-new-privileges. Raises `OSError`.
    """
    handled = file_rights(version)
    ruleset = _Ruleset(handled, _ALL_TCP if version >= 4 else 0, _ALL_SCOPES if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _call(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), ctypes.c_uint32(0))
    try:
        for path, rights in allowed:
            _allow(rules, path, rights & handled)
        _call(_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint32(0))
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
            return
        raise
    try:
        if not stat.S_ISDIR(os.fstat(parent).st_mode):
            rights &= _OF_FILES
        beneath = _PathBeneath(rights, parent)
        _call(
            _ADD_RULE,
            ctypes.c_int(rules),
            ctypes.c_int(_PATH_BENEATH),
            ctypes.byref(beneath),
            ctypes.c_uint32(0),
        )
    finally:
        os.close(parent)
