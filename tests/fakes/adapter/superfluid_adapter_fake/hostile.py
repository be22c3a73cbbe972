"""What a model that took over its worker would try. An act that comes back succeeded.

Acts are harmless where nothing holds them back: they read, send signal 0, or pass arguments that
the kernel refuses as nonsense after it has let the call through.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

REPORT: Final = "escapes.json"
"""In the worker's folder for temporary files: outcome by act, `done` or the error's name."""

_LET_THROUGH: Final = {
    errno.EINVAL, errno.EFAULT, errno.EBADF, errno.ESRCH, errno.ENOENT, errno.ENOTTY
}  # fmt: skip
Act = Callable[[], object]
_libc = ctypes.CDLL(None, use_errno=True)
_CALLS: Final = {
    "x86_64": {
        "ptrace": 101, "mount": 165, "umount2": 166, "unshare": 272, "setns": 308,
        "kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313,
        "bpf": 321, "perf_event_open": 298, "keyctl": 250, "add_key": 248, "reboot": 169,
        "swapon": 167, "chroot": 161, "pivot_root": 155, "process_vm_readv": 310,
        "process_vm_writev": 311, "open_by_handle_at": 304, "personality": 135, "setuid": 105,
        "shmget": 29, "mq_open": 240, "fork": 57, "vfork": 58, "userfaultfd": 323, "msgget": 68,
        "semget": 64, "kcmp": 312, "tkill": 200, "rt_sigqueueinfo": 129, "syslog": 103,
        "settimeofday": 164, "fanotify_init": 300, "name_to_handle_at": 303, "delete_module": 176,
        "request_key": 249, "migrate_pages": 256, "iopl": 172, "modify_ldt": 154,
    },
    "aarch64": {
        "ptrace": 117, "mount": 40, "umount2": 39, "unshare": 97, "setns": 268,
        "kexec_load": 104, "kexec_file_load": 294, "init_module": 105, "finit_module": 273,
        "bpf": 280, "perf_event_open": 241, "keyctl": 219, "add_key": 217, "reboot": 142,
        "swapon": 224, "chroot": 51, "pivot_root": 41, "process_vm_readv": 270,
        "process_vm_writev": 271, "open_by_handle_at": 265, "personality": 92, "setuid": 146,
        "shmget": 194, "mq_open": 180, "userfaultfd": 282, "msgget": 186, "semget": 190,
        "kcmp": 272, "tkill": 130, "rt_sigqueueinfo": 138, "syslog": 116, "settimeofday": 170,
        "fanotify_init": 262, "name_to_handle_at": 264, "delete_module": 106, "request_key": 218,
        "migrate_pages": 238,
    },
}  # fmt: skip
_NEW_CALLS: Final = {
    "pidfd_open": 434, "pidfd_getfd": 438, "io_uring_setup": 425, "clone3": 435, "openat2": 437,
    "open_tree": 428, "fsopen": 430, "move_mount": 429, "mount_setattr": 442,
    "process_madvise": 440, "io_uring_enter": 426, "io_uring_register": 427, "fsconfig": 431,
    "fsmount": 432, "fspick": 433, "pidfd_send_signal": 424, "process_mrelease": 448,
    "lsm_set_self_attr": 460, "listmount": 458,
}  # fmt: skip
_FIRST: Final = {"unshare": 0x10000000, "msgget": 1, "semget": 1}
"""First arguments that are no 0: a user namespace, keys of objects that nobody has."""
_SEIZE: Final = 0x4206
_TIOCSTI: Final = 0x5412
_MANY_THREADS: Final = 1_000


def attempt(targets: Mapping[str, str]) -> None:
    """Try everything, or what begins as one of the words in `only`. `targets` are paths and
    numbers that only the test knows."""
    folder = Path(os.environ["TMPDIR"])
    only = tuple(targets.get("only", "").split(","))
    acts = [(name, act) for name, act in _acts(targets, folder) if name.startswith(only)]
    (folder / "own").write_text("x")
    outcomes = {name: _outcome(act) for name, act in acts}
    (folder / REPORT).write_text(json.dumps(outcomes))


def _outcome(act: Act) -> str:
    try:
        act()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    except MemoryError:
        return "ENOMEM"
    return "done"


def _acts(targets: Mapping[str, str], folder: Path) -> Iterator[tuple[str, Act]]:
    yield "find foreign descriptors", _foreign_descriptors
    yield from _reads(targets)
    yield from _writes(targets, folder)
    yield from _names(targets, folder)
    yield from _sockets(targets)
    yield from _processes()
    yield from _siblings(int(targets["sibling"]))
    yield from _terminals()
    yield from _system_calls()
    yield from _limits(folder)


def _reads(targets: Mapping[str, str]) -> Iterator[tuple[str, Act]]:
    parent, secret, sibling = os.getppid(), targets["secret"], targets["sibling"]
    for name, path in {
        "a sibling's environment": f"/proc/{sibling}/environ",
        "a sibling's memory": f"/proc/{sibling}/mem",
        "a sibling's maps": f"/proc/{sibling}/maps",
        "a sibling's arguments": f"/proc/{sibling}/cmdline",
        "a sibling beside its own entry": f"/proc/self/../{sibling}/environ",
        "a sibling's scratch": f"{targets['scratch']}/private",
        "the list of users": "/etc/passwd",
        "a file at home": secret,
        "the password hashes": "/etc/shadow",
        "the daemon's environment": f"/proc/{parent}/environ",
        "the daemon's memory": f"/proc/{parent}/mem",
        "the daemon's maps": f"/proc/{parent}/maps",
        "its first process's environment": "/proc/1/environ",
        "through its own root": f"/proc/self/root{secret}",
        "through its own folder": f"/proc/self/cwd/{os.path.relpath(secret)}",
        "through a link in the model's folder": targets["link"],
        "the kernel's memory": "/dev/mem",
        "a disk": "/dev/vda",
    }.items():
        yield f"read {name}", lambda path=path: _read(path)  # type: ignore[misc]  # bound now
    for name, path in {
        "the home": str(Path(secret).parent),
        "everything": "/",
        "the daemon's descriptors": f"/proc/{parent}/fd",
        "the model's folder": str(Path(targets["model"]).parent),
        "a sibling's descriptors": f"/proc/{sibling}/fd",
        "a sibling's scratch": targets["scratch"],
        "the folder of all scratches": str(Path(targets["scratch"]).parent),
    }.items():
        yield f"list {name}", lambda path=path: list(Path(path).iterdir())  # type: ignore[misc]  # bound now
    yield "reopen a path-only descriptor", lambda: _reopen(secret)
    yield "watch the home", lambda: _check(_libc.inotify_init())


def _read(path: str) -> None:
    with open(path, "rb") as file:
        file.read(1)


def _reopen(path: str) -> None:
    _read(f"/proc/self/fd/{os.open(path, os.O_PATH)}")


def _foreign_descriptors() -> None:
    """Beside 0, 1, 2, the link and the one that lists them."""
    paths = list(Path("/proc/self/fd").iterdir())
    opened = {path.name: str(path.readlink()) for path in paths if path.is_symlink()}
    if all(int(name) <= 2 or it.startswith("socket:") for name, it in opened.items()):
        raise PermissionError(errno.EACCES, "none")


def _writes(targets: Mapping[str, str], folder: Path) -> Iterator[tuple[str, Act]]:
    model, secret = Path(targets["model"]), Path(targets["secret"])
    yield "write beside the model", lambda: (model.parent / "new").write_text("x")
    yield "make a folder beside the model", (model.parent / "new-folder").mkdir
    yield "write the model", lambda: os.open(model, os.O_WRONLY)
    yield "truncate the model", lambda: os.truncate(model, 8)
    yield "remove the model", model.unlink
    yield "rename the model", lambda: model.rename(model.with_name("other"))
    yield "move the model into its own folder", lambda: model.rename(folder / "mine")
    yield "write into the install", lambda: Path(sys.prefix, "new").write_text("x")
    yield "write into our code", lambda: os.open(__file__, os.O_WRONLY)
    yield "write into the home", lambda: (secret.parent / "new").write_text("x")
    yield "change a mode at home", lambda: secret.chmod(0o777)
    yield "change times at home", lambda: os.utime(secret)
    yield "change the owner at home", lambda: os.chown(secret, 1, 1)
    yield "set an attribute at home", lambda: os.setxattr(secret, "user.x", b"x")
    yield (
        "become the next victim's judge",
        lambda: Path("/proc/self/oom_score_adj").write_text("-9"),
    )
    yield "write to the kernel", lambda: os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY)
    yield "write into a sibling's scratch", lambda: Path(targets["scratch"], "x").write_text("x")
    yield "write compiled code of ours", lambda: _beside_us().write_bytes(b"")
    yield "write to shared memory", lambda: Path("/dev/shm/superfluid-escape").write_text("x")
    yield "write outside its scratch", lambda: (folder.parent / "new").write_text("x")
    yield from _caches(Path(targets["cache"]))
    yield from _groups()
    own = folder / "own"
    yield "make a file set-id", lambda: own.chmod(0o4755)
    yield "create a set-id file", lambda: os.open(folder / "s", os.O_CREAT | os.O_WRONLY, 0o4755)
    yield "make a device", lambda: os.mknod(folder / "d", stat.S_IFCHR | 0o600, os.makedev(1, 1))
    yield "make a pipe with a name", lambda: os.mkfifo(folder / "fifo")


def _beside_us() -> Path:
    return Path(__file__).with_name("__pycache__") / "escape.pyc"


def _caches(kernel: Path) -> Iterator[tuple[str, Act]]:
    """Compiled code that workers of other models load."""
    yield "write over a compiled kernel", lambda: os.open(kernel, os.O_WRONLY)
    yield "write a kernel beside it", lambda: kernel.with_name("new").write_text("x")
    yield "rename a compiled kernel", lambda: kernel.rename(kernel.with_name("old"))
    yield "remove a compiled kernel", kernel.unlink


def _groups() -> Iterator[tuple[str, Act]]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("pids", "memory", ""):
            group = Path("/sys/fs/cgroup", controllers or "unified", path.lstrip("/"))
            named = controllers or "other"
            yield f"leave its {named} group", (group.parent / "cgroup.procs").touch
            yield f"make a {named} group of its own", (group / "own").mkdir
    yield "raise its bound of tasks", lambda: _pids_max().write_text("max")


def _pids_max() -> Path:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    found = [line.split(":", 2)[2] for line in lines if ":pids:" in line or line.startswith("0::")]
    return Path("/sys/fs/cgroup/pids", found[0].lstrip("/"), "pids.max")


def _names(targets: Mapping[str, str], folder: Path) -> Iterator[tuple[str, Act]]:
    secret = targets["secret"]
    yield "link to a secret", lambda: os.link(secret, folder / "hard")
    yield "point at a secret", lambda: (folder / "soft").symlink_to(secret)
    yield "link beside the model", lambda: os.link(secret, f"{targets['model']}-hard")


def _sockets(targets: Mapping[str, str]) -> Iterator[tuple[str, Act]]:
    port = int(targets["port"])
    kinds = {
        "tcp": (socket.AF_INET, socket.SOCK_STREAM, 0, ("127.0.0.1", port)),
        "tcp beyond": (socket.AF_INET, socket.SOCK_STREAM, 0, ("192.0.2.1", 9)),
        "tcp 6": (socket.AF_INET6, socket.SOCK_STREAM, 0, ("::1", port)),
        "udp": (socket.AF_INET, socket.SOCK_DGRAM, 0, ("127.0.0.1", port)),
        "raw": (socket.AF_INET, socket.SOCK_RAW, 1, ("127.0.0.1", 0)),
        "packet": (17, socket.SOCK_RAW, 0, ("lo", 0)),
        "netlink": (16, socket.SOCK_RAW, 0, (0, 0)),
        "abstract": (socket.AF_UNIX, socket.SOCK_STREAM, 0, "\0" + targets["abstract"]),
        "path": (socket.AF_UNIX, socket.SOCK_STREAM, 0, targets["socket"]),
    }
    for name, kind in kinds.items():
        yield f"connect {name}", lambda kind=kind: _connect(*kind)  # type: ignore[misc]  # bound now
    yield "listen abstract", _listen_abstract
    yield "send from its link elsewhere", lambda: _send_elsewhere(targets["socket"])
    yield "take the control socket away", Path(targets["socket"]).unlink
    yield "send from a pair of sockets", lambda: socket.socketpair(type=socket.SOCK_DGRAM)


def _connect(family: int, kind: int, protocol: int, address: object) -> None:
    with socket.socket(family, kind, protocol) as made:
        made.connect(address)  # type: ignore[arg-type]  # one of each family's shapes


def _listen_abstract() -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("\0superfluid-escape")


def _send_elsewhere(path: str) -> None:
    """From the one socket it holds."""
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                held = socket.socket(fileno=os.dup(descriptor))
                break
    else:
        raise PermissionError(errno.EACCES, "none")
    with held:
        held.sendto(b"", path)


def _processes() -> Iterator[tuple[str, Act]]:
    parent = os.getppid()
    yield "signal the daemon", lambda: os.kill(parent, 0)
    yield "signal everybody", lambda: os.kill(-1, 0)
    yield "signal its group", lambda: os.kill(0, 0)
    yield "limit the daemon", lambda: _prlimit(parent)
    yield "slow the daemon down", lambda: os.setpriority(os.PRIO_PROCESS, parent, 19)
    yield "move the daemon", lambda: os.sched_setaffinity(parent, os.sched_getaffinity(parent))
    yield "outlive the daemon", lambda: _check(_libc.prctl(1, 0, 0, 0, 0))
    yield "fork", _fork
    yield "run a program", lambda: subprocess.run([sys.executable, "-c", ""], check=True)
    yield "spawn a program", lambda: os.posix_spawn(sys.executable, [sys.executable], {})
    yield "become a program", lambda: os.execv("/bin/true", ["true"])
    yield "become a program from memory", _exec_memory


def _siblings(sibling: int) -> Iterator[tuple[str, Act]]:
    """A worker of the same daemon and user, for another model."""
    calls = {**_CALLS[os.uname().machine], **_NEW_CALLS}
    yield "signal a sibling", lambda: os.kill(sibling, 0)
    yield "signal a sibling's thread", lambda: _system_call(calls["tkill"], sibling, 0)
    yield "limit a sibling", lambda: _prlimit(sibling)
    yield "slow a sibling down", lambda: os.setpriority(os.PRIO_PROCESS, sibling, 1)
    yield "move a sibling", lambda: os.sched_setaffinity(sibling, os.sched_getaffinity(sibling))
    yield "trace a sibling", lambda: _system_call(calls["ptrace"], _SEIZE, sibling)
    yield "copy a sibling's memory", lambda: _system_call(calls["process_vm_readv"], sibling)
    yield "hold a sibling", lambda: _system_call(calls["pidfd_open"], sibling)


def _terminals() -> Iterator[tuple[str, Act]]:
    for descriptor in range(3):
        yield (
            f"type into descriptor {descriptor}",
            lambda descriptor=descriptor: _check(  # type: ignore[misc]  # bound now
                _libc.ioctl(descriptor, ctypes.c_ulong(_TIOCSTI), b"x")
            ),
        )
    for path in ("/dev/tty", "/dev/console", "/dev/tty1"):
        yield f"open {path}", lambda path=path: os.open(path, os.O_RDWR | os.O_NOCTTY)  # type: ignore[misc]  # bound now


def _prlimit(pid: int) -> None:
    import resource

    resource.prlimit(pid, resource.RLIMIT_NOFILE)


def _fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _exec_memory() -> None:
    code = os.memfd_create("code")
    os.write(code, Path("/bin/true").read_bytes())
    os.execve(code, ["true"], {})


def _system_calls() -> Iterator[tuple[str, Act]]:
    for name, number in {**_CALLS[os.uname().machine], **_NEW_CALLS}.items():
        first = _FIRST.get(name, 0)
        yield f"call {name}", lambda number=number, first=first: _system_call(number, first)  # type: ignore[misc]  # bound now


def _system_call(number: int, *arguments: int) -> None:
    given = [ctypes.c_ulong(each) for each in (*arguments, 0, 0, 0, 0, 0, 0)[:6]]
    if _libc.syscall(ctypes.c_long(number), *given) >= 0:
        if number in (57, 58) and os.getpid() != _PID:
            os._exit(0)
        return
    code = ctypes.get_errno()
    if code not in _LET_THROUGH:
        raise OSError(code, os.strerror(code))


def _check(result: int) -> None:
    if result < 0:
        code = ctypes.get_errno()
        if code not in _LET_THROUGH:
            raise OSError(code, os.strerror(code))


def _limits(folder: Path) -> Iterator[tuple[str, Act]]:
    yield "fill the disk", lambda: os.truncate(folder / "own", 1 << 50)
    yield "take all memory", lambda: mmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE)
    yield "start threads without bound", _threads


def _threads() -> None:
    """More than a worker that is shut in may have, and few enough that a busy machine soon has
    them gone again; each waits for the last."""
    stop = threading.Event()
    try:
        for _ in range(_MANY_THREADS):
            threading.Thread(target=stop.wait, daemon=True).start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error
    finally:
        stop.set()


_PID: Final = os.getpid()
