"""Which streams a worker is given, and again when it has died; who is to blame when it dies.

A death counts against a stream that the worker had begun on and that gained no token since it was
sent there, nor got further into its prompt than ever before: by `FAULT` when the worker failed by
itself, by `OUTSIDE` when somebody killed it. From `SUSPECT` in a row on the stream is a suspect:
suspects are sent one at a time, with nothing beside them, until each has gained a token. A worker
that fails before that was killed by the one it had, and so, in the end, was one that is killed
again and again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Final

from superfluid.supervisor import judged
from superfluid.supervisor.streams import LiveStream
from superfluid_compat.errors import LinkError
from superfluid_workerd.link.frames import Cancel, Delta, Prompted, ToWorker

OUTSIDE: Final = 1
FAULT: Final = 8 * OUTSIDE
SUSPECT: Final = 2 * FAULT
_CERTAIN: Final = 2 * SUSPECT


class Resumption:
    """The streams of one model, whichever worker has them. Pure but for `send`.

    A stream has a new number each time it is sent, so that what a withdrawn one still gains is
    nobody's. `send` may raise `LinkError` for a stream that no frame holds.
    """

    def __init__(self, send: Callable[[ToWorker], None], numbers: Iterator[int]) -> None:
        self._send = send
        self._numbers = numbers
        self._arrivals = itertools.count()
        self._held: dict[int, LiveStream] = {}
        self._sent: dict[int, LiveStream] = {}
        self._probe: LiveStream | None = None
        self._serving = False
        self._context = 0

    def __len__(self) -> int:
        return len(self._held) + len(self._sent)

    def __getitem__(self, number: int) -> LiveStream | None:
        return self._sent.get(number)

    @property
    def probing(self) -> bool:
        """Whether a suspect runs, which is to have nothing beside it."""
        return self._probe is not None

    def add(self, stream: LiveStream) -> None:
        """Send it as soon as a worker serves and none is being probed."""
        stream.arrival = next(self._arrivals)
        self._held[stream.arrival] = stream
        self._pump()

    def remove(self, stream: LiveStream) -> None:
        """Nobody waits for it any more."""
        if stream.number in self._sent:
            self._send(Cancel(stream=stream.number))
        self._drop(stream)

    def serving(self, context: int) -> None:
        """A worker takes streams, of at most `context` tokens with their prompt."""
        self._serving, self._context = True, context
        self._pump()

    def prompted(self, message: Prompted) -> None:
        """Raises `BadFrame`."""
        if stream := self._sent.get(message.stream):
            judged.prompted(stream, message, self._context)
            stream.prompted(message)

    def prefilled(self, number: int, tokens: int) -> None:
        """How far a stream has come that waits for a token. Raises `BadFrame`."""
        if stream := self._sent.get(number):
            judged.prefilled(stream, tokens)
            stream.prefilled(tokens)

    def gained(self, delta: Delta) -> None:
        """What a turn committed. Raises `BadFrame` for more than was asked for."""
        stream = self._sent.get(delta.stream)
        if stream is None:
            return
        judged.delta(stream, delta, self._context)
        stream.gained(delta)
        if stream.ended:
            self._drop(stream)
        elif delta.tokens and stream is self._probe:
            self._cleared(stream)

    def failed(self, number: int) -> LiveStream | None:
        """The stream that its worker refused, no longer kept here."""
        stream = self._sent.get(number)
        if stream is not None:
            self._drop(stream)
        return stream

    def died(self, *, outside: bool = False) -> LiveStream | None:
        """The worker is gone, killed from `outside` or by itself: hold what it had for the next;
        the stream that is to blame for its death, no longer kept here."""
        probe, self._probe = self._probe, None
        self._serving = False
        for stream in self._sent.values():
            stream.bereave(OUTSIDE if outside else FAULT)
            self._held[stream.arrival] = stream
        self._sent.clear()
        if probe is None or (outside and probe.blame < _CERTAIN):
            return None
        self._drop(probe)
        return probe

    def clear(self) -> list[LiveStream]:
        """All of them, none kept any more."""
        streams = [*self._held.values(), *self._sent.values()]
        self._held.clear()
        self._sent.clear()
        self._probe, self._serving = None, False
        return streams

    def _drop(self, stream: LiveStream) -> None:
        self._held.pop(stream.arrival, None)
        self._sent.pop(stream.number, None)
        if stream is self._probe:
            self._probe = None
        self._pump()

    def _cleared(self, stream: LiveStream) -> None:
        """It is innocent; out of the way of the next suspect, if there is one."""
        self._probe = None
        stream.blame = 0
        if self._suspects():
            self._send(Cancel(stream=stream.number))
            del self._sent[stream.number]
            self._held[stream.arrival] = stream
        self._pump()

    def _suspects(self) -> list[LiveStream]:
        return [it for it in self._in_order() if it.blame >= SUSPECT]

    def _in_order(self) -> list[LiveStream]:
        return [self._held[arrival] for arrival in sorted(self._held)]

    def _pump(self) -> None:
        if not self._serving or self._probe is not None:
            return
        suspects = self._suspects()
        if not suspects:
            for stream in self._in_order():
                self._start(stream)
        elif not self._sent:
            self._probe = suspects[0]
            self._start(suspects[0])

    def _start(self, stream: LiveStream) -> None:
        if stream.arrival not in self._held:
            return
        del self._held[stream.arrival]
        message = stream.sent_as(next(self._numbers))
        self._sent[stream.number] = stream
        try:
            self._send(message)
        except LinkError as error:
            self._drop(stream)
            stream.fail(error)
