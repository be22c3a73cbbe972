"""A real `superfluid serve` process, for tests that talk to it from outside."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

START_S = 120.0
STOP_S = 30.0
_READY = re.compile(r"(http://\S+)/v1\s*$")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a server's process ended."""

    code: int
    out: str
    err: str


class Server:
    """A running server. `url` is its root, without `/v1`."""

    def __init__(self, process: subprocess.Popen[str], out: list[str], errors: Path) -> None:
        self._process = process
        self._out = out
        self._errors = errors
        self.url = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self, number: signal.Signals = signal.SIGTERM) -> Ended:
        """Ask it to end and wait; kills it, and fails, when it does not."""
        if self._process.poll() is None:
            self._process.send_signal(number)
        return self.wait()

    def wait(self) -> Ended:
        try:
            code = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        return Ended(code, "".join(self._out), self._errors.read_text())


def environment(home: Path, **extra: str) -> dict[str, str]:
    """This process's environment with its own superfluid home, any free port, and nothing else of
    superfluid's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SUPERFLUID_")}
    return {**kept, "SUPERFLUID_HOME": str(home), "SUPERFLUID_PORT": "0", **extra}


# The superuser reads and writes where it may not, unless it gave up those rights
# (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH) for good (PR_CAPBSET_DROP).
MORTAL: Final = """
import ctypes, os, sys
if sys.platform == "linux":
    for right in (1, 2):
        ctypes.CDLL(None).prctl(24, right, 0, 0, 0)
os.execv(sys.executable, [sys.executable, "-m", "superfluid", *sys.argv[1:]])
"""


PATIENT: Final = """
from superfluid import cli, daemon
daemon.DRAIN_S = 3600.0
cli.main()
"""
"""Drains for an hour: what ends within a test's time was told to end."""


def run(
    arguments: Sequence[str],
    home: Path,
    timeout_s: float = 120.0,
    program: Sequence[str] = ("-m", "superfluid"),
    **extra: str,
) -> Ended:
    """`superfluid ARGUMENTS` to its end; `program` as for `serving`."""
    done = subprocess.run(
        [sys.executable, *program, *arguments],
        env=environment(home, **extra),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@contextlib.contextmanager
def serving(
    arguments: Sequence[str],
    home: Path,
    python: str = sys.executable,
    program: Sequence[str] = ("-m", "superfluid"),
    **extra: str,
) -> Iterator[Server]:
    """`superfluid serve ARGUMENTS` on a free port, until the block ends; a group of its own.
    `program` is what `python` runs as superfluid."""
    home.mkdir(parents=True, exist_ok=True)
    errors = home / f"stderr-{os.urandom(4).hex()}"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [python, *program, "serve", "--port", "0", *arguments],
            env=environment(home, **extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            process_group=0,
        )
    out: list[str] = []
    server = Server(process, out, errors)
    ready = threading.Event()

    def listen() -> None:
        for line in process.stdout or ():
            out.append(line)
            found = _READY.search(line)
            if found and not server.url:
                server.url = found[1]
                ready.set()
        ready.set()

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        ready.wait(START_S)
        if not server.url:
            ended = server.stop()
            raise RuntimeError(f"exit {ended.code}, {ended.out!r}, {ended.err!r}")
        yield server
    finally:
        if process.poll() is None:
            server.stop()
        listener.join()
        if process.stdout is not None:
            process.stdout.close()
