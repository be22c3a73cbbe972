"""What is answered at once and whole, to embed or to tokenize: kept until a worker has answered.

A death counts against what the worker had, as it does against streams. What comes to be a suspect
fails: it is not worth a worker of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

from superfluid.supervisor.resume import FAULT, OUTSIDE, SUSPECT
from superfluid_compat.errors import BadFrame, LinkError, SuperfluidError
from superfluid_workerd.link.frames import Cancel, ToDaemon, ToWorker

Build: TypeAlias = Callable[[int], ToWorker]
"""A frame under the number it is given."""


class Asked:
    """One request, and the frame that is `wanted` in answer. `number` is what its worker knows it
    by, `blame` what the deaths over it come to, of which `SUSPECT` is too much. A `fleeting` one
    outlives no worker and explains no death."""

    def __init__(self, build: Build, wanted: type[ToDaemon], *, fleeting: bool = False) -> None:
        self.build: Final = build
        self.wanted: Final = wanted
        self.fleeting: Final = fleeting
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.number = 0
        self.blame = 0


class Requests:
    """Those of one model, whichever worker has them. Pure but for `send`, which may raise
    `LinkError` for what no frame holds."""

    def __init__(self, send: Callable[[ToWorker], None], numbers: Iterator[int]) -> None:
        self._send = send
        self._numbers = numbers
        self._held: list[Asked] = []
        self._sent: dict[int, Asked] = {}
        self._doomed: list[Asked] = []

    def __len__(self) -> int:
        return len(self._held) + len(self._sent)

    @property
    def guilty(self) -> bool:
        """Whether there are such as had too many deaths, and wait to be told of the last."""
        return any(not asked.fleeting for asked in self._doomed)

    def hold(self, asked: Asked) -> None:
        """Have it sent with the next `pump`."""
        self._held.append(asked)

    def start(self, asked: Asked) -> None:
        """Send it now."""
        asked.number = next(self._numbers)
        self._sent[asked.number] = asked
        try:
            self._send(asked.build(asked.number))
        except LinkError as error:
            del self._sent[asked.number]
            _settle(asked, error)

    def pump(self) -> None:
        """A worker takes what is held."""
        held, self._held = self._held, []
        for asked in held:
            self.start(asked)

    def withdraw(self, asked: Asked) -> None:
        """Nobody waits for it any more."""
        if self._sent.pop(asked.number, None) is asked:
            self._send(Cancel(stream=asked.number))
        elif asked in self._held:
            self._held.remove(asked)

    def answered(self, number: int, answer: ToDaemon | SuperfluidError) -> None:
        """What its worker said: an answer, or the error that it fails with. Raises `BadFrame` for
        the answer to something else."""
        asked = self._sent.get(number)
        if asked is None:
            return
        if not isinstance(answer, (asked.wanted, SuperfluidError)):
            wanted = asked.wanted.__name__
            raise BadFrame(f"answered with a {type(answer).__name__}, wanted a {wanted}")
        del self._sent[number]
        _settle(asked, answer)

    def died(self, *, outside: bool) -> None:
        """The worker is gone, killed from `outside` or by itself: hold what it had for the next,
        but what had too many deaths."""
        for asked in self._sent.values():
            asked.blame += OUTSIDE if outside else FAULT
            doomed = asked.fleeting or asked.blame >= SUSPECT
            (self._doomed if doomed else self._held).append(asked)
        self._sent.clear()

    def condemn(self, error: SuperfluidError) -> None:
        """End what had too many deaths."""
        doomed, self._doomed = self._doomed, []
        for asked in doomed:
            _settle(asked, error)

    def clear(self, error: SuperfluidError) -> None:
        """End all of them, none kept any more."""
        self._doomed += [*self._held, *self._sent.values()]
        self._held.clear()
        self._sent.clear()
        self.condemn(error)


def _settle(asked: Asked, answer: ToDaemon | SuperfluidError) -> None:
    if asked.answer.done():
        return
    if isinstance(answer, SuperfluidError):
        asked.answer.set_exception(answer)
    else:
        asked.answer.set_result(answer)
