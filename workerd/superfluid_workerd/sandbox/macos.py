"""The sandbox on macOS: a seatbelt profile (sandbox(7)) generated from the same rights."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from typing import Final

from superfluid_workerd.sandbox.rights import Reached, Rights, interpreter

SYSTEM: Final = (
    "/usr",
    "/bin",
    "/System",
    "/Library/Apple",
    "/opt/homebrew",
    "/private/var/db/dyld",
    "/private/var/db/timezone",
    "/private/etc/localtime",
    "/dev/null",
    "/dev/zero",
    "/dev/random",
    "/dev/urandom",
)
"""Read by libraries, Metal's included; none of it is anybody's secret."""

_HEAD: Final = """(version 1)
(deny default)
(allow process-info* (target self))
(allow signal (target self))
(allow sysctl-read)
(allow file-read-metadata)
(allow file-map-executable)"""
_GPU: Final = """(allow iokit-open)
(allow iokit-get-properties)
(allow mach-lookup (global-name "com.apple.MTLCompilerService"))"""


def profile(rights: Rights, runs: Iterator[str] | None = None) -> str:
    """The profile's text; `runs` is what the interpreter reads."""
    reads = [*SYSTEM, *(interpreter() if runs is None else runs), *rights.read]
    lines = [_HEAD]
    if rights.spawn:
        lines.append("(allow process-fork)\n(allow process-exec)")
    lines += [f"(allow file-read* {_beneath(path)})" for path in dict.fromkeys(reads)]
    lines += [f"(allow file-read* file-write* {_beneath(path)})" for path in rights.write]
    lines.append('(allow file-write-data (literal "/dev/null"))')
    lines += [
        f"(allow file-read* file-write-data file-ioctl {_beneath(path)})"
        for path in rights.devices
        if path.startswith("/dev/")
    ]
    if any(not path.startswith("/dev/") for path in rights.devices):
        lines.append(_GPU)
    # The last rule that matches counts.
    lines.append("(deny file-write-mode file-write-setugid file-link)")
    lines.append("(deny network*)")
    return "\n".join(lines) + "\n"


def _beneath(path: str) -> str:
    quoted = path.replace("\\", "\\\\").replace('"', '\\"')
    return f'(subpath "{quoted}")'


def apply(rights: Rights) -> Reached:
    """See `sandbox.apply`. `strict` is a profile that is in force."""
    _limit(rights)
    library = ctypes.CDLL("/usr/lib/libsandbox.1.dylib")
    told = ctypes.c_char_p()
    code = library.sandbox_init(profile(rights).encode(), ctypes.c_uint64(0), ctypes.byref(told))
    if code == 0:
        return Reached(asked=rights.level, level="strict", means=("seatbelt profile",))
    reason = (told.value or b"refused").decode(errors="replace")
    problem = ""
    if rights.level != "auto":
        problem = f"a {rights.level} sandbox was asked for, macOS refused the profile: {reason}"
    missing = (f"seatbelt profile ({reason})",)
    return Reached(asked=rights.level, level="none", missing=missing, problem=problem)


def _limit(rights: Rights) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if rights.file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (rights.file_bytes, rights.file_bytes))
