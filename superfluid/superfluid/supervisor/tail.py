"""The last lines of what a process printed, in bounded memory; all of them, to a debug log."""

from __future__ import annotations

import logging
from typing import Final

_LOG = logging.getLogger("superfluid.worker")

KEEP_BYTES: Final = 16 << 10
LINES: Final = 40
LINE_CHARACTERS: Final = 400


class Tail:
    """Feed it anything; it keeps the end."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._unlogged = bytearray()

    def feed(self, data: bytes) -> None:
        self._kept += data[-KEEP_BYTES:]
        del self._kept[:-KEEP_BYTES]
        if _LOG.isEnabledFor(logging.DEBUG):
            self._log(data)

    def _log(self, data: bytes) -> None:
        whole, newline, rest = (bytes(self._unlogged) + data).rpartition(b"\n")
        self._unlogged[:] = rest[-KEEP_BYTES:]
        for line in _printable(whole + newline):
            _LOG.debug("%s", line)

    def lines(self) -> list[str]:
        """The last lines, oldest first, printable, none empty."""
        return _printable(bytes(self._kept))[-LINES:]


def _printable(data: bytes) -> list[str]:
    text = data.decode(errors="replace")
    shown = ("".join(c if c.isprintable() else " " for c in line) for line in text.splitlines())
    return [line.rstrip()[:LINE_CHARACTERS] for line in shown if line.strip()]
