"""One worker: its process and the daemon's end of its link."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from superfluid.supervisor import confine
from superfluid.supervisor.ledger import Ledger
from superfluid.supervisor.process import Exit, Process
from superfluid_compat.errors import LinkError
from superfluid_workerd.link import framing
from superfluid_workerd.link.frames import ToDaemon, ToWorker
from superfluid_workerd.sandbox.rights import Rights

_READ_BYTES: Final = 256 << 10
_MOST_UNSENT: Final = 4 * framing.CAP
_REST_READS: Final = 16
_STAY_S: Final = 2.0
"""How long a worker that closed its link may take to exit by itself."""


class Listener(Protocol):
    """Who is told what a worker does, on the loop's thread; nothing follows `exited`."""

    def frame(self, message: ToDaemon) -> None: ...

    def broken(self, reason: str) -> None:
        """The link can no longer be used; the process may still run."""
        ...

    def exited(self, how: Exit) -> None: ...


class Worker:
    """A started worker. `command` builds its argv from the link's descriptor; `rights` is handed
    to it as an open file."""

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        *,
        environment: Mapping[str, str],
        ledger: Ledger,
        listener: Listener,
        rights: Rights | None = None,
    ) -> None:
        """Raises `OSError` when the process cannot be started."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._frames = framing.to_daemon()
        self._unsent = bytearray()
        self._stay: asyncio.TimerHandle | None = None
        self._link, theirs = socket.socketpair()
        self._open = True
        try:
            self._link.setblocking(False)
            self._loop.add_reader(self._link, self._read)
            with confine.handed(rights) as given:
                self.process = Process(
                    [*command(theirs.fileno()), *confine.words(given)],
                    environment=environment,
                    inherit=(theirs.fileno(), *given),
                    ledger=ledger,
                    on_exit=self._exited,
                    group=rights.group if rights else "",
                )
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()

    def send(self, message: ToWorker) -> None:
        """Queue `message`. Raises `FrameTooLarge`; a link that is gone takes it silently."""
        data = framing.encode(message)
        if not self._open:
            return
        self._unsent += data
        if len(self._unsent) > _MOST_UNSENT:
            self._break("did not read its link")
            return
        self._write()

    def _write(self) -> None:
        try:
            sent = self._link.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # the reader hears the end of the link and says so
            sent = len(self._unsent)
        del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(self._link, self._write)
        else:
            self._loop.remove_writer(self._link)

    def _read(self) -> bool:
        """Take what arrived; False when there is nothing more for now."""
        try:
            data = self._link.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        try:
            if not data:
                self._frames.close()
                self._ended()
                return False
            for message in self._frames.feed(data):
                self._listener.frame(message)
                if not self._open:
                    return False
        except LinkError as error:
            self._break(error.message)
            return False
        return True

    def _ended(self) -> None:
        self._close()
        self._stay = self._loop.call_later(
            _STAY_S, self._listener.broken, "closed its link and stayed"
        )

    def _break(self, reason: str) -> None:
        self._close()
        self._listener.broken(reason)

    def _exited(self, how: Exit) -> None:
        # Its last words may still be in the link; whoever inherited it may go on writing.
        for _ in range(_REST_READS):
            if not (self._open and self._read()):
                break
        self._close()
        if self._stay is not None:
            self._stay.cancel()
        self._listener.exited(how)

    def _close(self) -> None:
        if self._open:
            self._open = False
            with contextlib.suppress(OSError):
                self._loop.remove_reader(self._link)
                self._loop.remove_writer(self._link)
            self._link.close()
