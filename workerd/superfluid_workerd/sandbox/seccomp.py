"""A system call filter generated from a table (linux/seccomp.h, linux/filter.h).

A worker computes: it maps files, waits, talks over descriptors that it has. What changes the
machine, looks into other processes, opens a way out or starts a program is refused; so is every
call that is newer than this table.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

NEWEST: Final = 468
"""The last system call number that the table was written against; its two columns share all
numbers from 424 on."""

ALLOW: Final = 0x7FFF0000
KILL: Final = 0x80000000
_ERRNO: Final = 0x00050000

_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_EQUAL: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_ABOVE: Final = 0x25  # BPF_JMP | BPF_JGT | BPF_K
_ANY: Final = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN: Final = 0x06  # BPF_RET | BPF_K

_SECCOMP: Final = {"x86_64": 317, "aarch64": 277}
_FILTER: Final = 1
_ALL_THREADS: Final = 1
ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_CLONE_THREAD: Final = 0x10000
_CLONE_NEW: Final = 0x7E020000
_SET_ID_BITS: Final = 0o6000
_CREATES: Final = os.O_CREAT | 0o20000000
_REQUESTS: Final = (0x5412, 0x541C, 0x40086602, 0x401C5820)
"""TIOCSTI, TIOCLINUX, FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR."""
_PR_SET_PDEATHSIG: Final = 1
SELF: Final = -1
"""Stands for this process's id."""


@dataclass(frozen=True, slots=True)
class Test:
    """Whether the low 32 bits of an argument are (`equal`, `other`), or have one of (`any`) or
    none of (`none`), `value`."""

    argument: int
    how: Literal["equal", "other", "any", "none"]
    value: int


@dataclass(frozen=True, slots=True)
class Rule:
    """A system call by its numbers (None where the architecture has none). Refused with `error`
    when all tests of one of `cases` hold; without cases, always. `spawns`: only once no more
    processes may be started."""

    name: str
    x86_64: int | None
    aarch64: int | None
    error: int = errno.EPERM
    cases: tuple[tuple[Test, ...], ...] = ()
    spawns: bool = False


def _all(*rows: tuple[str, int | None, int | None]) -> tuple[Rule, ...]:
    return tuple(Rule(*row) for row in rows)


def _new(*rows: tuple[str, int]) -> tuple[Rule, ...]:
    return tuple(Rule(name, number, number) for name, number in rows)


TABLE: Final = (
    # Other processes.
    *_all(
        ("ptrace", 101, 117),
        ("process_vm_readv", 310, 270),
        ("process_vm_writev", 311, 271),
        ("kcmp", 312, 272),
        ("move_pages", 279, 239),
        ("migrate_pages", 256, 238),
        ("tkill", 200, 130),
        ("rt_sigqueueinfo", 129, 138),
        ("rt_tgsigqueueinfo", 297, 240),
        ("setpriority", 141, 140),
        ("ioprio_set", 251, 30),
    ),
    *_new(
        ("pidfd_send_signal", 424),
        ("pidfd_open", 434),
        ("pidfd_getfd", 438),
        ("process_madvise", 440),
        ("process_mrelease", 448),
        ("lsm_set_self_attr", 460),
    ),
    Rule("kill", 62, 129, cases=((Test(0, "other", SELF),),)),
    Rule("tgkill", 234, 131, cases=((Test(0, "other", SELF),),)),
    Rule("prlimit64", 302, 261, cases=((Test(0, "other", 0), Test(0, "other", SELF)),)),
    *(
        Rule(name, x86_64, aarch64, cases=((Test(0, "other", 0),),))
        for name, x86_64, aarch64 in (
            ("sched_setaffinity", 203, 122),
            ("sched_setparam", 142, 118),
            ("sched_setscheduler", 144, 119),
            ("sched_setattr", 314, 274),
        )
    ),
    Rule("prctl", 157, 167, cases=((Test(0, "equal", _PR_SET_PDEATHSIG),),)),
    # New processes and programs.
    Rule("fork", 57, None, spawns=True),
    Rule("vfork", 58, None, spawns=True),
    Rule("execve", 59, 221, spawns=True),
    Rule("execveat", 322, 281, spawns=True),
    Rule("clone", 56, 220, cases=((Test(0, "any", _CLONE_NEW),),)),
    Rule("clone", 56, 220, cases=((Test(0, "none", _CLONE_THREAD),),), spawns=True),
    # Its flags lie in memory, where no filter looks; libraries then use clone.
    Rule("clone3", 435, 435, errno.ENOSYS),
    # Ways out.
    *_all(
        ("socket", 41, 198),
        # A pair of datagram sockets can send to any path.
        ("socketpair", 53, 199),
        ("connect", 42, 203),
        ("bind", 49, 200),
        ("listen", 50, 201),
        ("shmget", 29, 194),
        ("msgget", 68, 186),
        ("semget", 64, 190),
        ("mq_open", 240, 180),
    ),
    # Files: no names for what lies elsewhere, no set-id programs; and what Landlock leaves to
    # anybody who owns a file, whose path is all it takes.
    *_all(
        ("chmod", 90, None),
        ("fchmod", 91, 52),
        ("fchmodat", 268, 53),
        ("utime", 132, None),
        ("utimes", 235, None),
        ("futimesat", 261, None),
        ("utimensat", 280, 88),
        ("removexattr", 197, 14),
        ("lremovexattr", 198, 15),
        ("fremovexattr", 199, 16),
        ("inotify_init", 253, None),
        ("inotify_init1", 294, 26),
        ("inotify_add_watch", 254, 27),
        ("link", 86, None),
        ("linkat", 265, 37),
        ("symlink", 88, None),
        ("symlinkat", 266, 36),
        ("mknod", 133, None),
        ("mknodat", 259, 33),
        ("chown", 92, None),
        ("lchown", 94, None),
        ("fchown", 93, 55),
        ("fchownat", 260, 54),
        ("setxattr", 188, 5),
        ("lsetxattr", 189, 6),
        ("fsetxattr", 190, 7),
        ("name_to_handle_at", 303, 264),
        ("open_by_handle_at", 304, 265),
        ("fanotify_init", 300, 262),
        ("fanotify_mark", 301, 263),
    ),
    *_new(("fchmodat2", 452), ("setxattrat", 463), ("removexattrat", 466)),
    Rule("openat2", 437, 437, errno.ENOSYS),
    Rule("creat", 85, None, cases=((Test(1, "any", _SET_ID_BITS),),)),
    Rule("open", 2, None, cases=((Test(1, "any", _CREATES), Test(2, "any", _SET_ID_BITS)),)),
    Rule("openat", 257, 56, cases=((Test(2, "any", _CREATES), Test(3, "any", _SET_ID_BITS)),)),
    # Input put into a terminal, and flags of files that are only read.
    Rule("ioctl", 16, 29, cases=tuple((Test(1, "equal", request),) for request in _REQUESTS)),
    # Who it is.
    *_all(
        ("setuid", 105, 146),
        ("setgid", 106, 144),
        ("setreuid", 113, 145),
        ("setregid", 114, 143),
        ("setgroups", 116, 159),
        ("setresuid", 117, 147),
        ("setresgid", 119, 149),
        ("setfsuid", 122, 151),
        ("setfsgid", 123, 152),
        ("personality", 135, 92),
        ("unshare", 272, 97),
        ("setns", 308, 268),
        ("chroot", 161, 51),
        ("pivot_root", 155, 41),
    ),
    # The machine, and parts of the kernel that a worker has no business with.
    *_all(
        ("mount", 165, 40),
        ("umount2", 166, 39),
        ("swapon", 167, 224),
        ("swapoff", 168, 225),
        ("reboot", 169, 142),
        ("sethostname", 170, 161),
        ("setdomainname", 171, 162),
        ("settimeofday", 164, 170),
        ("clock_settime", 227, 112),
        ("adjtimex", 159, 171),
        ("clock_adjtime", 305, 266),
        ("acct", 163, 89),
        ("quotactl", 179, 60),
        ("syslog", 103, 116),
        ("vhangup", 153, 58),
        ("iopl", 172, None),
        ("ioperm", 173, None),
        ("modify_ldt", 154, None),
        ("uselib", 134, None),
        ("ustat", 136, None),
        ("sysfs", 139, None),
        ("_sysctl", 156, None),
        ("nfsservctl", 180, 42),
        ("lookup_dcookie", 212, 18),
        ("init_module", 175, 105),
        ("delete_module", 176, 106),
        ("finit_module", 313, 273),
        ("kexec_load", 246, 104),
        ("kexec_file_load", 320, 294),
        ("add_key", 248, 217),
        ("request_key", 249, 218),
        ("keyctl", 250, 219),
        ("perf_event_open", 298, 241),
        ("bpf", 321, 280),
        ("userfaultfd", 323, 282),
    ),
    *_new(
        ("io_uring_setup", 425),
        ("io_uring_enter", 426),
        ("io_uring_register", 427),
        ("open_tree", 428),
        ("move_mount", 429),
        ("fsopen", 430),
        ("fsconfig", 431),
        ("fsmount", 432),
        ("fspick", 433),
        ("mount_setattr", 442),
        ("quotactl_fd", 443),
        ("statmount", 457),
        ("listmount", 458),
        ("open_tree_attr", 467),
    ),
)

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand."""


def program(architecture: str, pid: int, *, spawn: bool = False) -> list[Instruction]:
    """The filter for a process on one of `ARCHITECTURES`."""
    found: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, ARCHITECTURES[architecture]),
        (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, 0),
        (_ABOVE, 0, 1, NEWEST),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    for number, rules in _by_number(architecture, spawn=spawn).items():
        block = [step for rule in rules for step in _refusal(rule, pid)]
        if all(rule.cases for rule in rules):
            block.append((_RETURN, 0, 0, ALLOW))
        found += [(_EQUAL, 0, len(block), number), *block]
    return [*found, (_RETURN, 0, 0, ALLOW)]


def _by_number(architecture: str, *, spawn: bool) -> dict[int, list[Rule]]:
    found: dict[int, list[Rule]] = {}
    for rule in TABLE:
        number = rule.x86_64 if architecture == "x86_64" else rule.aarch64
        if number is not None and not (spawn and rule.spawns):
            found.setdefault(number, []).append(rule)
    return found


def _refusal(rule: Rule, pid: int) -> Iterator[Instruction]:
    refuse: Instruction = (_RETURN, 0, 0, _ERRNO | rule.error)
    if not rule.cases:
        yield refuse
    for tests in rule.cases:
        for index, test in enumerate(tests):
            past = 2 * (len(tests) - 1 - index) + 1
            value = pid if test.value == SELF else test.value
            code = _EQUAL if test.how in ("equal", "other") else _ANY
            yield (_LOAD, 0, 0, 16 + 8 * test.argument)
            holds = test.how in ("equal", "any")
            yield (code, 0, past, value) if holds else (code, past, 0, value)
        yield refuse


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install(*, spawn: bool = False) -> None:
    """Filter every thread of this process, for good. Needs no-new-privileges. Raises `OSError`."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no filter is known for {machine}")
    steps = program(machine, os.getpid(), spawn=spawn)
    _load(_SECCOMP[machine], steps)


def _load(number: int, steps: Sequence[Instruction]) -> None:
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_uint(_FILTER),
        ctypes.c_uint(_ALL_THREADS),
        ctypes.byref(_Program(len(steps), code)),
    )
    if result != 0:
        failed = ctypes.get_errno()
        raise OSError(failed, os.strerror(failed) if result < 0 else "a thread has other filters")
