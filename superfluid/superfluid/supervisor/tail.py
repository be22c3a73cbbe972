"""The last lines of what a process printed, in bounded memory."""

from __future__ import annotations

from typing import Final

KEEP_BYTES: Final = 16 << 10
LINES: Final = 40
LINE_CHARACTERS: Final = 400


class Tail:
    """Feed it anything; it keeps the end."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def feed(self, data: bytes) -> None:
        self._kept += data[-KEEP_BYTES:]
        del self._kept[:-KEEP_BYTES]

    def lines(self) -> list[str]:
        """The last lines, oldest first, printable, none empty."""
        text = self._kept.decode(errors="replace")
        shown = ("".join(c if c.isprintable() else " " for c in line) for line in text.splitlines())
        return [line.rstrip()[:LINE_CHARACTERS] for line in shown if line.strip()][-LINES:]
